"""Credit over turns and conversations, against plain loops: returns, group baselines, weights, split conversations."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

import shardproof as sp
from shardproof.config.algorithms import SPECS
from shardproof.config.load import parse_recipe
from shardproof.config.schema import Algorithm, Rollout
from shardproof.errors import ConfigError
from shardproof.rl.advantages import discounted, gae
from shardproof.rl.algorithms.grouped import GroupAlgorithm
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.batches import make_batch
from shardproof.rl.experience import Experience
from shardproof.rl.updates import mini_batches
from shardproof.rollout.trajectory import Reward, Segment, Trajectory, conversations_of
from tests.ranks import run_ranks

GAMMA, LAMBDA, KL = 0.9, 0.8, 0.1
NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo")
CREDITS = ("trajectory", "turn")


@dataclass(frozen=True)
class Talk:
    """A conversation: the environment's reward of each turn, what reward functions and penalty add, what becomes of it."""

    turns: tuple[float, ...]
    functions: float = 0.0
    penalty: float = 0.0
    failed: bool = False
    left_out: bool = False

    @property
    def counts(self) -> bool:
        return not (self.failed or self.left_out)

    def size(self, turn: int) -> int:
        """Tokens of a turn."""
        return 1 + (3 * turn + len(self.turns)) % 4


# One group per rank.
TALKS = [
    [
        Talk((0.0,), 1.0),
        Talk((0.5, -0.25), 0.25, -0.125),
        Talk((9.0, 9.0), 9.0, failed=True),
        Talk((0.1, 0.0, 0.7), 0.0),
        Talk((0.0, 0.3, 0.0, 0.2), 0.5),
    ],
    [
        Talk((0.3, 0.1), 1.0),
        Talk((0.2, 0.9)),
        Talk((0.4, 0.0, 0.6), 0.25),
        Talk((5.0, 5.0, 5.0), 5.0, left_out=True),
    ],
]


def opinion(kind: int, group: int, sample: int, turn: int, token: int) -> float:
    """A log-prob or value of a trained token, wherever in a sequence it stands."""
    return math.sin(kind + 7 * group + 3 * sample + 5 * turn + token) / 2


def conversation(talk: Talk, group: int, sample: int, split: bool) -> Trajectory:
    """In one sequence with a tool's answers between the turns, or in one sequence per turn."""
    reward = Reward(
        sum(talk.turns) + talk.functions,
        failed=talk.failed,
        penalty=talk.penalty,
        left_out=talk.left_out,
    )
    turns = [
        Segment((7,) * talk.size(k), "policy", (-1.0,) * talk.size(k), 0, True, worth)
        for k, worth in enumerate(talk.turns)
    ]
    if split:
        parts = [Trajectory((Segment((1,) * (2 + k), "prompt"), turn)) for k, turn in enumerate(turns)]
    else:
        segments = [Segment((1, 1), "prompt")]
        for turn in turns:
            segments += [turn, Segment((2,), "environment")]
        parts = [Trajectory(tuple(segments))]
    return replace(parts[-1], group=group, sample=sample, reward=reward, earlier=tuple(parts[:-1]))


def given(talks: list[Talk], group: int, split: bool) -> tuple[list[Trajectory], sp.Batch]:
    """A group's sequences, and their batch with the models' opinions."""
    rows = [
        row for sample, talk in enumerate(talks) for row in conversation(talk, group, sample, split).sequences
    ]
    batch = make_batch(rows)
    for kind, name in enumerate(("old_logps", "ref_logps", "values")):
        column, seen = [], {}
        for row in rows:
            values = []
            for segment in row.segments:
                if segment.trained:
                    turn = seen.setdefault(row.sample, 0)
                    seen[row.sample] += 1
                    values += [opinion(kind, group, row.sample, turn, k) for k in range(len(segment.tokens))]
                else:
                    values += [0.5] * len(segment.tokens)  # that nothing may read
            column.append(torch.tensor(values[1:]))
        batch = batch.with_column(name, column)
    return rows, batch


def settings_of(name: str, credit: str, turn_gamma: float, kl: float = KL) -> Algorithm:
    return Algorithm(
        name=name,
        credit=credit if SPECS[name].compares_group else "trajectory",
        turn_gamma=turn_gamma,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        kl_coef=kl,
        kl_in="reward",
        kl_estimator="k1",
    )


