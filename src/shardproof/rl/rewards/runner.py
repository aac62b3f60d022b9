"""Rewards: what completions are worth, from functions of ours or of the user's, found out while the rank does other work.

A user's function runs in worker processes, and a thread of the rank feeds them and reads their answers, so that call by
call their deadlines hold while the main thread is busy. Built-in functions that cannot hang run where they are awaited:
they take microseconds, for all of which a thread would hold the interpreter lock.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby

from shardproof.bounds import MAX_WEIGHT, within
from shardproof.errors import choose, fail
from shardproof.rl.rewards.async_workers import AsyncPool
from shardproof.rl.rewards.calling import Function, Outcome, Sample
from shardproof.rl.rewards.functions import cannot_hang, find_reward
from shardproof.rl.rewards.jobs import Call, Job
from shardproof.rl.rewards.parts import clipped, normalised_each, summed
from shardproof.rl.rewards.queue import RewardQueue
from shardproof.rl.rewards.specs import RewardSpec, Surroundings, unknown_reward
from shardproof.rl.rewards.workers import WorkerPool
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of

_OWN_LOOP = ("code", "judge")  # built-in functions that are async
ENVIRONMENT = "environment"  # the key of what an environment gave


@dataclass(frozen=True)
class Lane:
    """Reward functions that are asked by the same processes."""

    queue: RewardQueue
    specs: tuple[RewardSpec, ...]

    def calls(self, job: Job, samples: Sequence[Sample], first: int) -> list[Call]:
        """The calls for samples that have the places from `first` on; those of one sample follow each other."""
        single = [spec for spec in self.specs if not spec.is_batched]
        calls = [
            Call(job, (first + k,), spec.key, (sample,))
            for k, sample in enumerate(samples)
            for spec in single
        ]
        for spec in self.specs:
            size = spec.batch_size or max(1, len(samples))
            for begin in range(0, len(samples) if spec.is_batched else 0, size):
                part = tuple(samples[begin : begin + size])
                places = tuple(range(first + begin, first + begin + len(part)))
                calls.append(Call(job, places, spec.key, part))
        return calls


@dataclass(frozen=True)
class Shaping:
    """What is learned from in place of the weighted sum."""

    clip: tuple[float, float] | None = None
    each: bool = False  # each reward is normalised within its group, and then they are summed
    environment_weight: float = 1.0


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
        around: Surroundings | None = None,
        shaping: Shaping | None = None,
    ):
        self.specs, self.shaping = tuple(specs), shaping or Shaping()
        self.stops = choose("reward", "reward.on_error", on_error, ("zero", "stop")) == "stop"
        _require_settings(self.specs, timeout_s, num_workers)
        around = replace(around or Surroundings(), timeout_s=timeout_s, num_workers=num_workers)
        self.inside: dict[str, Function] = {
            spec.key: find_reward(spec, around) for spec in self.specs if cannot_hang(spec)
        }
        own_loop = [spec for spec in self.specs if spec.name in _OWN_LOOP]
        outside = [spec for spec in self.specs if spec.key not in self.inside and spec not in own_loop]
        self.noticed: set[str] = set()  # the kinds of failures that the terminal has shown
        self.pool = WorkerPool(outside, num_workers if outside else 0, around)
        self.async_pool = AsyncPool(own_loop, around)
        self.lanes: list[Lane] = []
        try:
            # Now, so that a name that cannot be imported stops the run before its first step.
            kinds = self.pool.start()
            plain = tuple(spec for spec in outside if not kinds[spec.key].is_async)
            later = tuple(
                spec for spec in self.specs if spec in own_loop or (spec in outside and spec not in plain)
            )
            if later:
                self.async_pool = AsyncPool(later, around)
                self.async_pool.start()
                self.lanes.append(Lane(RewardQueue(self.async_pool), later))
            if plain:
                self.lanes.append(Lane(RewardQueue(self.pool), plain))
            else:
                self.pool.close()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is not scored yet and end every worker; scoring again would start new ones."""
        for lane in self.lanes:
            lane.queue.close()
        self.pool.close()
        self.async_pool.close()

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

    def outcome(self, index: int, key: str, sample: Sample, found: Outcome) -> Outcome:
        """What a reward said about a sample; raises R504 if it failed and the recipe wants that to end the run."""
        if found.error is not None and self.stops:
            where = f"sample {index} (prompt {sample[0][-60:]!r}, completion {sample[1][:60]!r})"
            raise fail("R504", "reward", f"reward {key!r} failed on {where}: {found.error}.")
        return found

    def sum(self, found: Mapping[str, Outcome]) -> Reward:
        """A sample's rewards from what each function said."""
        return summed(self.specs, found)

    def shaped(
        self, trajectories: Sequence[Trajectory], more: Sequence[RewardSpec] = ()
    ) -> Sequence[Trajectory]:
        """The trajectories with what is learned from, if that is not the total; `more` are parts that others added.

        The trajectories of a group follow each other.
        """
        if self.shaping.each:
            weights = {spec.key: spec.weight for spec in (*self.specs, *more)}
            weights |= {ENVIRONMENT: self.shaping.environment_weight}
            clips = {spec.key: spec.clip for spec in self.specs if spec.clip is not None}
            groups = [list(members) for _, members in groupby(trajectories, key=lambda made: made.group)]
            rewards = [
                one
                for group in groups
                for one in normalised_each([reward_of(t) for t in group], weights, clips)
            ]
        elif self.shaping.clip is not None:
            rewards = [clipped(reward_of(made), self.shaping.clip) for made in trajectories]
        else:
            return trajectories
        return [replace(made, reward=one) for made, one in zip(trajectories, rewards, strict=True)]


