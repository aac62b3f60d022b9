"""Which prompts a step takes in the order of `rollout.order = "finished"`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof.errors import ShardproofError
from shardproof.rl import finished
from shardproof.rl.buffer import Buffer
from shardproof.rl.data import Prompt
from shardproof.rl.rounds import BackgroundRound, Drawn
from shardproof.rl.saved_rounds import describe_buffer, restore_buffer
from shardproof.rl.versions import Versions

NUM = 4  # prompts of a step
MEANS: Any = SimpleNamespace(leads=True)


class Complete(BackgroundRound):
    """A round whose trajectories are all there."""

    def __init__(self, begun_at: int):
        super().__init__(MEANS, 0, [Drawn(k, k, k) for k in range(NUM)])
        self.begun_at = begun_at

    def complete_groups(self) -> list[int]:
        return [each.group for each in self.drawn]

    def trajectories(self, groups: Any = None) -> list[Any]:
        self.drawn = [each for each in self.drawn if each.group not in groups]
        return []


@pytest.fixture(autouse=True)
def one_rank_that_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def alone(stage: str) -> Iterator[Any]:
        message = SimpleNamespace()
        yield message
        message.rows = [message.mine]

    def wait(seconds: float) -> None:
        raise AssertionError("the step waits, although everything is complete")

    monkeypatch.setattr(finished, "together", alone)
    monkeypatch.setattr(finished, "time", SimpleNamespace(sleep=wait, perf_counter=lambda: 0.0))


@pytest.mark.parametrize(
    ("begun_at", "left"), [([3, 4, 5], [0, 4, 4]), ([5, 3, 4], [4, 0, 4]), ([4, 4, 3], [4, 4, 0])]
)
def test_a_step_takes_what_may_not_get_older_first_also_if_it_was_drawn_later(begun_at, left):
    # So it is after a resume, if nothing of the prompts that were drawn first could be kept: they begin again.
    buffer = finished.FinishedBuffer(MEANS, None, num_prompts=NUM, num_steps=9, ahead=2)
    rounds = [Complete(each) for each in begun_at]
    buffer.rounds = [*rounds]
    assert len(buffer.take(5, NUM).groups) == NUM
    assert [len(each.drawn) for each in rounds] == left


def test_prompts_that_were_begun_in_this_order_are_not_lost_in_the_other():
    prompts = [Prompt({"prompt": str(k)}, str(k), (1, k)) for k in range(NUM)]
    sampler = SimpleNamespace(versions=Versions(), rewards=None)
    means: Any = SimpleNamespace(prompts=prompts, sampler=sampler, background=None)
    saved = finished.FinishedBuffer(means, None, num_prompts=NUM, num_steps=9, ahead=2)
    saved.rounds = [BackgroundRound(means, 3, [Drawn(1, 1, 1)])]
    with pytest.raises(ShardproofError, match="C006 resume: the checkpoint has prompts that were begun"):
        restore_buffer(Buffer(means, None, num_prompts=NUM, num_steps=9), describe_buffer(saved), {})
