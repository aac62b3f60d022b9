"""Deadlines of their own for stages: a lost rank ends the others with a clear error, not after half an hour."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardproof.errors import ShardproofError, fail

# What backends say when a peer is gone or does not answer.
_LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "peer", "nccl", "socket")


def mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups that a model on this mesh talks through."""
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]


@contextmanager
def deadline(stage: str, code: str, seconds: float, groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """No collective in the block waits longer than `seconds`; a lost or late peer becomes one clear error."""
    unique = {id(group): group for group in groups}.values()
    previous = [(group, _timeout_of(group)) for group in unique]
    for group, _ in previous:
        _set_pg_timeout(timedelta(seconds=seconds), group)
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if dist.get_world_size() > 1 and any(sign in text for sign in _LOST) and not isinstance(error, ShardproofError):
            waited = time.monotonic() - started
            first_line = str(error).strip().splitlines()[0][:200]
            message = f"another rank was lost or did not answer within {seconds:g} s ({waited:.1f} s into it): {first_line}"
            raise fail(code, stage, message, rank=dist.get_rank()) from error
        raise
    finally:
        for group, timeout in previous:
            _set_pg_timeout(timeout, group)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(group._device_types[0]).options._timeout
