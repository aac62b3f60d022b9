"""Runs that credit turns: the advantages of the batch are those of the rewards that the turns had, in plain Python."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.rl.conversations.kept import recipe_with, run_and_keep, sequences
from tests.rl.runs import comparable

pytestmark = pytest.mark.distributed


def returns_of(conversation: dict[str, Any], turn_gamma: float) -> list[float]:
    """The return from each of a conversation's turns on."""
    rewards = [
        segment["reward"]
        for part in sequences(conversation)
        for segment in part["segments"]
        if segment["author"] == "policy"
    ]
    reward = conversation["reward"]
    rewards[-1] += reward["total"] + reward["penalty"] - sum(rewards)
    return [
        sum(turn_gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))
    ]


def expected(conversations: list[dict[str, Any]], credit: str, turn_gamma: float) -> list[list[float]]:
    """Dr. GRPO's advantage of every turn of every conversation."""
    returns = [returns_of(conversation, turn_gamma) for conversation in conversations]
    found = []
    for mine, conversation in zip(returns, conversations, strict=True):
        group = [
            row for row, c in zip(returns, conversations, strict=True) if c["group"] == conversation["group"]
        ]
        places = [k if credit == "turn" else 0 for k in range(len(mine))]
        found.append(
            [mine[at] - statistics.fmean(row[at] for row in group if len(row) > at) for at in places]
        )
    return found


def advantages_by_turn(found: dict[str, Any]) -> list[list[float]]:
    """Of each conversation's turns; all tokens of a turn have the same."""
    rows, by_turn = iter(found["advantages"]), []
    for conversation in found["trajectories"]:
        by_turn.append([])
        for part in sequences(conversation):
            row, start = [0.0, *next(rows)], 0
            for segment in part["segments"]:
                values = set(row[start : start + len(segment["tokens"])])
                start += len(segment["tokens"])
                if segment["trained"]:
                    by_turn[-1] += values
                    assert len(values) == 1
                else:
                    assert values <= {0.0}
    return by_turn


@pytest.mark.parametrize("world", ["AsksAgain", "ForgetsAndCounts"])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_turns_of_a_run_are_credited_by_the_rewards_that_they_had(tmp_path, world, credit):
    settings = [
        "algorithm.name=dr_grpo",
        f"algorithm.credit={credit}",
        "algorithm.turn_gamma=0.5",
        "rollout.max_new_tokens=8",
        "environment.reward_weight=0.5",
    ]
    recipe = recipe_with(tmp_path, world, *settings)
    ranks = run_ranks(2, run_and_keep, recipe)
    assert comparable(ranks[0]["metrics"]) == comparable(ranks[1]["metrics"])
    assert ranks[0]["metrics"]["updates"] == 1.0
    turns, seen = 0, set()
    for found in ranks:
        right = expected(found["trajectories"], credit, 0.5)
        for mine, wanted in zip(advantages_by_turn(found), right, strict=True):
            assert mine == pytest.approx(wanted, abs=1e-6)
            turns = max(turns, len(wanted))
            seen |= {round(value, 4) for value in wanted}
    assert turns > 1 and len(seen) > 4, "there is something to compare"
    if world == "ForgetsAndCounts":
        assert sum(len(found["tokens"]) for found in ranks) > sum(len(f["trajectories"]) for f in ranks)


def test_conversations_that_a_limit_ended_are_left_out_of_the_update_and_of_their_groups(tmp_path):
    settings = ["rollout.max_new_tokens=3", "environment.max_turns=2", "algorithm.name=dr_grpo"]
    settings += ["environment.truncation=mask", "rollout.group_size=8", "algorithm.credit=turn"]
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path, "AsksAgain", *settings))
    ended = [conversation["ended"] for conversation in found["trajectories"]]
    assert {"done"} < set(ended), "some are cut, and some are not"
    whole = [c for c in found["trajectories"] if c["ended"] == "done"]
    right = dict(zip([(c["group"], c["sample"]) for c in whole], expected(whole, "turn", 1.0), strict=True))
    for conversation, mine in zip(found["trajectories"], advantages_by_turn(found), strict=True):
        assert mine == pytest.approx(right.get((conversation["group"], conversation["sample"]), []), abs=1e-6)
