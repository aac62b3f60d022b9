"""What a sample's reward is made of: sums, no signal, clipping, and each reward normalised. TRL's are in tests/rl/parity."""

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shardproof.config.load import from_json, load_recipe
from shardproof.config.roles import RESERVED
from shardproof.config.schema import Reward as Section
from shardproof.environments.protocol import Opening, Reply
from shardproof.environments.spec import EnvironmentFacts
from shardproof.errors import ConfigError
from shardproof.rl.conversations import prepare
from shardproof.rl.conversations.measures import with_environment
from shardproof.rl.conversations.steps import begin
from shardproof.rl.experience_metrics import Success, value_of
from shardproof.rl.rewards.calling import Function, Outcome
from shardproof.rl.rewards.from_recipe import spec_of
from shardproof.rl.rewards.measures import part_metrics, reward_facts
from shardproof.rl.rewards.parts import clipped, normalised_each, summed, with_part
from shardproof.rl.rewards.runner import RewardRunner, Shaping
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from tests.rl.background_parts import make_rules, starts_from
from tests.rl.runs import TINY, small_recipe

SPECS = [RewardSpec("a", 2.0), RewardSpec("b", 0.5), RewardSpec("watched", 0.0)]


def total_of(a, b, watched=1.0):
    outcomes = [one if isinstance(one, Outcome) else Outcome(one) for one in (a, b, watched)]
    return summed(SPECS, dict(zip(("a", "b", "watched"), outcomes, strict=True)))


def test_a_function_without_a_signal_does_not_count():
    whole, half, none = total_of(1.0, 4.0), total_of(None, 4.0), total_of(None, None)
    assert (whole.total, whole.no_signal, whole.counts) == (4.0, (), True)
    assert (half.total, half.no_signal, half.counts) == (2.0, ("a",), True)
    assert half.parts == {"b": 4.0, "watched": 1.0}
    # What has weight 0 is looked at only: it cannot make a sample count.
    assert (none.silent, none.known, none.counts, none.failed, none.errors) == (True, False, False, False, ())
    watching = total_of(1.0, 1.0, None)
    assert watching.counts and watching.no_signal == ("watched",)


def test_no_signal_is_no_failure_and_a_failure_is_no_silence():
    mixed = total_of(None, Outcome(0.0, "KeyError"))
    assert mixed.failed and not mixed.silent and not mixed.counts
    assert total_of(None, None, Outcome(0.0, "KeyError")).silent
    nothing = Reward(0.0, silent=True)
    assert with_part(nothing, "model", 1.0, 0.25).counts  # a reward model, or an environment, speaks for it
    assert with_part(nothing, "model", 1.0, None).silent
    assert with_part(nothing, "model", 1.0, None, "too long").failed


def test_a_reward_is_the_same_after_it_was_saved():
    reward = dataclasses.replace(total_of(None, 4.0), shaped=1.5, facts={"b/seconds": 0.5})
    made = Trajectory.of_prompt((1, 2))
    kept = dataclasses.replace(made, reward=reward)
    assert Trajectory.from_json(kept.to_json()) == kept
    old = kept.to_json()
    for key in ("no_signal", "silent", "shaped", "facts", "greedy"):
        del old["reward"][key]
    assert Trajectory.from_json(old).reward == Reward(reward.total, reward.parts)


def test_metrics_tell_no_signal_from_failure():
    rewards = [
        total_of(1.0, 2.0),
        total_of(None, 4.0),
        total_of(None, None),
        total_of(Outcome(0.0, "E"), 1.0),
    ]
    rewards[0] = dataclasses.replace(rewards[0], facts={"b/cached": 1.0})
    rewards[1] = dataclasses.replace(rewards[1], facts={"b/cached": 0.0})
    made = [dataclasses.replace(Trajectory.of_prompt((1,)), reward=reward) for reward in rewards]
    parts = [dict(reward.parts) for reward in rewards if reward.known]
    assert part_metrics(parts, reward_facts(made)) == {
        "reward/a": 1.0,  # of the one that has it
        "reward/b": 3.0,
        "reward/b/cached": 0.5,
        "reward/watched": 1.0,
        "reward/a/no_signal": 2.0,
        "reward/b/no_signal": 1.0,
        "reward/silent": 1.0,
    }


