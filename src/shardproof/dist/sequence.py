"""Sequence parallelism: the exchanges of Ulysses attention, with autograd.

A group of consecutive ranks shares one packed batch; each rank runs every layer on its slice of the tokens. Inside
attention the group trades slices of tokens for slices of heads, attends over whole sequences, and trades back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.groups import new_group


class SequenceGroup:
    """The ranks that share one batch, and the exchanges between them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens / size, dim] on each rank to [1, heads / size, tokens, dim].

        Collective: the group.
        """
        return _AllToAll.apply(states, self.group, 1, 2)

    def split_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """[1, heads / size, tokens, dim] on each rank back to [1, heads, tokens / size, dim].

        Collective: the group.
        """
        return _AllToAll.apply(states, self.group, 2, 1)

    def gather_tokens(self, local: torch.Tensor) -> torch.Tensor:
        """[n] on each rank to [size * n], in rank order. The gradient of a rank's part goes to that rank alone.

        Every rank of the group computes the same loss from the result, so nothing is summed over them.
        Collective: the group.
        """
        return _Gather.apply(local, self.group)


def make_sequence_group(size: int) -> SequenceGroup | None:
    """This rank's group of `size` consecutive ranks; None for size 1.

    Collective: every rank.
    """
    if size == 1:
        return None
    mine = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return SequenceGroup(mine)


def _all_to_all(
    states: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
) -> torch.Tensor:
    """Cut `split_dim` into one part per rank, exchange them, and join what arrives along `join_dim`."""
    size = dist.get_world_size(group)
    parts = torch.stack(states.chunk(size, dim=split_dim)).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(0), dim=join_dim)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
    ) -> torch.Tensor:
        ctx.exchange = (group, split_dim, join_dim)
        return _all_to_all(states, group, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        group, split_dim, join_dim = ctx.exchange
        return _all_to_all(grad, group, join_dim, split_dim), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.part = (dist.get_rank(group), local.shape[0])
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rank, length = ctx.part
        return grad[rank * length : (rank + 1) * length], None
