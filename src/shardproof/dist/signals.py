"""The signals that stop a run, as the process that started its ranks notes them."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

SIGNALLED = 128  # a shell's exit codes for signals begin above it
_NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_SAME_INTERRUPT_S = 1.0  # a terminal and a wrapper may both deliver one Ctrl-C


class Signals:
    """Inside the block the signals that stop a run are noted. Only the main thread gets any."""

    def __init__(self) -> None:
        self.number = 0  # of the first
        self.is_repeated = False  # by an interrupt that came after the first signal
        self._first_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _NOTED:
                # nohup ignores SIGHUP on purpose; background jobs of scripts ignore SIGINT too, but by default.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._first_at = number, now
        elif number == signal.SIGINT and now - self._first_at >= _SAME_INTERRUPT_S:
            self.is_repeated = True
