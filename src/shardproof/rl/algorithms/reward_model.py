"""Training of a reward model: pairs of completions, of which one is the better."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shardproof.config.algorithms import SPECS
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import Loss
from shardproof.train.reward_loss import bradley_terry


class RewardModelling(Algorithm):
    """Scores such that the better text of a pair has the higher one."""

    spec = SPECS["reward_model"]

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        return batch

    @property
    def columns(self) -> frozenset[str]:
        return frozenset()

    def weigh(self, batch: Batch, num_sequences: float, share: int) -> Batch:
        """Every pair weighs the same. Collective: every rank."""
        return weigh(batch, "sequence_mean", share=share)

    @cached_property
    def loss(self) -> Loss:
        return bradley_terry(self.settings.center_rewards_coef)
