"""KTO: completions that are desirable or not, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shardproof.config.algorithms import SPECS
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import Loss
from shardproof.train.preferences import labelled


class KTO(Algorithm):
    """Kahneman-Tversky optimisation, or unpaired APO-zero."""

    spec = SPECS["kto"]

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        return batch

    @property
    def columns(self) -> frozenset[str]:
        return frozenset() if self.settings.preference.reference_free else frozenset({"ref_logps"})

    def weigh(self, batch: Batch, num_sequences: float, share: int) -> Batch:
        """Every completion weighs the same. Collective: every rank."""
        return weigh(batch, "sequence_mean", share=share)

    @cached_property
    def loss(self) -> Loss:
        settings = self.settings.preference
        (kind,) = settings.losses("kto")
        return labelled(
            kind,
            beta=settings.beta,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
            reference_free=settings.reference_free,
            name=self.settings.name,
        )
