"""What a rank holds of a model, at any time and wherever it lies."""

from __future__ import annotations

import torch

from shardproof.shard.local import LocalShard
from shardproof.shard.sharded_model import ShardedModel


def local_shards(policy: ShardedModel) -> list[LocalShard]:
    """This rank's shards of every parameter, in the inventory's order, from host memory while offloaded."""
    return policy.local_shards()


def persistent_buffers(policy: ShardedModel) -> dict[str, torch.Tensor]:
    """Buffers that belong to the checkpoint, whole on every rank."""
    return policy.persistent_buffers()
