"""A run's own files and folders: written whole or not at all.

Everything that a run leaves on disk goes through this file. What is there is complete at every instant: a kill, a full
disk or a lost machine leaves the old content or the new one, never a part of either.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial-"  # being written
REPLACED = ".replaced-"  # the old folder, between the two renames of a replacement
REMOVED = ".removed-"  # being deleted
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it, as one step."""
    with open_atomic(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name at the end of the block, flushed to disk; an error leaves the old one."""
    partial = path.with_name(f"{PARTIAL}{path.name}-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Add one JSON object as a line. A line that an earlier kill cut short is ended first."""
    line = json.dumps(value).encode() + b"\n"
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, final: Path) -> None:
    """Give a complete folder its final name, beside it on the same disk; a folder that had the name is removed.

    At every instant `current_folder(final)` is the whole old folder or the whole new one.
    """
    parent = final.parent
    aside = parent / f"{REPLACED}{final.name}"
    if final.is_dir() and not _exchange(new, final):
        remove_folder(aside)
        os.rename(final, aside)
        os.rename(new, final)
    elif not final.is_dir():
        os.rename(new, final)
    sync_folder(parent)
    remove_folder(new)  # after an exchange the old folder has this name
    remove_folder(aside)


def current_folder(final: Path) -> Path:
    """Where the folder of this name lies now: there, or aside if a replacement was cut short between two renames."""
    aside = final.parent / f"{REPLACED}{final.name}"
    return aside if not final.exists() and aside.is_dir() else final


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so a partly removed folder never has its name."""
    if not folder.is_dir():
        return
    doomed = folder.with_name(f"{REMOVED}{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
