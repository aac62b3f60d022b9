"""A folder that several ranks write into: its lock, the codes of disk errors, and whether rank 0 sees every file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from shardproof.errors import fail
from shardproof.files import FolderLock

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@contextlib.contextmanager
def disk_errors(stage: str, what: str) -> Iterator[None]:
    """The disk's errors as E408, with this rank's number."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise fail("E408", stage, f"{what}: {reason}.", rank=dist.get_rank()) from error


def claim_folder(lock: FolderLock, stage: str) -> None:
    """Take the lock, or raise an error that names its holder. A file system without locks is used without one."""
    try:
        lock.acquire(stage)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


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
