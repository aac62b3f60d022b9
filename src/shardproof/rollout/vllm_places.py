"""Where the vLLM servers of a run are or will be, and which settings of them cannot work. Only rank 0 starts them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shardproof.config.vllm import VllmSettings
from shardproof.errors import fail

_LAST_PORT = 65535


@dataclass(frozen=True)
class Place:
    """Where one server of a run is. `url` is None for one that the run starts."""

    name: str  # "0", "1", ...: how messages and metrics call the replica
    url: str | None = None
    port: int = 0  # of a started server that listens on TCP
    devices: str = ""  # GPUs or CPU cores of a started server; empty: what the run sees
    log: str | None = None


@dataclass(frozen=True)
class Gpus:
    """The GPUs that rank 0's process sees, by the names that CUDA_VISIBLE_DEVICES takes, and how many ranks train on them."""

    names: Sequence[str] = ()
    num_trainer: int = 0


def places(settings: VllmSettings, device: str = "cpu", gpus: Gpus | None = None) -> list[Place]:
    """The place of every server. Ports of started ones are chosen here, so that no two get the same."""
    check_settings(settings)
    if settings.urls:
        return [Place(str(number), url) for number, url in enumerate(settings.urls)]
    num = settings.replicas
    check_replica_devices(settings, device)
    devices = settings.devices or spread_devices(settings, gpus or Gpus())
    ports = [0] * num
    if settings.mode == "server":
        ports = [settings.port + k for k in range(num)] if settings.port else _free_ports(settings.host, num)
    logs = [_log(settings.log, k, num) for k in range(num)]
    return [Place(str(k), None, ports[k], devices[k], logs[k]) for k in range(num)]


def spread_devices(settings: VllmSettings, gpus: Gpus) -> list[str]:
    """The GPUs of each started server where the settings name none: blocks of their own, behind the trainer's if they fit.

    A single server, and one on CPUs, sees what the run sees.
    """
    num, size = settings.replicas, settings.tensor_parallel_size
    if num == 1 or len(gpus.names) < 2:
        return [""] * num
    if len(gpus.names) < size:
        message = (
            f"rollout.vllm.tensor_parallel_size={size} needs {size} GPUs, this run sees {len(gpus.names)}."
        )
        raise fail("C001", "rollout", message)
    behind = len(gpus.names) - gpus.num_trainer
    free = gpus.names[gpus.num_trainer :] if behind >= num * size else gpus.names
    blocks = [",".join(free[at : at + size]) for at in range(0, len(free) - size + 1, size)]
    return [blocks[k % len(blocks)] for k in range(num)]