def test_totals_are_learned_from_within_bounds_and_shown_without():
    shaping = Shaping(clip=(-1.0, 2.0))
    made = [
        dataclasses.replace(Trajectory.of_prompt((1,)), reward=Reward(total, penalty=-0.5))
        for total in (-5.0, 0.5, 5.0)
    ]
    with RewardRunner([], shaping=shaping) as runner:
        shaped = [one.reward for one in runner.shaped(made)]
    assert [one.trained for one in shaped] == [-1.5, 0.0, 1.5]
    assert [one.measured for one in shaped] == [-5.5, 0.0, 4.5] and [one.total for one in shaped] == [
        -5.0,
        0.5,
        5.0,
    ]
    assert clipped(Reward(3.0), (0.0, 1.0)).trained == 1.0
    with RewardRunner([]) as runner:
        assert list(runner.shaped(made)) == made


def test_a_penalty_and_an_environment_are_parts_of_their_own():
    group = [
        Reward(1.0, {"a": 1.0, "environment": 4.0}, penalty=-1.0),
        Reward(0.0, {"a": 0.0, "environment": 4.0}),
        Reward(0.0, {"a": 0.0}, {"a": "KeyError"}, failed=True),
    ]
    shaped = normalised_each(group, {"a": 1.0, "environment": 0.5})
    by_a, by_penalty = 0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)
    assert [one.shaped for one in shaped] == pytest.approx([by_a + by_penalty, -by_a - by_penalty, 0.0])


def test_values_are_cut_before_they_are_normalised():
    specs = [RewardSpec("numeric", label="a", clip=(0.0, 1.0)), RewardSpec("numeric", label="b")]
    values = [(50.0, 0.0), (1.0, 0.0), (-7.0, 3.0), (0.0, 3.0)]
    made = [
        dataclasses.replace(
            Trajectory.of_prompt((1,)), reward=summed(specs, {"a": Outcome(a), "b": Outcome(b)})
        )
        for a, b in values
    ]
    with RewardRunner(specs, shaping=Shaping(each=True)) as runner:
        shaped = [one.reward.shaped for one in runner.shaped(made)]
    by_a, by_b = 0.5 / (3**-0.5 + 1e-4), 1.5 / (3**0.5 + 1e-4)
    assert shaped == pytest.approx([by_a - by_b, by_a - by_b, by_b - by_a, by_b - by_a])


