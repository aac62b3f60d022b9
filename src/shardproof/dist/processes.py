"""The rank processes of one host: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.dist.signals import SIGNALLED
from shardproof.text import printable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Function = Callable[..., Any]


@dataclass(frozen=True)
class Failure:
    """How a rank ended that did not finish: its exit code, or the negative number of the signal that ended it."""

    rank: int
    exit_code: int
    text: str


class RankProcesses:
    """Processes that each call a function, with an environment of their own. They do not outlive this process."""

    def __init__(self, function: Function, args: tuple[Any, ...], environments: Sequence[dict[str, str]]):
        self.results: dict[int, Any] = {}
        self.failure: Failure | None = None  # the first
        self._running: dict[int, tuple[Any, multiprocessing.connection.Connection]] = {}
        self._errors: dict[int, str] = {}
        try:
            with _held_back(signal.SIGUSR1):
                for environment in environments:
                    self._start(function, args, environment)
        except BaseException:
            self.kill()
            raise

    def _start(self, function: Function, args: tuple[Any, ...], environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        rank = int(environment["RANK"])
        start = (os.getpid(), environment, sender, function, args)
        process = context.Process(target=_run_rank, args=start, name=f"rank {rank}")
        process.start()
        sender.close()
        self._running[rank] = (process, receiver)

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def poll(self, seconds: float) -> None:
        """Wait until a rank ends, at most this long, and note what it returned or how it failed."""
        sentinels = [process.sentinel for process, _ in self._running.values()]
        pipes = [pipe for _, pipe in self._running.values() if not pipe.closed]
        multiprocessing.connection.wait([*sentinels, *pipes], seconds)
        for rank, (process, pipe) in list(self._running.items()):
            ended = not process.is_alive()
            self._read(rank, pipe)
            if ended:
                process.join()
                pipe.close()
                del self._running[rank]
                if process.exitcode != 0 and self.failure is None:
                    self.failure = self._describe(rank, process.pid, process.exitcode)

    def _read(self, rank: int, pipe: multiprocessing.connection.Connection) -> None:
        if pipe.closed:
            return
        try:
            while pipe.poll():
                kind, value = pipe.recv()
                (self.results if kind == "result" else self._errors)[rank] = value
        except (EOFError, OSError):
            pipe.close()

    def _describe(self, rank: int, pid: int, code: int) -> Failure:
        if code < 0:
            with contextlib.suppress(ValueError):
                return Failure(rank, code, f"{signal.Signals(-code).name} ended process {pid}")
        return Failure(rank, code, printable(self._errors.get(rank, f"process {pid} ended")))

    def send(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """End every rank at once, and wait until none is left."""
        for process, _ in self._running.values():
            process.kill()
        while self.are_running:
            self.poll(0.1)


@contextlib.contextmanager
def _held_back(number: int) -> Iterator[None]:
    """A signal that comes in the block is delivered after it; processes that start here begin without it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_rank(
    parent: int,
    environment: dict[str, str],
    pipe: multiprocessing.connection.Connection,
    function: Function,
    args: tuple[Any, ...],
) -> None:
    """What each rank's process runs."""
    _die_with_parent(parent)
    # A scheduler's warning may reach every process of a task, also those that this one starts; ours hands it on as SIGTERM.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    os.environ.update(environment)
    try:
        result = function(*args)
    except KeyboardInterrupt:
        raise SystemExit(SIGNALLED + signal.SIGINT) from None
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        raise SystemExit(1) from None
    pipe.send(("result", result))


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the one that started it is gone, however that one ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
