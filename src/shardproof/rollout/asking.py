"""Requests of all ranks to servers: each rank asks for its own, and what several ranks ask for is drawn once.

Ranks of one sequence-parallel group ask for the same and must train on the same tokens. Seeds alone do not ensure that:
a server's batches round differently.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from shardproof.dist.collectives import any_rank, exchange_among, together
from shardproof.rollout.engine import Answering, Request, Sampling
from shardproof.rollout.trajectory import Trajectory


@dataclass
class _Question:
    """What this rank, and maybe others, asked for: once, or several times."""

    shared: bool  # with other ranks
    asked: list[tuple[int, Trajectory]] = field(default_factory=list)  # ticket, and what is to be continued
    answering: Answering | None = None  # on the rank that asks

    def answered(self, said: Trajectory) -> list[tuple[int, Trajectory]]:
        """(ticket, trajectory) of all who asked; `said` ends with the answer."""
        segment, found = said.segments[-1], []
        for ticket, trajectory in self.asked:
            answer = trajectory.extended(segment, said.finished, said.stop_string)
            found.append((ticket, replace(answer, facts={**trajectory.facts, **said.facts})))
        return found


class CollectiveRequests:
    """`submit`, `poll` and `busy` of an engine, over something that answers each rank's requests in the background.

    `start` takes a request. `deadline` makes the block in which ranks wait for each other's answers. Runs of `share`
    ranks may ask for the same; nobody else is told what they ask and what they are answered.
    """

    def __init__(
        self,
        start: Callable[[Request, Sampling], Answering],
        deadline: Callable[[], AbstractContextManager[Any]],
        share: int,
    ):
        self._start, self._deadline, self._num_sharers = start, deadline, share
        self._open: dict[str, _Question] = {}  # that this rank has no answer for
        self._ended: SimpleQueue[str] = SimpleQueue()  # of those that this rank asks
        self._num_tickets = 0
        self.busy = False

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Take this rank's requests; returns a ticket for each. Collective: every rank, possibly with no request."""
        keys = [_key(request, sampling) for request in requests]
        rows, place = exchange_among(keys, self._num_sharers), dist.get_rank() % self._num_sharers
        others = {key for at, row in enumerate(rows) if at != place for key in row}
        earlier = {key for row in rows[:place] for key in row}
        tickets = list(range(self._num_tickets, self._num_tickets + len(requests)))
        self._num_tickets += len(requests)
        for ticket, key, request in zip(tickets, keys, requests, strict=True):
            question = self._open.setdefault(key, _Question(shared=False))
            question.shared |= key in others
            question.asked.append((ticket, request.trajectory))
            if question.answering is None and key not in earlier:
                self._ask(key, question, request, sampling)
        (some,) = any_rank(bool(keys))
        self.busy = self.busy or some
        return tickets

    def _ask(self, key: str, question: _Question, request: Request, sampling: Sampling) -> None:
        question.answering = self._start(request, sampling)

        def ended(_: Future[Trajectory]) -> None:
            self._ended.put(key)

        question.answering.future.add_done_callback(ended)

    def poll(self) -> list[tuple[int, Trajectory]]:
        """Wait until each rank that asks for something has an answer; returns (ticket, trajectory) of this rank's.

        Collective: every rank.
        """
        found: list[tuple[int, Trajectory]] = []
        if not self.busy:
            return found
        try:
            shared: dict[str, Any] = {}
            with self._deadline(), together("generate"):
                for key, question in self._next_ended():
                    assert question.answering is not None
                    said = question.answering.future.result()
                    found += question.answered(said)
                    if question.shared:
                        shared[key] = replace(said, segments=said.segments[-1:], earlier=()).to_json()
        except BaseException:
            self.drop()
            raise
        for row in exchange_among(shared, self._num_sharers):
            for key, said in row.items():
                if key in self._open:
                    found += self._open.pop(key).answered(Trajectory.from_json(said))
        (self.busy,) = any_rank(bool(self._num_asked))
        return found

    def drop(self) -> None:
        """Give up all requests."""
        questions, self._open = self._open, {}
        for question in questions.values():
            if question.answering is not None:
                question.answering.future.cancel()
        self._ended, self.busy = SimpleQueue(), False

    @property
    def _num_asked(self) -> int:
        """How many requests that this rank asks for have no answer."""
        return sum(question.answering is not None for question in self._open.values())

    def _next_ended(self) -> list[tuple[str, _Question]]:
        """Questions of this rank that have ended, which are then no longer open: at least one, if it asks for any."""
        found: list[tuple[str, _Question]] = []
        while True:
            try:
                key = self._ended.get(block=not found and bool(self._num_asked))
            except Empty:
                return found
            question = self._open.get(key)
            # Others may have been given up, or answered by another rank.
            if question is not None and question.answering is not None and question.answering.future.done():
                found.append((key, self._open.pop(key)))


def _key(request: Request, sampling: Sampling) -> str:
    """The same for requests that have the same answer."""
    digest = hashlib.blake2b(array("q", request.tokens).tobytes(), digest_size=12)
    begun = request.begun.tokens if request.begun is not None else ()
    digest.update(repr((request.seed, request.settings(sampling), request.limit(sampling), begun)).encode())
    return digest.hexdigest()
