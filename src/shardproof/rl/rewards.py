"""Rewards: what completions are worth, from functions of ours or of the user's, found out while the rank does other work.

A user's function runs in worker processes, and a thread of the rank feeds them and reads their answers, so that call by
call their deadlines hold while the main thread is busy. Built-in functions that cannot hang run where they are awaited:
they take microseconds, for all of which a thread would hold the interpreter lock.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from shardproof.bounds import MAX_WEIGHT, within
from shardproof.errors import choose, fail
from shardproof.rl.reward_functions import (
    BUILT_IN,
    CANNOT_HANG,
    Outcome,
    Sample,
    attempt,
    unknown_reward,
)
from shardproof.rl.reward_queue import RewardQueue
from shardproof.rl.reward_workers import Call, Job, WorkerPool
from shardproof.rollout.trajectory import Reward


@dataclass(frozen=True)
class RewardSpec:
    """A reward by name, and its weight in the total."""

    name: str
    weight: float = 1.0


class RewardRunner(contextlib.AbstractContextManager["RewardRunner"]):
    """Scores samples; a reward that raises, hangs, dies or returns no finite number marks its sample as failed.

    With on_error="stop" the first such failure raises R504 instead. The weighted sum of a sample's rewards is its total;
    without any functions, where an environment alone rewards, it is 0.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        timeout_s: float = 10.0,
        num_workers: int = 2,
        on_error: str = "zero",
    ):
        self.specs = tuple(specs)
        self.stops = choose("reward", "reward.on_error", on_error, ("zero", "stop")) == "stop"
        _require_settings(self.specs, timeout_s, num_workers)
        self.inside = [spec.name for spec in self.specs if spec.name in CANNOT_HANG]
        self.outside = [spec.name for spec in self.specs if spec.name not in CANNOT_HANG]
        self.pool = WorkerPool(self.outside, num_workers if self.outside else 0, timeout_s)
        self.queue = RewardQueue(self.pool)
        self.noticed: set[str] = set()  # the kinds of failures that the terminal has shown
        try:
            # Now, so that a name that cannot be imported stops the run before its first step.
            self.pool.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is not scored yet and end every worker; scoring again would start new ones."""
        self.queue.close()
        self.pool.close()

    def start(self) -> PendingRewards:
        """Rewards of samples still to be added. Several batches may be pending: they share the workers, first come first."""
        return PendingRewards(self)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Each sample's rewards, in the order of `samples`."""
        with self.start() as pending:
            pending.add(samples)
            return pending.result()

    def score_later(self, sample: Sample, place: int) -> Future[Reward]:
        """One sample's rewards, from the workers' thread; returns at once, and may be called from any thread.

        `place` names the sample in errors. To cancel the future gives it up.
        """
        return _OneSample(self, sample, place).future

    def outcome(self, index: int, name: str, sample: Sample, found: Outcome) -> Outcome:
        """What a reward said about a sample; raises R504 if it failed and the recipe wants that to end the run."""
        if found[1] is not None and self.stops:
            where = f"sample {index} (prompt {sample[0][-60:]!r}, completion {sample[1][:60]!r})"
            raise fail("R504", "reward", f"reward {name!r} failed on {where}: {found[1]}.")
        return found

    def sum(self, found: Mapping[str, Outcome]) -> Reward:
        """A sample's rewards from what each function said."""
        total = sum(spec.weight * found[spec.name][0] for spec in self.specs)
        parts, failures, failed = {}, {}, False
        for spec in self.specs:
            parts[spec.name], error = found[spec.name]
            if error is not None:
                failures[spec.name] = error
                failed |= bool(spec.weight)
        return Reward(total, parts, failures, failed)


