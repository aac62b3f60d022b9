"""One host made of namespaces, and the programs that run on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.hosts.preloaded import RANK, ROOT, Entered, Preloaded
from tests.hosts.system import WITH_ME, delete, empty, kill, run, start_up
from tests.ranks import RANK_ENV

# What programs on a host are made of: this source tree, its environment and the Python of that.
_KEPT = list(dict.fromkeys(map(str, (ROOT, sys.prefix, sys.base_prefix))))
_INIT, _SLOW_LINK = (str(Path(__file__).with_name(name)) for name in ("init.py", "slow_link.py"))
_INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", *RANK_ENV)
_preloaded = Preloaded()


class Switch:
    """Where the hosts' cables end: a bridge in a network namespace that nobody else sees."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._holder = start_up("unshare", "--net", "sh", "-c", "echo up; exec cat")
        self._enter = ["nsenter", "-t", str(self._holder.pid), "-n"]
        self.run("ip", "link", "add", "switch", "type", "bridge")
        self.run("ip", "link", "set", "switch", "up")

    def run(self, *command: str) -> None:
        """Run a command where the cables end."""
        run(*self._enter, *command)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """A program that runs where the cables end, once it has said that it is up."""
        return start_up(*self._enter, *command)

    def connect(self, host: Host) -> None:
        """Lay a cable to a host."""
        port = f"port{host.number}"
        self.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.init))
        self.run("ip", "link", "set", port, "master", "switch", "up")
        host.run_ip("link", "set", "lo", "up")
        host.run_ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run_ip("link", "set", "eth0", "up")
        self.hosts.append(host)

    def close(self) -> None:
        kill(self._holder)


@dataclass(frozen=True)
class Place:
    """What the hosts of a cluster have in common."""

    folder: Path
    shared: Path | None
    switch: Switch


def address_of(number: int) -> str:
    return f"10.77.0.{number + 1}"


