"""All `fully_shard` calls, in one place."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardproof.model.roles import ROOT_PREFIX, RoleModule
from shardproof.shard import torch_private
from shardproof.shard.local import LocalShard
from shardproof.shard.plan import ShardPlan
from shardproof.shard.settings import LoadSettings


def shard_fsdp2(root: RoleModule, plan: ShardPlan, settings: LoadSettings) -> list[LocalShard]:
    """Shard the meta module by units, then give each shard its memory, unwritten.

    Memory: this rank's shards.
    """
    offload = CPUOffloadPolicy(pin_memory=settings.pin_memory) if settings.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": settings.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=settings.compute_dtype, reduce_dtype=settings.reduce_dtype
        ),
        "offload_policy": offload,
    }
    for unit in plan.units:
        fully_shard(root.model.get_submodule(unit), **options)
    fully_shard(root, **options)
    params = list(torch_private.fsdp2_params(root))
    torch_private.allocate_fsdp2(params, settings.storage_device, settings.pin_memory)
    return fsdp2_shards(root)


def fsdp2_shards(root: nn.Module) -> list[LocalShard]:
    """What this rank holds of each parameter."""
    torch_private.reshard(root)
    shards = []
    for name, param in root.named_parameters():
        assert isinstance(param, DTensor)
        start, stop = torch_private.dtensor_range(param)
        flat = torch_private.local_tensor(param).view(-1)
        shards.append(LocalShard.of_range(name.removeprefix(ROOT_PREFIX), param.shape, start, stop, flat))
    return shards
