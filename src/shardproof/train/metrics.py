"""Metrics that declare their reduction, kept on the device until the step's one exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from shardproof.bounds import largest
from shardproof.errors import choose, error_for
from shardproof.findings import Finding

REDUCTIONS = ("sum", "mean", "max", "min", "ess")


class MetricSums:
    """Running reductions of per-token values over micro-batches. Adding to it never waits for the device.

    `ess` is the effective sample size of weights as a share of their number: (sum w)^2 / (n sum w^2). Where a weight
    belongs to several tokens, its value has two rows: the weights, and how much each of them counts; a `mean` over
    sequences or pairs has them too.
    """

    def __init__(self, reductions: Mapping[str, str]):
        for name, reduction in reductions.items():
            choose("metrics", f"the reduction of {name!r}", reduction, REDUCTIONS)
        self.reductions = dict(reductions)
        self._partial: dict[str, torch.Tensor] = {}

    def add(self, values: Mapping[str, torch.Tensor], counted: torch.Tensor) -> None:
        """Take in one value per token; only tokens with `counted` true matter."""
        for name, value in values.items():
            reduction = self.reductions.get(name, "mean")
            self.reductions.setdefault(name, reduction)
            part = _partial(value.detach().float(), counted, reduction)
            self._partial[name] = (
                _merge(self._partial[name], part, reduction) if name in self._partial else part
            )

    def rows(self) -> dict[str, torch.Tensor]:
        """Name to its partial result, the second number of which is a count, still on the device."""
        return self._partial


def _partial(value: torch.Tensor, counted: torch.Tensor, reduction: str) -> torch.Tensor:
    number = counted.sum().float()
    if reduction == "ess":
        weights, times = value if value.ndim == 2 else (value, torch.ones_like(value))
        times = torch.where(counted, times, 0.0)
        weights = torch.where(counted, weights, 0.0)
        return torch.stack([(times * weights).sum(), times.sum(), (times * weights.square()).sum()])
    if reduction == "mean" and value.ndim == 2:
        times = torch.where(counted, value[1], 0.0)
        return torch.stack([torch.where(counted, times * value[0], 0.0).sum(), times.sum()])
    if reduction in ("sum", "mean"):
        return torch.stack([torch.where(counted, value, 0.0).sum(), number])
    edge = float("-inf") if reduction == "max" else float("inf")
    kept = torch.where(counted, value, edge)
    best = kept.max() if reduction == "max" else kept.min()
    return torch.stack([best, number])


def _merge(a: torch.Tensor, b: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction in ("sum", "mean", "ess"):
        return a + b
    pick = torch.maximum if reduction == "max" else torch.minimum
    return torch.stack([pick(a[0], b[0]), a[1] + b[1]])


def check_same_metrics(rows: list[dict[str, Any]]) -> None:
    """Raise if ranks have metrics of other names."""
    names = list(rows[0])
    for rank, row in enumerate(rows):
        if sorted(row) != sorted(names):
            odd = sorted(set(row) ^ set(names))
            message = f"it reports {sorted(row)}, rank 0 reports {sorted(names)}; they differ in {odd}."
            raise error_for([Finding("T306", "metrics", message, rank=rank)])


def reduce_metrics(rows: list[dict[str, Any]], reductions: Mapping[str, str]) -> dict[str, float]:
    """One number per metric from every rank's {name: partial result}; raises if ranks have other names.

    A metric of what a batch does not have, such as completions of one label, is NaN; without any token all are 0.
    """
    check_same_metrics(rows)
    nothing = math.nan if any(part[1] > 0 for row in rows for part in row.values()) else 0.0
    return {
        name: _reduce([row[name] for row in rows], reductions.get(name, "mean"), nothing) for name in rows[0]
    }


def _reduce(parts: list[list[float]], reduction: str, nothing: float) -> float:
    live = [part for part in parts if part[1] > 0]
    if not live:
        return nothing
    if reduction == "max":
        return largest(part[0] for part in live)
    if reduction == "min":
        return -largest(-part[0] for part in live)
    total = sum(part[0] for part in live)
    if reduction == "ess":
        number, squares = (sum(part[k] for part in live) for k in (1, 2))
        return min(total**2 / (number * squares), 1.0) if squares else 0.0  # rounding may take it beyond
    return total if reduction == "sum" else total / sum(part[1] for part in live)
