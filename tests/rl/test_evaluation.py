"""Evaluation beside training: the same numbers as before it, on any number of ranks, with the weights that wrote them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardproof.errors import RolloutFault
from shardproof.rl.background import BackgroundBatch
from shardproof.rl.data import Share
from shardproof.rl.evaluation import HeldOutTask, RunningEvaluation, evaluate
from shardproof.rl.experience_metrics import Success
from shardproof.rl.rollouts import Sampler
from shardproof.rl.versions import Versions
from tests.ranks import run_ranks
from tests.rl.background_engine import wait_until
from tests.rl.background_parts import SAMPLING, USERS, Letters, Parts, making, starts_from

pytestmark = pytest.mark.distributed

REWARDS = ["exact_match", "talking_users:score"]
SIZE = 3


@pytest.fixture(autouse=True)
def users(user_module, monkeypatch):
    return str(user_module("talking_users", USERS))


def parts_of_evaluation(parts: Parts, sequence_parallel: int = 1) -> tuple[Sampler, list[Any], Share]:
    versions = Versions()
    versions.hand_over(0)
    policy: Any = SimpleNamespace(version=0)
    sampler = Sampler(
        parts.engine, Letters(), parts.rewards, policy, 17, parts.conversations, versions=versions
    )  # type: ignore[arg-type]
    rows = [{"turns": 1 + n % 3, "answer": "a", "score": "raise" if n == 4 else ""} for n in range(7)]
    prompts = [start.prompt for start in starts_from(rows)]
    return sampler, prompts, Share(dist.get_rank(), dist.get_world_size(), sequence_parallel)


def task_of(prompts: list[Any], prefix: str = "eval/") -> HeldOutTask:
    return HeldOutTask(prompts, SAMPLING, SIZE, (1, SIZE), Success(("exact_match",)), prefix=prefix)


def compare(folder: str, environment: bool) -> dict[str, float]:
    """On a rank: the same metrics as an evaluation that training waits for, and of which weights they are."""
    sys.path.insert(0, folder)
    with making(environment, REWARDS) as parts:
        sampler, prompts, share = parts_of_evaluation(parts)
        tasks = [task_of(prompts), task_of(prompts[:2], "eval/few/")]
        before = evaluate(sampler, tasks[0], 4, share) | evaluate(sampler, tasks[1], 4, share)
        beside = RunningEvaluation(parts.background, sampler, tasks, 4, share)
        wait_until(lambda: beside.ready)
        found = beside.result()
    sys.path.remove(folder)
    assert {name: value for name, value in found.items() if name in before} == before
    return {name: found[name] for name in found.keys() - before.keys()}


@pytest.mark.invariant
@pytest.mark.parametrize("environment", [False, True])
def test_an_evaluation_beside_training_gives_the_same_metrics(users, environment):
    for more in run_ranks(2, compare, users, environment):
        assert more.pop("time/evaluation") > 0.0
        assert more == {"eval/step": 4.0, "eval/version": 0.0}


def wait_in_turns(folder: str) -> int:
    """On a rank: how often it looks for the completions of an evaluation, which the second rank has at its first look."""
    sys.path.insert(0, folder)
    with making(rewards=["exact_match"], held=True) as parts, pytest.MonkeyPatch.context() as patch:
        sampler, prompts, share = parts_of_evaluation(parts)
        running = RunningEvaluation(parts.background, sampler, [task_of(prompts)], 4, share)
        num_looks = 0

        def settled(self: BackgroundBatch, places: object, within_s: float) -> bool:
            nonlocal num_looks
            num_looks += places is None  # not when the completions are taken
            if num_looks == (3 if share.rank == 0 else 1):
                parts.engine.held = False
                wait_until(lambda: parts.engine.answer() or running.ready)
            return not self.num_in_progress

        patch.setattr(BackgroundBatch, "settled", settled)
        assert "eval/reward" in running.result()
    sys.path.remove(folder)
    return num_looks


def test_a_rank_that_has_its_completions_early_hears_that_others_still_wait(users):
    assert run_ranks(2, wait_in_turns, users) == [3, 3]


def change_weights(folder: str) -> tuple[bool, dict[str, float]]:
    """On two ranks that share sequences: whether this one waits, and the metrics of an evaluation during a sync."""
    sys.path.insert(0, folder)
    with making(rewards=["exact_match"], held=True) as parts:
        sampler, prompts, share = parts_of_evaluation(parts, sequence_parallel=2)
        running = RunningEvaluation(parts.background, sampler, [task_of(prompts)], 4, share)
        waits = not running.ready
        if waits:
            wait_until(lambda: len(parts.engine.waiting) == SIZE * len(prompts))
            first, *others = parts.engine.waiting
            parts.engine.answer(first)
            parts.engine.draw(others[0], 1)
            parts.engine.version = 2
            parts.engine.answer()
        found = running.result()
    sys.path.remove(folder)
    return waits, found


def test_metrics_say_which_weights_wrote_the_completions(users):
    (first, found), (second, other) = run_ranks(2, change_weights, users)
    assert (first, second) == (True, False), "the first of the ranks that share sequences has them made"
    assert (found["eval/version"], found["eval/version_last"]) == (0.0, 2.0)
    assert {k: v for k, v in found.items() if k != "time/evaluation"} == {
        k: v for k, v in other.items() if k != "time/evaluation"
    }


def fail_on_one(folder: str) -> str:
    """On a rank: what an evaluation raises whose engine fails on the other one."""
    sys.path.insert(0, folder)
    with making(rewards=["exact_match"], held=True) as parts:
        sampler, prompts, share = parts_of_evaluation(parts)
        running = RunningEvaluation(parts.background, sampler, [task_of(prompts)], 4, share)
        wait_until(lambda: parts.engine.waiting)
        if share.rank == 1:
            parts.engine.fail(parts.engine.waiting[0], ConnectionError("no replica is left"))
            wait_until(lambda: running.ready)
        parts.engine.held = False
        parts.engine.answer()
        wait_until(lambda: running.ready)
        with pytest.raises(RolloutFault) as caught:
            running.result()
        running.cancel()
    sys.path.remove(folder)
    return str(caught.value)


@pytest.mark.fault
def test_an_engine_that_fails_on_one_rank_is_raised_on_all(users):
    first, second = run_ranks(2, fail_on_one, users)
    assert first == second and "rank 1" in first and "no replica is left" in first
