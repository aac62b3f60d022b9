"""Rewards: what completions are worth, from functions of ours or of the user's, found out while the rank does other work.

A user's function runs in worker processes, and a thread of the rank feeds them and reads their answers, so that call by
call their deadlines hold while the main thread is busy. Built-in functions that cannot hang run where they are awaited:
they take microseconds, for all of which a thread would hold the interpreter lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait

from shardproof.background import BackgroundThread
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
from shardproof.rl.reward_workers import Call, WorkerPool
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
        self.noticed: set[str] = set()  # the kinds of failures that the terminal has shown
        self._pending: PendingRewards | None = None
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
        self._cancel()
        self.pool.close()

    def start(self) -> PendingRewards:
        """Rewards of samples still to be added. One batch at a time: what another has not scored yet is given up."""
        self._cancel()
        self._pending = PendingRewards(self)
        return self._pending

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Each sample's rewards, in the order of `samples`."""
        with self.start() as pending:
            pending.add(samples)
            return pending.result()

    def _cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


class PendingRewards(contextlib.AbstractContextManager["PendingRewards"]):
    """Samples that are scored while the caller does something else; leaving the block gives up those that are not.

    Only `result` raises what went wrong, so that ranks can agree on it there.
    """

    def __init__(self, runner: RewardRunner):
        self._runner, self.noticed = runner, runner.noticed
        self._samples: list[Sample] = []
        self._places: list[int] = []  # of each sample's reward in the result
        self._queue: deque[Call] = deque()  # filled by the caller, emptied by the thread
        self._outcomes: dict[tuple[int, str], Outcome] = {}  # by the sample's place and the reward's name
        self._complete = self._cancelled = False
        self._failure: BaseException | None = None
        self._thread: BackgroundThread | None = None

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def add(self, samples: Sequence[Sample], places: Sequence[int] | None = None) -> None:
        """Have these samples scored as well; returns at once. `places` are those of their rewards in the result."""
        first = len(self._samples)
        self._places += range(first, first + len(samples)) if places is None else places
        self._samples += samples
        calls = [(i, name, s) for i, s in enumerate(samples, first) for name in self._runner.outside]
        if not calls or self._failure is not None:
            return
        try:
            if self._thread is None:
                self._start()  # while there is no work yet: no reward can interrupt the start
            self._queue.extend(calls)
            self._wake()
        except (OSError, RuntimeError) as error:  # no file or thread is left to be had
            self._failure = error

    def result(self) -> list[Reward]:
        """Each sample's rewards, as soon as all are there: in the order of their places, or as they were added."""
        for index, sample in enumerate(self._samples):
            for name in self._runner.inside:
                self._record((index, name, sample), attempt(BUILT_IN[name], sample))
        self._complete = True
        self._join()
        if self._failure is not None:
            raise self._failure
        return [self._sum(index) for index in sorted(range(len(self._samples)), key=self._places.__getitem__)]

    def cancel(self) -> None:
        """Stop scoring; workers that are in the middle of it are ended."""
        self._cancelled = True
        self._join()

    def _start(self) -> None:
        self._wake_end, self._wake_start = Pipe(duplex=False)
        # Known before it runs: an interrupt may come at any time from then on, and it must be ended then too.
        self._thread = BackgroundThread("shardproof rewards", self._work)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            raise

    def _wake(self) -> None:
        """Wake the thread, which waits for this connection beside its workers'."""
        self._wake_start.send_bytes(b"!")

    def _join(self) -> None:
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._thread = None
            self._wake_end.close()
            self._wake_start.close()

    def _work(self) -> None:
        """The thread: hand calls to the workers and record their answers until all samples are there and scored."""
        pool = self._runner.pool
        pool.lock.acquire()
        try:
            while not self._cancelled:
                if self._wake_end.poll():
                    self._wake_end.recv_bytes()
                    pool.restart_ended()
                complete = self._complete  # looked at before the queue, which nothing is added to afterwards
                if self._queue or pool.busy:
                    pool.dispatch(self._queue)
                    for call, outcome in pool.collect(self._queue, [self._wake_end]):
                        self._record(call, outcome)
                elif complete:
                    return
                else:
                    wait([self._wake_end])
        except BaseException as error:
            self._failure = error
        finally:
            pool.cancel()
            pool.lock.release()

    def _record(self, call: Call, outcome: Outcome) -> None:
        index, name, (prompt, completion, _) = call
        if outcome[1] is not None and self._runner.stops:
            sample = f"sample {index} (prompt {prompt[-60:]!r}, completion {completion[:60]!r})"
            raise fail("R504", "reward", f"reward {name!r} failed on {sample}: {outcome[1]}.")
        self._outcomes[index, name] = outcome

    def _sum(self, index: int) -> Reward:
        specs = self._runner.specs
        found = {spec.name: self._outcomes[index, spec.name] for spec in specs}
        total = sum(spec.weight * found[spec.name][0] for spec in specs)
        parts = {name: value for name, (value, _) in found.items()}
        failures = {name: error for name, (_, error) in found.items() if error is not None}
        return Reward(total, parts, failures, any(spec.weight and spec.name in failures for spec in specs))


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
