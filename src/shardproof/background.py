"""A thread beside the main thread, whose start and end an interrupt (Ctrl-C) cannot break."""

from __future__ import annotations

import threading
from collections.abc import Callable

_START_S = 1.0  # after which a thread that has not started was interrupted before it could


class BackgroundThread:
    """Runs `work`, which raises nothing. Keep the object before you start it: an interrupt may come at any time then."""

    def __init__(self, name: str, work: Callable[[], None]):
        self._work, self._ended = work, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def start(self) -> None:
        """Start the thread; RuntimeError if no more can be had."""
        try:
            self._thread.start()
        except RuntimeError as error:
            # An interrupt in the middle of a start can come out as an error of the start's lock; the thread runs then.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def join(self) -> None:
        """Wait until `work` is over, if it ever began."""
        # Not the thread's own join: interrupted once, it takes a running thread for an ended one.
        while not self._ended.wait(_START_S) and self._thread.ident is not None:
            pass

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()
