"""What a rank holds of a model, at any time and wherever it lies."""

from __future__ import annotations

import torch

from shardproof.shard.fsdp1 import fsdp1_shards
from shardproof.shard.fsdp2 import fsdp2_shards
from shardproof.shard.local import LocalShard
from shardproof.shard.settings import FSDP1
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name


def local_shards(policy: ShardedModel) -> list[LocalShard]:
    """This rank's shards of every parameter, in the inventory's order, from host memory while offloaded."""
    if policy.offloaded is not None:
        return policy.offloaded.shards
    shards = fsdp1_shards(policy.module) if policy.strategy == FSDP1 else fsdp2_shards(policy.module)
    by_name = {shard.name: shard for shard in shards}
    return [by_name[info.name] for info in policy.inventory.parameters]


def persistent_buffers(policy: ShardedModel) -> dict[str, torch.Tensor]:
    """Buffers that belong to the checkpoint, whole on every rank."""
    buffers = {clean_name(name): buffer for name, buffer in policy.model.named_buffers()}
    return {info.name: buffers[info.name].detach() for info in policy.inventory.persistent_buffers}
