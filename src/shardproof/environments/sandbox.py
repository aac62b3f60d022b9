"""Python code run in a process of its own that can compute, and not much else. See docs/security.md for what it may do.

The limits are the kernel's and need no privileges: resource limits, no_new_privs, a seccomp filter and Landlock. Whether
they hold is tried out before the first call, and code never runs without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import marshal
import math
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.environments import sandbox_folders, sandbox_rules
from shardproof.environments.sandbox_child import BEGUN, FAILED
from shardproof.errors import ShardproofError, fail

_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_MIB = 2**20
_MOST_CODE, _MOST_OUTPUT = _MIB, 16 * _MIB  # bytes; code that prints more is stopped
_OPEN_FILES, _FILES_IN_ALL = 64, 4  # the latter: times the largest file
_LOOK_S = 0.2  # how often the folder is looked at
_LAST_WORDS_S = 5.0  # to read what code has printed that ended in time
_START_S = 60.0  # for the trial at the start
_AT_ONCE = max(4, os.cpu_count() or 1)  # processes per worker: each may take all of its memory
_LANDLOCK_VERSION = 1  # flag
_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
_NETWORK_FILES = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/ssl",
    "/etc/pki",
    "/run/systemd/resolve",
)


@dataclass(frozen=True)
class Limits:
    """Limits of one run of code."""

    timeout_s: float = 5.0
    memory_mb: int = 512
    files_mb: int = 16
    network: bool = False
    output_chars: int = 10_000


@dataclass(frozen=True)
class Script:
    """Code that is run as a script, not as a notebook's cell: its output is what it prints, without errors and values."""

    stdin: bytes = b""
    module: str = "__main__"  # its `__name__`
    before: str = ""  # code that runs in the same module first
    behind: str = ""  # and once the script has ended by itself


@dataclass(frozen=True)
class Ran:
    """What came of a run: its output, and how it ended if it did not end by itself."""

    output: bytes  # at most the first and the last part of it
    left_out: int  # bytes between these parts
    head: int  # bytes of the first part
    ended: str | None = None
    status: int | None = None  # the exit status of code that ended by itself


