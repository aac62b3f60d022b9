"""Engines that answer one batch per poll: their requests wait in batches, as many on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from shardproof.dist.collectives import exchange
from shardproof.errors import fail
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Trajectory


def by_temperature(requests: Sequence[Request], sampling: Sampling) -> dict[float, list[int]]:
    """The places of requests that are drawn at each temperature: one batch has one."""
    found: dict[float, list[int]] = {}
    for place, request in enumerate(requests):
        found.setdefault(request.settings(sampling).temperature, []).append(place)
    return found


class BatchEngine(ABC):
    """Takes requests, first in, first out, in batches of up to `batch_size`; a rank with fewer has empty batches."""

    asleep = False

    def __init__(self, batch_size: int):
        self._batch_size: int | None = batch_size
        self._batches: deque[tuple[list[int], Sequence[Request], Sampling]] = deque()
        self._num_tickets = 0

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the weights it samples from; -1 if it has none."""

    @abstractmethod
    def complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
        """Answer this rank's requests in one batch, in their order. Collective: every rank, possibly with no request."""

    def take_all_at_once(self) -> None:
        """From now on the requests of one `submit` are one batch, for engines that bound their rows themselves."""
        self._batch_size = None

    @property
    def busy(self) -> bool:
        """Whether requests of any rank are unanswered. The same on every rank."""
        return bool(self._batches)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Queue this rank's requests; returns a ticket for each. Collective: every rank, possibly with no request."""
        self.check_awake("generate")
        if self.version < 0:
            raise fail("R501", "generate", "the engine has no weights yet.")
        tickets = list(range(self._num_tickets, self._num_tickets + len(requests)))
        self._num_tickets += len(requests)
        most = max(exchange(len(requests)))
        size = self._batch_size or max(most, 1)
        for start in range(0, most, size):
            part = slice(start, start + size)
            self._batches.append((tickets[part], requests[part], sampling))
        return tickets

    def poll(self) -> list[tuple[int, Trajectory]]:
        """Answer the next batch; returns (ticket, trajectory) for this rank's part of it. Collective: every rank.

        A batch that cannot be answered raises on every rank, and those behind it are dropped.
        """
        if not self._batches:
            return []
        tickets, requests, sampling = self._batches.popleft()
        try:
            found = self.complete(requests, sampling)
            if len(found) != len(requests):
                message = f"complete() answered {len(found)} of {len(requests)} requests."
                raise fail(
                    "R500", "generate", message, fix="return one trajectory per request, in their order"
                )
            return list(zip(tickets, found, strict=True))
        except BaseException:
            self._batches.clear()
            raise

    def check_awake(self, stage: str) -> None:
        """Raise if the engine has given up its memory."""
        if self.asleep:
            fix = "call wake, then load_weights"
            raise fail("R501", stage, "the engine is asleep: its weights and memory were freed.", fix=fix)

    def check_idle(self, stage: str) -> None:
        """Raise if requests are unanswered."""
        if self.busy:
            fix = "poll it until it is not busy"
            raise fail("R501", stage, "the engine still has requests to answer.", fix=fix)