class Program:
    """A command on a host."""

    def __init__(self, host: Host, command: Sequence[str], env: Mapping[str, str], log: Path, real: bool):
        self.host, self.command, self._log = host, tuple(command), log
        log.write_bytes(b"")  # a host that was emptied begins to count again
        self._entering: subprocess.Popen[bytes] | Entered
        if command[0] == "shardproof" and not real:
            self._entering = _preloaded.start(host.init, command, env, host.folder, log)
            return
        with log.open("wb") as out:
            self._entering = subprocess.Popen(
                [*WITH_ME, *host.enter(), "--", "setsid", *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._entering.poll() is None

    def wait(self, timeout: float = 120) -> int:
        """The exit code, as Python gives it: -9 for one that SIGKILL ended. Raises when the time is over."""
        return self._entering.wait(timeout)

    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 120) -> str:
        """Its output, once it has printed the text."""
        end = time.monotonic() + timeout
        while text not in (found := self.output()):
            assert self.is_running, f"{self} ended without {text!r}:\n{found}"
            assert time.monotonic() < end, f"{self} did not print {text!r} in {timeout:.0f} s:\n{found}"
            time.sleep(0.05)
        return found

    def send(self, number: int) -> None:
        """Signal the program itself: what a scheduler, or a person at its terminal, would do."""
        if (process := self.process) is not None:
            process.send_signal(number)

    @property
    def process(self) -> psutil.Process | None:
        """The program as the machine sees it; None once it has ended."""
        while self.is_running:
            with contextlib.suppress(psutil.NoSuchProcess):
                if found := psutil.Process(self._entering.pid).children():
                    return found[0]
            time.sleep(0.005)  # it is still on its way in
        return None

    def ranks(self) -> list[psutil.Process]:
        """The ranks that it started, in the order in which it did."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := self.process) is not None:
                return sorted(filter(_is_rank, process.children()), key=lambda each: each.pid)
        return []

    def tree(self) -> list[psutil.Process]:
        """The program and all that it started, and the process that holds the way in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            entering = psutil.Process(self._entering.pid)
            return [entering, *entering.children(recursive=True)]
        return []

    def close(self) -> None:
        if self.is_running:
            self._entering.kill()
        self._entering.wait()

    def __str__(self) -> str:
        return f"{' '.join(self.command)} on host {self.host.name}"


class Host:
    """One host. `folder` is its disk, which it sees under that path and as /tmp/disk."""

    def __init__(self, place: Place, number: int, name: str, names: Path, disk_mib: int):
        self.name, self.number = name, number
        self.address = address_of(number)
        self.folder = place.folder / f"{number}-{name}"
        self.programs: list[Program] = []
        self._place = place
        self._slow: subprocess.Popen[bytes] | None = None  # what carries packets, while the link is shaped
        self.folder.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", "disk", str(self.folder))
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
        paths = (str(names), str(place.folder), str(self.folder), str(place.shared or ""))
        self._unshare = start_up("unshare", *kinds, sys.executable, "-S", "-I", _INIT, name, *paths, *_KEPT)
        self.init = psutil.Process(self._unshare.pid).children()[0].pid
        self._mounts = {path.name for path in self.seen("/tmp").iterdir()}  # and what they are in
        place.switch.connect(self)

    def enter(self) -> list[str]:
        """The command that enters this host."""
        return ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", f"--wd={self.folder}"]

    def run_ip(self, *words: str) -> None:
        """Run `ip` there."""
        run("nsenter", "-t", str(self.init), "-n", "ip", *words)

    def start(self, *command: str, env: Mapping[str, str] | None = None, real: bool = False) -> Program:
        """Start a command, as somebody who is logged in there would.

        `shardproof` starts from a process that has imported torch already, unless it is to be the `real` thing.
        """
        log = self._place.folder / f"{self.number}-{len(self.programs)}.log"
        program = Program(self, command, {**self._environment(), **(env or {})}, log, real)
        self.programs.append(program)
        return program

    def _environment(self) -> dict[str, str]:
        found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        path = f"{ROOT / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**RANK_ENV, **found, "PATH": path, "HOME": str(self.folder), "PYTHONUNBUFFERED": "1"}

    def seen(self, path: str | Path) -> Path:
        """What this host has under a path, such as /tmp/disk/run, as a path of this machine."""
        return Path(f"/proc/{self.init}/root", str(path).lstrip("/"))

    def cut(self) -> None:
        """Pull the cable: packets are lost, and nobody is told."""
        self._plug("nomaster")

    def mend(self) -> None:
        """Plug it in again."""
        self._plug("master", "switch")

    def _plug(self, *where: str) -> None:
        end = f"{'port' if self._slow is None else 'far'}{self.number}"
        self._place.switch.run("ip", "link", "set", end, *where)

    def shape(self, delay_ms: float = 0, loss_percent: float = 0) -> None:
        """Hold every packet from and to this host for a while, and lose some; without arguments, no longer."""
        port, near, far = (f"{end}{self.number}" for end in ("port", "near", "far"))
        if self._slow is not None:
            kill(self._slow)
            self._place.switch.run("ip", "link", "del", near)
            self._slow = None
        if not delay_ms and not loss_percent:
            self.mend()
            return
        self.cut()
        self._place.switch.run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        for end in (near, far):
            self._place.switch.run("ip", "link", "set", end, "up")
        for host in self._place.switch.hosts:  # packets as they are on a wire, not 64 KiB in one
            host.run_ip("link", "set", "eth0", "gso_max_segs", "1")
        self._slow = self._place.switch.start(
            sys.executable, "-S", "-I", _SLOW_LINK, port, near, str(delay_ms), str(loss_percent)
        )
        self.mend()

    def processes(self) -> list[psutil.Process]:
        """All that runs there, other than the host itself."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(self.init).children(recursive=True)  # what outlived its parent
        for program in self.programs:
            found += program.tree()[1:]
        return [each for each in found if _is_alive(each)]

    def freeze(self) -> None:
        """Stop everything that runs there; its kernel still answers the network."""
        stopped: set[psutil.Process] = set()
        while moving := set(self.processes()) - stopped:  # more may have been started meanwhile
            for process in moving:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)
            stopped |= moving

    def thaw(self) -> None:
        """Let everything go on."""
        # The process that holds a program's way in stopped together with the program.
        entering = [process for program in self.programs for process in program.tree()[:1]]
        for process in [*entering, *self.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def die(self) -> None:
        """Lose its power: everything ends at once, and not even its kernel says good-bye. `mend` brings it back."""
        self.cut()
        while alive := self.processes():
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)

    def reset(self) -> None:
        """End what runs there, mend its link, and empty its folders."""
        self.die()
        self.shape()
        for program in self.programs:
            program.close()
        self.programs.clear()
        for folder in (self.folder, self.seen("/dev/shm")):
            empty(folder)
        for path in self.seen("/tmp").iterdir():
            if path.name not in self._mounts:
                delete(path)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def close(self) -> None:
        for program in self.programs:
            program.close()
        for process in (self._slow, self._unshare):
            if process is not None:
                kill(process)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _is_rank(process: psutil.Process) -> bool:
    return process.name() == RANK or "--multiprocessing-fork" in process.cmdline()
