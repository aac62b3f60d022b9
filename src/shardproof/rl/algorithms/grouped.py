"""Algorithms that compare the completions of one prompt, and what they compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from shardproof.dist.collectives import together
from shardproof.errors import fail
from shardproof.rl.advantages import discounted
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
        return batch.with_column("advantages", self.within_groups(batch, trajectories))

    def within_groups(self, batch: Batch, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
        """What `compare` gives the tokens of each sequence. Collective: every rank."""
        with together("rollout"):
            if not trajectories:
                return []
            groups = Groups.of(self, batch, trajectories)
            return groups.spread(self.compare(groups.rewards_PG, groups.counted_PG), type(self).__name__)


@dataclass(frozen=True)
class Groups:
    """This rank's groups: what their completions, or the k-th turns of these, are compared by."""

    rewards_PG: torch.Tensor
    counted_PG: torch.Tensor
    present_PGK: torch.Tensor  # groups that are smaller than the largest are filled up
    batch: Batch
    conversation: torch.Tensor  # of each prediction, from 0
    number: torch.Tensor  # of each prediction's turn; 0 where conversations are compared as wholes

    @classmethod
    def of(cls, algorithm: Algorithm, batch: Batch, trajectories: Sequence[Trajectory]) -> Groups:
        """Those of a batch, of which `trajectories` are the sequences; there is at least one."""
        turns, settings = Turns.of(batch, trajectories), algorithm.settings
        rewards_CK = turns.sums(algorithm.token_rewards(batch, turns)).double()
        returns_CK = discounted(rewards_CK, torch.full_like(rewards_CK, settings.turn_gamma)).float()
        if settings.credit == "turn":
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
        rewards_PG, counted_PG = (
            table.transpose(1, 2).reshape(-1, table.shape[1]) for table in (rewards_PGK, counted_PGK)
        )
        return cls(rewards_PG, counted_PG, present_PGK, batch, turns.conversation, number)

    def spread(self, advantages_PG: torch.Tensor, name: str) -> list[torch.Tensor]:
        """The advantages of each sequence's tokens, from those of completions or their turns; `name` gave them."""
        if advantages_PG.shape != self.rewards_PG.shape:
            shapes = f"{tuple(advantages_PG.shape)} for rewards of shape {tuple(self.rewards_PG.shape)}"
            message = f"{name}.compare returned advantages of shape {shapes}."
            raise fail("C001", "rollout", message, fix="return one advantage per completion")
        num_prompts, _, num_turns = self.present_PGK.shape
        advantages_PGK = advantages_PG.view(num_prompts, num_turns, -1).transpose(1, 2)
        advantages_CK = advantages_PGK[self.present_PGK].view(-1, num_turns)
        return self.batch.rows(advantages_CK[self.conversation, self.number] * self.batch.flat("mask"))
