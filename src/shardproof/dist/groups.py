"""Process groups that wait no longer than the default group does at the moment."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

# What was made here: a deadline that ends gives groups that were made inside it the timeout from before.
made: WeakSet[dist.ProcessGroup] = WeakSet()


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of all ranks, or of some, whose timeout is the default group's.

    torch would let it wait for 30 minutes, whatever the default group's timeout. Collective: every rank.
    """
    assert dist.group.WORLD is not None
    group = dist.new_group(ranks, timeout=timeout_of(dist.group.WORLD), backend=backend)
    if ranks is None or dist.get_rank() in ranks:
        made.add(group)
    return group


def keep_in_time(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give groups that torch made the default group's timeout."""
    default = dist.group.WORLD
    assert default is not None
    for group in groups:
        if group is not default:
            set_timeout(group, timeout_of(default))
            made.add(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of the group may take."""
    found: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return found


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Say how long collectives of the group may take from now on."""
    _set_pg_timeout(timeout, group)
