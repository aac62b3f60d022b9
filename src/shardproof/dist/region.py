"""Shared memory of the processes of one host: how it is created, announced and mapped.

It is an anonymous file (memfd), and its address is a path under /proc. On another host, or after a process id was
reused, the same path leads to another file. A process that opens one therefore checks what it opened, and maps nothing
but the announced memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import exchange

_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_TOKEN = re.compile(r"[0-9a-f]{32}")
# Linux's flag; Python 3.13 is the first that names it.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class NotOurs(Exception):
    """The file at an address is not the memory that was announced."""


@dataclass(frozen=True)
class RegionAddress:
    """The path of shared memory, with the token and size that identify it."""

    path: str
    token: str
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RegionAddress:
        return cls(str(data["path"]), str(data["token"]), int(data["num_bytes"]))


def create_region(size: int) -> tuple[int, RegionAddress]:
    """(descriptor, address) of new memory, freed when the last process that holds or maps it ends."""
    token = secrets.token_hex(16)
    descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    return descriptor, RegionAddress(f"/proc/{os.getpid()}/fd/{descriptor}", token, size)


def map_region(address: RegionAddress, writable: bool = False) -> torch.Tensor:
    """The bytes of the memory at an address; raises `NotOurs` for anything else, which it neither opens nor changes.

    Without `writable` the mapping is private: writes to the tensor are not seen by others.
    """
    return torch.frombuffer(map_bytes(address, writable), dtype=torch.uint8)


def map_bytes(address: RegionAddress, writable: bool = False) -> mmap.mmap:
    """As `map_region`, for what is no tensor."""
    if not _DESCRIPTOR.fullmatch(address.path) or not _TOKEN.fullmatch(address.token):
        raise NotOurs(f"{address.path!r} is not the address of shared memory")
    try:
        # This pins the file without opening it: a device or a pipe would notice, and a path can change meanwhile.
        pinned = os.open(address.path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise NotOurs(f"{address.path} cannot be opened: {_reason(error)}") from error
    try:
        _check(pinned, address)
        mode = os.O_RDWR if writable else os.O_RDONLY
        descriptor = os.open(f"/proc/self/fd/{pinned}", mode | os.O_CLOEXEC)
    except OSError as error:
        raise NotOurs(f"{address.path} cannot be opened: {_reason(error)}") from error
    finally:
        os.close(pinned)
    try:
        # A private mapping reserves nothing: only what a consumer overwrites costs memory.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _MAP_NORESERVE
        return mmap.mmap(descriptor, address.num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise NotOurs(f"{address.path} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _name(token: str) -> str:
    return f"shardproof-{token}"


def _check(descriptor: int, address: RegionAddress) -> None:
    """Raise unless a descriptor is of the announced memory: by its token, its size and its owner."""
    # The kernel writes this link; a file can only bear the name if it lies in the root directory, and then has a link.
    target, status = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor)
    if (
        target != f"/memfd:{_name(address.token)} (deleted)"
        or status.st_nlink
        or not stat.S_ISREG(status.st_mode)
    ):
        raise NotOurs(f"{address.path} is a different file on this host")
    if status.st_uid != os.geteuid():
        raise NotOurs(f"{address.path} belongs to another user")
    if status.st_size != address.num_bytes:
        raise NotOurs(f"{address.path} has {status.st_size} bytes, {address.num_bytes} were expected")


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return "there is no such process or descriptor here"
    return error.strerror or str(error)


def open_region(size: int, group: dist.ProcessGroup) -> torch.Tensor | None:
    """`size` bytes that every rank of the group maps, or None on all of them where one cannot.

    No descriptor stays open: the memory is freed with its last mapping, however a process ends.
    Collective: every rank, each with its group.
    """
    memory, answers = _offer(size, dist.get_global_rank(group, 0))
    mine = dist.get_process_group_ranks(group)
    return memory if all(answers[rank] for rank in mine) else None


def _offer(size: int, first: int) -> tuple[torch.Tensor | None, list[bool]]:
    """(memory of the rank `first`, which may differ between ranks; which ranks have mapped theirs).

    Collective: every rank.
    """
    descriptor, address = -1, None
    if dist.get_rank() == first and hasattr(os, "memfd_create"):
        descriptor, made = create_region(size)
        address = made.to_json()
    try:
        memory = _map(exchange(address)[first])
        # By this exchange every rank has mapped it, or failed to, before the first rank closes it.
        return memory, exchange(memory is not None)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _map(address: Mapping[str, Any] | None) -> torch.Tensor | None:
    """The memory at an address, unless it is another host's or another user's."""
    if address is None:
        return None
    try:
        return map_region(RegionAddress.from_json(address), writable=True)
    except NotOurs:
        return None
