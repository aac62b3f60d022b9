"""All replicas as one rank sees them: which of them serve the committed version, and which are left alone until they do.

Used in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from shardproof.rollout.labels import label_of
from shardproof.rollout.replica_link import ReplicaAddress, ReplicaLink
from shardproof.rollout.vllm_client import Refused, Unreachable

_SPREAD_S = 0.3
_WATCH_S = 5.0  # a replica that has requests and was silent for so long is asked for its label


class Fleet:
    """The replicas. `on_serving` is called when one serves again.

    Replicas that do not serve are looked at every `look_s`; one that has requests and does not answer a question within
    `silent_s` counts as hanging. While `held`, nothing is sent and nobody is looked at.
    """

    def __init__(
        self,
        addresses: Sequence[ReplicaAddress],
        run: str,
        says_versions: bool,
        look_s: float,
        silent_s: float,
        on_serving: Callable[[], None],
    ):
        self.run, self.says_versions = run, says_versions
        self.look_s, self.silent_s = look_s, silent_s
        self.links = [ReplicaLink(address, says_versions) for address in addresses]
        self.version = -1
        self.held = True
        self._on_serving = on_serving
        self.epoch = 0  # counts holds and releases: what was seen before one of them says nothing after it
        self._unserved_since: float | None = None
        self._unread: set[str] = set()  # replicas whose label was not read since the release
        self._spread_until = 0.0

    @property
    def label(self) -> str:
        """What replicas must have as their label."""
        return label_of(self.run, self.version)

    def hold(self) -> None:
        self.held = True
        self.epoch += 1

    def release(self, version: int, serving: Collection[str]) -> None:
        """Go on with a version, which the replicas of these names have."""
        self.version, self.held = version, False
        self.epoch += 1
        self._unserved_since = None
        self._unread.clear()
        for link in self.links:
            link.num_failures = 0
            if link.name not in serving:
                self.leave(link, link.error or "it did not take the last weights", abandon=True)
            elif self.says_versions:
                link.serve()
            else:
                self.leave(link, "its label was not read yet")
                self._unread.add(link.name)
        if self._unread:
            # The first replica whose label is read would get everything: wait for the others', but not for long.
            self._spread_until = time.monotonic() + _SPREAD_S
            asyncio.get_running_loop().call_later(_SPREAD_S, self._on_serving)

    def choose(self, in_flight: int, refused: Collection[str]) -> ReplicaLink | None:
        """The replica with the least work among those that serve and have room, the first of several."""
        if self._unread and time.monotonic() < self._spread_until:
            return None
        room = [
            link for link in self.links if link.serving and link.num < in_flight and link.name not in refused
        ]
        return min(room, key=lambda link: link.work, default=None)

    def leave(self, link: ReplicaLink, error: str, abandon: bool = False) -> None:
        """Give a replica nothing until its label is right; with `abandon`, give up what it has."""
        link.serving, link.error = False, error
        if abandon:
            for task in link.attempts:
                task.cancel()
        if link.minder is None or link.minder.done():
            link.minder = asyncio.ensure_future(self._mind(link))

    async def _mind(self, link: ReplicaLink) -> None:
        """Look at a replica's label until it says the committed version."""
        if link.num_failures > 1:
            await asyncio.sleep(self.look_s)
        while not link.serving:
            if not self.held:
                epoch = self.epoch
                problem, marks = await self._ask(link)
                if epoch == self.epoch:
                    link.error = problem
                    self._unread.discard(link.name)
                    if not problem:
                        link.serve(marks)
                        self._on_serving()
                        return
            await asyncio.sleep(self.look_s)

    def watch(self) -> None:
        """Ask replicas that have requests and have long said nothing for their labels. To be called now and then."""
        for link in self.links:
            silent = time.monotonic() - link.heard >= min(_WATCH_S, self.silent_s)
            watched = link.watcher is not None and not link.watcher.done()
            if not self.held and link.serving and link.num and silent and not watched:
                link.watcher = asyncio.ensure_future(self._watch(link))

    async def _watch(self, link: ReplicaLink) -> None:
        epoch = self.epoch
        problem, _ = await self._ask(link)
        if problem and epoch == self.epoch:
            self.leave(link, problem, abandon=True)

    async def _ask(self, link: ReplicaLink) -> tuple[str, int | None]:
        """What is wrong with a replica's label, "" for nothing; and how often it was set, where that counts."""
        wanted = self.label
        try:
            label, marks = await link.look(self.silent_s)
        except (Unreachable, Refused) as error:
            return str(error), None
        return ("" if label == wanted else f"its weights have the label {label!r}, not {wanted!r}"), marks

    def unserved(self, seconds: float) -> str:
        """Who is to blame if no replica has served for so long; "" otherwise. To be called now and then."""
        if self.held or any(link.serving for link in self.links):
            self._unserved_since = None
            return ""
        now = time.monotonic()
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since < seconds:
            return ""
        said = "; ".join(f"{link}: {link.error.removeprefix(f'{link.url}: ')}" for link in self.links)
        return f"no vLLM server has served version {self.version} for {seconds:g} s. {said}."

    async def close(self) -> None:
        for link in self.links:
            await link.close()
