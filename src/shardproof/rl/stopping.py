"""Stopping a run by a signal: after a whole step, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_EXIT_CODES = tuple(128 + number for number in STOP_SIGNALS)

_requested = 0  # the signal that `request_stop` stands for, until a run has ended


def request_stop(number: int) -> None:
    """Let this process's run save and stop at the end of its step, as the signal `number` would.

    For launchers that send ranks no signals, such as Ray, which runs them in threads.
    """
    global _requested
    _requested = number


class Stopped(Exception):
    """A signal ended the run after a whole step, and everything was saved."""

    def __init__(self, number: int, step: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")


class StopFlag:
    """Inside the block signals that end a process are noted; the loop then saves and stops at the end of its step.

    A second Ctrl-C interrupts at once. Signals reach the main thread only; elsewhere only `request_stop` stops a run.
    """

    def __init__(self) -> None:
        self._noted = 0  # the signal
        self._before: dict[int, Any] = {}
        # Under an agent a terminal's Ctrl-C comes twice: from the terminal, and handed on by the agent.
        self._interrupts_left = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1

    @property
    def number(self) -> int:
        """The signal that came or was requested; 0 if none."""
        return self._noted or _requested

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # nohup ignores SIGHUP on purpose; background jobs of scripts ignore SIGINT too, but by default of the shell.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._raise_flag)
        return self

    def __exit__(self, *exception: object) -> None:
        request_stop(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise_flag(self, number: int, _: Any) -> None:
        if number == signal.SIGINT:
            self._interrupts_left -= 1
            if self._interrupts_left < 0:
                raise KeyboardInterrupt
        self._noted = number
