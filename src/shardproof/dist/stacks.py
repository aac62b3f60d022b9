"""The stacks of all ranks when a collective hangs, requested through the process group's store.

A collective that does not end says nothing about the ranks it waits for. Each process therefore has a thread that looks
into the store about twice per second. When a deadline is near, or a connection is lost, a rank asks there; every living
process answers with the call it is in and the lines that led to it. The first that asks reads the answers and writes
them down for all, so a request takes a few calls per rank, however many ranks there are. The store is the one channel
that still works while collectives hang. A rank that cannot reach it knows at least that: only this thread waits for the
store, so one that never answers holds up nobody.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from shardproof.dist.lost import Answers, Wait, summarise
from shardproof.dist.places import place_of_error, place_of_thread
from shardproof.text import printable

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_CALLS_PER_S = 100  # of all ranks together to the store, while nothing happens: many ranks look less often
_ANSWER_S = 1.0  # beside two intervals, how long answers are awaited
_GONE_S = 5.0  # a call to the store that takes longer gets no answer any more
_KEPT_S = 60.0  # what was found out about a loss counts for all that fails after it
_STOP_S = 10.0  # how long the end of a process waits for its thread

_watch: Watch | None = None


def start() -> None:
    """Start this process's thread for the current process group, once. A group of one needs none.

    The place that it tells is that of the thread which calls this.
    """
    global _watch
    group = dist.group.WORLD
    if dist.get_world_size() == 1 or (_watch is not None and _watch.group is group and _watch.is_alive()):
        return
    stop()
    _watch = Watch(group)
    _watch.start()
    atexit.register(stop)


def stop() -> None:
    """End this process's thread and wait for it, unless it waits for a store that does not answer."""
    global _watch
    atexit.unregister(stop)
    if _watch is not None and _watch is not threading.current_thread():
        _watch.stop()
    _watch = None


def current() -> Watch | None:
    """The thread of the current process group."""
    return _watch if _watch is not None and _watch.group is dist.group.WORLD else None


