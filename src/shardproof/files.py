"""A run's own files and folders: written whole or not at all, and by one process at a time.

Everything that a run leaves on disk goes through this file. What is there is complete at every instant: a kill, a full
disk or a lost machine leaves the old content or the new one, never a part of either.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shardproof.errors import fail

LOCK_NAME = ".lock"
PARTIAL = ".partial-"  # being written
REPLACED = ".replaced-"  # the old folder, between the two renames of a replacement
REMOVED = ".removed-"  # being deleted
# Number, then kernel, namespace and start time of the process that claimed a folder.
_HOLDER = re.compile(r"process (\d+) on host [^\n]* since [^\n]*\n(\S+ \S+ \S+) \S+\n")
_START_TIME = 19  # among the fields of /proc/PID/stat after the name
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


def claim_is_dead(folder: Path) -> bool:
    """Whether the last process that claimed a folder ended without giving it up; False where this host cannot tell.

    It can tell of processes of its own kernel alone. Other hosts may have the same hostname.
    """
    path = folder / LOCK_NAME
    try:
        noted = _HOLDER.match(path.read_text(errors="replace"))
        number, claimed = (int(noted[1]), noted[2].split(" ")) if noted else (0, [])
        if not noted or claimed[0] != _kernel() or (claimed == _place_of(number)):
            return False
        # The process may live in a container that shows other numbers, or none: whoever lives still holds the lock.
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # no file, or a lock that is held
        return False
    return True


def _kernel() -> str:
    """What names the kernel of this host since it booted, also in containers; "" where the system does not say it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _place_of(pid: int) -> list[str]:
    """What no two processes share, as this process sees one: kernel, namespace of process ids, and when it started."""
    try:
        # The name of the program, in parentheses, may contain anything; after it fields are numbers.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return [_kernel(), os.readlink("/proc/self/ns/pid"), fields[_START_TIME]]
    except OSError:  # there is no such process, or no /proc
        return ["", "", ""]


class FolderLock:
    """This process's claim on a folder. It ends with `release`, or with the process however that ends."""

    def __init__(self, folder: Path):
        self._path = folder / LOCK_NAME
        self._descriptor: int | None = None
        self._noted = b""  # in the file, by this process

    def acquire(self, stage: str) -> None:
        """Claim the folder, or raise with the host and process that hold it."""
        # A symbolic link of this name is not followed, so its target is not emptied.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o644)
        try:
            # The kernel drops the lock with its last holder, so a killed process leaves no lock behind.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder, *_ = os.pread(descriptor, 1024, 0).decode(errors="replace").strip().split("\n")
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            message = f"{self._path.parent} is in use by {holder or 'another process'}."
            raise fail("C006", stage, message, fix="wait for it, stop it, or use another folder") from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on host {socket.gethostname()} since {since}"
        # The second line proves who it was; its last word is unique to this claim.
        proof = " ".join([*_place_of(os.getpid()), secrets.token_hex(4)])
        noted = f"{holder}\n{proof}\n".encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, noted, 0)
            self._noted = noted
        self._descriptor = descriptor

    def is_lost(self) -> bool:
        """Whether the folder that was claimed is gone from its place, or another process has claimed a new one there."""
        try:
            return bool(self._noted) and self._path.read_bytes() != self._noted
        except FileNotFoundError:
            return True
        except OSError:  # a disk that does not answer at the moment
            return False

    def release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            # A child that was forked meanwhile would keep the lock if the file were only closed.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
