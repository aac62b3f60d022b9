"""The stacks of all ranks when a collective hangs, requested and answered through the process group's store.

A collective that does not end says nothing about the ranks it waits for. Each process therefore has a thread that
checks the store twice per second. When a deadline is near, or a connection is lost, one rank writes a request there;
every living process answers with the call its main thread is in and the lines that led to it. The store is the one
channel that still works while collectives hang.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardproof.text import printable

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_ANSWER_S = 2.0  # how long a request waits for answers
_STOP_S = 10.0  # how long the end of a process waits for a call to the store that does not return
_MAX_LINES = 5
_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_OWN_FILES = ("stacks.py", "deadline.py", "contextlib.py", "threading.py", "c10d_logger.py")

Place = tuple[str, int, str]  # file, line, function

_watch: _Watch | None = None


def start() -> None:
    """Start this process's thread for the current process group, once. A group of one needs none."""
    global _watch
    group = dist.group.WORLD
    if dist.get_world_size() == 1 or (_watch is not None and _watch.group is group and _watch.is_alive()):
        return
    stop()
    _watch = _Watch(group)
    _watch.start()
    atexit.register(stop)


def stop() -> None:
    """End this process's thread and wait for it.

    A thread that is inside the store while the interpreter or the store goes would end the process with a signal.
    """
    global _watch
    atexit.unregister(stop)
    if _watch is not None and _watch is not threading.current_thread():
        _watch.stop()
    _watch = None


def current() -> _Watch | None:
    """The thread of the current process group."""
    return _watch if _watch is not None and _watch.group is dist.group.WORLD else None


class _Watch(threading.Thread):
    """Answers requests for stacks, and makes one when its process is about to miss a deadline."""

    def __init__(self, group: Any):
        super().__init__(name="shardproof stacks", daemon=True)
        self.group = group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._shared_store: Any = _get_default_store()
        self._store: Any = None  # until the thread has a connection
        self._stopping = threading.Event()
        self._num_requests = 0
        self._limit: float | None = None  # seconds that a collective may take now
        self._seen = ("", time.monotonic())  # where the main thread was last, and since when
        self._failed_at: str | None = None  # where the main thread was when its collective failed
        self._lock = threading.Lock()
        self._answers: dict[int, str] = {}
        self._last_request_at = float("-inf")  # made or answered

    def run(self) -> None:
        try:
            # A connection of its own: the main thread may be waiting on the other one. Made here, because it does not
            # return for many minutes once the process that holds the store is gone.
            self._store = self._shared_store.clone()
        except Exception:
            return
        while not self._stopping.wait(_INTERVAL_S):
            if dist.group.WORLD is not self.group:
                return
            try:
                if self._is_late():
                    self.request_stacks()
                    self._warn()
                elif self._store.check([self._key()]):
                    self._answer()
            except Exception:  # the store went with the run
                return

    def stop(self) -> None:
        """Let the thread end after the call it is in, and wait for that."""
        self._stopping.set()
        self.join(_STOP_S)

    def set_limit(self, seconds: float | None) -> float | None:
        """Request stacks shortly before a collective has taken this long; returns the previous limit."""
        before, self._limit = self._limit, seconds
        self._failed_at = None
        return before

    def _is_late(self) -> bool:
        """Whether the main thread has been at one place for nearly as long as it may. True once for each place."""
        limit = self._limit
        if limit is None or self._failed_at is not None:
            return False
        now, place = time.monotonic(), describe(list(_places_of_main_thread()))
        if place != self._seen[0]:
            self._seen = (place, now)
        late = now - self._seen[1] >= max(limit - _ANSWER_S - 2 * _INTERVAL_S, 0.5 * limit)
        if late:
            self._seen = (place, float("inf"))
        return late

    def _warn(self) -> None:
        # NCCL ends the process at its timeout, before an error could be raised.
        if "nccl" in str(dist.get_backend_config(self.group)):
            logger.warning(
                "a collective has not finished and is close to its timeout: %s",
                summarise(self._answers, self.world_size),
            )

    def report(self, error: BaseException) -> dict[int, str]:
        """{rank: where it is, or was before connections were lost}; ranks that do not answer are left out."""
        self._failed_at = describe(list(_places_of_error(error)))
        try:
            if time.monotonic() - self._last_request_at > 2 * _ANSWER_S + 2 * _INTERVAL_S:
                self.request_stacks()
            else:
                self._collect(self._num_requests - 1)
        except Exception:  # without the store only this rank's own stack is known
            self._answers = {self.rank: self._failed_at}
        return self._answers

    def request_stacks(self) -> None:
        """Ask every rank for its stack, and wait briefly for the answers."""
        with self._lock:
            request = self._num_requests
            self._store.set(self._key(request), "")
            self._post(request)
            self._num_requests = request + 1
        self._collect(request)

    def _answer(self) -> None:
        with self._lock:
            if self._store.check([self._key()]):
                self._post(self._num_requests)
                self._num_requests += 1

    def _collect(self, request: int) -> None:
        """Wait briefly for every rank's answer."""
        until = time.monotonic() + _ANSWER_S
        found: dict[int, str] = {}
        while len(found) < self.world_size and time.monotonic() < until and not self._stopping.is_set():
            for rank in range(self.world_size):
                key = f"{self._key(request)}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = printable(self._store.get(key).decode(errors="replace"))
            time.sleep(0.05)
        self._answers = found

    def _post(self, request: int) -> None:
        place = self._failed_at or describe(list(_places_of_main_thread()))
        self._store.set(f"{self._key(request)}/{self.rank}", place)
        self._last_request_at = time.monotonic()

    def _key(self, request: int | None = None) -> str:
        return f"shardproof/stacks/{self._num_requests if request is None else request}"


