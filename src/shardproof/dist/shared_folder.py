"""A folder that several ranks write into: the codes of disk errors, and whether rank 0 sees every file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from shardproof.dist.hosts import known_hosts
from shardproof.errors import fail

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def disk_errors(
    stage: str, what: str, num_bytes: int | None = None, folder: Path | None = None
) -> Iterator[None]:
    """The disk's errors as E408, with this rank's number and, where there are several, its host.

    For a disk that is full the message has the `num_bytes` that this rank writes, and those that `folder` has free.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in _FULL and num_bytes is not None:
            reason += f"; this rank has {num_bytes:,} bytes to write{_free(folder)}"
        raise fail("E408", stage, f"{on_host()}{what}: {reason}.", rank=dist.get_rank()) from error


def _free(folder: Path | None) -> str:
    try:
        return f", and {shutil.disk_usage(folder).free:,} are free" if folder is not None else ""
    except OSError:
        return ""


def on_host() -> str:
    """`host b: ` where there are several hosts, else nothing. Not a collective."""
    found = known_hosts()
    return f"host {found.name}: " if found is not None and found.num > 1 else ""


def check_seen(folder: Path, written: Iterable[tuple[int, str, int]], stage: str) -> None:
    """Raise unless rank 0 sees every written file, (rank, file, size), in full: the folder must be shared."""
    for rank, name, size in written:
        try:
            with (folder / name).open("rb") as file:  # opening it asks a server anew
                found = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            found = None
        if found != size:
            seen = "does not see it" if found is None else f"sees {found} bytes"
            message = f"it wrote {name} with {size} bytes, but rank 0 {seen}."
            raise fail("E408", stage, message, rank=rank, fix="save into a folder that all hosts share")
