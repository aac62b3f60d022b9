"""A warning when the engine's and the trainer's probabilities of the sampled tokens drift apart; a fault in exact mode."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from shardproof.errors import fail
from shardproof.findings import Finding

_METRIC, _LARGEST = "mismatch/kl", "mismatch/max"
_FEW = 3  # steps whose median is the mismatch now: one odd batch says nothing
_MANY = 20  # steps whose median is the mismatch as it was
_TIMES = 5.0  # how much larger counts as grown
_FLOOR = 0.01  # nats per token; below, rounding and ordinary lag explain it
_PAUSE = 50  # steps between two warnings


def require_exact(step: int, metrics: Mapping[str, float]) -> None:
    """Raise R512 unless engine and trainer gave every trained token the same log-prob, bit for bit.

    All ranks have the same metrics, so all raise. A step that had nothing to train on has no mismatch.
    """
    gap = metrics.get(_LARGEST, 0.0)
    if gap != 0.0:
        mean = metrics.get("mismatch/mean", float("nan"))
        message = (
            f"step {step}: log-probs of engine and trainer differ by up to {gap:.3g} ({mean:.3g} on average), and "
            "rollout.exact=true promises that they are equal."
        )
        raise fail("R512", "update", message)


class MismatchWatch:
    """Compares each step's mismatch KL with what it was before.

    The mismatch has grown if its median over the last 3 steps is above 0.01 and more than 5 times the lowest median of
    20 steps in a row so far. The lowest, not the latest: a mismatch that grows slowly is found, too. All ranks have the
    same metrics, so all find the same.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_FEW + _MANY)
        self._lowest = math.inf
        self._silent_until = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep, JSON-able: a run that goes on compares with what was before it was stopped."""
        recent, (lowest,) = map(_finite, (self._recent, [self._lowest]))
        return {"recent": recent, "lowest": lowest, "silent_until": self._silent_until}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; nothing from a checkpoint of an earlier version."""
        self._recent.clear()
        self._recent.extend(math.nan if each is None else float(each) for each in state.get("recent", ()))
        lowest = state.get("lowest")
        self._lowest = math.inf if lowest is None else float(lowest)
        self._silent_until = int(state.get("silent_until", 0))

    def see(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """What there is to say about this step: nothing, or that the mismatch has grown."""
        if _METRIC not in metrics:
            return []
        self._recent.append(metrics[_METRIC])
        if len(self._recent) < _FEW + _MANY:
            return []
        values = list(self._recent)
        self._lowest = min(self._lowest, statistics.median(values[:_MANY]))
        now = statistics.median(values[_MANY:])
        if now <= max(_FLOOR, _TIMES * self._lowest) or step < self._silent_until:
            return []
        self._silent_until = step + _PAUSE
        times = f"{now / self._lowest:.0f} times" if self._lowest * 1e6 > now else "far above"
        message = (
            f"step {step}: the mismatch KL of the last {_FEW} steps is {now:.2g} per token, {times} what it was "
            f"({self._lowest:.2g}, the lowest median of {_MANY} steps)."
        )
        return [Finding("R510", "update", message)]


def _finite(values: Iterable[float]) -> list[float | None]:
    """The values, with None for those that JSON has not."""
    return [each if math.isfinite(each) else None for each in values]