def _places_of_main_thread() -> Iterator[Place]:
    """The main thread's frames, the innermost first; autograd's where it is in a collective and the main one is not."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    others = [frame for ident, frame in frames.items() if ident not in (main, threading.get_ident())]
    stacks = [list(_walk(frames[main]))] if main in frames else []
    stacks += [list(_walk(frame)) for frame in others]
    return iter(next((stack for stack in stacks if _collective(stack)), stacks[0] if stacks else []))


def _walk(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _places_of_error(error: BaseException) -> Iterator[Place]:
    """The frames in which an error was raised, the innermost first, and those that led to them."""
    entries = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.endswith(_OWN_FILES)
    ]
    for frame, line in reversed(entries):
        yield frame.f_code.co_filename, line, frame.f_code.co_name
    if entries:
        yield from _walk(entries[0][0].f_back)


def _collective(places: list[Place]) -> str | None:
    """The public torch.distributed function that the stack is in."""
    for file, _, function in places:
        if file.endswith("distributed_c10d.py") and not function.startswith("_"):
            return function
    return None


def describe(places: list[Place]) -> str:
    """`all_gather: gather_rows (dist/collectives.py:61) < agree (train/guard.py:70) < main (train.py:12)`."""
    visible = [p for p in places if not p[0].startswith((_TORCH, "<")) and not p[0].endswith(_OWN_FILES)]
    lines = [f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, name in visible]
    # The innermost lines tell which collective it is; the first line outside of any package, which call of the user.
    outside = [
        i for i, p in enumerate(visible) if not p[0].startswith(_PACKAGE) and "site-packages" not in p[0]
    ]
    shown = lines[:_MAX_LINES]
    if outside and outside[0] >= _MAX_LINES:
        shown = [*lines[: _MAX_LINES - 1], lines[outside[0]]]
    return f"{_collective(places) or 'no collective'}: {' < '.join(shown) or 'unknown lines'}"


def summarise(answers: dict[int, str], world_size: int) -> str:
    """The answers in one line, with ranks at the same place grouped and ranks without an answer last."""
    by_place: dict[str, list[int]] = {}
    for rank in sorted(answers):
        by_place.setdefault(answers[rank], []).append(rank)
    parts = [f"{_ranks(ranks)} in {place}" for place, ranks in by_place.items()]
    silent = [rank for rank in range(world_size) if rank not in answers]
    if silent:
        parts.append(f"{_ranks(silent)} did not answer: its process has died or is stuck outside Python")
    return "; ".join(parts)


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
