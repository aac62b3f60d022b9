"""Processes that run the user's rewards, none of which can hang a run.

Each worker answers call by call, so that the call that hangs or kills its worker is known: it alone is recorded as
failed, and the rest of its chunk goes to other workers.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

from shardproof.rl.rewards import jobs
from shardproof.rl.rewards.calling import Outcome
from shardproof.rl.rewards.jobs import Call, Job, Kind, Link, NotAnAnswer, checked, did_not_start
from shardproof.rl.rewards.specs import RewardSpec, Surroundings

MAX_CHUNK = 32  # calls sent at a time


def serve() -> None:
    """A worker's life: import the rewards, then answer chunks of calls, one reply per call, until told to leave."""
    with contextlib.suppress(EOFError, OSError):
        if (begun := jobs.first_words()) is None:
            return
        connection, functions = begun
        while (chunk := connection.recv()) is not None:
            for call in chunk:
                # Read here, so that each call has a row of its own: what a reward does to it reaches no other call.
                key, samples = pickle.loads(call)
                connection.send(functions[key].now(samples))


class _Worker(Link):
    """One worker process, and the calls it has not answered yet."""

    def __init__(self, specs: Sequence[RewardSpec], around: Surroundings):
        self.timeout_s = around.timeout_s
        self.pending: deque[Call] = deque()
        super().__init__("shardproof.rl.rewards.workers", specs, around)

    def submit(self, calls: Sequence[Call]) -> None:
        self.pending.extend(calls)
        self.deadline = time.monotonic() + self.timeout_s
        # One by one: in one message the samples of a group would share their row.
        self.send([pickle.dumps((call.key, call.samples)) for call in calls])

    def receive(self) -> tuple[Call, list[Outcome]] | None:
        """One answered call; None for the message that the worker is ready."""
        was_ready, message = self.ready, self.read()
        if not was_ready:
            return None
        if not self.pending:
            raise NotAnAnswer
        outcomes = checked(message, self.pending[0])
        call = self.pending.popleft()
        self.deadline = time.monotonic() + self.timeout_s if self.pending else math.inf
        return call, outcomes


class WorkerPool:
    """The workers of a rank, and the jobs that they answer: first come, first served. One thread at a time uses it."""

    def __init__(self, specs: Sequence[RewardSpec], num_workers: int, around: Surroundings):
        self._specs, self._num_workers, self._around = specs, num_workers, around
        self.workers: list[_Worker] = []
        self.jobs: dict[Job, None] = {}  # with calls that wait for a worker

    def start(self) -> dict[str, Kind]:
        """Start every worker, and wait until each has imported the rewards; returns what these are."""
        self._fill()
        while not all(worker.ready for worker in self.workers):
            for _ in self.collect():
                pass
        return dict(self.workers[0].kinds or {}) if self.workers else {}

    @property
    def busy(self) -> bool:
        """Calls are not answered yet."""
        return any(worker.pending for worker in self.workers)

    def restart_ended(self) -> None:
        """Replace workers that died between calls, which no call is to blame for."""
        self._drop(
            [worker for worker in self.workers if not worker.pending and worker.process.poll() is not None]
        )
        self._fill()

    def add(self, job: Job, calls: Sequence[Call]) -> None:
        """Have these calls of a job answered as well."""
        if calls:
            job.extend(calls)
            self.jobs.setdefault(job)

    def drop(self, job: Job) -> None:
        """Give up a job. Workers in the middle of its calls are ended: nothing else stops them."""
        job.give_up()
        self.jobs.pop(job, None)
        self._drop([worker for worker in self.workers if worker.pending and worker.pending[0].job is job])

    def dispatch(self) -> None:
        """Give every idle worker a chunk of one job; chunks shrink towards its end, so that workers finish together."""
        if self.jobs:
            self._fill()
        for worker in self.workers:
            if self.jobs and worker.ready and not worker.pending:
                job = next(iter(self.jobs))
                size = max(1, min(MAX_CHUNK, len(job.waiting) // (2 * len(self.workers))))
                worker.submit([job.waiting.popleft() for _ in range(size)])
                if not job.waiting:
                    del self.jobs[job]

    def collect(self, wake: Sequence[socket.socket] = ()) -> Iterator[tuple[Call, list[Outcome]]]:
        """Wait for answers, the nearest deadline or a message on `wake`; yield what came, and replace workers that hang or died."""
        active = [worker for worker in self.workers if worker.pending or not worker.ready]
        patience = min(worker.deadline for worker in active) - time.monotonic()
        wait([*wake, *(worker.connection for worker in active)], timeout=max(0.0, patience))
        for worker in active:
            try:
                while worker.connection.poll():
                    if (answered := worker.receive()) is not None:
                        yield answered
            except NotAnAnswer:
                yield from self._replace(worker, "its worker returned something that is not a reward")
            except (EOFError, OSError):
                yield from self._replace(worker, f"its worker process died ({worker.stop(1.0)})")
            else:
                if time.monotonic() >= worker.deadline:
                    limit_s = self._around.timeout_s if worker.ready else jobs.START_S
                    yield from self._replace(worker, f"no answer in {limit_s:g} s")

    def cancel(self) -> None:
        """Give up every job. Workers in the middle of a chunk are ended: they would answer the next with its rewards."""
        self.jobs.clear()
        self._drop([worker for worker in self.workers if worker.pending])

    def close(self) -> None:
        """End every worker, idle ones after a moment for their exit handlers."""
        idle = [worker for worker in self.workers if worker.ready and not worker.pending]
        for worker in idle:
            worker.send(None)
        until = time.monotonic() + 1.0
        for worker in self.workers:
            worker.stop(max(0.0, until - time.monotonic()) if worker in idle else 0.0)
        self.workers = []

    def _fill(self) -> None:
        while len(self.workers) < self._num_workers:
            self.workers.append(_Worker(self._specs, self._around))

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self.workers.remove(worker)
            worker.stop()

    def _replace(self, worker: _Worker, failure: str) -> Iterator[tuple[Call, list[Outcome]]]:
        """Blame the call that the worker was in, put the rest of its chunk back, and start another worker."""
        self._drop([worker])
        if not worker.ready:
            raise did_not_start(self._specs, failure)
        self._fill()
        if worker.pending:
            call, *rest = worker.pending
            if rest:
                call.job.waiting.extendleft(reversed(rest))
                self.jobs = {call.job: None, **self.jobs}
            yield call, call.failed(failure)