def test_a_recipes_entry_reaches_its_function_whole():
    section = Section(
        name="m:f",
        weight=2,
        label="x",
        options={"k": 1},
        signature="trl",
        batch_size=4,
        concurrency=3,
        clip=(0, 1),
        only={"kind": "a", "level": [1, 2]},
    )
    only = {"kind": ("a",), "level": (1, 2)}
    assert spec_of(section) == RewardSpec("m:f", 2.0, "x", {"k": 1}, "trl", 4, 3, (0.0, 1.0), only)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['reward.functions=[{name="numeric"},{name="numeric"}]'], "two rewards are called 'numeric'"),
        (['reward.functions=[{name="numeric",label="mean"}]'], "is the name of another metric"),
        *[
            ([f'reward.models=[{{path="x",name="{name}"}}]'], f"{name!r} cannot name a reward model")
            for name in RESERVED
        ],
        (['reward.functions=[{name="numeric",label="a/b"}]'], "has a slash"),
        # In evaluations it would stand in the place of the weighted sum, the loss or pass@1.
        (['reward.functions=[{name="numeric",label="reward"}]'], "is the name of another metric"),
        (['reward.functions=[{name="numeric",label="loss"}]'], "is the name of another metric"),
        (['reward.functions=[{name="numeric",label="pass@1"}]'], "has a slash or an @"),
        (['reward.models=[{path="x",name="reward_se"}]'], "cannot name a reward model"),
        (['reward.functions=[{name="m:f",batch_size=2}]'], "batch_size is for signature='batch' or 'trl'"),
        (['reward.functions=[{name="m:f",only={kind=[]}}]'], "only.kind is an empty list"),
        (['reward.functions=[{name="m:f",clip=[1,0]}]'], "the first number must be below the second"),
        (["reward.clip=[1,1]"], "the first number must be below the second"),
        (["reward.clip=[0,1]", "reward.normalise=each"], "clip is for normalise='sum'"),
        (["reward.normalise=each", "algorithm.name=ppo"], "reward.normalise='each'"),
        (["reward.normalise=each", "algorithm.name=remax"], "reward.normalise='each'"),
        (["reward.normalise=each", "algorithm.name=rloo", "rollout.group_size=1"], "needs at least 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides, said):
    with pytest.raises(ConfigError) as caught:
        load_recipe(TINY, overrides)
    assert said in str(caught.value)


def test_a_function_that_says_nothing_or_failed_has_no_value_and_solves_nothing():
    said, silent, failed = total_of(0.0, 1.0), total_of(None, 1.0), total_of(Outcome(0.0, "broken"), 1.0)
    assert [value_of(reward, "a") for reward in (said, silent, failed)] == [0.0, None, None]
    assert [Success(("a",), 0.0).of(reward) for reward in (said, silent, failed)] == [True, False, False]
    assert [Success(("a", "b")).of(reward) for reward in (said, silent, failed)] == [False, True, False]
    assert value_of(silent, None) == silent.total and Success((), 0.5).of(silent)


def test_options_reach_a_users_object_whatever_its_attributes_are_called():
    class Mine:
        longest_s = 5.0

        def __call__(self, prompt, completion, row, bonus=0.0):
            return bonus

    asked = Function(Mine(), RewardSpec("mine:reward", options={"bonus": 0.25}))
    assert asked.now([("p", "c", {})]) == [Outcome(0.25)] and asked.longest_s == 5.0


def test_a_table_without_a_score_is_a_failure_and_no_silence():
    tables = {"ok": {"score": None}, "old": {"reward": 1}, "typo": {"scores": 1.0}, "empty": {}}
    asked = Function(
        lambda solution_str, **others: tables[solution_str], RewardSpec("mine:reward", signature="verl")
    )
    said = Outcome(0.0, "returned a table without 'score'")
    assert [asked.now([("p", name, {})])[0][:2] for name in tables] == [
        (None, None),
        (1.0, None),
        said[:2],
        said[:2],
    ]


def test_numbers_of_arrays_and_tensors_are_numbers():
    given = [np.bool_(True), np.float32(0.5), torch.tensor(2.0), torch.tensor(3), np.array(4)]
    values = [1.0, 0.5, 2.0, 3.0, 4.0]
    each = Function(lambda prompt, completion, row: row["value"])
    assert [each.now([("p", "c", {"value": value})])[0] for value in given] == [*map(Outcome, values)]
    batch = Function(lambda completions, **columns: given, RewardSpec("mine:reward", signature="trl"))
    assert batch.now([("p", "c", {})] * 5) == [*map(Outcome, values)]
    wrong = {"torch.Tensor": torch.ones(1), "str": np.array("1"), "complex": torch.tensor(1j)}
    for name, value in wrong.items():
        (found,) = each.now([("p", "c", {"value": value})])
        assert found.error == f"returned {name}, expected a number"


def test_not_a_number_is_no_signal_where_trl_takes_it_so():
    def from_trl(**columns):
        return torch.tensor([float("nan"), 1.0])

    samples = [("", "a", {}), ("", "b", {})]
    found = Function(from_trl, RewardSpec("m:f", signature="trl")).now(samples)
    assert found == [Outcome(None), Outcome(1.0)]
    found = Function(lambda *lists: [float("nan"), 1.0], RewardSpec("m:f", signature="batch")).now(samples)
    assert found == [Outcome(0.0, "returned nan, expected a finite number"), Outcome(1.0)]


def test_an_option_that_has_the_name_of_a_column_is_a_failure_that_says_so():
    async def later(**columns):
        return [1.0]

    for function in (lambda **columns: [1.0], later):
        asked = Function(function, RewardSpec("m:f", signature="trl", options={"level": 1}))
        for row, values in (({"level": 2}, [0.0]), ({}, [1.0])):
            samples = [("", "a", row)]
            found = asyncio.run(asked.later(samples)) if asked.is_async else asked.now(samples)
            assert [one.value for one in found] == values
            assert not row or "multiple values for keyword argument 'level'" in found[0].error


def test_a_function_is_asked_about_its_own_rows_alone():
    rows = [
        {"kind": "a", "n": 1},
        {"kind": "b", "n": 2},
        {"n": 3},
        {"kind": ["a"], "n": 4},
        {"kind": "c", "n": 5},
    ]
    samples = [("", "", row) for row in rows]
    only = {"kind": ("a", "c")}

    def numbers(prompts, completions, rows):
        return [row["n"] for row in rows]

    async def later(prompt, completion, row):
        return row["n"]

    expected = [Outcome(value) for value in (1.0, None, None, None, 5.0)]
    batched = Function(numbers, RewardSpec("m:f", signature="batch", only=only))
    assert batched.now(samples) == expected and batched.now(samples[1:2]) == [Outcome(None)]
    single = Function(later, RewardSpec("m:f", only=only))
    assert [asyncio.run(single.later([sample]))[0] for sample in samples] == expected
    both = [
        RewardSpec("numeric", only={"kind": ("a",)}),
        RewardSpec("exact_match", 0.5, only={"kind": ("b",)}),
    ]
    texts = [("", "7", {"kind": "a", "answer": "7"}), ("", "no", {"kind": "b", "answer": "no"})]
    with RewardRunner(both) as runner:
        scored = runner.score([*texts, ("", "7", {"answer": "7"})])
    assert [(one.total, one.parts, one.silent) for one in scored] == [
        (1.0, {"numeric": 1.0}, False),
        (0.5, {"exact_match": 1.0}, False),
        (0.0, {}, True),
    ]


def test_a_function_that_changes_its_rows_has_a_say_about_them_all_the_same():
    def single(prompt, completion, row):
        row["kind"] = "read"
        return 1.0

    def batched(prompts, completions, rows):
        for row, kind in zip(rows, ("b", None), strict=True):
            row["kind"] = kind
        return [1.0, 2.0]

    async def later(prompt, completion, row):
        return float(row.pop("kind") == "a")

    only = {"kind": ("a",)}
    assert Function(single, RewardSpec("m:f", only=only)).now([("", "", {"kind": "a"})]) == [Outcome(1.0)]
    samples = [("", "", {"kind": kind}) for kind in ("a", "b", "a")]
    found = Function(batched, RewardSpec("m:f", signature="batch", only=only)).now(samples)
    assert found == [Outcome(1.0), Outcome(None), Outcome(2.0)]
    asked = Function(later, RewardSpec("m:f", only=only))
    assert asyncio.run(asked.later([("", "", {"kind": "a"})])) == [Outcome(1.0)]


@pytest.mark.parametrize(
    ("given", "rules", "silent"),
    [
        (None, {"speaks": False}, True),  # tools that only answer: the functions alone decide
        (0.0, {"speaks": False}, False),
        (None, {}, False),  # of a game, nothing is 0
        (1.0, {"reward_weight": 0.0}, True),  # it is only measured
    ],
)
def test_an_environment_without_rewards_does_not_speak_for_functions_that_are_silent(given, rules, silent):
    conversation = begin(starts_from([{}])[0], make_rules(**rules))
    conversation.begin(Opening(), 8)
    said = Segment((97, 1), "policy", (-1.0, -1.0), 0)
    conversation.take(conversation.current.extended(said, True), 8)
    conversation.answer(Reply(reward=given, done=True), 8)
    made = conversation.result()
    found = with_environment(made, Reward(0.0, no_signal=("a",), silent=True), False)
    assert (found.silent, found.known) == (silent, not silent)
    assert with_environment(made, Reward(0.5, {"a": 0.5}), False).known
    assert with_environment(made, Reward(0.0), False).known, "no function counts"


def test_of_the_environments_tools_alone_have_nothing_to_say_without_rewards(tmp_path):
    facts = EnvironmentFacts(("user",), (), True)
    for name, speaks in (("tools", False), ("game:Game", True)):
        options = ('environment.tools={functions=["a:b"]}',) if name == "tools" else ()
        recipe = from_json(small_recipe(tmp_path, f"environment.name={name}", *options))
        tokenizer = SimpleNamespace(eos_token_id=1)
        assert prepare.make_rules(recipe, tokenizer, False, facts, Opening(), None).speaks == speaks
