"""Corrections for tokens that were drawn from another distribution than the trainer's: weights, and what they tell.

The gap of a token is its log-prob under the trainer's policy less the one that the engine drew it with, so exp(gap) is
its importance weight. No gradient flows through a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shardproof.bounds import require_number
from shardproof.errors import choose, fail

Columns = Mapping[str, torch.Tensor]
# (gap, columns) -> (weight per token, {metric: value per token})
Weigher = Callable[[torch.Tensor, Columns], tuple[torch.Tensor, dict[str, torch.Tensor]]]

_MAX_GAP = 20.0  # in metrics: exp of a larger one would make a mean useless, and of 89 infinite


@dataclass(frozen=True)
class Correction:
    """How the loss of drawn tokens is weighed, and the reductions of the metrics that say what it did."""

    name: str
    weigh: Weigher
    metrics: Mapping[str, str]


def truncated(cap: float) -> Correction:
    """TIS: min(exp(gap), cap) per token."""
    require_number("loss", "tis_cap", cap, above=0)

    def weigh(gap: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = torch.exp(gap)
        weights = ratio.clamp(max=cap)
        return weights, {"correction/ess": weights, "correction/clipped": (ratio > cap).float()}

    return Correction("tis", weigh, {"correction/ess": "ess", "correction/clipped": "mean"})


def masked_by_sequence(cap: float) -> Correction:
    """MIS: exp(sum of a sequence's gaps) for all of its tokens, or 0 if that is above `cap`."""
    require_number("loss", "mis_cap", cap, above=0)

    def weigh(gap: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # A micro-batch has whole sequences, and each rank of a sequence-parallel group has all of their log-probs.
        sequence, counted = columns["sequence"].long(), columns["mask"] != 0
        sums, counts = gap.new_zeros(2, len(gap), dtype=torch.float64)
        sums = sums.index_add(0, sequence, torch.where(counted, gap, 0.0).double())
        counts = counts.index_add(0, sequence, counted.double())
        ratio = torch.exp(sums)
        weights = torch.where(ratio > cap, 0.0, ratio)[sequence].to(gap.dtype)
        each = (1.0 / counts.clamp(min=1.0))[sequence].to(gap.dtype)  # so that a sequence counts once
        masked = (ratio > cap)[sequence].float()
        return weights, {"correction/ess": torch.stack([weights, each]), "correction/masked": masked}

    return Correction("mis", weigh, {"correction/ess": "ess", "correction/masked": "mean"})


def masked_by_token(low: float, high: float) -> Correction:
    """IcePop: exp(gap) per token, or 0 if that is outside of [low, high]."""
    require_number("loss", "icepop_bounds", low, above=0)
    if not low < require_number("loss", "icepop_bounds", high, above=0):
        message = f"icepop_bounds=({low}, {high}): the first must be below the second."
        raise fail("C001", "loss", message, fix="order the bounds, such as (0.5, 5.0)")

    def weigh(gap: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = torch.exp(gap)
        outside = (ratio < low) | (ratio > high)
        weights = torch.where(outside, 0.0, ratio)
        return weights, {"correction/ess": weights, "correction/masked": outside.float()}

    return Correction("icepop", weigh, {"correction/ess": "ess", "correction/masked": "mean"})


CORRECTIONS = ("tis", "mis", "icepop", "none")


def find_correction(
    name: str, tis_cap: float | None, mis_cap: float, icepop_bounds: tuple[float, float]
) -> Correction | None:
    """The correction with this name and its own settings; None if nothing is corrected."""
    choose("loss", "correction", name, CORRECTIONS)
    if name == "mis":
        return masked_by_sequence(mis_cap)
    if name == "icepop":
        return masked_by_token(*icepop_bounds)
    return None if name == "none" or tis_cap is None else truncated(tis_cap)


def importance(gap: torch.Tensor) -> torch.Tensor:
    """exp(gap), for metrics."""
    return torch.exp(gap.clamp(max=_MAX_GAP))


def mismatch_kl(gap: torch.Tensor) -> torch.Tensor:
    """KL(engine || trainer) of drawn tokens by the k3 estimate: exp(gap) - gap - 1, never negative."""
    # In float64: in float32 small gaps, which are the usual ones, would be lost to rounding.
    gap = gap.double().clamp(max=_MAX_GAP)
    return torch.expm1(gap) - gap