class PendingRewards(contextlib.AbstractContextManager["PendingRewards"]):
    """Samples that are scored while the caller does something else; leaving the block gives up those that are not.

    Only `result` raises what went wrong, so that ranks can agree on it there.
    """

    def __init__(self, runner: RewardRunner):
        self._runner, self.noticed = runner, runner.noticed
        self._samples: list[Sample] = []
        self._places: list[int] = []  # of each sample's reward in the result
        self._outcomes: dict[tuple[int, str], Outcome] = {}  # by the sample's place and the reward's name
        self._settled: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._job = Job(self._record, self._settled.put)
        self._failure: BaseException | None = None

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def add(self, samples: Sequence[Sample], places: Sequence[int] | None = None) -> None:
        """Have these samples scored as well; returns at once. `places` are those of their rewards in the result."""
        first = len(self._samples)
        self._places += range(first, first + len(samples)) if places is None else places
        self._samples += samples
        outside = self._runner.outside
        calls = [
            Call(self._job, i, name, sample) for i, sample in enumerate(samples, first) for name in outside
        ]
        if calls:
            self._ask(calls)

    def result(self) -> list[Reward]:
        """Each sample's rewards, as soon as all are there: in the order of their places, or as they were added."""
        for index, sample in enumerate(self._samples):
            for name in self._runner.inside:
                found = attempt(BUILT_IN[name], sample)
                self._outcomes[index, name] = self._runner.outcome(index, name, sample, found)
        if self._samples and self._runner.outside:
            self._ask((), last=True)
            self._failure = self._failure or self._settled.get()
        if self._failure is not None:
            raise self._failure
        names = [spec.name for spec in self._runner.specs]
        order = sorted(range(len(self._samples)), key=self._places.__getitem__)
        return [self._runner.sum({name: self._outcomes[index, name] for name in names}) for index in order]

    def cancel(self) -> None:
        """Stop scoring; workers that are in the middle of it are ended."""
        self._failure = self._failure or RuntimeError("these rewards were given up")
        self._runner.queue.drop(self._job)()

    def _ask(self, calls: Sequence[Call], last: bool = False) -> None:
        if self._failure is None:
            try:
                self._runner.queue.add(self._job, calls, last)
            except (OSError, RuntimeError) as error:  # no file or thread is left to be had
                self._failure = error

    def _record(self, call: Call, found: Outcome) -> None:
        self._outcomes[call.number, call.name] = self._runner.outcome(
            call.number, call.name, call.sample, found
        )


class _OneSample:
    """One sample's rewards, as a future."""

    def __init__(self, runner: RewardRunner, sample: Sample, place: int):
        self.future: Future[Reward] = Future()
        self._runner, self._sample, self._place = runner, sample, place
        self._outcomes: dict[str, Outcome] = {}
        self._job = Job(self._record, self._settle)
        try:
            for name in runner.inside:
                self._note(name, attempt(BUILT_IN[name], sample))
            if runner.outside:
                self.future.add_done_callback(self._drop_if_cancelled)
                calls = [Call(self._job, place, name, sample) for name in runner.outside]
                runner.queue.add(self._job, calls, last=True)
                return
        except Exception as error:  # R504, or no file or thread is left to be had
            self._settle(error)
        else:
            self._settle(None)

    def _record(self, call: Call, found: Outcome) -> None:
        self._note(call.name, found)

    def _note(self, name: str, found: Outcome) -> None:
        self._outcomes[name] = self._runner.outcome(self._place, name, self._sample, found)

    def _settle(self, error: BaseException | None) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self._runner.sum(self._outcomes))

    def _drop_if_cancelled(self, future: Future[Reward]) -> None:
        if future.cancelled():
            self._runner.queue.drop(self._job)


def _require_settings(specs: Sequence[RewardSpec], timeout_s: float, num_workers: int) -> None:
    names = [spec.name for spec in specs]
    wrong = {
        f"reward.functions lists a function twice: {', '.join(names)}": len(set(names)) < len(names),
        f"a reward's weight is not between -{MAX_WEIGHT:g} and {MAX_WEIGHT:g}": not all(
            within(abs(spec.weight), MAX_WEIGHT) for spec in specs
        ),
        f"reward.timeout_s={timeout_s} is not between 0 and a million": not 0 < timeout_s <= 1e6,
        f"reward.num_workers={num_workers} is not positive": num_workers < 1,
    }
    for message, found in wrong.items():
        if found:
            raise unknown_reward(f"{message}.", "correct this setting of the recipe")
