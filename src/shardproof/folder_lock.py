"""A process's claim on a folder, which others on this host and on hosts that share the folder respect.

The kernel's lock says at once whether a holder lives, but on a network's disk it may reach no other host, or not exist. So
the holder's name lies in the lock's file, and the holder touches the file every few seconds. Whoever finds the claim of
another host that the kernel does not vouch for watches the file for a while.

The ranks of a run that starts again, because a host was lost, belong to a later attempt of the same job. A later attempt
takes the claim over at once, by putting another file in its place: an earlier one that only seemed dead finds out by
`is_lost`, which it asks before it writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import threading
import time
from pathlib import Path

from shardproof.errors import ShardproofError, fail

LOCK_NAME = ".lock"
ATTEMPT = "SHARDPROOF_ATTEMPT"  # "job:number": which start of the ranks of which job this process belongs to
# Number, then kernel, namespace and start time of the process that claimed a folder, then its attempt.
_HOLDER = re.compile(
    r"process (\d+) on host [^\n]* since [^\n]*\n(\S*) (\S*) (\S*) \S+\n(?:attempt (\S+)\n)?"
)
_ATTEMPT = re.compile(r"([^\s:]+):(\d{1,9})")
_START_TIME = 19  # among the fields of /proc/PID/stat after the name
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_MAX_BYTES = 1024
_BEAT_S, _WATCH_S = (
    2.0,
    12.0,
)  # how often a holder touches its file, and how long one is watched that may be dead
_TRIES = 5


def claim_is_dead(folder: Path) -> bool:
    """Whether the last process that claimed a folder ended without giving it up; False where this host cannot tell.

    It can tell of processes of its own kernel alone. Other hosts may have the same hostname.
    """
    path = folder / LOCK_NAME
    try:
        noted = _HOLDER.match(path.read_text(errors="replace"))
        if not noted or noted[2] != _kernel() or list(noted.groups()[1:4]) == _place_of(int(noted[1])):
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


def _is_earlier(noted: str) -> bool:
    """Whether a claim is that of an earlier attempt of this process's job."""
    found = _HOLDER.match(noted)
    theirs = _ATTEMPT.fullmatch(found[5]) if found and found[5] else None
    mine = _ATTEMPT.fullmatch(os.environ.get(ATTEMPT, ""))
    return bool(theirs and mine and theirs[1] == mine[1] and int(theirs[2]) < int(mine[2]))


class FolderLock:
    """This process's claim on a folder. It ends with `release`, or with the process however that ends."""

    def __init__(self, folder: Path):
        self._path = folder / LOCK_NAME
        self._descriptor: int | None = None
        self._noted = b""  # in the file, by this process
        self._is_over = threading.Event()
        self._guard = threading.Lock()  # around the descriptor

    def acquire(self, stage: str) -> None:
        """Claim the folder, or raise with the host and process that hold it.

        The claim of an earlier attempt of the same job is taken over, whether its process lives or not.
        """
        for _ in range(_TRIES):
            # A symbolic link of this name is not followed, so its target is not emptied.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o644)
            try:
                noted = self._ask(descriptor, stage)
                if noted is None:
                    continue
                if noted:
                    descriptor = self._replace(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._note(descriptor)
            return
        raise self._refused("other processes, one after another", stage)

    def _ask(self, descriptor: int, stage: str) -> str | None:
        """What a holder that is gone has left in the file; None if the file is another one by now. Raises if it lives."""
        is_mine = _lock(descriptor)
        noted = os.pread(descriptor, _MAX_BYTES, 0).decode(errors="replace")
        if not _is_at(descriptor, self._path):
            os.close(descriptor)
            return None
        if _is_earlier(noted):
            return noted
        if is_mine is False or (noted and self._may_live(noted, is_mine is True) and self._beats()):
            raise self._refused(noted.strip().partition("\n")[0] or "another process", stage)
        return noted

    def _refused(self, holder: str, stage: str) -> ShardproofError:
        message = f"{self._path.parent} is in use by {holder}."
        return fail("C006", stage, message, fix="wait for it, stop it, or use another folder")

    def _may_live(self, noted: str, is_locked: bool) -> bool:
        """Whether the process of a claim may be at work although no lock of the kernel says so."""
        found = _HOLDER.match(noted)
        if found is None:
            return False
        kernel, namespace, start = found.groups()[1:4]
        if not kernel or kernel != _kernel():
            return True
        mine = _place_of(os.getpid())
        if is_locked or not mine[1]:
            return False  # on one host the kernel's lock is the proof, or there is no proof at all
        return namespace != mine[1] or [kernel, namespace, start] == _place_of(int(found[1]))

    def _beats(self) -> bool:
        """Whether the holder touches the file, or does something else with it, while it is watched."""
        first = self._look()
        end = time.monotonic() + _WATCH_S
        while time.monotonic() < end:
            time.sleep(min(0.2, _WATCH_S))
            seen = self._look()
            if seen is None or not seen[1]:  # it was given up
                return False
            if seen != first:
                return True
        return False

    def _look(self) -> tuple[int, bytes] | None:
        try:
            with self._path.open("rb") as file:  # opening it asks a server anew
                return os.fstat(file.fileno()).st_mtime_ns, file.read(_MAX_BYTES)
        except OSError:
            return None

    def _replace(self, old: int) -> int:
        """Put another file in the lock's place, which the holder of the old one has no hand on."""
        other = self._path.with_name(f"{LOCK_NAME}-{secrets.token_hex(4)}")
        descriptor = os.open(other, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor)
            os.rename(other, self._path)
        except BaseException:
            os.close(descriptor)
            other.unlink(missing_ok=True)
            raise
        os.close(old)
        return descriptor

    def _note(self, descriptor: int) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on host {socket.gethostname()} since {since}"
        # The second line proves who it was; its last word is unique to this claim.
        proof = " ".join([*_place_of(os.getpid()), secrets.token_hex(4)])
        attempt = os.environ.get(ATTEMPT, "")
        third = f"attempt {attempt}\n" if _ATTEMPT.fullmatch(attempt) else ""
        noted = f"{holder}\n{proof}\n{third}".encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, noted, 0)
            self._noted = noted
        self._descriptor = descriptor
        self._is_over.clear()
        threading.Thread(target=self._beat, name="folder-lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            with self._guard, contextlib.suppress(OSError):
                if self._descriptor is None:
                    return
                os.utime(self._descriptor)

    def is_lost(self) -> bool:
        """Whether the folder that was claimed is gone from its place, or another process has claimed it."""
        try:
            return bool(self._noted) and self._path.read_bytes() != self._noted
        except FileNotFoundError:
            return True
        except OSError:  # a disk that does not answer at the moment
            return False

    def release(self) -> None:
        """Give the folder up; what somebody else has put into it stays."""
        self._is_over.set()
        with self._guard:
            if self._descriptor is None:
                return
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                if os.pread(descriptor, _MAX_BYTES, 0) == self._noted:
                    os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):
                # A child that was forked meanwhile would keep the lock if the file were only closed.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Take the kernel's lock: whether it is this process's now; None where the file system has none.

    The kernel drops it with its last holder, so a killed process leaves no lock behind.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path leads to this open file: another process may have put its own there."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
