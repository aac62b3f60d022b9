"""Rewards run while completions are made and models score them, and nothing else changes by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardproof.errors import fail
from shardproof.rl import scorers
from shardproof.rl.rewards import runner as rewards
from shardproof.rl.rewards.calling import Sample
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Reward
from tests.ranks import RankError, run_ranks
from tests.rl.runs import lines, run_recipe, small_recipe, trajectory, write_rows

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

REWARDS = "tests.rl.user_rewards"
LONG_S = 60.0  # what waits for something that never comes fails after this
ONE_STEP = ("train.steps=1", "output.eval_every=0", "algorithm.kl_coef=0.01", f"reward.timeout_s={LONG_S}")


def reward(name: str) -> str:
    return f"reward.functions=[{{name='{REWARDS}:{name}'}}]"


def write_prompts(folder: Path, end: str = "") -> tuple[str, Path]:
    """Six prompts, the last of which comes to an end of its own, and the file that rewards and ranks meet at."""
    signal = folder / "signal"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "signal": str(signal)} for n in range(1, 7)]
    rows[-1]["end"] = end
    return f"data.train={write_rows(folder / 'rows.jsonl', rows)}", signal


class InSequence(rewards.PendingRewards):
    """Begins with the first reward when all of them are awaited."""

    def __init__(self, runner: rewards.RewardRunner):
        super().__init__(runner)
        self.held: list[Sample] = []
        self.places: list[int] = []

    def add(self, samples: Sequence[Sample], places: Sequence[int] | None = None) -> None:
        self.held += samples
        self.places += places or []

    def result(self) -> list[Reward]:
        super().add(self.held, self.places)
        return super().result()


def run_in_sequence(recipe: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "PendingRewards", InSequence)
        return run_recipe(recipe)


def run_with_scores(recipe: str, before: Callable[..., None], *args: Any) -> dict[str, float]:
    """A run in which `before` is called whenever log-probs are asked for."""
    scores = scorers.logprobs

    def logprobs(*given: Any, **settings: Any) -> Any:
        before(*args)
        return scores(*given, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorers, "logprobs", logprobs)
        return run_recipe(recipe)


def touch(signal: Path) -> None:
    signal.touch()


def run_until_rewarded(recipe: str, signal: Path) -> int:
    """The calls of a run whose second call makes no completion before a reward of the first one has run."""
    calls, complete = [], EmbeddedEngine.complete

    def wait_and_complete(self: Any, requests: Any, sampling: Any) -> Any:
        calls.append(len(requests))
        until = time.monotonic() + LONG_S
        while calls.count(6) == 2 and not signal.exists():
            assert time.monotonic() < until, "no reward has run"
            time.sleep(0.005)
        return complete(self, requests, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedEngine, "complete", wait_and_complete)
        run_recipe(recipe)
    return calls.count(6)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=grpo", "algorithm.kl_coef=0.01"],
        ["algorithm.name=grpo", "algorithm.kl_coef=0.01", "algorithm.kl_in=reward", "rollout.engine=sharded"],
        ["algorithm.name=dapo", "algorithm.overlong_from=1"],
        ["algorithm.name=ppo", "algorithm.updates_per_batch=2", "model.sequence_parallel=2"],
    ],
)
def test_a_run_is_the_same_as_with_rewards_in_sequence(tmp_path, overrides):
    functions = (
        f"reward.functions=[{{name='{REWARDS}:refuses_even_answers'}},{{name='exact_match',weight=0.5}}]"
    )
    settings = [functions, "rollout.batch_size=5", "output.samples_per_step=100", *overrides]
    run_ranks(2, run_recipe, small_recipe(tmp_path / "now", *settings))
    run_ranks(2, run_in_sequence, small_recipe(tmp_path / "before", *settings))
    found = trajectory(tmp_path / "now")
    assert found == trajectory(tmp_path / "before")
    assert sum(step["reward/errors"] for step in found) > 0.0
    for name in ("samples.jsonl", "events.jsonl"):
        now, before = (
            [line for line in lines(tmp_path / when / name) if line.get("kind") != "proof"]
            for when in ("now", "before")
        )
        assert now == before and now


def test_models_score_completions_while_their_rewards_run(tmp_path):
    """In sequence no reward would ever see the file, and the run would end with R504."""
    data, signal = write_prompts(tmp_path)
    recipe = small_recipe(tmp_path / "run", *ONE_STEP, data, reward("waits"), "reward.on_error=stop")
    found, _ = run_ranks(2, run_with_scores, recipe, touch, signal)
    assert found["updates"] == 1.0
    assert 0.0 < found["time/reward"] < found["time/rollout"]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_completions_are_made_while_rewards_of_earlier_ones_run(tmp_path, algorithm):
    data, signal = write_prompts(tmp_path)
    settings = [*ONE_STEP, f"algorithm.name={algorithm}", "rollout.batch_size=6", data, reward("tells")]
    calls = run_ranks(2, run_until_rewarded, small_recipe(tmp_path / "run", *settings), signal)
    assert min(calls) >= 2 and calls[0] == calls[1]


@pytest.mark.parametrize(
    ("end", "timeout_s", "said"),
    [("raise", LONG_S, "KeyError: 'no such thing' (user_rewards.py:"), ("hang", 2, "no answer in 2 s")],
)
def test_a_reward_that_fails_while_models_score_ends_the_run_on_every_rank(tmp_path, end, timeout_s, said):
    data, signal = write_prompts(tmp_path, end)  # a prompt of one rank alone comes to that end
    settings = [*ONE_STEP, data, reward("waits"), "reward.on_error=stop", f"reward.timeout_s={timeout_s}"]
    with pytest.raises(RankError) as caught:
        run_ranks(2, run_with_scores, small_recipe(tmp_path / "run", *settings), touch, signal)
    first, second = (caught.value.errors[rank][:2] for rank in (0, 1))
    assert first == second
    assert first[0] == "RolloutFault" and "R504 reward: rank" in first[1] and said in first[1]


def give_in() -> None:
    raise fail("T301", "score", "log-prob nan of the policy.")


def run_and_count(recipe: str) -> tuple[str, int]:
    """How a run ended whose models cannot score anything, and how many more processes there are after it."""
    before = set(psutil.Process().children(recursive=True))
    try:
        run_with_scores(recipe, give_in)
    except Exception as error:
        after = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        return str(error), len(set(after) - before)
    return "it did not end", -1


def test_scores_that_fail_while_rewards_run_end_the_run_and_the_rewards(tmp_path):
    data, _ = write_prompts(tmp_path)
    recipe = small_recipe(tmp_path / "run", *ONE_STEP, data, reward("waits"), "reward.timeout_s=1000")
    first, second = run_ranks(2, run_and_count, recipe)
    assert first == second and "T301 score: log-prob nan" in first[0] and first[1] == 0
