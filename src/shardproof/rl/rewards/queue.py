"""The thread that feeds a rank's reward workers and reads their answers, for any number of jobs at the same time."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from shardproof.background import BackgroundThread
from shardproof.rl.rewards.calling import Outcome
from shardproof.rl.rewards.jobs import Call, Job, Pool

_LOOK_S = 1.0  # how often a caller that waits looks whether the thread still runs


class RewardQueue:
    """Has calls answered by workers while the callers do something else. Every method may be called from any thread.

    The thread starts with the first calls, and again after an end. Whatever ends it settles all jobs.
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self._thread: _Thread | None = None
        self._lock = threading.Lock()  # of who starts and ends the thread

    def add(self, job: Job, calls: Sequence[Call], last: bool = False) -> None:
        """Have these calls answered; `last`: the job gets no others. OSError or RuntimeError if there can be no thread."""
        with self._lock:
            if self._thread is None or not self._thread.knows(job):
                self._end()
                # Known before it runs: an interrupt may come at any time from then on, and it must be ended then too.
                self._thread = _Thread(self._pool)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
                    raise
                self._thread.knows(job)
            self._thread.do(lambda thread: thread.add(job, calls, last))

    def drop(self, job: Job) -> Callable[[], None]:
        """Give a job up: nothing of it is recorded any more. What is returned waits until its workers are ended."""
        thread, done = self._thread, queue.SimpleQueue[None]()
        if thread is None:
            return lambda: None
        thread.do(lambda thread: thread.drop(job), done.put)
        return lambda: thread.wait_for(done)

    def close(self) -> None:
        """Settle all jobs with an error, and end the thread."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None


class _Thread:
    """One life of the queue's thread."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._jobs: dict[Job, None] = {}  # that are not settled
        self._tasks: deque[tuple[Callable[[_Thread], None], Callable[[None], None]]] = deque()
        self._lock = threading.Lock()
        self._closing = self._over = False  # over: no more jobs are taken
        self._wake_end, self._wake_start = socket.socketpair()
        self._wake_end.setblocking(False)
        self._wake_start.setblocking(False)
        self._thread = BackgroundThread("shardproof rewards", self._work)

    def start(self) -> None:
        """RuntimeError if no more threads can be had."""
        try:
            self._thread.start()
        except RuntimeError:
            self._wake_end.close()
            self._wake_start.close()
            raise

    def knows(self, job: Job) -> bool:
        """Whether the job will be settled by this thread; a new one is taken in."""
        with self._lock:
            if not self._over and not job.over:
                self._jobs.setdefault(job)
            return not self._over

    def do(self, task: Callable[[_Thread], None], done: Callable[[None], None] = lambda _: None) -> None:
        """Have the thread do something, and tell when it is done."""
        self._tasks.append((task, done))
        with contextlib.suppress(
            OSError
        ):  # it is full, and the thread will wake anyway; or the thread has ended
            self._wake_start.send(b"!")

    def wait_for(self, done: queue.SimpleQueue[None]) -> None:
        """Wait until something is done, or the thread has ended."""
        while not self._thread.has_ended:
            with contextlib.suppress(queue.Empty):
                return done.get(timeout=_LOOK_S)

    def end(self) -> None:
        """Give up every job, and end the thread."""
        self._closing = True
        self.do(lambda thread: None)
        self._thread.join()
        self._wake_end.close()
        self._wake_start.close()

    def add(self, job: Job, calls: Sequence[Call], last: bool) -> None:
        """On the thread."""
        if not job.over:
            job.complete |= last
            self._pool.add(job, calls)
            self._settle_if_complete(job)

    def drop(self, job: Job) -> None:
        """On the thread."""
        self._jobs.pop(job, None)
        self._pool.drop(job)

    def _work(self) -> None:
        """The thread: hand calls to the workers and record their answers until it is told to end."""
        pool, error = self._pool, None
        try:
            while True:
                self._do_tasks()
                if self._closing:  # looked at after the byte that woke the thread was taken
                    break
                if pool.jobs or pool.busy:
                    pool.dispatch()
                    # All of them before any is recorded: a job that fails then ends workers.
                    for call, outcomes in list(pool.collect([self._wake_end])):
                        self._record(call, outcomes)
                else:
                    wait([self._wake_end])
        except BaseException as failure:
            error = failure
        finally:
            with self._lock:
                self._over = True
            pool.cancel()
            for job in self._jobs:
                job.over = True
                job.settle(error or RuntimeError("the rewards' workers are closed"))

    def _do_tasks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_end.recv(4096)
        if not self._tasks:
            return
        while self._tasks:
            task, done = self._tasks.popleft()
            task(self)
            done(None)
        if self._pool.jobs:
            self._pool.restart_ended()

    def _record(self, call: Call, outcomes: Sequence[Outcome]) -> None:
        job = call.job
        if job.over:
            return
        job.num_open -= 1
        try:
            job.record(call, outcomes)
        except Exception as error:  # R504, where the recipe wants a failure to end the run
            self.drop(job)
            job.settle(error)
        else:
            self._settle_if_complete(job)

    def _settle_if_complete(self, job: Job) -> None:
        if job.complete and not job.num_open:
            job.over = True
            self._jobs.pop(job, None)
            job.settle(None)
