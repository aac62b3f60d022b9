"""All FullyShardedDataParallel calls, in one place."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from shardproof.errors import fail
from shardproof.model.inventory import Inventory
from shardproof.model.replace import replace_parameters
from shardproof.model.roles import ROOT_PREFIX, RoleModule
from shardproof.model.skeleton import Skeleton
from shardproof.shard import torch_private
from shardproof.shard.local import LocalShard
from shardproof.shard.plan import ShardPlan
from shardproof.shard.settings import LoadSettings


def shard_fsdp1(
    root: RoleModule, plan: ShardPlan, settings: LoadSettings
) -> tuple[nn.Module, list[LocalShard]]:
    """Wrap the meta module by units; FSDP1 flattens memory that nobody reads, and only the shards of it stay.

    Memory: this rank's shards, and one unit at a time.
    """
    mixed = settings.compute_dtype != settings.param_dtype or settings.reduce_dtype != settings.param_dtype
    precision = MixedPrecision(
        param_dtype=settings.compute_dtype,
        reduce_dtype=settings.reduce_dtype,
        buffer_dtype=None,  # anything else casts rotary frequencies
        cast_forward_inputs=settings.compute_dtype != settings.param_dtype,
        cast_root_forward_inputs=settings.compute_dtype != settings.param_dtype,
    )
    options: dict[str, Any] = {
        **_layout(settings),
        "device_id": settings.device,
        "mixed_precision": precision if mixed else None,
        "cpu_offload": CPUOffload(offload_params=True) if settings.cpu_offload else None,
        "use_orig_params": True,
        "sync_module_states": False,
        "param_init_fn": _MetaToEmpty(settings.device),
    }
    for unit in plan.units:
        parent, _, leaf = unit.rpartition(".")
        wrapped = FullyShardedDataParallel(root.model.get_submodule(unit), **options)
        setattr(root.model.get_submodule(parent), leaf, wrapped)
        _give_back_freed_memory()
    wrapper = FullyShardedDataParallel(root, **options)
    wrapper.train(root.training)  # a new wrapper is in training mode whatever it wraps
    return wrapper, fsdp1_shards(wrapper)


def _give_back_freed_memory() -> None:
    """Return what a wrapped unit freed to the system; glibc would keep it, scattered between the shards that stay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _layout(settings: LoadSettings) -> dict[str, Any]:
    """How FSDP1 is told about the mesh. HYBRID_SHARD with one rank a shard group would not reduce over replicas."""
    if settings.mesh.ndim == 1:
        return {"device_mesh": settings.mesh, "sharding_strategy": ShardingStrategy.FULL_SHARD}
    if settings.shard_size == 1:
        return {"process_group": settings.mesh.get_group(0), "sharding_strategy": ShardingStrategy.NO_SHARD}
    return {"device_mesh": settings.mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}


def fsdp1_shards(root: nn.Module) -> list[LocalShard]:
    """What this rank holds of each parameter."""
    return [
        LocalShard.of_range(name.removeprefix(ROOT_PREFIX), shape, start, stop, flat)
        for name, shape, start, stop, flat in torch_private.fsdp1_shards(root)
    ]


def check_fsdp1(skeleton: Skeleton, inventory: Inventory, settings: LoadSettings) -> None:
    """Raise for what FSDP1 itself cannot do."""
    tied = next((info for info in inventory.parameters if len(info.names) > 1), None)
    if settings.shard_size == 1 and skeleton.has_lora and tied is not None:
        # On one rank FSDP1 does not shard, and then loses track of a frozen tied parameter in its second backward.
        message = f"strategy='fsdp1' on one rank cannot train adapters of a model that ties {tied.names}."
        raise fail("S214", "shard", message, tensor=tied.name, fix="use strategy='fsdp2'")


class _MetaToEmpty:
    """A `param_init_fn`: memory for a module's own meta parameters, one piece for tied ones.

    FSDP calls it module by module; without the memory of what was replaced, ties would come apart.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.replaced: dict[torch.Tensor, Any] = {}

    def __call__(self, module: nn.Module) -> None:
        replace_parameters([module], self._memory, self.replaced)

    def _memory(self, param: torch.Tensor) -> torch.Tensor:
        # Never touched, these pages cost address space only; the flat parameter made of them is written next.
        return torch.empty(param.shape, dtype=param.dtype, device=self.device) if param.is_meta else param