def trained_values(rows: list[Trajectory], batch: sp.Batch, column: str) -> dict[int, list[float]]:
    """{sample: the values of its trained tokens, in their order across its sequences}."""
    found: dict[int, list[float]] = {row.sample: [] for row in rows}
    masks = [[float(s.trained) for s in row.segments for _ in s.tokens][1:] for row in rows]
    for row, values, mask in zip(rows, batch.columns[column], masks, strict=True):
        found[row.sample] += [v for v, counted in zip(values.tolist(), mask, strict=True) if counted]
        assert not any(v for v, counted in zip(values.tolist(), mask, strict=True) if not counted)
    return found


def credit_of_rank(talks: list[list[Talk]], cases: list[tuple]) -> list[dict[str, dict[int, list[float]]]]:
    """Of each (name, credit, turn_gamma, kl, split): the columns of advantages, returns and weights."""
    answers = []
    for name, credit, turn_gamma, kl, split in cases:
        group = dist.get_rank()
        rows, batch = given(talks[group], group, split)
        algorithm = make_algorithm(settings_of(name, credit, turn_gamma, kl), Rollout(max_new_tokens=8))
        batch = algorithm.advantages(batch, rows)
        batch = algorithm.weigh(batch, 7.0, 1)
        columns = [key for key in ("advantages", "returns", "weights") if key in batch.columns]
        answers.append({key: trained_values(rows, batch, key) for key in columns})
    return answers


# The formulas in plain loops.


def turn_rewards(talk: Talk, group: int, sample: int, kl: float) -> list[list[float]]:
    """The rewards of each turn's tokens."""
    found = []
    for k, worth in enumerate(talk.turns):
        row = [
            -kl * (opinion(0, group, sample, k, t) - opinion(1, group, sample, k, t))
            for t in range(talk.size(k))
        ]
        row[-1] += worth
        found.append(row)
    found[-1][-1] += talk.functions + talk.penalty
    return found


def compared(name: str, mine: float, others: list[float]) -> float:
    everyone = [mine, *others]
    if name == "dr_grpo":
        return mine - statistics.fmean(everyone)
    if name == "rloo":
        return mine - statistics.fmean(others) if others else 0.0
    return (mine - statistics.fmean(everyone)) / (statistics.pstdev(everyone) + 1e-4)


def grouped(name: str, credit: str, turn_gamma: float, kl: float, group: int) -> dict[int, list[float]]:
    to_go: dict[int, list[float]] = {}
    for sample, talk in enumerate(TALKS[group]):
        if talk.counts:
            sums = [sum(row) for row in turn_rewards(talk, group, sample, kl)]
            to_go[sample] = [
                sum(turn_gamma ** (j - k) * sums[j] for j in range(k, len(sums))) for k in range(len(sums))
            ]
    found = {}
    for sample, mine in to_go.items():
        found[sample] = []
        for k in range(len(mine)):
            at = k if credit == "turn" else 0
            others = [row[at] for other, row in to_go.items() if other != sample and len(row) > at]
            advantage = compared(name, mine[at], others)
            found[sample] += [advantage] * TALKS[group][sample].size(k)
    return found


def returned(name: str, turn_gamma: float, kl: float, group: int, sample: int) -> list[tuple[float, float]]:
    """(advantage before it is normalised, return) of each of a conversation's tokens."""
    tokens = [
        (k, t, reward)
        for k, row in enumerate(turn_rewards(TALKS[group][sample], group, sample, kl))
        for t, reward in enumerate(row)
    ]
    found, following, following_value, following_turn = [], 0.0, 0.0, None
    for k, t, reward in reversed(tokens):
        discount = GAMMA * (turn_gamma if following_turn not in (None, k) else 1.0)
        value = opinion(2, group, sample, k, t)
        if name == "ppo":
            following = reward + discount * following_value - value + discount * LAMBDA * following
        else:
            following = reward + discount * following
        following_value, following_turn = value, k
        found.append((following, following + value))
    return found[::-1]


def expected(name: str, credit: str, turn_gamma: float, kl: float) -> list[dict[str, dict[int, list[float]]]]:
    """What each rank should find."""
    if SPECS[name].compares_group:
        return [{"advantages": grouped(name, credit, turn_gamma, kl, group)} for group in range(len(TALKS))]
    rows = {
        (group, sample): returned(name, turn_gamma, kl, group, sample)
        for group, talks in enumerate(TALKS)
        for sample, talk in enumerate(talks)
        if talk.counts
    }
    every = [advantage for row in rows.values() for advantage, _ in row]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every)
    found = []
    for group in range(len(TALKS)):
        mine = {sample: row for (g, sample), row in rows.items() if g == group}
        normalised = {s: [(a - mean) / (deviation + 1e-8) for a, _ in row] for s, row in mine.items()}
        found.append({"advantages": normalised})
        if name == "ppo":
            found[-1]["returns"] = {s: [value for _, value in row] for s, row in mine.items()}
    return found


