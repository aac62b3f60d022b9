"""One rank's view of a replica: whether it serves, what it was given, what its label says. Used in one event loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from shardproof.rollout.labels import label_of_workers
from shardproof.rollout.vllm_client import Unreachable
from shardproof.rollout.vllm_http import AsyncClient


@dataclass(frozen=True)
class ReplicaAddress:
    """A server: the name that it has in metrics, and where it is (http://host:port or unix:/path)."""

    name: str
    url: str


class ReplicaLink:
    """A replica as one rank sees it."""

    def __init__(self, address: ReplicaAddress, says_versions: bool):
        self.name, self.url = address.name, address.url
        self.client = AsyncClient(address.url)
        self.serving = False
        self.error = "it was not asked yet"  # why it does not serve
        self.num_failures = 0  # one after another
        self.marks: int | None = None  # how often its label had been set when it began to serve
        self.num, self.work = 0, 0  # requests of this rank that it has, and an estimate of their tokens
        self.attempts: dict[asyncio.Task[None], Any] = {}  # and what each is about
        self.minder: asyncio.Task[None] | None = None  # looks at its label until it serves
        self.watcher: asyncio.Task[None] | None = None  # looks whether it still answers
        self.heard = time.monotonic()  # when it answered last
        self._says_versions = says_versions
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        self._next_look: asyncio.Task[tuple[str, int | None]] | None = None
        self._looks: set[asyncio.Task[tuple[str, int | None]]] = set()  # under way, and the next one
        self._turn = asyncio.Lock()

    def __str__(self) -> str:
        return f"replica {self.name} ({self.url})"

    def serve(self, marks: int | None = None) -> None:
        """Count as one that takes requests."""
        self.serving, self.marks, self.error, self.heard = True, marks, "", time.monotonic()

    def give(self, work: int) -> None:
        """Count a request that it gets."""
        if not self.num:
            self._idle_s += time.monotonic() - self._idle_since
            self.heard = time.monotonic()
        self.num += 1
        self.work += work

    def take_back(self, work: int) -> None:
        """Count a request that it no longer has."""
        self.num -= 1
        self.work -= work
        if not self.num:
            self._idle_since = time.monotonic()

    def idle_s(self) -> float:
        """Seconds without a request since the last call."""
        now = time.monotonic()
        found = self._idle_s + (0.0 if self.num else now - self._idle_since)
        self._idle_s, self._idle_since = 0.0, now
        return found

    async def look(self, seconds: float) -> tuple[str, int | None]:
        """Its label, and how often it was set where only the workers keep it (see `label_of_workers`)."""
        try:
            async with asyncio.timeout(seconds):
                if self._says_versions:
                    label, marks = str((await self.client.get("/weight_info"))["weight_version"]), None
                else:
                    body = {"method": "shardproof_label", "args": []}
                    label, marks = label_of_workers(
                        (await self.client.post("/collective_rpc", body))["results"]
                    )
        except TimeoutError as error:
            raise Unreachable(f"no answer from {self.url} within {seconds:g} s") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise Unreachable(f"{self.url} does not say its label") from error
        self.heard = time.monotonic()
        return label, marks

    async def look_again(self, seconds: float) -> tuple[str, int | None]:
        """As `look`, by a call that is made after this one; those who wait at the same time share it."""
        if self._next_look is None:
            self._next_look = asyncio.ensure_future(self._look_in_turn(seconds))
            self._looks.add(self._next_look)
            self._next_look.add_done_callback(self._looked)
        return await asyncio.shield(self._next_look)

    def _looked(self, task: asyncio.Task[tuple[str, int | None]]) -> None:
        self._looks.discard(task)
        if not task.cancelled():
            task.exception()  # those who wait raise it; without this, one that nobody waits for would be reported

    async def _look_in_turn(self, seconds: float) -> tuple[str, int | None]:
        async with self._turn:
            self._next_look = None  # who comes from here on needs a later look
            return await self.look(seconds)

    async def close(self) -> None:
        tasks = [
            task for task in (self.minder, self.watcher, *self._looks, *self.attempts) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
