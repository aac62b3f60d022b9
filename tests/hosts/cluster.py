"""Hosts made of Linux namespaces: real processes that share neither network, names, memory nor process numbers.

Each host has a network interface on a bridge that only this cluster sees, a hostname, its own /etc/hosts, /tmp, /dev/shm
and /proc, and a disk. Links can be cut, slowed and made lossy; hosts can freeze and die. Needs root, `ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.hosts.host import Host, Place, Program, Switch, address_of
from tests.hosts.preloaded import ROOT
from tests.hosts.system import empty, missing, run

__all__ = ["DISK", "PORT", "Cluster", "Host", "Program", "open_clusters", "tiny_run"]

DISK = "/tmp/disk"  # a host's own disk, under the same name on every host
PORT = 29500  # of the rendezvous: every cluster has a network of its own
_PREFIX = "hosts-"

open_clusters: list[Cluster] = []


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
            switch = Switch()
            self._stack.callback(switch.close)
            place = Place(self.folder, self.shared, switch)
            for number, (name, disk_mib) in enumerate(zip(self._names, self._disks)):
                host = Host(place, number, name, self._write_hosts_file(number), disk_mib)
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

    def _write_hosts_file(self, number: int) -> Path:
        """What /etc/hosts says on a host. A name that several hosts have means the host itself."""
        own = "127.0.1.1" if self._loopback_names else address_of(number)
        lines = ["127.0.0.1 localhost", f"{own} {self._names[number]}"]
        for other, name in enumerate(self._names):
            if name != self._names[number]:
                lines.append(f"{address_of(other)} {name}")
        path = self.folder / f"{number}.hosts"
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
        endpoint: str | None = None,
        env: Mapping[str, str] | None = None,
        real: bool = False,
    ) -> list[Program]:
        """Start the documented `shardproof train` command on each host."""
        chosen = self.hosts if hosts is None else list(hosts)
        counts = [ranks] * len(chosen) if isinstance(ranks, int) else ranks
        start = ["--nnodes", str(nnodes or len(chosen)), "--rdzv-endpoint", endpoint or self.endpoint]
        if max_restarts:
            start += ["--max-restarts", str(max_restarts)]
        command = ("shardproof", "train")
        secret = {"SHARDPROOF_RDZV_ID": self.secret, **(env or {})}
        return [
            host.start(*command, str(recipe), *words, f"train.ranks={count}", *start, env=secret, real=real)
            for host, count in zip(chosen, counts)
        ]

    def reset(self) -> None:
        """End what runs, mend what was cut, and empty every folder."""
        for host in self.hosts:
            host.reset()
        if self.shared is not None:
            empty(self.shared)

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


def _remove(folder: Path) -> None:
    for disk in folder.iterdir():
        if os.path.ismount(disk):
            run("umount", "-l", str(disk))
    shutil.rmtree(folder)


def _sweep() -> None:
    """Remove what a test that was killed could not: everything but its files ended with it."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*-*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            with contextlib.suppress(OSError, AssertionError):  # another test sweeps as well
                _remove(folder)
