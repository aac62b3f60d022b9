"""Between the ranks of a run on Ray and the terminal that started it: what ranks say, and that they should stop.

Ray's own way for workers' output may lose the last lines of a process that ends, knows no progress bars, and mixes it with
the logs of Ray's own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from dataclasses import asdict
from typing import Any, TextIO

from shardproof.terminal import Bar, Terminal

_FLUSH_S = 10.0  # for the last lines of a rank that ends


class Console:
    """An actor on the starting terminal's node, which that terminal and the ranks both talk to."""

    def __init__(self) -> None:
        self._said: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._number = 0
        self._stop = asyncio.Event()
        self._is_heard = False  # a rank waits for the stop

    async def say(self, event: dict[str, Any]) -> None:
        """Keep what a rank or the controller has to say."""
        if event["kind"] == "failed":
            self._is_heard = False
        self._said.append(event)
        self._news.set()

    async def hear(self, timeout_s: float) -> list[dict[str, Any]]:
        """All that was said since the last call, as soon as there is something; empty after the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()
        said, self._said = self._said, []
        return said

    async def stop(self, number: int) -> bool:
        """Let the ranks know that a signal came; returns whether there are any yet."""
        self._number = number
        self._stop.set()
        return self._is_heard

    async def wait_for_stop(self) -> int:
        """The signal that came, once one has."""
        self._is_heard = True
        await self._stop.wait()
        return self._number


class Sent(Terminal):
    """A rank's terminal whose lines appear on the terminal that started the run."""

    def __init__(self, console: Any, rank: int):
        super().__init__()
        self._console, self._last = console, None
        self._prefix = f"rank {rank}: " if rank else ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.split(".")[0] == "ray":  # would send lines about sending lines
            return
        bar = getattr(record, "bar", None)
        self._last = self._console.say.remote(
            {
                "kind": "record",
                "name": record.name,
                "level": record.levelno,
                "text": f"{self._prefix}{record.getMessage()}",
                "bar": asdict(bar) if isinstance(bar, Bar) else None,
                "created": record.created,
            }
        )

    def show(self, text: str) -> None:
        """Nothing: a rank shows its finding, which leaves it with its exit code and is printed once for all ranks."""

    def close(self) -> None:
        import ray

        if self._last is not None:
            with contextlib.suppress(Exception):  # the console is gone with the terminal
                ray.get(self._last, timeout=_FLUSH_S)
        super().close()


class Printed(io.TextIOBase):
    """What a rank's code prints, line by line: on the terminal that started the run, and in Ray's log of the rank."""

    def __init__(self, console: Any, rank: int, log: TextIO):
        self._console, self._log, self._begun = console, log, ""
        self._prefix = f"rank {rank}: " if rank else ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._log.fileno()

    def write(self, text: str) -> int:
        self._log.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._console.say.remote({"kind": "line", "text": f"{self._prefix}{line}"})
        return len(text)

    def flush(self) -> None:
        self._log.flush()


def repeat(event: dict[str, Any], terminal: Terminal) -> None:
    """Show a line or a record of a rank on this terminal."""
    if event["kind"] == "line":
        terminal.show(event["text"])
        return
    record = logging.LogRecord(event["name"], event["level"], "", 0, "%s", (event["text"],), None)
    record.created = event["created"]
    if event["bar"] is not None:
        record.bar = Bar(**event["bar"])
    terminal.emit(record)
