"""What a rollout engine is: it takes requests and weights, and it is polled for trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from shardproof.bounds import require_number
from shardproof.dist.collectives import raise_together
from shardproof.errors import ShardproofError, error_for, fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream
from shardproof.findings import Finding
from shardproof.rollout.experts import Experts
from shardproof.rollout.sampling import Sampling as Sampling  # what every request takes
from shardproof.rollout.token_ledger import TokenLedger, appended
from shardproof.rollout.trajectory import Segment, Trajectory


@dataclass(frozen=True)
class Request:
    """A trajectory to continue. The seed decides every draw, whatever else is in the batch."""

    trajectory: Trajectory
    seed: int
    # Another turn may follow: an engine may keep what it computed, until `forget`.
    continues: bool = False
    # What was drawn of the answer before the run was interrupted. An engine may go on from it, or begin anew.
    begun: Segment | None = None
    # Longest answer where this request may have fewer tokens than `Sampling.max_new_tokens` allows all of them.
    max_new_tokens: int | None = None
    # How this request's tokens are drawn, in place of what all requests of a call have.
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            require_number("rollout", "max_new_tokens", self.max_new_tokens, at_least=1)

    def settings(self, sampling: Sampling) -> Sampling:
        """How its tokens are drawn, in a call of this sampling."""
        own = self.sampling
        return sampling if own is None or own == sampling else replace(own, exact=sampling.exact)

    def limit(self, sampling: Sampling) -> int:
        """The most tokens that the answer may have."""
        most = sampling.max_new_tokens if self.sampling is None else self.sampling.max_new_tokens
        return min(self.max_new_tokens or most, most)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the policy reads before it writes."""
        return self.trajectory.tokens

    def answered(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        finished: bool,
        version: int,
        parts: Sequence[tuple[int, int]] = (),
        experts: Experts | None = None,
        stop_string: str = "",
    ) -> Trajectory:
        """The trajectory with what the policy wrote at its end.

        `parts` are (number of tokens, version) where the weights changed meanwhile; `version` is then the oldest.
        `experts` are those that were chosen for its tokens, and for what was read since its last turn. `stop_string` is the
        string that ended it, where one did.
        """
        segment = Segment(
            tuple(tokens),
            "policy",
            tuple(logprobs),
            version,
            trained=True,
            parts=tuple(parts),
            experts=experts,
        )
        return self.trajectory.extended(segment, finished, stop_string)


