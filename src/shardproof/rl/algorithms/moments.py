"""Mean and deviation of numbers that are spread over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardproof.dist.collectives import exchange
from shardproof.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Moments:
    """Of all ranks' numbers; 0 without any."""

    mean: float
    variance: float  # of the population
    number: float

    def deviation(self, kind: str) -> float:
        """Of the "population", or of the "sample", which needs two numbers."""
        if kind == "population":
            return self.variance**0.5
        return (self.variance * self.number / (self.number - 1)) ** 0.5 if self.number > 1 else 0.0


def moments(values: torch.Tensor, trajectories: Sequence[Trajectory]) -> Moments:
    """Those of every rank's `values`, which belong to these trajectories. Collective: every rank.

    Ranks of a sequence-parallel group have the same trajectories, and their values count once.
    """
    values, own = values.double(), float(values.double().mean()) if len(values) else 0.0
    groups = sorted({trajectory.group for trajectory in trajectories})
    rows = exchange([float(values.sum()), len(values), own, float((values - own).square().sum()), groups])
    number = sum(row[1] for row in rows)
    mean = sum(row[0] for row in rows) / max(number, 1)
    # Squares of distances from a mean: the difference of two large numbers would drown a small deviation.
    squares = sum(within + num * (center - mean) ** 2 for _, num, center, within, _ in rows)
    copies = max(Counter(tuple(row[4]) for row in rows if row[4]).values(), default=1)
    return Moments(mean, squares / max(number, 1), number / copies)
