"""What tasksets (verifiers 0.4) and environments with a rubric (verifiers 0.1) have in common."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from shardproof.environments.model_caller import ModelCaller
from shardproof.environments.protocol import Schema

Outcome = tuple[float, dict[str, float]]  # the reward, and numbers for the metrics
_MAX_METRICS = 50


class Kind(Protocol):
    """An environment of verifiers, loaded once for all conversations of a worker."""

    tools: list[Schema]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The data rows of a split."""

    async def play(self, row: dict[str, Any], caller: ModelCaller) -> Outcome:
        """Run a row's rollout and score it."""


def numbers_of(named: Mapping[str, Any]) -> dict[str, float]:
    """What of the metrics is a number."""
    some = itertools.islice(named.items(), _MAX_METRICS)
    return {name: float(value) for name, value in some if isinstance(value, (int, float))}