def expected_weights(name: str, group: int) -> dict[int, list[float]]:
    counted = [talk for talks in TALKS for talk in talks if talk.counts]
    num_tokens = sum(talk.size(k) for talk in counted for k in range(len(talk.turns)))
    found = {}
    for sample, talk in enumerate(TALKS[group]):
        length = sum(talk.size(k) for k in range(len(talk.turns)))
        each = {
            "sequence_mean": 1 / length / len(counted),
            "token_mean": 1 / num_tokens,
            "constant": 1 / (7.0 * 8),
        }[SPECS[name].weights]
        found[sample] = [each if talk.counts else 0.0] * length
    return found


CASES = [
    (name, credit, turn_gamma, kl, split)
    for name in NAMES
    for credit in CREDITS
    for turn_gamma in (1.0, 0.5)
    for kl in (0.0, KL)
    for split in (False, True)
    if SPECS[name].compares_group or credit == "trajectory"
]


@pytest.fixture(scope="module")
def found():
    """{case: what each rank found}."""
    ranks = run_ranks(2, credit_of_rank, TALKS, CASES)
    return {case: [answers[k] for answers in ranks] for k, case in enumerate(CASES)}


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_advantages_returns_and_weights_are_those_of_plain_loops(found, name):
    for case in (case for case in CASES if case[0] == name):
        rows = expected(*case[:-1])
        for group, (columns, wanted) in enumerate(zip(found[case], rows, strict=True)):
            assert columns.keys() == wanted.keys() | {"weights"}
            for column, by_sample in wanted.items():
                for sample, values in columns[column].items():
                    right = by_sample.get(sample, [0.0] * len(values))
                    assert values == pytest.approx(right, abs=2e-6), (case, group, sample)
            for sample, right in expected_weights(name, group).items():
                assert columns["weights"][sample] == pytest.approx(right, rel=1e-6)


@pytest.mark.distributed
def test_a_split_conversation_learns_as_an_unsplit_one_bit_for_bit(found):
    for case in CASES:
        if not case[-1]:
            assert found[case] == found[(*case[:-1], True)]


@pytest.mark.distributed
def test_a_turn_that_only_one_conversation_has_teaches_nothing(found):
    for name in ("grpo", "dr_grpo", "rloo"):
        advantages = found[name, "turn", 0.5, KL, False][0]["advantages"]
        fourth = TALKS[0][4].size(3)
        assert advantages[4][-fourth:] == [0.0] * fourth and any(advantages[4][:-fourth])


# Invariants.

AT_THE_END = [
    [Talk((0.0,) * 3, worth, -worth / 7) for worth in (0.3, 0.7, 0.1, 0.9)],
    [Talk((0.0,) * 2, worth) for worth in (1.0, 0.0, 0.45)],
]
ONE_TURN = [[Talk((0.2 * k,), 0.1 + k / 3) for k in range(4)], [Talk((0.7,), 1 / 3), Talk((0.1,), 0.9)]]


@pytest.mark.distributed
def test_with_all_reward_at_the_end_turns_are_credited_as_their_conversation():
    cases = [(name, credit, 1.0, 0.0, False) for name in ("grpo", "dr_grpo", "rloo") for credit in CREDITS]
    for answers in run_ranks(2, credit_of_rank, AT_THE_END, cases):
        for by_trajectory, by_turn in zip(answers[::2], answers[1::2], strict=True):
            assert by_trajectory == by_turn


@pytest.mark.distributed
def test_with_one_turn_neither_credit_nor_discount_matters():
    cases = [
        (name, credit, turn_gamma, KL, False)
        for name in NAMES
        for credit in CREDITS
        for turn_gamma in (1.0, 0.5)
    ]
    for answers in run_ranks(2, credit_of_rank, ONE_TURN, cases):
        for k in range(0, len(answers), 4):
            assert answers[k] == answers[k + 1] == answers[k + 2] == answers[k + 3]


class Noting(GroupAlgorithm):
    """Keeps what it is asked to compare."""

    spec = SPECS["grpo"]

    def compare(self, rewards_PG, counted_PG):
        self.asked = rewards_PG, counted_PG
        return torch.zeros_like(rewards_PG)


