"""The process that runs a rank's async rewards, many at once in one event loop; it cannot hang a run either.

The process itself ends calls that take too long. If it does not answer because a call keeps its event loop, or dies, it
is killed, and each call that was running is asked again by itself: the one to blame is found that way, and it alone
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from shardproof.rl.rewards import jobs
from shardproof.rl.rewards.calling import Function, Outcome
from shardproof.rl.rewards.jobs import Call, Job, Kind, Link, NotAnAnswer, checked, did_not_start
from shardproof.rl.rewards.specs import RewardSpec, Surroundings

_BEAT_S = 1.0  # how often the process says that its event loop runs
_GRACE_S = 2.0  # for the process to end a call itself
_SILENT_S = 30.0  # at least so long a silence is no sign of anything
_BEAT = -1  # in place of a call's number


def serve() -> None:
    """The process's life: import the rewards, then answer each call as soon as it can, until told to leave."""
    with contextlib.suppress(EOFError, OSError):
        if (begun := jobs.first_words()) is not None:
            asyncio.run(_serve(*begun))


async def _serve(connection: Connection, functions: Mapping[str, Function]) -> None:
    over, running = asyncio.Event(), set[asyncio.Task[None]]()

    async def answer(number: int, given: bytes) -> None:
        # Read here, so that each call has a row of its own.
        key, samples = pickle.loads(given)
        found = await functions[key].later(samples)
        with contextlib.suppress(OSError):
            connection.send((number, found))

    def read() -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = None
        if message is None:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            over.set()
            return
        task = asyncio.ensure_future(answer(*message))
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_reader(connection.fileno(), read)
    while not over.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), _BEAT_S)
        if running:
            with contextlib.suppress(OSError):
                connection.send((_BEAT, None))
    for task in running:
        task.cancel()


class _Running:
    """A call that the process has not answered yet."""

    def __init__(self, call: Call, limit_s: float):
        self.call = call
        self.deadline = time.monotonic() + limit_s + _GRACE_S


class _Worker(Link):
    """The process, and the calls that it has not answered yet, by their numbers."""

    def __init__(self, specs: Sequence[RewardSpec], around: Surroundings):
        self._numbers = itertools.count()
        self.pending: dict[int, _Running] = {}
        self._heard = math.inf  # until when silence is no sign
        self.silence_s = max(_SILENT_S, around.timeout_s + _GRACE_S)
        super().__init__("shardproof.rl.rewards.async_workers", specs, around)

    @property
    def is_alone(self) -> bool:
        """Whether it is in a call that nothing may run beside."""
        return any(each.call.alone for each in self.pending.values())

    def submit(self, call: Call, limit_s: float) -> None:
        number = next(self._numbers)
        self.pending[number] = _Running(call, limit_s)
        self._expect()
        self.send((number, pickle.dumps((call.key, call.samples))))

    def receive(self) -> tuple[Call, list[Outcome]] | None:
        """One answered call; None for other messages."""
        was_ready, message = self.ready, self.read()
        if not was_ready:
            return None
        number, found = _pair(message)
        if number != _BEAT:
            if number not in self.pending:
                raise NotAnAnswer
            found = checked(found, self.pending[number].call)
            call = self.pending.pop(number).call
        self._expect()
        return None if number == _BEAT else (call, found)

    def _expect(self) -> None:
        self._heard = time.monotonic() + self.silence_s
        limits = [self._heard, *(each.deadline for each in self.pending.values())]
        self.deadline = min(limits) if self.pending else math.inf


def _pair(message: Any) -> tuple[int, Any]:
    if not isinstance(message, tuple) or len(message) != 2 or not isinstance(message[0], int):
        raise NotAnAnswer
    return message


