"""Device meshes: one shard axis, or replicas of a shard axis (HSDP)."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.dist.groups import keep_in_time
from shardproof.dist.launch import default_device, init_distributed
from shardproof.errors import fail

REPLICATE, SHARD = "replicate", "shard"


def make_mesh(replicate: int = 1, shard: int | None = None, device_type: str | None = None) -> DeviceMesh:
    """A mesh of all ranks: each copy of the model is sharded over `shard` ranks, and there are `replicate` copies.

    Collective: every rank.
    """
    init_distributed(device_type)
    world_size = dist.get_world_size()
    if replicate < 1 or world_size % replicate:
        message = f"replicate={replicate} does not divide the {world_size} ranks."
        raise fail("C002", "mesh", message, fix="set replicate to a number that divides the ranks")
    shard = world_size // replicate if shard is None else shard
    if replicate * shard != world_size:
        raise fail(
            "C002",
            "mesh",
            f"replicate={replicate} x shard={shard} is not the {world_size} ranks of this run.",
        )
    kind = device_type or default_device().type
    if replicate == 1:
        mesh = init_device_mesh(kind, (shard,), mesh_dim_names=(SHARD,))
    else:
        mesh = init_device_mesh(kind, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))
    keep_in_time(mesh.get_group(axis) for axis in range(mesh.ndim))
    return mesh


def check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """`mesh` if it is one we can shard over: all ranks, one shard axis, at most one replicate axis before it."""
    if mesh.size() != dist.get_world_size():
        raise fail(
            "C002",
            "mesh",
            f"the mesh has {mesh.size()} ranks, but the process group has {dist.get_world_size()}.",
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or (mesh.ndim == 2 and tuple(names) != (REPLICATE, SHARD)):
        raise fail("C002", "mesh", f"mesh axes are {names}; expected ('shard',) or ('replicate', 'shard').")
    return mesh


def replicate_size(mesh: DeviceMesh) -> int:
    """How many copies of the model the mesh holds."""
    return mesh.size(0) if mesh.ndim == 2 else 1