def compared_on_rank(split: bool) -> tuple[list[float], list[bool], list[float]]:
    generator = torch.Generator().manual_seed(3)
    talks = []
    for k in range(64):
        *turns, last = torch.rand(2 + k % 4, generator=generator, dtype=torch.float64).tolist()
        talks.append(Talk(tuple(turns), last, -last / 3, left_out=k % 9 == 0))
    rows, batch = given(talks, 0, split)
    algorithm = Noting(Algorithm(), Rollout())
    algorithm.advantages(batch, rows)
    totals = {row.sample: row.reward.trained for row in rows}
    rewards, counted = algorithm.asked
    return rewards[0].tolist(), counted[0].tolist(), torch.tensor(list(totals.values())).tolist()


@pytest.mark.distributed
@pytest.mark.parametrize("split", [False, True])
def test_without_discount_a_conversation_is_worth_its_reward_bit_for_bit(split):
    ((rewards, counted, totals),) = run_ranks(1, compared_on_rank, split)
    for k, (reward, counts, total) in enumerate(zip(rewards, counted, totals, strict=True)):
        assert counts == (k % 9 != 0)
        assert reward == total


def test_returns_are_those_of_a_loop_over_tokens_bit_for_bit():
    generator = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(2, 7, 30, generator=generator)
    discounts = torch.full((7, 30), 0.97, dtype=torch.float64)
    found = discounted(rewards, discounts), *gae(rewards, values, discounts, 0.95)
    for c in range(7):
        following = advantage = torch.zeros(())
        for t in reversed(range(30)):
            following = rewards[c, t] + 0.97 * following
            next_value = values[c, t + 1] if t < 29 else torch.zeros(())
            advantage = rewards[c, t] + 0.97 * next_value - values[c, t] + 0.97 * 0.95 * advantage
            right = [following, advantage, advantage + values[c, t]]
            assert [float(table[c, t]) for table in found] == [float(value) for value in right]


# Conversations in batches and updates.


def test_sequences_of_a_conversation_have_its_place_and_follow_each_other():
    rows, batch = given(TALKS[0][:4], 3, split=True)
    assert conversations_of(rows) == batch.conversations == [0, 1, 1, 2, 2, 3, 3, 3]
    part = batch.select([2, 1, 5]).with_column("weights", [torch.zeros(1)] * 3)
    assert part.conversations == [1, 1, 3]
    assert part.conversation_indices().unique().tolist() == [0, 2]
    assert int((batch.counts() > 0).sum()) == 4
    with pytest.raises(ConfigError, match="2 numbers of conversations for 8 sequences"):
        batch.in_conversations([0, 1])


def test_updates_take_whole_conversations():
    rows, batches = [], []
    for group in range(4):
        more, batch = given(TALKS[group % 2], group, split=True)
        rows += more
        batches += batch.sequences
    batch = sp.Batch(batches).in_conversations(conversations_of(rows))
    parts = mini_batches(Experience(rows, batch, order=[0, 1, 2, 3]), 3)
    owners = [set(part.conversations) for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 18
    assert sum(map(len, parts)) == len(rows)


def test_a_turn_of_any_sequence_can_be_too_long():
    algorithm = make_algorithm(Algorithm(overlong_from=2), Rollout(max_new_tokens=6))
    talk = TALKS[0][4]
    longest = max(talk.size(k) for k in range(4))
    for split in (False, True):
        assert algorithm.penalty(conversation(talk, 0, 0, split)) == -(longest - 2) / 4


# Settings.

RECIPE = {
    "model": {"path": "models/any"},
    "data": {"train": "rows.jsonl"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "train": {"steps": 1},
    "output": {"folder": "runs/any"},
}
WITH_TURNS = {"environment": {"name": "my_world:World"}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"credit": "turn"}}, "algorithm.credit is for conversations of several turns"),
        ({"algorithm": {"turn_gamma": 0.9}}, "algorithm.turn_gamma is for conversations of several turns"),
        (
            {"algorithm": {"credit": "turn", "name": "ppo"}, **WITH_TURNS},
            "algorithm.credit='turn' is for algorithms that compare a group",
        ),
        ({"algorithm": {"credit": "token"}, **WITH_TURNS}, "'trajectory' or 'turn'"),
    ],
)
def test_credit_that_cannot_be_meant_is_refused_by_name(sections, said):
    with pytest.raises((ConfigError, ValidationError)) as caught:
        parse_recipe(RECIPE | sections, "recipe.toml")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_credit_that_makes_sense_is_taken(name):
    credit = "turn" if SPECS[name].compares_group else "trajectory"
    algorithm = {"name": name, "credit": credit, "turn_gamma": 0.5}
    recipe = parse_recipe(RECIPE | WITH_TURNS | {"algorithm": algorithm}, "recipe.toml")
    assert recipe.algorithm.credit == credit
