"""Hosts made of Linux namespaces: real processes that share neither network, names, memory nor process numbers.

Each host has a network interface on a bridge that only this cluster sees, a hostname, its own /etc/hosts, /tmp, /dev/shm
and /proc, and a disk. Links can be cut, slowed and made lossy; hosts can freeze and die. Needs root, `ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.ranks import RANK_ENV

ROOT = Path(__file__).parents[2]
DISK = "/tmp/disk"  # a host's own disk, under the same name on every host
PORT = 29500  # of the rendezvous: every cluster has a network of its own
_PREFIX = "hosts-"
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
_WITH_ME = ["setpriv", "--pdeathsig", "KILL"]  # the kernel ends it when this process ends, in whatever way
_INIT, _SLOW_LINK = (str(Path(__file__).with_name(name)) for name in ("init.py", "slow_link.py"))
_INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", *RANK_ENV)

open_clusters: list[Cluster] = []


def missing() -> str | None:
    """What this machine lacks for hosts made of namespaces, and how to get it; None if it has everything."""
    lacking = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if sys.platform != "linux":
        return "hosts made of namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts made of namespaces need root: run `sudo make test-hosts`"
    if lacking:
        return f"hosts made of namespaces need {' and '.join(lacking)}: run `apt-get install {' '.join(lacking)}`"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True
    )
    if tried.returncode:
        return "this container may not make namespaces: start it with --privileged, or use a virtual machine"
    return None


class Program:
    """A command on a host."""

    def __init__(self, host: Host, command: Sequence[str], env: Mapping[str, str], log: Path):
        self.host, self.command, self._log = host, tuple(command), log
        with log.open("wb") as out:
            self._entering = subprocess.Popen(
                [*_WITH_ME, *host.enter(), "--", "setsid", *command],
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

    def __init__(self, cluster: Cluster, number: int, name: str, disk_mib: int):
        self.name, self.number = name, number
        self.address = f"10.77.0.{number + 1}"
        self.folder = cluster.folder / f"{number}-{name}"
        self.programs: list[Program] = []
        self._cluster = cluster
        self._slow: subprocess.Popen[bytes] | None = None  # what carries packets, while the link is shaped
        self.folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", "disk", str(self.folder))
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
        names = cluster.write_hosts_file(self)
        paths = (str(names), str(cluster.folder), str(self.folder), str(cluster.shared or ""))
        self._unshare = _start_up("unshare", *kinds, sys.executable, "-S", "-I", _INIT, name, *paths)
        self.init = psutil.Process(self._unshare.pid).children()[0].pid
        cluster.connect(self)

    def enter(self) -> list[str]:
        """The command that enters this host."""
        return ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", f"--wd={self.folder}"]

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> Program:
        """Start a command, as somebody who is logged in there would."""
        log = self._cluster.folder / f"{self.number}-{len(self.programs)}.log"
        program = Program(self, command, {**self._environment(), **(env or {})}, log)
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
        self._cluster.in_switch("ip", "link", "set", end, *where)

    def shape(self, delay_ms: float = 0, loss_percent: float = 0) -> None:
        """Hold every packet from and to this host for a while, and lose some; without arguments, no longer."""
        port, near, far = (f"{end}{self.number}" for end in ("port", "near", "far"))
        if self._slow is not None:
            _end(self._slow)
            self._cluster.in_switch("ip", "link", "del", near)
            self._slow = None
        if not delay_ms and not loss_percent:
            self.mend()
            return
        self.cut()
        self._cluster.in_switch("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        for end in (near, far):
            self._cluster.in_switch("ip", "link", "set", end, "up")
        for host in self._cluster.hosts:  # packets as they are on a wire, not 64 KiB in one
            _run("nsenter", "-t", str(host.init), "-n", "ip", "link", "set", "eth0", "gso_max_segs", "1")
        self._slow = self._cluster.start_in_switch(
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
        while moving := [each for each in self.processes() if each.status() != psutil.STATUS_STOPPED]:
            for process in moving:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)
            time.sleep(0.01)

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
            _empty(folder)
        for path in self.seen("/tmp").iterdir():  # the rest of it are mounts
            if not os.path.ismount(path) and path.name != self._cluster.folder.name:
                _delete(path)

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def close(self) -> None:
        for program in self.programs:
            program.close()
        for process in (self._slow, self._unshare):
            if process is not None:
                _end(process)


class Cluster:
    """Several hosts on one network, inside a `with` block; afterwards nothing of them is left."""

    def __init__(
        self,
        num_hosts: int,
        hostnames: Sequence[str] | None = None,
        shared: bool = True,
        disk_mib: int | Sequence[int] = 512,
        loopback_names: bool = True,
    ):
        """`loopback_names`: a host's own name means 127.0.1.1 to itself, as on every Debian and Ubuntu."""
        self._names = list(hostnames or "abcdefgh"[:num_hosts])
        self._disks = [disk_mib] * num_hosts if isinstance(disk_mib, int) else list(disk_mib)
        self._shares, self._loopback_names = shared, loopback_names
        self.hosts: list[Host] = []
        self.secret = secrets.token_hex(16)

    def __enter__(self) -> Cluster:
        assert (reason := missing()) is None, reason
        _sweep()
        self._stack = contextlib.ExitStack()
        with self._stack:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
            self._stack.callback(_remove, self.folder)
            self.shared = self.folder / "shared" if self._shares else None
            if self.shared is not None:
                self.shared.mkdir()
            holder = subprocess.Popen([*_WITH_ME, "unshare", "--net", "cat"], stdin=subprocess.PIPE)
            self._stack.callback(_end, holder)
            self._switch = ["nsenter", "-t", str(holder.pid), "-n"]
            _wait_for_namespace(holder.pid)
            self.in_switch("ip", "link", "add", "switch", "type", "bridge")
            self.in_switch("ip", "link", "set", "switch", "up")
            for number, (name, disk_mib) in enumerate(zip(self._names, self._disks)):
                host = Host(self, number, name, disk_mib)
                self._stack.callback(host.close)
                self.hosts.append(host)
            self._stack = self._stack.pop_all()
        open_clusters.append(self)
        self._stack.callback(open_clusters.remove, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def in_switch(self, *command: str) -> None:
        """Run a command where the cables end."""
        _run(*self._switch, *command)

    def start_in_switch(self, *command: str) -> subprocess.Popen[bytes]:
        """A program that runs where the cables end, once it has said that it is up."""
        return _start_up(*self._switch, *command)

    def connect(self, host: Host) -> None:
        """Lay a cable from a host to the switch."""
        port, address = f"port{host.number}", f"{host.address}/24"
        self.in_switch(
            "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.init)
        )
        self.in_switch("ip", "link", "set", port, "master", "switch", "up")
        inside = ["nsenter", "-t", str(host.init), "-n", "ip"]
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "addr", "add", address, "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")

    def write_hosts_file(self, host: Host) -> Path:
        """What /etc/hosts says on a host. A name that several hosts have means the host itself."""
        lines = ["127.0.0.1 localhost"]
        own = "127.0.1.1" if self._loopback_names else host.address
        lines.append(f"{own} {host.name}")
        for number, name in enumerate(self._names):
            if name != host.name:
                lines.append(f"10.77.0.{number + 1} {name}")
        path = self.folder / f"{host.number}.hosts"
        path.write_text("\n".join(lines) + "\n")
        return path

    @property
    def endpoint(self) -> str:
        """What --rdzv-endpoint gets: the first host by its name, or by its address where its name is not its own."""
        first = self.hosts[0]
        return f"{first.name if self._names.count(first.name) == 1 else first.address}:{PORT}"

    def train(
        self,
        recipe: str | Path,
        *words: str,
        ranks: int | Sequence[int] = 1,
        hosts: Sequence[Host] | None = None,
        nnodes: int | str | None = None,
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
    ) -> list[Program]:
        """Start the documented `shardproof train` command on each host."""
        chosen = self.hosts if hosts is None else list(hosts)
        counts = [ranks] * len(chosen) if isinstance(ranks, int) else ranks
        start = ["--nnodes", str(nnodes or len(chosen)), "--rdzv-endpoint", self.endpoint]
        if max_restarts:
            start += ["--max-restarts", str(max_restarts)]
        secret = {"SHARDPROOF_RDZV_ID": self.secret, **(env or {})}
        return [
            host.start("shardproof", "train", str(recipe), *words, f"train.ranks={count}", *start, env=secret)
            for host, count in zip(chosen, counts)
        ]

    def reset(self) -> None:
        """End what runs, mend what was cut, and empty every folder."""
        for host in self.hosts:
            host.reset()
        if self.shared is not None:
            _empty(self.shared)

    def transcript(self) -> str:
        """What every program printed, each line with its host's name in front."""
        return "\n".join(_transcript(self.hosts))


