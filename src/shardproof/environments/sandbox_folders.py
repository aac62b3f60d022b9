"""The temporary folders that code runs in: made, looked at, and removed, also those of workers that were killed."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import tempfile
from pathlib import Path

_PREFIX = "shardproof-python-"
_MANY_FILES = 4096


@functools.cache
def base() -> str:
    """The folder of this process, which holds those of its runs. Locked as long as the process lives."""
    remove_stale()
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # another process took it for stale, and has it or removed it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(folder), os.fstat(lock)):
                atexit.register(_remove_own, folder, os.getpid())
                return folder
        os.close(lock)


def remove_stale() -> None:
    """Remove the folders of this user's processes that were killed: nobody holds their locks any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone by now
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(folder))
            finally:
                os.close(lock)


def _remove_own(folder: str, process: int) -> None:
    if os.getpid() == process:
        remove(folder)


def holds_more(folder: str, most: int) -> bool:
    """Whether the files below a folder have more than `most` bytes together, or are too many or too deep."""
    folders, count = [folder], 0
    try:
        while folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    # What is removed while looking hides nothing of the others.
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            most -= entry.stat(follow_symlinks=False).st_blocks * 512
                    if most < 0 or count > _MANY_FILES:
                        return True
    except OSError:  # a path that is too long, a folder without rights
        return True
    return False


def remove(folder: str) -> None:
    """Remove a folder and what code left in it. However deep that is: folders inside of folders are moved to the top."""
    moved = 0
    with contextlib.suppress(OSError):
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                        moved += 1
                        os.rename(inner.path, os.path.join(folder, f"moved-{moved}"))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        os.rmdir(folder)