class AsyncPool:
    """A rank's process for async rewards, and the jobs that it answers. One thread at a time uses it."""

    def __init__(self, specs: Sequence[RewardSpec], around: Surroundings):
        self._specs, self._around = specs, around
        self.worker: _Worker | None = None
        self._kinds: dict[str, Kind] = {}
        self.jobs: dict[Job, None] = {}  # with calls that wait

    def start(self) -> None:
        """Start the process, and wait until it has imported the rewards."""
        while self._specs and (self.worker is None or not self.worker.ready):
            self._fill()
            for _ in self.collect():
                pass

    @property
    def busy(self) -> bool:
        """Calls are not answered yet."""
        return self.worker is not None and bool(self.worker.pending)

    def restart_ended(self) -> None:
        """Replace a process that died between calls, which no call is to blame for."""
        if self.worker is not None and not self.worker.pending and self.worker.process.poll() is not None:
            self._end()
        self._fill()

    def add(self, job: Job, calls: Sequence[Call]) -> None:
        """Have these calls of a job answered as well."""
        if calls:
            job.extend(calls)
            self.jobs.setdefault(job)

    def drop(self, job: Job) -> None:
        """Give up a job. The process is ended if it is in the middle of its calls, and other jobs' are asked again."""
        job.give_up()
        self.jobs.pop(job, None)
        worker = self.worker
        if worker is not None and any(each.call.job is job for each in worker.pending.values()):
            self._end()
            self._put_back([each.call for each in worker.pending.values() if each.call.job is not job])

    def dispatch(self) -> None:
        """Give the process as many calls as each function may have at once, in the order of the jobs."""
        if self.jobs:
            self._fill()
        worker = self.worker
        if worker is None or not worker.ready:
            return
        running: dict[str, int] = {}
        for each in worker.pending.values():
            running[each.call.key] = running.get(each.call.key, 0) + 1
        room = sum(kind.concurrency for kind in self._kinds.values())
        for job in list(self.jobs):
            left: list[Call] = []
            while job.waiting and len(worker.pending) < room and not worker.is_alone:
                call = job.waiting.popleft()
                kind = self._kinds[call.key]
                if running.get(call.key, 0) >= kind.concurrency or (call.alone and worker.pending):
                    left.append(call)
                else:
                    worker.submit(call, kind.longest_s)
                    running[call.key] = running.get(call.key, 0) + 1
            job.waiting.extendleft(reversed(left))
            if not job.waiting:
                del self.jobs[job]

    def collect(self, wake: Sequence[socket.socket] = ()) -> Iterator[tuple[Call, list[Outcome]]]:
        """Wait for answers, the nearest deadline or a message on `wake`; yield what came, and replace a process that hangs or died."""
        worker = self.worker
        assert worker is not None, "somebody has begun something"
        patience = max(0.0, worker.deadline - time.monotonic())
        wait([*wake, worker.connection], timeout=None if math.isinf(patience) else patience)
        try:
            while worker.connection.poll():
                if (answered := worker.receive()) is not None:
                    yield answered
                if worker.kinds is not None:
                    self._kinds = worker.kinds
        except NotAnAnswer:
            yield from self._replace("its worker returned something that is not a reward")
        except (EOFError, OSError):
            yield from self._replace(f"its worker process died ({worker.stop(1.0)})")
        else:
            if time.monotonic() >= worker.deadline:
                yield from self._replace(None)

    def cancel(self) -> None:
        """Give up every job."""
        self.jobs.clear()
        if self.busy:
            self._end()

    def close(self) -> None:
        """End the process."""
        if self.worker is not None and self.worker.ready and not self.worker.pending:
            self.worker.send(None)
            self.worker.stop(1.0)
        self._end()

    def _fill(self) -> None:
        if self.worker is None and self._specs:
            self.worker = _Worker(self._specs, self._around)

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.stop()
            self.worker = None

    def _replace(self, failure: str | None) -> Iterator[tuple[Call, list[Outcome]]]:
        """Start another process. A call that was running alone is to blame, else each is asked again by itself."""
        worker = self.worker
        assert worker is not None
        self._end()
        if not worker.ready:
            raise did_not_start(self._specs, failure or f"no answer in {jobs.START_S:g} s")
        self._fill()
        calls = [each.call for each in worker.pending.values()]
        if len(calls) > 1:
            self._put_back([call._replace(alone=True) for call in calls])
            return
        for call in calls:
            limit_s = min(self._kinds[call.key].longest_s, worker.silence_s)
            yield call, call.failed(failure or f"no answer in {limit_s:g} s")

    def _put_back(self, calls: Sequence[Call]) -> None:
        for call in reversed(calls):
            call.job.waiting.appendleft(call)
            self.jobs = {call.job: None, **self.jobs}
