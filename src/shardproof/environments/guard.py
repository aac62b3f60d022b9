"""The deadline of the code that a worker's main thread is in, and a note for the rank of whose code that is."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from shardproof.user_code import end_fork_of

NOTE_BYTES = 16
_NOTE = struct.Struct("!qq")  # the call whose code runs, or 0; the last call that was begun
_SIGNAL = signal.SIGVTALRM  # not SIGALRM, which libraries use for time limits of their own
_LOOK_S, _AGAIN_S = 0.05, 1.0


class TooLong(BaseException):
    """A call took longer than it may. Not an Exception, which users' code catches and goes on."""


def read_note(note: int) -> tuple[int, int]:
    """(the call that a worker's main thread is in, or was in when it died, or 0; the last that it began).

    `note` is the open file.
    """
    running, begun = _NOTE.unpack(os.pread(note, NOTE_BYTES, 0))
    return running, begun


class Guard:
    """Runs users' code in the main thread, piece by piece; each has a deadline and is noted for the rank.

    A thread looks at the clock and sends the main thread a signal, whose handler raises. This ends Python code and calls
    that wait; C code that keeps the interpreter lock is ended by the rank, which then reads the note.
    """

    def __init__(self, note: int):
        self._note = mmap.mmap(note, NOTE_BYTES)
        self._process, self._main = os.getpid(), threading.get_ident()
        self._until = math.inf
        self._begun = 0
        self.spent_s = 0.0  # in all code that was run
        signal.signal(_SIGNAL, self._raise)
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, call: int, limit_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; TooLong once it has taken `limit_s` seconds."""
        self._begun = max(self._begun, call)
        _NOTE.pack_into(self._note, 0, call, self._begun)
        started = time.monotonic()
        try:
            try:
                self._until = started + limit_s
                return function(*arguments)
            finally:
                self._until = math.inf
        except TooLong:  # perhaps in the line above
            self._until = math.inf
            raise
        finally:
            end_fork_of(self._process)
            self.spent_s += time.monotonic() - started
            _NOTE.pack_into(self._note, 0, 0, self._begun)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if time.monotonic() >= self._until:
                with contextlib.suppress(OSError):
                    signal.pthread_kill(self._main, _SIGNAL)

    def _raise(self, *_: object) -> None:
        now = time.monotonic()
        if now >= self._until:  # else the code that it was meant for is over
            self._until = now + _AGAIN_S  # for code that catches it and goes on
            raise TooLong
