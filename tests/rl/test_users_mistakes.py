"""Algorithms and engines of users that break their promises: an error says what is wrong, on every rank where it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.config.algorithms import AlgorithmSpec
from shardproof.errors import ShardproofError
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.algorithms.presets import GRPO
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Trajectory
from tests.ranks import run_ranks_outcomes
from tests.rl.runs import run_recipe, small_recipe

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

HERE = "tests.rl.test_users_mistakes"
ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")


class ReturnsNothing(GRPO):
    def advantages(self, batch: Any, trajectories: Any) -> Any:
        return None


class LeavesItOut(GRPO):
    def advantages(self, batch: Any, trajectories: Any) -> Any:
        return batch


class NotWritten(Algorithm):
    spec = GRPO.spec


class OnePerPrompt(GRPO):
    def compare(self, rewards_PG: Any, counted_PG: Any) -> Any:
        return rewards_PG[:, :1]


class FailsOnRankOne(GRPO):
    def compare(self, rewards_PG: Any, counted_PG: Any) -> Any:
        if dist.get_rank() == 1:
            raise LookupError("here alone")
        return super().compare(rewards_PG, counted_PG)


class MisspeltSurrogate(GRPO):
    surrogate = "clippd"


class CriticWithoutLoss(GRPO):
    spec = AlgorithmSpec(has_critic=True)
    value_loss = None


class WantsValues(GRPO):
    columns = frozenset({"old_logps", "values"})


class PenaltyOfText(GRPO):
    def penalty(self, trajectory: Any) -> Any:
        return "much"


class RefusesOnRankOne(torch.optim.SGD):
    def __init__(self, groups: Any, lr: float):
        if dist.get_rank() == 1:
            raise LookupError("here alone")
        super().__init__(groups, lr=lr)


class NeedsAnArgument:
    def __init__(self, page: str):
        self.page = page


class Embedded(EmbeddedEngine):
    def __init__(self, policy: Any, rollout: Any):
        super().__init__(policy, rollout.batch_size)


class AnswersTooFew(Embedded):
    def complete(self, requests: Any, sampling: Any) -> Any:
        return super().complete(requests, sampling)[:-1]


class KeepsTheReceipt(Embedded):
    def load_weights(self, stream: Any) -> Any:
        super().load_weights(stream)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "algorithm.name={}:ReturnsNothing",
            "ReturnsNothing.advantages returned NoneType; expected the batch",
        ),
        ("algorithm.name={}:LeavesItOut", "LeavesItOut.advantages returned columns "),
        ("algorithm.name={}:NotWritten", "NotWritten has no advantages(batch, trajectories)"),
        ("algorithm.name={}:OnePerPrompt", "OnePerPrompt.compare returned advantages of shape (3, 1) for"),
        ("algorithm.name={}:FailsOnRankOne", "rank 1: LookupError: here alone"),
        ("algorithm.name={}:PenaltyOfText", "penalty='much'"),
        ("optimizer.name={}:RefusesOnRankOne", "cannot be created: LookupError: here alone"),
        ("rollout.engine={}:AnswersTooFew", "complete() answered 0 of 1 requests"),
        ("rollout.engine={}:KeepsTheReceipt", "load_weights returned NoneType, not the stream's receipt"),
    ],
)
def test_a_broken_promise_is_named_on_every_rank(tmp_path, setting, said):
    outcomes = run_ranks_outcomes(2, run_recipe, small_recipe(tmp_path, *ONE_STEP, setting.format(HERE)))
    assert outcomes[0][0] == "error" and said in outcomes[0][2]
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "algorithm.name={}:MisspeltSurrogate",
            "surrogate='clippd' is not one of clipped, sequence, detached",
        ),
        ("algorithm.name={}:CriticWithoutLoss", "value_loss is a NoneType; expected a shardproof.Loss"),
        (
            "environment.name={}:NeedsAnArgument",
            "does not fit environment.options: missing",
        ),
    ],
)
def test_what_cannot_be_made_is_named_before_a_model_is_loaded(tmp_path, setting, said):
    (outcome,) = run_ranks_outcomes(1, run_without_models, small_recipe(tmp_path, setting.format(HERE)))
    assert outcome[1] == "ConfigError" and said in outcome[2]


def run_without_models(recipe: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardproof.rl.setup.load_role", lambda *given: pytest.fail("a model was loaded"))
        run_recipe(recipe)


class Scripted:
    """An engine that hands out the tickets and answers that it was given."""

    submitted = False

    def __init__(self, tickets: list[int], polls: list[list[tuple[int, Any]]]):
        self.tickets, self.polls = tickets, polls

    @property
    def busy(self) -> bool:
        return bool(self.polls) and self.submitted

    def submit(self, requests: Any, sampling: Any) -> list[int]:
        self.submitted = True
        return self.tickets

    def poll(self) -> list[tuple[int, Any]]:
        return self.polls.pop(0)


ASKED = Trajectory.of_prompt((1, 2))
ANSWER = Request(ASKED, 1).answered([3], [-0.5], True, 0)


@pytest.mark.parametrize(
    ("tickets", "polls", "said"),
    [
        ([0], [], "returned 1 tickets for 2 requests"),
        ([0, 1], [[(0, ANSWER)], [(5, ANSWER)]], "answered ticket 5, which was not requested"),
        ([0, 1], [[(0, ANSWER)], [(0, ANSWER)]], "answered ticket 0, which was not requested"),
        ([0, 1], [[(0, "text")]], "answered with a str, not a Trajectory"),
        ([0, 1], [[], [(1, ANSWER)]], "is not busy, but 1 of 2 requests have no answer"),
        ([0, 1], [[(0, ASKED)], [(1, ANSWER)]], "prompt 0 appended nothing, expected one policy segment"),
    ],
)
def test_an_engine_answers_each_request_once(tickets, polls, said):
    engine: Any = Scripted(tickets, polls)
    with pytest.raises(ShardproofError, match=said):
        generate(engine, [Request(ASKED, seed) for seed in (1, 2)], Sampling(4))