def tiny_run(folder: Path, *, steps: int = 2, deadline_s: float = 60) -> Path:
    """The recipe of a run that takes seconds, in `folder` with its own copy of the model and the data."""
    tiny = ROOT / "recipes" / "tiny"
    shutil.copytree(tiny / "model", folder / "model")
    for name in ("train.jsonl", "evaluation.jsonl"):
        shutil.copy(tiny / name, folder / name)
    recipe = folder / "tiny.toml"
    recipe.write_text(
        f"""[model]
path = "{folder}/model"
compute_dtype = "float32"
[data]
train = "{folder}/train.jsonl"
[reward]
functions = [{{ name = "exact_match" }}]
[rollout]
group_size = 4
max_new_tokens = 4
[algorithm]
name = "grpo"
[optimizer]
lr = 1e-3
[train]
steps = {steps}
prompts_per_step = 6
micro_batch_tokens = 16384
ranks = 1
deadline_s = {deadline_s}
[output]
folder = "{folder}/run"
trackers = []
save_every = 1
"""
    )
    return recipe


def _transcript(hosts: Sequence[Host]) -> Iterator[str]:
    for host in hosts:
        for program in host.programs:
            yield f"{host.name} $ {' '.join(program.command)}"
            yield from (f"{host.name} | {line}" for line in program.output().splitlines())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _start_up(*command: str) -> subprocess.Popen[bytes]:
    """A process that ends with this one, once it has said that it is up."""
    process = subprocess.Popen([*_WITH_ME, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n", f"{command} did not start"
    return process


def _wait_for_namespace(pid: int) -> None:
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.005)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _remove(folder: Path) -> None:
    for disk in folder.iterdir():
        if os.path.ismount(disk):
            _run("umount", "-l", str(disk))
    shutil.rmtree(folder)


def _sweep() -> None:
    """Remove what a test that was killed could not: everything but its files ended with it."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*-*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            with contextlib.suppress(OSError, AssertionError):  # another test sweeps as well
                _remove(folder)


if __name__ == "__main__":  # for the Makefile: says what is missing
    if (reason := missing()) is not None:
        raise SystemExit(reason)
