"""Ranks of one machine that behave as if they were on several hosts, for tests of what a rank then does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from shardproof.dist import region


@contextmanager
def pretend_hosts(letters: str, same_name: bool = False) -> Iterator[None]:
    """Inside, rank r is on host `letters[r]` ("aabb": two hosts of two ranks): no rank can map another host's memory.

    `same_name` gives all hosts one hostname. Use it inside the function that `run_ranks` calls, before anything asks
    for hosts: a group keeps its answer.
    """
    rank = dist.get_rank()
    mine = letters[rank]
    with pytest.MonkeyPatch.context() as patch:
        # The kernel's name of shared memory then bears the host's letter, and the check of region.py tells them apart.
        patch.setattr(region, "_name", lambda token: f"shardproof-{token}-{mine}")
        patch.setattr(socket, "gethostname", lambda: "node" if same_name else f"host-{mine}")
        patch.setitem(os.environ, "LOCAL_RANK", str(letters[:rank].count(mine)))
        patch.setitem(os.environ, "LOCAL_WORLD_SIZE", str(letters.count(mine)))
        yield
