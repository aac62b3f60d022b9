"""Starts `shardproof` on a host without the seconds that every process spends on importing torch.

One process has imported everything and forks itself into a host's namespaces, where the copy runs the command's own script.
So that ranks need not import anything either, the copy leaves a second copy behind, which it forks into each rank that
torch would start as a new interpreter. Everything else is as in a real start: processes, their parents, pipes, signals.
Variables that libraries read as they are imported come too late: for those, start the program with `real=True`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANK = "a-rank"  # the name of a rank's process
_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
    "shardproof.cli",
    "shardproof.cli.ranks",
    "shardproof.config.load",
    "shardproof.dist.agent",
    "shardproof.rl.loop",
)
_NAMESPACES = ("uts", "ipc", "net", "pid", "mnt")
_SPAWNED = re.compile(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)")
_LARGEST = 1 << 20
_PDEATHSIG, _SET_NAME, _SUBREAPER = 1, 15, 36  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


class Entered:
    """A process on a host, with the interface of `subprocess.Popen`; `pid` is that of its parent on this machine."""

    def __init__(self, link: socket.socket):
        self._link, self._code = link, None
        self.pid = self._read()["pid"]

    def _read(self) -> dict[str, int]:
        return json.loads(self._link.recv(_LARGEST) or '{"code": -9}')

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("shardproof", timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None:
            self._link.settimeout(timeout)
            try:
                self._code = self._read()["code"]
            except (TimeoutError, BlockingIOError):
                return None
            self._link.close()
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Preloaded:
    """The process that has imported everything, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, init: int, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path
    ) -> Entered:
        """Run a Python script of the environment's on the host whose first process is `init`."""
        if self._process is None:
            from tests.ranks import RANK_ENV

            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", __name__, str(theirs.fileno())],
                    cwd=ROOT,
                    env={**os.environ, **RANK_ENV},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            atexit.register(self._end)
        told = {"init": init, "command": [*command], "env": dict(env), "folder": str(folder), "log": str(log)}
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._link, [json.dumps(told).encode()], [theirs.fileno()])
        return Entered(mine)

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Fork for every request, until nobody can ask any more."""
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in _MODULES:
        importlib.import_module(name)
    # What the imports left is never garbage; without this every collection below would walk all of it.
    gc.collect()
    gc.freeze()
    while True:
        told, files, _, _ = socket.recv_fds(link, _LARGEST, 1)
        if not told:
            return
        if os.fork() == 0:
            link.close()
            enter(json.loads(told), socket.socket(fileno=files[0]))
        os.close(files[0])
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def enter(told: dict[str, Any], link: socket.socket) -> None:
    """Run a command inside a host's namespaces; the process that stays outside tells how it ended."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY)
    link.send(json.dumps({"pid": os.getpid()}).encode())
    for kind in [os.open(f"/proc/{told['init']}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]:
        if _libc.setns(kind, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(kind)
    pid = os.fork()  # a process that is in the other PID namespace from its beginning
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        link.send(json.dumps({"code": code}).encode())
        os._exit(0)
    link.close()
    os.setsid()
    _libc.prctl(_PDEATHSIG, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(told["folder"])
    _become(told["env"], told["command"])
    _fork_ranks()
    script = shutil.which(told["command"][0])
    assert script is not None
    sys.path[0] = os.path.dirname(script)
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
    sys.exit()


def _become(env: Mapping[str, str], command: Sequence[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = command


def _fork_ranks() -> None:
    """Have a copy of this process, as it is now, forked into each rank that this process starts from now on."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    if os.fork() == 0:
        mine.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        _serve_ranks(theirs, agent)
    theirs.close()
    spawn = multiprocessing.util.spawnv_passfds

    def start(path: bytes, args: Sequence[str], files: Sequence[int]) -> int:
        if _SPAWNED.search(" ".join(map(os.fsdecode, args))) is None:
            return spawn(path, args, files)
        told = {"args": [*map(os.fsdecode, args)], "env": dict(os.environ), "files": [*files]}
        # The rank's parent is this process, once the one between them has ended.
        _libc.prctl(_SUBREAPER, 1)
        socket.send_fds(mine, [json.dumps(told).encode()], list(files))
        pid = json.loads(mine.recv(_LARGEST))["pid"]
        _libc.prctl(_SUBREAPER, 0)
        return pid

    multiprocessing.util.spawnv_passfds = start


def _serve_ranks(link: socket.socket, agent: int) -> None:
    """Fork a rank for every request, by way of a process that ends at once. Returns never, in a rank when it ends."""
    while True:
        told, files, _, _ = socket.recv_fds(link, _LARGEST, 64)
        if not told:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != agent:
                time.sleep(0.001)
            link.send(json.dumps({"pid": os.getpid()}).encode())
            link.close()
            _run_rank(json.loads(told), files)
        os.waitpid(pid, 0)
        for file in files:
            os.close(file)


def _run_rank(told: dict[str, Any], files: Sequence[int]) -> None:
    """Be the interpreter that multiprocessing would have started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _libc.prctl(_PDEATHSIG, 0)
    _libc.prctl(_SET_NAME, RANK.encode())
    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(out_of_the_way, told["files"]):
        os.dup2(file, number)
        os.close(file)
    _become(told["env"], ["-c", *told["args"][told["args"].index("--multiprocessing-fork") :]])
    tracker, pipe = map(int, _SPAWNED.search(" ".join(told["args"])).groups())
    from multiprocessing.spawn import spawn_main

    spawn_main(pipe_handle=pipe, tracker_fd=tracker)


if __name__ == "__main__":
    main()
