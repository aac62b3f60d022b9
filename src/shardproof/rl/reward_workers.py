"""Processes that run the user's rewards, none of which can hang a run.

Each worker answers call by call, so that the call that hangs or kills its worker is known: it alone is recorded as
failed, and the rest of its chunk goes to other workers.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

from shardproof.errors import ShardproofError, error_for, fail
from shardproof.findings import Finding
from shardproof.processes import WorkerProcess, take_files
from shardproof.rl.reward_functions import Outcome, Sample, attempt, find_reward

START_S, MAX_CHUNK = 120.0, 32  # what a worker may take to import the user's modules; calls sent at a time


def serve() -> None:
    """A worker's life: import the rewards, then answer chunks of calls, one reply per call, until told to leave."""
    (descriptor,) = take_files()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        try:
            functions = {name: find_reward(name) for name in connection.recv()}
        except ShardproofError as error:
            connection.send(error.findings[0])
            return
        connection.send(None)
        while (chunk := connection.recv()) is not None:
            for call in chunk:
                # Read here, so that each call has a row of its own: what a reward does to it reaches no other call.
                name, sample = pickle.loads(call)
                connection.send(attempt(functions[name], sample))


class Job:
    """Calls that are awaited and given up together. `record` takes each outcome, `settle` the end: None, or an error.

    Both are called by the thread that uses the workers.
    """

    def __init__(
        self, record: Callable[[Call, Outcome], None], settle: Callable[[BaseException | None], None]
    ):
        self.record, self.settle = record, settle
        self.waiting: deque[Call] = deque()
        self.num_open = 0  # calls that have no outcome yet
        self.complete = False  # no more calls come
        self.over = False  # settled, or given up


class Call(NamedTuple):
    """A reward that is to be asked about a sample."""

    job: Job
    number: int  # the sample's place in the batch
    name: str  # the reward's
    sample: Sample


class _NotAnAnswer(Exception):
    """A worker sent what is no answer: a reward wrote to the connection itself."""


def _is_outcome(message: object) -> bool:
    if not isinstance(message, tuple) or len(message) != 2:
        return False
    value, error = message
    return isinstance(value, float) and (error is None or isinstance(error, str))


class _Worker:
    """One worker process, and the calls it has not answered yet."""

    def __init__(self, names: Sequence[str], timeout_s: float):
        self.timeout_s = timeout_s
        self.ready = False
        self.pending: deque[Call] = deque()
        self.deadline = time.monotonic() + START_S
        self.connection, remote = Pipe()
        # A worker that stops in the middle of a message must not stop its rank.
        limit = struct.pack("ll", math.ceil(timeout_s), 0)
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        with remote:
            self._started = WorkerProcess("shardproof.rl.reward_workers", [remote.fileno()])
        self.process = self._started.popen
        self.send(list(names))

    def submit(self, calls: Sequence[Call]) -> None:
        self.pending.extend(calls)
        self.deadline = time.monotonic() + self.timeout_s
        # One by one: in one message the samples of a group would share their row.
        self.send([pickle.dumps((call.name, call.sample)) for call in calls])

    def send(self, message: object) -> None:
        # A worker that is gone or stuck is noticed where its answers are read.
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> tuple[Call, Outcome] | None:
        """One answered call; None for the message that the worker is ready."""
        raw = self.connection.recv_bytes()
        try:
            message = pickle.loads(raw)
        except Exception as error:
            raise _NotAnAnswer from error
        if isinstance(message, Finding):
            raise error_for([message])
        if not self.ready:
            self.ready, self.deadline = True, math.inf
            return None
        if not self.pending or not _is_outcome(message):
            raise _NotAnAnswer
        call = self.pending.popleft()
        self.deadline = time.monotonic() + self.timeout_s if self.pending else math.inf
        return call, message

    def stop(self, patience_s: float = 0.0) -> str:
        """End the process and all it started; returns how it ended."""
        how = self._started.end(patience_s)
        self.connection.close()
        return how


class WorkerPool:
    """The workers of a rank, and the jobs that they answer: first come, first served. One thread at a time uses it."""

    def __init__(self, names: Sequence[str], num_workers: int, timeout_s: float):
        self._names, self._num_workers, self._timeout_s = names, num_workers, timeout_s
        self.workers: list[_Worker] = []
        self.jobs: dict[Job, None] = {}  # with calls that wait for a worker

    def start(self) -> None:
        """Start every worker, and wait until each has imported the rewards."""
        self._fill()
        while not all(worker.ready for worker in self.workers):
            for _ in self.collect():
                pass

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
            job.num_open += len(calls)
            job.waiting.extend(calls)
            self.jobs.setdefault(job)

    def drop(self, job: Job) -> None:
        """Give up a job. Workers in the middle of its calls are ended: nothing else stops them."""
        job.over = True
        self.jobs.pop(job, None)
        job.waiting.clear()
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

    def collect(self, wake: Sequence[socket.socket] = ()) -> Iterator[tuple[Call, Outcome]]:
        """Wait for answers, the nearest deadline or a message on `wake`; yield what came, and replace workers that hang or died."""
        active = [worker for worker in self.workers if worker.pending or not worker.ready]
        patience = min(worker.deadline for worker in active) - time.monotonic()
        wait([*wake, *(worker.connection for worker in active)], timeout=max(0.0, patience))
        for worker in active:
            try:
                while worker.connection.poll():
                    if (answered := worker.receive()) is not None:
                        yield answered
            except _NotAnAnswer:
                yield from self._replace(worker, "its worker returned something that is not a reward")
            except (EOFError, OSError):
                yield from self._replace(worker, f"its worker process died ({worker.stop(1.0)})")
            else:
                if time.monotonic() >= worker.deadline:
                    limit_s = self._timeout_s if worker.ready else START_S
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
            self.workers.append(_Worker(self._names, self._timeout_s))

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self.workers.remove(worker)
            worker.stop()

    def _replace(self, worker: _Worker, failure: str) -> Iterator[tuple[Call, Outcome]]:
        """Blame the call that the worker was in, put the rest of its chunk back, and start another worker."""
        self._drop([worker])
        if not worker.ready:
            message = f"a worker for {', '.join(self._names)} did not start: {failure}."
            raise fail(
                "R504",
                "reward",
                message,
                fix="check that the reward's module can be imported in a new Python process",
            )
        self._fill()
        if worker.pending:
            call, *rest = worker.pending
            if rest:
                call.job.waiting.extendleft(reversed(rest))
                self.jobs = {call.job: None, **self.jobs}
            yield call, (0.0, failure)
