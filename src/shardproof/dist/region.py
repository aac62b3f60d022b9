"""Memory that the ranks of one host share, to hand each other tensors without a socket between them."""

from __future__ import annotations

import os
import secrets

import torch
import torch.distributed as dist

from shardproof.dist.collectives import exchange


def open_region(size: int, group: dist.ProcessGroup) -> torch.Tensor | None:
    """`size` bytes that every rank of the group maps, or None on all of them where one cannot.

    The memory is an anonymous file without a name in any file system. Nobody keeps it open: it is gone when the last
    mapping is, however a process ends. Collective: every rank, each with its group.
    """
    first = dist.get_global_rank(group, 0)
    descriptor, address = -1, None
    if dist.get_rank() == first and hasattr(os, "memfd_create"):
        token = secrets.token_hex(16)
        descriptor = os.memfd_create(f"shardproof-{token}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        address = [f"/proc/{os.getpid()}/fd/{descriptor}", token]
    try:
        memory = _map(exchange(address)[first], size)
        # Every rank has mapped it, or tried to, before the first one closes it.
        answers = exchange(memory is not None)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    mine = dist.get_process_group_ranks(group)
    return memory if all(answers[rank] for rank in mine) else None


def _map(address: list[str] | None, size: int) -> torch.Tensor | None:
    """The memory at an address, unless it is another host's or another user's."""
    if address is None:
        return None
    path, token = address
    try:
        if token not in os.readlink(path):
            return None
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
