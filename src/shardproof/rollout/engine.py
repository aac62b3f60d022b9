"""What a rollout engine is: it completes prompts, and it takes weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardproof.bounds import require_number
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream


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
    """A prompt to complete. The seed decides every draw, whatever else is in the batch."""

    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """What an engine answers: token ids, the log-prob each was drawn with, and the weights' version."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool  # it ended with a stop token, not at the length limit
    version: int


class Engine(Protocol):
    """A rollout engine."""

    @property
    def version(self) -> int:
        """Of the weights it samples from."""
        ...

    @property
    def canary_gap(self) -> float | None:
        """What the engine's own canary measured at the last sync; None if it has none, and the loop runs one."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Complete this rank's requests, in their order. Collective: every rank, possibly with no request."""
        ...

    def load_weights(self, stream: WeightStream) -> ExportReceipt:
        """Take the weights of a policy. Collective: every rank."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...
