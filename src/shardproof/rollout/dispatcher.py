"""Gives one rank's requests to all replicas: side by side, from one thread, with a bound on what is under way.

A replica gets requests while its label says the version that was committed last. What it answers counts by the version
of each token; tokens of anything else than a committed version are drawn again. A request that a sync interrupts goes on
from its tokens, at any replica. A request that a replica loses begins again at another, where it began there.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from shardproof.rollout.draft import Draft
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.fleet import Fleet
from shardproof.rollout.replica_link import ReplicaAddress
from shardproof.rollout.sending import Asked, Sending
from shardproof.rollout.vllm_http import import_aiohttp
from shardproof.rollout.vllm_versions import Interface


class Dispatcher:
    """One rank's way to the replicas; its methods may be called from any thread. Nothing is sent before `release`.

    `in_flight` is the most requests of this rank that one replica has at a time; the rest waits here, first in, first out.
    `request_timeout_s` is how long replicas may need for one request. Requests fail if no replica serves for `unserved_s`.
    `look_s` and `silent_s` are explained at `Fleet`. With `adapter`, requests name the adapter of the version. With
    `experts`, what the policy routes, answers have the experts of their tokens.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaAddress],
        run: str,
        interface: Interface,
        *,
        in_flight: int,
        request_timeout_s: float,
        adapter: bool = False,
        experts: ExpertShape | None = None,
        unserved_s: float | None = None,
        look_s: float = 0.5,
        silent_s: float = 60.0,
    ):
        import_aiohttp()
        self._unserved_s = request_timeout_s if unserved_s is None else unserved_s
        self._numbers = itertools.count()
        self._closed = False
        self._experts = experts
        self._sending = Sending(in_flight, request_timeout_s, adapter)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dispatcher", daemon=True)
        self._thread.start()
        self._wait_for(self._open, list(replicas), run, interface.weight_versions, look_s, silent_s)

    def start(self, request: Request, sampling: Sampling) -> Asked:
        """Take a request; returns at once. To cancel its future gives it up, also at the replica."""
        asked = Asked(Draft(request, sampling, self._experts), next(self._numbers))
        # Not by itself: a future keeps its callbacks, and answered requests would wait for the garbage collector.
        known = weakref.ref(asked)
        asked.future.add_done_callback(lambda future: self._notice(known()) if future.cancelled() else None)
        self._loop.call_soon_threadsafe(self._sending.take, asked)
        return asked

    def hold(self) -> None:
        """Send nothing new until `release`. Requests that replicas have go on until they are interrupted."""
        self._wait_for(self._sending.fleet.hold)

    def release(self, version: int, serving: Sequence[str]) -> None:
        """Go on with a version that was committed, at the replicas of these names; others follow when they have it."""
        self._wait_for(self._release, version, frozenset(serving))

    @property
    def num_unanswered(self) -> int:
        """Requests without an answer."""
        return len(self._sending)

    def activity(self) -> dict[str, float]:
        """Metrics: `ahead/in_flight`, requests without an answer; `time/engine_idle`, seconds that a replica was without
        a request of this rank since the last call, averaged over replicas.
        """
        return self._wait_for(self._measure)

    def close(self) -> None:
        """Cancel what is unanswered, and end thread and connections. May be called again."""
        if not self._closed:
            self._closed = True
            self._wait_for(self._shut)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _notice(self, asked: Asked | None) -> None:
        """Give up a request whose future was cancelled."""
        if asked is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._sending.give_up, asked)

    def _wait_for(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the loop's thread and wait for it."""

        async def call() -> Any:
            found = action(*args)
            return await found if isinstance(found, Coroutine) else found

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    # In the loop's thread.

    async def _open(
        self, replicas: list[ReplicaAddress], run: str, says_versions: bool, look_s: float, silent_s: float
    ) -> None:
        sending = self._sending
        sending.fleet = Fleet(replicas, run, says_versions, look_s, silent_s, sending.send)
        self._ticker = asyncio.ensure_future(self._tick())

    def _release(self, version: int, serving: frozenset[str]) -> None:
        self._sending.fleet.release(version, serving)
        self._sending.send()

    def _measure(self) -> dict[str, float]:
        idle = [link.idle_s() for link in self._sending.fleet.links]
        return {"ahead/in_flight": float(len(self._sending)), "time/engine_idle": sum(idle) / len(idle)}

    async def _tick(self) -> None:
        """Now and then, see whether replicas that have requests still answer, and whether any serves what waits."""
        fleet = self._sending.fleet
        while True:
            await asyncio.sleep(fleet.look_s)
            fleet.watch()
            self._sending.fail_refused(self._unserved_s)
            if problem := fleet.unserved(self._unserved_s):
                self._sending.fail_waiting("R505", problem)

    async def _shut(self) -> None:
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        await self._sending.close()
