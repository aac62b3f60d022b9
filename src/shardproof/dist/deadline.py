"""Deadlines of their own for stages: a lost rank ends the others with a clear error, not after half an hour."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardproof.bounds import require_number
from shardproof.dist import stacks
from shardproof.dist.collectives import known_control_group
from shardproof.errors import ShardproofError, fail

_MAX_SECONDS = 10**9  # more than timedelta and the backends can count with would overflow
# What backends say when a peer is gone or does not answer.
_LOST = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "peer",
    "nccl",
    "socket",
)


class Deadline:
    """Seconds that several waits share."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """What is left, never less than a millisecond."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


def mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups that a model on this mesh talks through."""
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]


@contextmanager
def deadline(
    stage: str,
    code: str = "T308",
    seconds: float = 600.0,
    groups: Sequence[dist.ProcessGroup] | None = None,
) -> Iterator[None]:
    """Fail with one clear error if a collective in the block waits longer than `seconds` for a lost or slow rank.

    The error says which rank was in which call at which line, and which did not answer. Without `groups` the deadline
    applies to the default group. It always applies to shardproof's own exchanges, whichever group they use.
    """
    assert dist.group.WORLD is not None
    require_number(stage, "deadline_s", seconds, above=0, at_most=_MAX_SECONDS)
    control = known_control_group()
    every = [*(groups or [dist.group.WORLD]), *([control] if control is not None else [])]
    unique = {id(group): group for group in every}.values()
    previous = [(group, _timeout_of(group)) for group in unique]
    for group, _ in previous:
        _set_pg_timeout(timedelta(seconds=seconds), group)
    stacks.start()
    watch = stacks.current()
    limit_before = watch.set_limit(seconds) if watch is not None else None
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        waited = time.monotonic() - started
        first_line = str(error).strip().splitlines()[0][:200]
        message = f"another rank was lost or did not answer within {seconds:g} s ({waited:.1f} s after the call began)"
        where = "" if watch is None else f": {stacks.summarise(watch.report(error), watch.world_size)}"
        raise fail(
            code, stage, f"{message}{where}. The backend says: {first_line}", rank=dist.get_rank()
        ) from error
    finally:
        if watch is not None:
            watch.set_limit(limit_before)
        for group, timeout in previous:
            _set_pg_timeout(timeout, group)


def _is_lost(error: RuntimeError) -> bool:
    text = str(error).lower()
    lost = any(sign in text for sign in _LOST)
    return lost and dist.get_world_size() > 1 and not isinstance(error, ShardproofError)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(group._device_types[0]).options._timeout