@dataclass
class _Need:
    """A main thread that wants to know where all ranks are, because its collective failed."""

    wait: Wait
    found: Answers | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Watch(threading.Thread):
    """Answers requests for stacks, and makes one when its process is about to miss a deadline."""

    def __init__(self, group: Any):
        super().__init__(name="shardproof stacks", daemon=True)
        self.group = group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.watched = threading.get_ident()  # the thread whose place is told
        self.num_calls = 0  # to the store
        self._shared_store: Any = _get_default_store()
        self._store: Any = None  # until the thread has a connection
        self._stopping, self._wake = threading.Event(), threading.Event()
        self._number = 0  # of the next request
        self._last_at = float("-inf")  # when this rank last answered one
        self.wait: Wait | None = None  # what this process does now, and for how long a collective may take
        self._seen = ("", time.monotonic())  # where the process was last, and since when
        self._failed_at: str | None = None  # where it was when its collective failed
        self._need: _Need | None = None
        self._kept: tuple[float, Answers] | None = None
        self._call_began: float | None = time.monotonic()  # the one that it is in; at first it connects

    def run(self) -> None:
        try:
            # A connection of its own: the main thread may be waiting on the other one. Made here, because it does not
            # return for many minutes once the process that holds the store is gone.
            self._store = self._shared_store.clone()
            self._store.set_timeout(timedelta(seconds=_GONE_S))
            self._call_began = None
            while not self._stopping.is_set():
                self._wake.wait(self._interval_s)
                self._wake.clear()
                if dist.group.WORLD is not self.group:
                    return
                self._look()
        except Exception as error:  # the store went with the run
            logger.debug("no more stacks: %s", error)
        finally:
            if self._need is not None:
                self._need.done.set()

    def _look(self) -> None:
        need = self._need
        if need is not None and not need.done.is_set():
            need.found = self._find_out(need.wait)
            need.done.set()
        elif self.wait is not None and self._is_late():
            self._request(self.wait)
            self._warn()
        elif self._call(self._store.check, [self._key()]):
            self._answer()

    def stop(self) -> None:
        """Let the thread end after the call it is in, and wait for that."""
        self._stopping.set()
        self._wake.set()
        end = time.monotonic() + _STOP_S
        while self.is_alive() and time.monotonic() < end and self.silent_s < _GONE_S:
            self.join(0.1)
        if self.is_alive():
            # A store that goes while a thread is inside would end the process with a signal, so it stays.
            for each in (self._store, self._shared_store):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    @property
    def silent_s(self) -> float:
        """For how many seconds the store has not answered the call that is under way; 0 if there is none."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    def set_wait(self, wait: Wait | None) -> None:
        """Say what the process does from now on, and how long a collective may take."""
        self.wait, self._failed_at = wait, None
        if wait is not None:
            self.watched = threading.get_ident()

    def report(self, error: BaseException, wait: Wait) -> Answers:
        """Where all ranks are, or were before connections were lost; ranks that do not answer are left out.

        Takes a few seconds at most, also where the store does not answer.
        """
        if self._kept is not None and time.monotonic() - self._kept[0] < _KEPT_S:
            return self._kept[1]
        self._failed_at = place_of_error(error)
        self._need = need = _Need(wait)
        self._wake.set()
        end = time.monotonic() + 2 * self._patience_s + 2 * _GONE_S
        while not need.done.wait(0.1) and time.monotonic() < end and self.silent_s < _GONE_S:
            pass
        found = need.found
        if found is None:
            silent = self.silent_s or _GONE_S
            found = Answers(wait, {self.rank: self._failed_at}, store_silent_s=max(silent, 0.0))
        self._kept = time.monotonic(), found
        return found

    @property
    def _interval_s(self) -> float:
        """How often the thread looks into the store."""
        common = max(_INTERVAL_S, self.world_size / _CALLS_PER_S)
        return common if self.wait is None else min(common, max(_INTERVAL_S, self.wait.seconds / 8))

    @property
    def _patience_s(self) -> float:
        """How long answers are awaited: every rank looks into the store in that time."""
        return _ANSWER_S + 2 * self._interval_s

    def _is_late(self) -> bool:
        """Whether the process has been at one place for nearly as long as it may. True once for each place."""
        wait = self.wait
        if wait is None or self._failed_at is not None:
            return False
        now, place = time.monotonic(), place_of_thread(self.watched)
        if place != self._seen[0]:
            self._seen = (place, now)
        before = self._patience_s + self._interval_s
        late = now - self._seen[1] >= max(wait.seconds - before, 0.5 * wait.seconds)
        if late:
            self._seen = (place, float("inf"))
        return late

    def _warn(self) -> None:
        # NCCL ends the process at its timeout, before an error could be raised.
        if "nccl" in str(dist.get_backend_config(self.group)) and self.wait is not None:
            found = self._published(self._number - 1) or Answers(self.wait, {})
            logger.warning(
                "a collective has not finished and is close to its timeout: %s",
                summarise(found, self.world_size),
            )

    def _find_out(self, wait: Wait) -> Answers | None:
        """The answers to the last request, if it is recent; else to a new one. One whose rank was lost is made again."""
        if time.monotonic() - self._last_at > 2 * self._patience_s:
            self._request(wait)
        found = self._published(self._number - 1)
        if found is None and not self._stopping.is_set():
            self._request(wait)
            found = self._published(self._number - 1)
        return found

    def _request(self, wait: Wait) -> None:
        """Answer the next request, and make it if no other rank was faster; the first then reads the answers."""
        key = self._key()
        is_first = self._call(self._store.add, f"{key}/asked", 1) == 1
        if is_first:
            self._call(self._store.set, key, "")
        self._answer()
        if is_first:
            found = Answers(wait, self._collect(key))
            self._call(self._store.set, f"{key}/all", json.dumps(asdict(found)))

    def _answer(self) -> None:
        """Tell where this rank is."""
        key, place = self._key(), self._failed_at or place_of_thread(self.watched)
        self._call(self._store.set, f"{key}/{self.rank}", place)
        self._call(self._store.add, f"{key}/answers", 1)
        self._number += 1
        self._last_at = time.monotonic()

    def _collect(self, key: str) -> dict[int, str]:
        """The answers that come in time."""
        end, ranks = time.monotonic() + self._patience_s, list(range(self.world_size))
        while time.monotonic() < end and not self._stopping.is_set():
            if self._call(self._store.add, f"{key}/answers", 0) >= self.world_size:
                break
            self._stopping.wait(0.1)
        else:
            ranks = [rank for rank in ranks if self._call(self._store.check, [f"{key}/{rank}"])]
        answers = self._call(self._store.multi_get, [f"{key}/{rank}" for rank in ranks]) if ranks else []
        return {
            rank: printable(answer.decode(errors="replace"))
            for rank, answer in zip(ranks, answers, strict=True)
        }

    def _published(self, number: int) -> Answers | None:
        """What the rank that made the request wrote down; None if it was lost before."""
        key = f"{self._key(number)}/all"
        try:
            self._call(self._store.wait, [key], timedelta(seconds=self._patience_s + _ANSWER_S))
            return Answers.from_json(json.loads(self._call(self._store.get, key)))
        except dist.DistError:
            return None

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call to the store."""
        self.num_calls += 1
        self._call_began = time.monotonic()
        result = function(*args)
        self._call_began = None
        return result

    def _key(self, number: int | None = None) -> str:
        return f"shardproof/stacks/{self._number if number is None else number}"
