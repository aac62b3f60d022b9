"""DPO and its variants: pairs of completions, of which one is the better."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from shardproof.config.algorithms import SPECS
from shardproof.dist.collectives import exchange
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import Loss
from shardproof.train.preferences import preference


class DPO(Algorithm):
    """Direct preference optimisation, by the losses that `algorithm.preference` names."""

    spec = SPECS["dpo"]

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        return batch

    @cached_property
    def losses(self) -> dict[str, float]:
        """The losses by name, each with its weight."""
        return self.settings.preference.losses("sigmoid")

    @property
    def columns(self) -> frozenset[str]:
        reference = frozenset() if self.settings.preference.reference_free else frozenset({"ref_logps"})
        # What is sorted must be known before the pass that has gradients.
        return reference | ({"old_logps"} if {"aot", "aot_unpaired"} & self.losses.keys() else frozenset())

    def weigh(self, batch: Batch, num_sequences: float, share: int) -> Batch:
        """Every pair weighs the same. Columns of losses that need the whole batch are added. Collective: every rank."""
        batch = weigh(batch, "sequence_mean", share=share)
        if "sft" in self.losses:
            batch = _with_sft_weight(batch, share)
        if {"aot", "aot_unpaired"} & self.losses.keys():
            batch = _with_sorted(batch, share, has_reference="ref_logps" in self.columns)
        return batch

    @cached_property
    def loss(self) -> Loss:
        settings = self.settings.preference
        return preference(
            self.losses,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
            divergence=settings.divergence,
            divergence_alpha=settings.divergence_alpha,
            discopop_tau=settings.discopop_tau,
            reference_free=settings.reference_free,
            name=self.settings.name,
        )


def _with_sft_weight(batch: Batch, share: int) -> Batch:
    """The batch with a factor that makes each chosen token of the global batch weigh the same. Collective: every rank."""
    chosen = [
        mask * (side > 0) for mask, side in zip(batch.masks(), batch.columns.get("side", []), strict=True)
    ]
    total = sum(exchange(sum(float(row.sum()) for row in chosen))) / share
    rows = [
        torch.where(row > 0, row / (weights * total).clamp(min=1e-30), 0.0)
        for row, weights in zip(chosen, batch.columns["weights"], strict=True)
    ]
    return batch.with_column("sft_weight", rows)


def _with_sorted(batch: Batch, share: int, has_reference: bool) -> Batch:
    """The batch with what each pair, and each completion, is compared with when all of them are sorted.

    `aot` sorts the policy's differences and the reference's, `aot_unpaired` the log-ratios of better completions and of
    worse ones. Collective: every rank.
    """
    factors = batch.columns.get("ld_factor") or [torch.ones_like(mask) for mask in batch.masks()]

    def totals(column: str) -> list[float]:
        rows = batch.columns.get(column, [])
        parts = zip(rows, batch.masks(), factors, strict=True)
        return [float((row.double() * mask * factor).sum()) for row, mask, factor in parts]

    policy = totals("old_logps")
    reference = totals("ref_logps") if has_reference else [0.0] * len(policy)
    every = exchange([policy, reference])
    groups = every[::share]
    before = sum(len(row[0]) for row in groups[: dist.get_rank() // share])
    policy_N, reference_N = (torch.tensor([v for row in groups for v in row[k]]).double() for k in (0, 1))
    own = slice(before // 2, before // 2 + len(batch) // 2)
    sides = (slice(0, None, 2), slice(1, None, 2))  # the better ones and the worse ones, pair by pair
    differences, targets = (each[sides[0]] - each[sides[1]] for each in (policy_N, reference_N))
    paired = _matched(differences, targets)[own]
    ratios = [(policy_N - reference_N)[side] for side in sides]
    others = [_matched(ratios[0], ratios[1])[own], _matched(ratios[1], ratios[0])[own]]
    sizes = [length - 1 for length in batch.lengths]
    aot = [torch.full((size,), float(paired[k // 2])) for k, size in enumerate(sizes)]
    other = [torch.full((size,), float(others[k % 2][k // 2])) for k, size in enumerate(sizes)]
    return batch.with_column("aot_reference", aot).with_column("aot_other", other)


def _matched(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Of each value, the one among `others` that has the same place when both are sorted."""
    places = torch.argsort(torch.argsort(values, stable=True), stable=True)
    return torch.sort(others).values[places]