class Engine(Protocol):
    """A rollout engine."""

    @property
    def version(self) -> int:
        """Of the weights it samples from; -1 if it has none."""
        ...

    @property
    def canary_gap(self) -> float | None:
        """What the engine's own canary measured at the last sync; None if it has none, and the loop runs one."""
        ...

    @property
    def busy(self) -> bool:
        """Whether requests of any rank are unanswered. The same on every rank."""
        ...

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Take this rank's requests; returns a ticket for each. Collective: every rank, possibly with no request."""
        ...

    def poll(self) -> list[tuple[int, Trajectory]]:
        """Work, or wait, for answers; returns (ticket, trajectory) for those that are ready on this rank, possibly none.

        A request that cannot be answered raises on every rank, and no request is left then. Collective: every rank.
        """
        ...

    def load_weights(self, stream: WeightStream) -> ExportReceipt:
        """Take the weights of a policy. Collective: every rank."""
        ...

    def sleep(self) -> None:
        """Give up memory until `wake`. Weights are lost; the next `load_weights` brings them. Collective: every rank."""
        ...

    def wake(self) -> None:
        """Take the memory back that `sleep` gave up. Collective: every rank."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...


class Answering(Protocol):
    """A request that an engine answers in the background."""

    @property
    def future(self) -> Future[Trajectory]:
        """The answer, or what went wrong; to cancel it gives the request up."""
        ...

    @property
    def so_far(self) -> Segment | None:
        """What was drawn so far, as `Request.begun` takes it; None for nothing."""
        ...


@runtime_checkable
class BackgroundEngine(Protocol):
    """An `Engine` that also answers requests while the rank does something else: requests need not wait for each other.

    Weights may change while a request is answered: the answer's `Segment.parts` then say which of them drew which tokens,
    and nothing that was computed from older weights is read by newer ones.
    """

    @property
    def version(self) -> int:
        """Of the weights it samples from; -1 if it has none."""
        ...

    def start(self, request: Request, sampling: Sampling) -> Answering:
        """Take a request of this rank; returns at once. From any thread. Not collective."""
        ...

    def check_drawn(self) -> None:
        """Raise on every rank if the weights behind what was drawn since the last call are not those that were proved.

        Collective: every rank.
        """
        ...

    def activity(self) -> Mapping[str, float]:
        """How busy this rank kept the engine since the last call: metrics by name, such as `time/engine_idle`."""
        ...


def answers(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, ledger: TokenLedger | None = None
) -> Iterator[list[tuple[int, Trajectory]]]:
    """[(index in `requests`, trajectory)] as they come; `ledger` records what each request read and what came back.

    An answer that breaks a promise of `Engine`, for example changes tokens that it was to continue, is not returned, and
    raises on every rank once the engine is done. Collective: every rank.
    """
    if engine.busy:
        fix = "poll it until it is not busy"
        raise fail("R501", "generate", "the engine still has other requests to answer.", fix=fix)
    tickets = engine.submit(requests, sampling)
    waiting = {ticket: index for index, ticket in enumerate(tickets[: len(requests)])}
    problems: list[Finding] = []
    if len(tickets) != len(requests):
        problems.append(_breach(f"returned {len(tickets)} tickets for {len(requests)} requests"))
    while engine.busy:
        ready = []
        for ticket, found in engine.poll():
            try:
                index = _index_of(ticket, found, waiting)
                check = appended if ledger is None else ledger.record
                check(requests[index].trajectory, found)
            except ShardproofError as error:
                problems += error.findings
            else:
                ready.append((index, found))
        yield ready
    if waiting and not problems:
        count = f"{len(waiting)} of {len(requests)} requests have no answer"
        problems.append(_breach(f"is not busy, but {count}"))
    _raise_on_every_rank(problems[:1])


def _index_of(ticket: Any, found: object, waiting: dict[Any, int]) -> int:
    """The request that a ticket stands for, which is answered now."""
    if ticket not in waiting:
        raise error_for([_breach(f"answered ticket {ticket!r}, which was not requested")])
    if not isinstance(found, Trajectory):
        raise error_for([_breach(f"answered with a {type(found).__name__}, not a Trajectory")])
    return waiting.pop(ticket)


def _breach(what: str) -> Finding:
    """What an engine, which may be a user's, does against what `Engine` promises."""
    return Finding("R500", "generate", f"the engine {what}.", fix="see docs/extending.md#an-engine")


def _raise_on_every_rank(problems: list[Finding]) -> None:
    """Collective: every rank, where there are several."""
    if dist.is_initialized():
        raise_together(problems)
    elif problems:
        raise error_for(problems)


def generate(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, ledger: TokenLedger | None = None
) -> list[Trajectory]:
    """All answers, in the order of the requests; `ledger` records them. Collective: every rank."""
    found = dict(answer for some in answers(engine, requests, sampling, ledger) for answer in some)
    return [found[index] for index in range(len(requests))]


def forget(engine: Engine) -> None:
    """Have an engine give up what it kept of conversations: none of them goes on. Engines need not have `forget()`."""
    method = getattr(engine, "forget", None)
    if callable(method):
        method()


def events_of(engine: Engine) -> list[str]:
    """What happened to an engine since the last call, for the run's record, on this rank. Engines need not have `events()`."""
    method = getattr(engine, "events", None)
    return method() if callable(method) else []
