"""The algorithms that are presets over switches: their advantages follow from the settings alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from shardproof.config.algorithms import PER_COMPLETION, SPECS
from shardproof.dist.collectives import together
from shardproof.rl.advantages import (
    deviation,
    discounted,
    gae,
    group_centred,
    group_normalised,
    leave_one_out,
)
from shardproof.rl.algorithms.base import counted_only
from shardproof.rl.algorithms.credit import Turns
from shardproof.rl.algorithms.grouped import GroupAlgorithm, Groups
from shardproof.rl.algorithms.moments import Moments, moments
from shardproof.rollout.trajectory import Trajectory, reward_of
from shardproof.train.batching import Batch
from shardproof.train.loss import Loss, value

Rows = list[torch.Tensor]


class PolicyGradient(GroupAlgorithm):
    """Advantages by the switches: a baseline, what it is taken over, and a deviation to divide by.

    With a baseline of completions (their mean, or that of the others) all tokens of a completion have one advantage. With
    any other, each token has the return from there on, less the baseline.
    """

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        batch, settings = counted_only(batch, trajectories), self.settings
        if settings.baseline in PER_COMPLETION:
            rows = self._of_completions(batch, trajectories)
        else:
            with together("rollout"):
                rows, returns = self._of_tokens(batch, trajectories)
            if self.spec.has_critic:
                batch = batch.with_column("returns", returns)
        if settings.scale != "off" and settings.scale_over == "tokens":
            masks = batch.columns["mask"]
            counted = [row[mask.bool()] for row, mask in zip(rows, masks, strict=True)]
            found = moments(torch.cat([torch.empty(0), *counted]), trajectories)
            rows = [self._normalised(row, found) * mask for row, mask in zip(rows, masks, strict=True)]
        return batch.with_column("advantages", rows)

    def compare(self, rewards_PG: torch.Tensor, counted_PG: torch.Tensor) -> torch.Tensor:
        """Advantages within the groups, before anything is divided by what other groups have."""
        settings = self.settings
        by_group = settings.scale != "off" and settings.scale_over == "group"
        if settings.baseline == "mean" and by_group:
            return group_normalised(rewards_PG, counted_PG, self._eps, sample=settings.scale == "sample")
        centred = leave_one_out if settings.baseline == "leave_one_out" else group_centred
        advantages_PG = centred(rewards_PG, counted_PG)
        if by_group:
            sample = settings.scale == "sample"
            advantages_PG = advantages_PG / (deviation(rewards_PG, counted_PG, sample=sample) + self._eps)
        return advantages_PG.to(rewards_PG.dtype)

    def _of_completions(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Rows:
        settings, groups = self.settings, None
        over = settings.scale_over if settings.scale != "off" else None
        if settings.compared_over == "group" and over not in ("batch", "advantages"):
            return self.within_groups(batch, trajectories)
        with together("rollout"):
            if trajectories:
                groups = Groups.of(self, batch, trajectories)
        found: Moments | None = None
        if over == "batch" or settings.compared_over == "batch":
            found = moments(_counted(groups, None if groups is None else groups.rewards_PG), trajectories)
        advantages_PG = torch.empty(0)
        with together("rollout"):
            if groups is not None:
                advantages_PG = self._compared(groups, found)
        if over == "advantages":
            found = moments(_counted(groups, advantages_PG), trajectories)
            if groups is not None:
                advantages_PG = self._normalised(advantages_PG, found) * groups.counted_PG
        with together("rollout"):
            return [] if groups is None else groups.spread(advantages_PG, type(self).__name__)

    def _compared(self, groups: Groups, found: Moments | None) -> torch.Tensor:
        """The advantages of completions; `found` are the rewards of the batch, where they are needed."""
        settings, rewards_PG, counted_PG = self.settings, groups.rewards_PG, groups.counted_PG
        if settings.compared_over == "group" or found is None:
            advantages_PG = self.compare(rewards_PG, counted_PG)
        else:
            advantages_PG = torch.where(counted_PG, rewards_PG.double() - found.mean, 0.0)
            if settings.baseline == "leave_one_out":
                advantages_PG = advantages_PG * found.number / max(found.number - 1, 1)
        if settings.scale != "off" and settings.scale_over == "batch" and found is not None:
            advantages_PG = advantages_PG.double() / (found.deviation(settings.scale or "") + self._eps)
        return advantages_PG.to(rewards_PG.dtype)

    def _of_tokens(self, batch: Batch, trajectories: Sequence[Trajectory]) -> tuple[Rows, Rows]:
        """(advantages, returns) of each sequence's tokens."""
        if not trajectories:
            return [], []
        settings, turns = self.settings, Turns.of(batch, trajectories)
        rewards_CT = turns.padded(self.token_rewards(batch, turns).float())
        discounts_CT = turns.discounts(settings.gamma, settings.turn_gamma)
        if settings.baseline == "critic":
            values_CT = turns.padded(batch.flat("values"))
            advantages_CT, returns_CT = gae(rewards_CT, values_CT, discounts_CT, settings.gae_lambda)
        else:
            advantages_CT = returns_CT = discounted(rewards_CT, discounts_CT)
        if settings.baseline == "greedy":
            greedy = [reward_of(member).greedy for member in turns.members]
            advantages_CT = advantages_CT - torch.tensor(greedy)[:, None]
        advantages, returns = (
            batch.rows(turns.unpadded(table_CT)) for table_CT in (advantages_CT, returns_CT)
        )
        return advantages, returns

    def _normalised(self, values: torch.Tensor, found: Moments) -> torch.Tensor:
        exact = (values.double() - found.mean) / (found.deviation(self.settings.scale or "") + self._eps)
        return exact.to(values.dtype)

    @property
    def _eps(self) -> float:
        return self.settings.scale_eps or 0.0

    @cached_property
    def value_loss(self) -> Loss | None:  # type: ignore[override]
        return value(self.settings.value_clip) if self.spec.has_critic else None


def _counted(groups: Groups | None, values_PG: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if groups is None or values_PG is None else values_PG[groups.counted_PG]


def preset(name: str) -> type[PolicyGradient]:
    """The class of an algorithm that is nothing but its row in the table of presets."""
    return type(name, (PolicyGradient,), {"spec": SPECS[name], "__module__": __name__})


class GRPO(PolicyGradient):
    spec = SPECS["grpo"]
