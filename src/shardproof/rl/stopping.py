"""Stopping a run by a signal: after a whole step, with everything saved."""

from __future__ import annotations

import signal
from typing import Any


class Stopped(Exception):
    """A signal ended the run after a whole step, and everything was saved."""

    def __init__(self, number: int, step: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")


class StopFlag:
    """Inside the block SIGTERM and SIGINT are noted; the loop then saves and stops at the end of its step."""

    def __init__(self) -> None:
        self.number = 0  # of the signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._raise_flag)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise_flag(self, number: int, _: Any) -> None:
        self.number = number