class PendingRewards(contextlib.AbstractContextManager["PendingRewards"]):
    """Samples that are scored while the caller does something else; leaving the block gives up those that are not.

    Only `result` raises what went wrong, so that ranks can agree on it there.
    """

    def __init__(self, runner: RewardRunner):
        self._runner, self.noticed = runner, runner.noticed
        self._samples: list[Sample] = []
        self._places: list[int] = []  # of each sample's reward in the result
        self._outcomes: dict[tuple[int, str], Outcome] = {}  # by the sample's place and the reward's key
        self._settled: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._jobs = [(lane, Job(self._record, self._settled.put)) for lane in runner.lanes]
        self._failure: BaseException | None = None

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def add(self, samples: Sequence[Sample], places: Sequence[int] | None = None) -> None:
        """Have these samples scored as well; returns at once. `places` are those of their rewards in the result."""
        first = len(self._samples)
        self._places += range(first, first + len(samples)) if places is None else places
        self._samples += samples
        for lane, job in self._jobs:
            if calls := lane.calls(job, samples, first):
                self._ask(lane, job, calls)

    def result(self) -> list[Reward]:
        """Each sample's rewards, as soon as all are there: in the order of their places, or as they were added."""
        for index, sample in enumerate(self._samples):
            for key, function in self._runner.inside.items():
                (found,) = function.now([sample])
                self._outcomes[index, key] = self._runner.outcome(index, key, sample, found)
        if self._samples:
            for lane, job in self._jobs:
                self._ask(lane, job, (), last=True)
            for _ in self._jobs:
                self._failure = self._failure or self._settled.get()
        if self._failure is not None:
            raise self._failure
        keys = [spec.key for spec in self._runner.specs]
        order = sorted(range(len(self._samples)), key=self._places.__getitem__)
        return [self._runner.sum({key: self._outcomes[index, key] for key in keys}) for index in order]

    def cancel(self) -> None:
        """Stop scoring; workers that are in the middle of it are ended."""
        self._failure = self._failure or RuntimeError("these rewards were given up")
        for wait in [lane.queue.drop(job) for lane, job in self._jobs]:
            wait()

    def _ask(self, lane: Lane, job: Job, calls: Sequence[Call], last: bool = False) -> None:
        if self._failure is None:
            try:
                lane.queue.add(job, calls, last)
            except (OSError, RuntimeError) as error:  # no file or thread is left to be had
                self._failure = error

    def _record(self, call: Call, found: Sequence[Outcome]) -> None:
        for number, sample, outcome in zip(call.numbers, call.samples, found, strict=True):
            self._outcomes[number, call.key] = self._runner.outcome(number, call.key, sample, outcome)


class _OneSample:
    """One sample's rewards, as a future."""

    def __init__(self, runner: RewardRunner, sample: Sample, place: int):
        self.future: Future[Reward] = Future()
        self._runner, self._sample, self._place = runner, sample, place
        self._outcomes: dict[str, Outcome] = {}
        self._lock, self._num_open = threading.Lock(), max(1, len(runner.lanes))
        self._jobs = [(lane, Job(self._record, self._settle)) for lane in runner.lanes]
        try:
            for key, function in runner.inside.items():
                self._note(key, function.now([sample])[0])
            if self._jobs:
                self.future.add_done_callback(self._drop_if_cancelled)
                for lane, job in self._jobs:
                    lane.queue.add(job, lane.calls(job, [sample], place), last=True)
                return
        except Exception as error:  # R504, or no file or thread is left to be had
            self._settle(error)
        else:
            self._settle(None)

    def _record(self, call: Call, found: Sequence[Outcome]) -> None:
        self._note(call.key, found[0])

    def _note(self, key: str, found: Outcome) -> None:
        self._outcomes[key] = self._runner.outcome(self._place, key, self._sample, found)

    def _settle(self, error: BaseException | None) -> None:
        """Called once by each lane, from its own thread: the last one settles the whole, or the first that failed."""
        with self._lock:
            self._num_open -= 1
            is_over = self.future.done() or (error is None and self._num_open > 0)
            if is_over or not self.future.set_running_or_notify_cancel():
                return
            # Within the lock: another lane's thread must find it done. What is called back then takes no lock of ours.
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(self._runner.sum(self._outcomes))
        if error is not None:
            self._drop()

    def _drop_if_cancelled(self, future: Future[Reward]) -> None:
        if future.cancelled():
            self._drop()

    def _drop(self) -> None:
        for lane, job in self._jobs:
            lane.queue.drop(job)


def _require_settings(specs: Sequence[RewardSpec], timeout_s: float, num_workers: int) -> None:
    names = [spec.key for spec in specs]
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
