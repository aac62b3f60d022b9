"""What a rollout engine is: it takes requests and weights, and it is polled for trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardproof.bounds import require_number
from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream
from shardproof.rollout.trajectory import Segment, Trajectory


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the most likely token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_number("rollout", "max_new_tokens", self.max_new_tokens, at_least=1)
        require_number("rollout", "temperature", self.temperature, at_least=0)
        require_number("rollout", "top_p", self.top_p, above=0, at_most=1)


@dataclass(frozen=True)
class Request:
    """A trajectory to continue. The seed decides every draw, whatever else is in the batch."""

    trajectory: Trajectory
    seed: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the policy reads before it writes."""
        return self.trajectory.tokens

    def answered(
        self, tokens: Sequence[int], logprobs: Sequence[float], finished: bool, version: int
    ) -> Trajectory:
        """The trajectory with what the policy wrote at its end."""
        segment = Segment(tuple(tokens), "policy", tuple(logprobs), version, trained=True)
        return self.trajectory.extended(segment, finished)


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


def answers(
    engine: Engine, requests: Sequence[Request], sampling: Sampling
) -> Iterator[list[tuple[int, Trajectory]]]:
    """[(index in `requests`, trajectory)] as they come. Collective: every rank."""
    if engine.busy:
        fix = "poll it until it is not busy"
        raise fail("R501", "generate", "the engine still has other requests to answer.", fix=fix)
    tickets = engine.submit(requests, sampling)
    _require(len(tickets) == len(requests), f"returned {len(tickets)} tickets for {len(requests)} requests")
    waiting = {ticket: index for index, ticket in enumerate(tickets)}
    while engine.busy:
        ready = engine.poll()
        for ticket, found in ready:
            _require(ticket in waiting, f"answered ticket {ticket!r}, which was not requested")
            _require(
                isinstance(found, Trajectory), f"answered with a {type(found).__name__}, not a Trajectory"
            )
        yield [(waiting.pop(ticket), trajectory) for ticket, trajectory in ready]
    _require(not waiting, f"is not busy, but {len(waiting)} of {len(requests)} requests have no answer")


def _require(is_kept: bool, breach: str) -> None:
    """Raise if an engine, which may be a user's, does not do what `Engine` promises."""
    if not is_kept:
        raise fail("R500", "generate", f"the engine {breach}.", fix="see docs/extending.md#an-engine")


def generate(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
    """All answers, in the order of the requests. Collective: every rank."""
    found = dict(answer for some in answers(engine, requests, sampling) for answer in some)
    return [found[index] for index in range(len(requests))]
