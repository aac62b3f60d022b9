"""Algorithms that compare the completions of one prompt: GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from shardproof.config.algorithms import SPECS
from shardproof.dist.collectives import together
from shardproof.errors import fail
from shardproof.rl.advantages import group_centred, group_normalised, leave_one_out
from shardproof.rl.algorithms.base import Algorithm, without_failed
from shardproof.rollout.trajectory import Trajectory, reward_of
from shardproof.train.batching import Batch


class GroupAlgorithm(Algorithm):
    """Every token of a completion has the advantage that `compare` gives the completion within its group."""

    def compare(self, rewards_PG: torch.Tensor, counted_PG: torch.Tensor) -> torch.Tensor:
        """Advantages of G completions of P prompts; 0 for those that are not counted, because their rewards failed."""
        raise NotImplementedError

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        batch = without_failed(batch, trajectories)
        with together("rollout"):
            rows = self._compared(batch, trajectories) if trajectories else []
        return batch.with_column("advantages", rows)

    def _compared(self, batch: Batch, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
        """The advantages of each sequence's tokens."""
        sequence = batch.sequence_indices()
        token_rewards = torch.cat(self.token_rewards(batch, trajectories))
        totals = torch.zeros(len(batch)).index_add(0, sequence, token_rewards)
        counted = torch.tensor([not reward_of(trajectory).failed for trajectory in trajectories])
        # Groups that are smaller than the largest are filled up with completions that do not count.
        sizes = [len(list(members)) for _, members in groupby(trajectories, lambda t: t.group)]
        rewards_PG, counted_PG, present_PG = (
            pad_sequence(row.split(sizes), batch_first=True)
            for row in (totals, counted, torch.ones_like(counted))
        )
        advantages_PG = self.compare(rewards_PG, counted_PG)
        if advantages_PG.shape != rewards_PG.shape:
            shapes = f"{tuple(advantages_PG.shape)} for rewards of shape {tuple(rewards_PG.shape)}"
            message = f"{type(self).__name__}.compare returned advantages of shape {shapes}."
            raise fail("C001", "rollout", message, fix="return one advantage per completion")
        each = advantages_PG[present_PG]
        return batch.rows(each[sequence] * batch.flat("mask"))


class GRPO(GroupAlgorithm):
    spec = SPECS["grpo"]

    def compare(self, rewards_PG: torch.Tensor, counted_PG: torch.Tensor) -> torch.Tensor:
        return group_normalised(rewards_PG, counted_PG)


class DAPO(GRPO):
    spec = SPECS["dapo"]


class GSPO(GRPO):
    spec = SPECS["gspo"]
    surrogate = "sequence"


class CISPO(GRPO):
    spec = SPECS["cispo"]
    surrogate = "detached"


class DrGRPO(GroupAlgorithm):
    spec = SPECS["dr_grpo"]

    def compare(self, rewards_PG: torch.Tensor, counted_PG: torch.Tensor) -> torch.Tensor:
        return group_centred(rewards_PG, counted_PG)


class RLOO(GroupAlgorithm):
    spec = SPECS["rloo"]

    def compare(self, rewards_PG: torch.Tensor, counted_PG: torch.Tensor) -> torch.Tensor:
        return leave_one_out(rewards_PG, counted_PG)