def visible_gpus(num: int) -> list[str]:
    """The names of the first `num` GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in named.split(",")] if named else [str(k) for k in range(num)]
    return names[:num]


def check_settings(settings: VllmSettings) -> None:
    """Raise for settings that cannot work or that open a server to other machines by mistake."""
    if settings.url is not None and not settings.urls:
        raise fail("C001", "rollout", "rollout.vllm.url is an empty list.", fix="name a server, or remove it")
    if settings.urls and settings.mode != "server":
        message = f"rollout.vllm.url is for mode='server', not for mode={settings.mode!r}."
        raise fail("C001", "rollout", message, fix="set rollout.vllm.mode to server, or remove the url")
    for url in settings.urls:
        if urlsplit(url).scheme not in ("http", "https", "unix"):
            message = f"rollout.vllm.url={url!r} must begin with http:// or unix:."
            fix = "write it like http://127.0.0.1:8000 or unix:/run/vllm.sock"
            raise fail("C001", "rollout", message, fix=fix)
    _check_several(settings)
    if settings.urls:
        for url in settings.urls:
            if not url.startswith("unix:"):
                _check_host(settings, urlsplit(url).hostname or "", url)
    elif settings.mode == "server":
        _check_host(settings, settings.host, None)


def _check_several(settings: VllmSettings) -> None:
    """Raise for what several servers cannot share."""
    urls, num = settings.urls, settings.replicas
    twice = sorted({url for url in urls if urls.count(url) > 1})
    problem, fix = None, "name each server once"
    if twice:
        problem = f"rollout.vllm.url names {twice[0]!r} more than once"
    elif urls and num > 1:
        problem = f"rollout.vllm.replicas={num} is for servers that the run starts, and rollout.vllm.url names others"
        fix = "remove one of the two; with a list of urls their number is the number of replicas"
    elif urls and settings.devices:
        problem = "rollout.vllm.devices is for servers that the run starts, and rollout.vllm.url names others"
        fix = "remove one of the two"
    elif settings.port and settings.port + num - 1 > _LAST_PORT:
        problem = f"rollout.vllm.port={settings.port} leaves no port for the last of {num} replicas, which listen on ports that follow each other"
        fix = "use a lower port, or 0 for free ones"
    elif settings.transport in ("nccl", "ipc") and settings.num_servers > 1:
        problem = f"rollout.vllm.transport={settings.transport!r} sends to one server, this run has {settings.num_servers}"
        fix = "use rollout.vllm.transport=shared"
    elif settings.transport == "network" and len(settings.receivers) != len(urls):
        problem = f"rollout.vllm.transport='network' needs a receiver for each url: there are {len(settings.receivers)} receivers for {len(urls)} urls"
        fix = "run `shardproof receive` on each server's host, and name it in rollout.vllm.receivers in the order of the urls"
    elif settings.transport == "network" and not (urls and settings.secret_file):
        problem = (
            "rollout.vllm.transport='network' is for servers that are already running, and needs a secret"
        )
        fix = "set rollout.vllm.url, rollout.vllm.receivers and rollout.vllm.secret_file"
    if problem is not None:
        raise fail("C001", "rollout", f"{problem}.", fix=fix)


def check_replica_devices(settings: VllmSettings, device: str) -> None:
    """Raise for devices that started servers cannot have: too few entries, of another size, or one device twice."""
    entries = settings.devices
    if not entries:
        return
    size, kind = settings.tensor_parallel_size, "GPUs" if device == "cuda" else "groups of cores"
    if len(entries) != settings.replicas:
        message = f"rollout.vllm.devices has {len(entries)} entries for {settings.replicas} replicas."
        raise fail("C001", "rollout", message, fix="write one entry per replica, or none")
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries):
        parts = entry.split("," if device == "cuda" else "|")
        if len(parts) != size or not all(part.strip() for part in parts):
            message = (
                f"rollout.vllm.devices[{number}]={entry!r} names {len(parts)} {kind}, but "
                f"rollout.vllm.tensor_parallel_size is {size}."
            )
            example = (
                ",".join(map(str, range(size))) if device == "cuda" else "|".join(["0-7", "8-15"][:size])
            )
            raise fail("C001", "rollout", message, fix=f"write it like {example!r}")
        for name in _named(entry, device):
            if seen.setdefault(name, number) != number:
                message = (
                    f"rollout.vllm.devices gives {name!r} to replica {seen[name]} and to replica {number}."
                )
                fix = "give each replica its own, or leave rollout.vllm.devices out to let them share"
                raise fail("C001", "rollout", message, fix=fix)


def _named(entry: str, device: str) -> set[str]:
    """The GPUs of an entry such as "0,1", or the cores of one such as "0-3,8|4-7"."""
    parts = [part.strip() for part in entry.replace("|", ",").split(",")]
    if device == "cuda":
        return set(parts)
    found: set[str] = set()
    for part in parts:
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            message = f"rollout.vllm.devices has {entry!r}, which are no CPU cores."
            raise fail("C001", "rollout", message, fix="write cores like '0-7' or '0,2,4'")
        found |= {str(core) for core in range(int(first), int(last or first) + 1)}
    return found


def _check_host(settings: VllmSettings, host: str, url: str | None) -> None:
    if is_loopback(host):
        return
    if not settings.allow_remote:
        message = f"the vLLM server at {host!r} can be reached from other machines, and its weight routes ask for no key."
        fix = "use 127.0.0.1, or set rollout.vllm.allow_remote=true on a network that you trust"
        raise fail("C001", "rollout", message, fix=fix)
    warnings.warn(
        f"the vLLM server at {host!r} can be reached from other machines; anyone who can connect can replace its weights "
        "and call any method of its workers.",
        stacklevel=2,
    )
    if url is not None and settings.transport == "shared":
        message = f"rollout.vllm.url={url!r} is on another host, which cannot share memory with this one."
        fix = "run the server on rank 0's host, or set rollout.vllm.transport=network"
        raise fail("C001", "rollout", message, fix=fix)


def check_sleep(settings: VllmSettings, device: str, adapter: bool) -> None:
    """Raise if servers with these settings cannot give up their memory, or not get back what they had."""
    problem, fix = None, "set rollout.sleep=false"
    if settings.urls:
        problem = f"the server at {settings.urls[0]!r} was not started by this run, so the run cannot put it to sleep"
        fix = "remove rollout.vllm.url, so that the run starts its own server, or set rollout.sleep=false"
    elif device == "cpu":
        problem = "vLLM's sleep mode needs a GPU"
    elif adapter:
        problem = "vLLM drops the base model when it sleeps, and a sync sends only the adapter"
        fix = "set rollout.vllm.lora=merge, or rollout.sleep=false"
    if problem is not None:
        raise fail("C001", "rollout", f"rollout.sleep: {problem}.", fix=fix)


def check_reach(urls: Sequence[str], apart: Sequence[int]) -> None:
    """Raise if ranks on other hosts than rank 0 cannot reach a server: each rank sends its requests itself."""
    for url in urls if apart else ():
        local = url.startswith("unix:") or is_loopback(urlsplit(url).hostname or "")
        if local:
            message = f"ranks {list(apart)} are on other hosts than rank 0 and cannot reach the vLLM server at {url}."
            fix = (
                "set rollout.vllm.mode=server with a host that they reach, and rollout.vllm.allow_remote=true"
            )
            raise fail("C001", "rollout", message, fix=fix)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def port_problem(host: str, ports: Sequence[int]) -> tuple[int, str] | None:
    """The first of some ports that cannot be listened on, and why; None if all can."""
    for port in ports:
        with socket.socket(_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                return port, str(error.strerror or error)
    return None


def _free_ports(host: str, num: int) -> list[int]:
    """Different free ports: all are bound before the first is given back."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(_family(host))) for _ in range(num)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _log(path: str | None, number: int, num: int) -> str | None:
    """The file of a replica's output: with several, the replica's number is part of its name."""
    if path is None or num == 1:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}-{number}{whole.suffix}"))
