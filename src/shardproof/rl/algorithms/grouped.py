"""Algorithms that compare the completions of one prompt: GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from shardproof.config.algorithms import SPECS
from shardproof.dist.collectives import together
from shardproof.errors import fail
from shardproof.rl.advantages import discounted, group_centred, group_normalised, leave_one_out
from shardproof.rl.algorithms.base import Algorithm, counted_only
from shardproof.rl.algorithms.credit import Turns
from shardproof.rollout.trajectory import Trajectory, reward_of
from shardproof.train.batching import Batch


class GroupAlgorithm(Algorithm):
    """Every token has the advantage that `compare` gives its conversation, or its turn, within the group.

    With credit="trajectory" the conversations of a group are compared by their whole returns, with credit="turn" their
    k-th turns by the returns from these turns on, for each k.
    """

    def compare(self, rewards_PG: torch.Tensor, counted_PG: torch.Tensor) -> torch.Tensor:
        """Advantages of G completions of P prompts, or of their k-th turns; 0 for those that are not counted.

        Not counted are completions that failed or are left out and, by turn, those that were over before.
        """
        raise NotImplementedError

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        batch = counted_only(batch, trajectories)
        with together("rollout"):
            rows = self._compared(batch, Turns.of(batch, trajectories)) if trajectories else []
        return batch.with_column("advantages", rows)

    def _compared(self, batch: Batch, turns: Turns) -> list[torch.Tensor]:
        """The advantages of each sequence's tokens."""
        rewards_CK = turns.sums(self.token_rewards(batch, turns)).double()
        returns_CK = discounted(rewards_CK, torch.full_like(rewards_CK, self.settings.turn_gamma)).float()
        if self.settings.credit == "turn":
            counted_CK, number = turns.counted(), turns.number
        else:
            returns_CK = returns_CK[:, :1]
            counted_CK = torch.tensor([[reward_of(member).counts] for member in turns.members])
            number = torch.zeros_like(turns.number)
        # Groups that are smaller than the largest are filled up with completions that do not count.
        sizes = [len(list(members)) for _, members in groupby(turns.members, lambda t: t.group)]
        rewards_PGK, counted_PGK, present_PGK = (
            pad_sequence(table.split(sizes), batch_first=True)
            for table in (returns_CK, counted_CK, torch.ones_like(counted_CK))
        )
        num_turns = returns_CK.shape[1]
        rewards_PG, counted_PG = (
            table.transpose(1, 2).reshape(-1, table.shape[1]) for table in (rewards_PGK, counted_PGK)
        )
        advantages_PG = self.compare(rewards_PG, counted_PG)
        if advantages_PG.shape != rewards_PG.shape:
            shapes = f"{tuple(advantages_PG.shape)} for rewards of shape {tuple(rewards_PG.shape)}"
            message = f"{type(self).__name__}.compare returned advantages of shape {shapes}."
            raise fail("C001", "rollout", message, fix="return one advantage per completion")
        advantages_PGK = advantages_PG.view(len(sizes), num_turns, -1).transpose(1, 2)
        advantages_CK = advantages_PGK[present_PGK].view(-1, num_turns)
        return batch.rows(advantages_CK[turns.conversation, number] * batch.flat("mask"))


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
