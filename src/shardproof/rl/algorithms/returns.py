"""Algorithms with one advantage per token, normalised over the batch: REINFORCE++ and PPO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from shardproof.config.algorithms import SPECS
from shardproof.dist.collectives import exchange
from shardproof.rl.advantages import discounted, gae
from shardproof.rl.algorithms.base import Algorithm, counted_only
from shardproof.rl.algorithms.credit import Turns
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch
from shardproof.train.loss import Loss, value


class ReinforcePP(Algorithm):
    """REINFORCE++: the return from each token on."""

    spec = SPECS["reinforce_pp"]

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        batch = counted_only(batch, trajectories)
        returns = []
        if trajectories:
            turns = Turns.of(batch, trajectories)
            rewards_CT = turns.padded(self.token_rewards(batch, turns).float())
            discounts_CT = turns.discounts(self.settings.gamma, self.settings.turn_gamma)
            returns = batch.rows(turns.unpadded(discounted(rewards_CT, discounts_CT)))
        return batch.with_column("advantages", normalised_over_batch(returns, batch.columns["mask"]))


class PPO(Algorithm):
    """PPO: generalised advantage estimation with a critic."""

    spec = SPECS["ppo"]

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        batch = counted_only(batch, trajectories)
        advantages, returns = [], []
        if trajectories:
            turns = Turns.of(batch, trajectories)
            tables = gae(
                turns.padded(self.token_rewards(batch, turns).float()),
                turns.padded(batch.flat("values")),
                turns.discounts(self.settings.gamma, self.settings.turn_gamma),
                self.settings.gae_lambda,
            )
            advantages, returns = (batch.rows(turns.unpadded(table_CT)) for table_CT in tables)
        batch = batch.with_column("returns", returns)
        return batch.with_column("advantages", normalised_over_batch(advantages, batch.columns["mask"]))

    @cached_property
    def value_loss(self) -> Loss:
        return value(self.settings.value_clip)


def normalised_over_batch(rows: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """(x - mean) / std over the counted tokens of every rank. Collective: every rank."""
    counted = (
        torch.cat([row[mask.bool()] for row, mask in zip(rows, masks, strict=True)])
        if rows
        else torch.empty(0)
    )
    parts = exchange([float(counted.double().sum()), float(counted.double().square().sum()), counted.numel()])
    total, square, number = (sum(part[k] for part in parts) for k in range(3))
    mean = total / max(number, 1)
    std = max(square / max(number, 1) - mean**2, 0.0) ** 0.5
    return [(row - mean) / (std + 1e-8) * mask for row, mask in zip(rows, masks, strict=True)]