class Sandbox:
    """Runs code under limits, many at once: by default as many as there are cores, at least four."""

    def __init__(self, limits: Limits, key: str = "environment.tools.python", at_once: int | None = None):
        self.limits, self._key, self._at_once = limits, key, at_once or _AT_ONCE
        self._machine = platform.machine()
        if sys.platform != "linux" or self._machine not in sandbox_rules.MACHINES:
            kinds = " or ".join(sandbox_rules.MACHINES)
            raise self._unavailable(
                f"it needs Linux on {kinds}, and this is {sys.platform} on {self._machine}"
            )
        self._ruleset, self._handled = sandbox_rules.landlock_ruleset(
            self._landlock_interface(), limits.network
        )
        self._filter = sandbox_rules.system_call_filter(self._machine, limits.network)
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = weakref.WeakKeyDictionary()

    def check(self) -> None:
        """Try the limits out; C001 that names the first that does not hold on this machine."""
        with tempfile.TemporaryDirectory(dir=sandbox_folders.base()) as place:
            folder, outside = Path(place, "inside"), Path(place, "outside")
            folder.mkdir()
            outside.write_text("outside")
            code = _TRIAL.format(outside=str(outside), limits=self.limits)
            done = subprocess.run(
                **self._process(str(folder)),
                input=self._given(code, str(folder)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_START_S,
            )
        said = done.stdout.removeprefix(BEGUN).decode(errors="replace").strip()
        if done.returncode == FAILED:
            raise self._unavailable(said)
        if "MemoryError" in said or done.returncode in (-signal.SIGSEGV, -signal.SIGABRT):
            message = f"{self._key}.memory_mb={self.limits.memory_mb} is too little for Python itself."
            raise fail("C001", "tools", message, fix="raise it: the default is 512")
        if done.returncode or said != "held":
            raise self._unavailable(
                f"{said[-500:] or 'its trial said nothing'} (exit status {done.returncode})"
            )

    async def run(self, code: str, script: Script | None = None) -> Ran:
        """Run the code in a new process with a new folder, and wait for its end."""
        if len(code) > _MOST_CODE:
            return Ran(b"", 0, 0, f"not run: the code is longer than {_MOST_CODE} characters")
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))
        async with slots:
            folder = tempfile.mkdtemp(dir=sandbox_folders.base())
            try:
                return await self._run_in(folder, self._given(code, folder, script))
            finally:
                # Not awaited: who is cancelled must not wait, and there may be much to remove.
                asyncio.get_running_loop().run_in_executor(None, sandbox_folders.remove, folder)

    async def _run_in(self, folder: str, given: bytes) -> Ran:
        arguments = self._process(folder)
        process = await asyncio.create_subprocess_exec(
            *arguments.pop("args"),
            **arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = _Output(self.limits.output_chars * 4)  # bytes of a character, at most
        try:
            ended = await self._watched(process, output, given, folder)
        finally:
            await _end(process)
        if ended is None and not output.has_begun:  # no exit status tells: the code may choose any
            raise OSError(
                f"the interpreter's limits could not be set: {bytes(output.head).decode(errors='replace')} "
                f"(exit status {process.returncode})"
            )
        if ended is None and process.returncode is not None and process.returncode < 0:
            ended = _signalled(-process.returncode, self.limits)
        return output.ran(ended, process.returncode if ended is None else None)

    async def _watched(
        self, process: asyncio.subprocess.Process, output: _Output, given: bytes, folder: str
    ) -> str | None:
        """Feed the process and read its output until it ends or breaks a limit; returns which."""
        watch = asyncio.ensure_future(self._too_many_files(folder))
        talk = asyncio.ensure_future(_talk(process, output, given))
        tasks = [watch, talk]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and _has_ended(process.pid):  # in time, while something else kept this loop
                done, _ = await asyncio.wait([talk], timeout=_LAST_WORDS_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if talk in done:
            return talk.result()
        if watch in done:
            return "stopped: it wrote too many files"
        return f"stopped: it took longer than {self.limits.timeout_s:g} s"

    async def _too_many_files(self, folder: str) -> None:
        """Return once the folder holds too much. A limit of the kernel's is on each file, not on all of them."""
        most = _FILES_IN_ALL * self.limits.files_mb * _MIB
        while True:
            await asyncio.sleep(_LOOK_S)
            if await asyncio.to_thread(sandbox_folders.holds_more, folder, most):
                return

    def _process(self, folder: str) -> dict[str, Any]:
        # No variables of the run's: keys and tokens are in them. Threads of numerical libraries would take memory.
        variables = {
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
            **{name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
        }
        return {
            "args": [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_SCRIPT)],
            "env": variables,
            "cwd": folder,
            "start_new_session": True,
        }

    def _given(self, code: str, folder: str, script: Script | None = None) -> bytes:
        limits = self.limits
        seconds, memory = math.ceil(limits.timeout_s), limits.memory_mb * _MIB
        readable = _readable(limits.network)
        return marshal.dumps(
            {
                "parent": os.getpid(),
                "machine": self._machine,
                "limits": {
                    "RLIMIT_CPU": seconds + 1,  # one thread reaches the limit of time first
                    "RLIMIT_AS": memory,
                    "RLIMIT_FSIZE": limits.files_mb * _MIB,
                    "RLIMIT_NOFILE": _OPEN_FILES,
                    "RLIMIT_CORE": 0,
                    "RLIMIT_MEMLOCK": 0,
                },
                "ruleset": self._ruleset,
                "rights": sandbox_rules.landlock_rights(self._handled, readable, folder, limits.files_mb > 0),
                "filter": self._filter,
                "own": sandbox_rules.OWN_PROCESS.to_bytes(4, "little"),
                "path": _packages(),
                "code": code,
                "script": None
                if script is None
                else (script.stdin, script.module, script.before, script.behind),
            }
        )

    def _landlock_interface(self) -> int:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        interface = libc.syscall(444, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
        if interface < 1:
            reason = os.strerror(ctypes.get_errno())
            raise self._unavailable(
                f"files cannot be kept from it, because this kernel has no Landlock ({reason})"
            )
        return interface

    def _unavailable(self, why: str) -> ShardproofError:
        return fail(
            "C001",
            "tools",
            f"{self._key} cannot be limited on this machine: {why}.",
            fix="run on Linux 5.13 or newer with Landlock and seccomp enabled, also inside of containers; or leave "
            f"{self._key} out",
        )


def _has_ended(process: int) -> bool:
    """Whether a child has ended, though the loop may not know of it yet."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody has been told so
        return True


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process and wait until it is gone. It cannot have started another, so that this ends all of it."""
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    while await process.stdout.read(2**16):  # asyncio reports its end after that of its output
        pass
    await process.wait()


def _signalled(number: int, limits: Limits) -> str:
    if number == signal.SIGXCPU:
        return f"stopped: it took more than {limits.timeout_s:g} s of processor time"
    return f"ended by signal {number}"


class _Output:
    """The beginning and the end of what code prints, however long it is."""

    def __init__(self, most: int):
        self.has_begun = False  # the code runs, and within its limits
        self._part = max(1, most // 2)
        self.head, self._tail, self._total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> bool:
        """Take the next piece; returns whether there may be more."""
        if not self._total and not self.has_begun and data.startswith(BEGUN):
            self.has_begun, data = True, data[len(BEGUN) :]
        self._total += len(data)
        room = self._part - len(self.head)
        self.head += data[:room]
        self._tail += data[room:]
        del self._tail[: -self._part]
        return self._total <= _MOST_OUTPUT

    def ran(self, ended: str | None, status: int | None) -> Ran:
        left_out = self._total - len(self.head) - len(self._tail)
        return Ran(bytes(self.head + self._tail), left_out, len(self.head), ended, status)


async def _talk(process: asyncio.subprocess.Process, output: _Output, given: bytes) -> str | None:
    """Send the process its code and read what it prints until it ends; returns why if it must be ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):  # it is gone
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
    while data := await process.stdout.read(2**16):
        if not output.add(data):
            return f"stopped: it printed more than {_MOST_OUTPUT // _MIB} MiB"
    await process.wait()
    return None


@functools.cache
def _packages() -> list[str]:
    """Where this interpreter's installed packages are; code may import them."""
    names = ("site-packages", "dist-packages")
    return [each for each in sys.path if isinstance(each, str) and os.path.basename(each) in names]


@functools.cache
def _readable(network: bool) -> list[str]:
    """What the interpreter needs to read: its own library, installed packages, shared libraries."""
    found = [sys.base_prefix, sys.base_exec_prefix, *_packages(), *_LIBRARIES]
    found += _NETWORK_FILES if network else ()
    # Data and answers lie where the run was started, and images often do that in /usr/src.
    here = os.path.realpath(os.getcwd())
    needed = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    if not any(_lies_in(path, here) for path in needed):
        found = [each for path in found for each in _without(here, path)]
    return list(dict.fromkeys(found))


def _without(folder: str, path: str) -> list[str]:
    """The path; or, if the folder lies below it, all that lies beside the folder."""
    if os.path.realpath(path) == folder or not _lies_in(folder, path):
        return [path]
    beside = [os.path.join(path, name) for name in os.listdir(path)]
    return [each for one in beside if os.path.realpath(one) != folder for each in _without(folder, one)]


def _lies_in(path: str, folder: str) -> bool:
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([path, folder]) == folder


# Tries each limit from inside, and says which does not hold.
_TRIAL = """
import os, _socket

def refused(what, action, *errors):
    try:
        action()
    except (PermissionError, *errors):
        return
    raise SystemExit(f"{{what}} is not limited")

refused("reading files outside", lambda: open({outside!r}))
refused("writing files outside", lambda: open({outside!r} + "2", "w"))
refused("starting processes", os.fork)
refused("running programs", lambda: os.execv("/bin/true", ["true"]), FileNotFoundError)
refused("signalling other processes", lambda: os.kill(os.getppid(), 0))
refused("memory", lambda: bytearray({limits.memory_mb} * 2**20), MemoryError)
if not {limits.network}:
    refused("the network", lambda: _socket.socket(_socket.AF_INET))
print("held")
"""
