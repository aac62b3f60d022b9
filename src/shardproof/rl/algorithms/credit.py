"""Who earned what: the turns and conversations that a batch's tokens belong to, and their rewards.

Shapes: C conversations, K turns of the longest of them, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from shardproof.rollout.trajectory import Trajectory, conversations_of, reward_of
from shardproof.train.batching import Batch, numbered


@dataclass(frozen=True)
class Turns:
    """This rank's turns, by the row of all predictions of its batch. A turn is a segment whose tokens count.

    A token that does not count belongs to the turn before it in its conversation, or else to the first.
    """

    mask: torch.Tensor  # of each prediction: whether it counts
    conversation: torch.Tensor  # of each prediction, from 0
    number: torch.Tensor  # of each prediction's turn in its conversation, from 0
    ends: torch.Tensor  # the last counted prediction of each turn
    rewards: torch.Tensor  # of the environment, for each turn
    last: torch.Tensor  # of each conversation: its last counted prediction, or its last if none counts
    rest: torch.Tensor  # of each conversation: what it is worth beyond the rewards of its turns
    members: list[Trajectory]  # the last sequence of each conversation

    @classmethod
    def of(cls, batch: Batch, trajectories: Sequence[Trajectory]) -> Turns:
        """Those of a batch, of which `trajectories` are the sequences; there is at least one."""
        conversations = conversations_of(trajectories)
        members = dict(zip(conversations, trajectories, strict=True))
        segments = [segment for trajectory in trajectories for segment in trajectory.segments]
        of_segment = torch.tensor(conversations)[numbered([len(each.segments) for each in trajectories])]
        # Predictions have no place for a sequence's first token.
        firsts = torch.tensor(batch.lengths).cumsum(0) - torch.tensor(batch.lengths)
        predicted = torch.ones(sum(batch.lengths), dtype=torch.bool).index_fill(0, firsts, False)
        segment = numbered([len(segment.tokens) for segment in segments])[predicted]

        mask = batch.flat_mask().bool()
        places = torch.arange(len(mask))
        nowhere = torch.full((len(segments),), -1)
        ends = nowhere.scatter_reduce(0, segment[mask], places[mask], "amax")
        is_turn = ends >= 0
        turns_C = torch.zeros(len(members), dtype=torch.int64).index_add(0, of_segment, is_turn.long())
        number = is_turn.cumsum(0) - 1 - (turns_C.cumsum(0) - turns_C)[of_segment]

        conversation = of_segment[segment]
        keys = places + len(mask) * mask  # those that count are behind all others
        last = torch.zeros(len(members), dtype=torch.int64).scatter_reduce(0, conversation, keys, "amax")
        worth = torch.tensor([reward_of(t).trained for t in members.values()], dtype=torch.float64)
        rewards = torch.tensor([segment.reward for segment in segments], dtype=torch.float64)[is_turn]
        of_turns = torch.zeros_like(worth).index_add(0, of_segment[is_turn], rewards)
        return cls(
            mask=mask,
            conversation=conversation,
            number=number.clamp(min=0)[segment],
            ends=ends[is_turn],
            rewards=rewards,
            last=last % len(mask),
            rest=worth - of_turns,
            members=list(members.values()),
        )

    def token_rewards(self) -> torch.Tensor:
        """Each turn's reward on its last counted prediction, and the rest of a conversation's on its last one."""
        row = torch.zeros(len(self.mask), dtype=torch.float64)
        return row.index_add(0, self.ends, self.rewards).index_add(0, self.last, self.rest)

    def sums(self, row: torch.Tensor) -> torch.Tensor:
        """(C, K): the sum over each turn's predictions."""
        num = int(self.number.max()) + 1
        cells = torch.zeros(len(self.members) * num, dtype=row.dtype)
        return cells.index_add(0, self.conversation * num + self.number, row).view(-1, num)

    def counted(self) -> torch.Tensor:
        """(C, K): whether the conversation has this turn."""
        return self.sums(self.mask.float()) > 0

    def padded(self, row: torch.Tensor) -> torch.Tensor:
        """(C, T): the counted predictions of each conversation in their order, across its sequences, then zeros."""
        return pad_sequence(row[self.mask].split(self._lengths()), batch_first=True)

    def unpadded(self, table_CT: torch.Tensor) -> torch.Tensor:
        """The inverse of `padded`: one row of all predictions, in which those that do not count have 0."""
        lengths = torch.tensor(self._lengths())
        row = torch.zeros(len(self.mask))
        row[self.mask] = table_CT[torch.arange(table_CT.shape[1]) < lengths[:, None]]
        return row

    def discounts(self, gamma: float, turn_gamma: float) -> torch.Tensor:
        """(C, T): from each counted prediction to the next: `gamma`, and `turn_gamma` too where another turn begins."""
        number_CT = self.padded(self.number)
        another_CT = torch.zeros_like(number_CT, dtype=torch.bool)
        another_CT[:, :-1] = number_CT[:, 1:] != number_CT[:, :-1]
        within_CT = torch.full(number_CT.shape, gamma, dtype=torch.float64)
        return within_CT.masked_fill(another_CT, gamma * turn_gamma)

    def _lengths(self) -> list[int]:
        return torch.bincount(self.conversation[self.mask], minlength=len(self.members)).tolist()
