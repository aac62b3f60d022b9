"""How fast a judge may be asked, and what it has answered before."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any


class Pace:
    """Spreads requests evenly over time, so that no minute has more requests or tokens than are allowed."""

    def __init__(
        self,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._clock, self._sleep = clock, sleep
        self._per_request = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60.0 / tokens_per_minute if tokens_per_minute else 0.0
        self._requests_at = self._tokens_at = self._paused_until = 0.0
        self._order = (
            asyncio.Lock()
        )  # one waits for its time, and the others for it: none begins together after a pause

    async def turn(self, tokens: int) -> None:
        """Wait until a request with about so many tokens may be sent."""
        async with self._order:
            at = self._clock()
            while (ready := max(self._requests_at, self._tokens_at, self._paused_until)) > self._clock():
                at = ready
                await self._sleep(ready - self._clock())
            self._requests_at, self._tokens_at = at + self._per_request, at + tokens * self._per_token

    def correct(self, estimated: int, tokens: int) -> None:
        """Count what a request really took."""
        self._tokens_at += (tokens - estimated) * self._per_token

    def pause(self, seconds: float) -> None:
        """Send nothing for so long: the server asked for that."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)


class Cache:
    """Answers on disk, in a file each, under a digest of what was asked. Any number of processes may share a folder."""

    def __init__(self, folder: str | None):
        self._folder = None if folder is None else Path(folder)

    @staticmethod
    def key(asked: Mapping[str, Any]) -> str:
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer; None if there is none that can be read."""
        if self._folder is None:
            return None
        try:
            found = json.loads(self._path(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("text"), str) else None

    def put(self, key: str, answer: Mapping[str, Any]) -> None:
        """Keep an answer. A disk that is full costs the next run a request, and this one nothing."""
        if self._folder is None:
            return
        path = self._path(key)
        part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(json.dumps(answer))
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key[2:]}.json"
