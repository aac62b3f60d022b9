"""The process group: ranks that are started here, ranks that torchrun started, or a group of one."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import resource

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardproof.dist import stacks
from shardproof.dist.addresses import loopback_interface
from shardproof.dist.collectives import control_group
from shardproof.dist.deadline import joining
from shardproof.dist.hosts import hosts
from shardproof.dist.interface import choose_interface

STORE_FOLDER = "SHARDPROOF_STORE_FOLDER"
_MAX_FILES = 65536
_MANY_RANKS = 64

_groups_made = itertools.count()


def init_distributed(device: str | torch.device | None = None, timeout_s: float = 600.0) -> None:
    """Join torchrun's process group, or create a group of one process; does nothing if a group exists.

    Collective: every rank that torchrun started.
    """
    raise_file_limit()
    with joining(timeout_s):
        if not dist.is_initialized():
            _init_group(device, timeout_s)
        control_group()  # made now, where every rank is, so that every deadline finds it
        hosts()
    stacks.start()


def shut_down() -> None:
    """Leave the process group, if there is one; nothing of this package uses it afterwards."""
    stacks.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_group(device: str | torch.device | None, timeout_s: float) -> None:
    kind = torch.device(device).type if device is not None else default_device().type
    # gloo stays beside NCCL: offloaded tensors and the control plane live on the CPU.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ
    rank, world_size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if started else (0, 1)
    if world_size in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))):
        _keep_to_loopback()
    spare_connections(world_size)
    if started and kind == "cuda":
        torch.cuda.set_device(default_device())
    store = _file_store(world_size) if started else dist.HashStore()
    if store is None:
        store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        if world_size != int(os.environ.get("LOCAL_WORLD_SIZE", "0")):
            choose_interface(store, rank, world_size)
        store = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _file_store(world_size: int) -> dist.Store | None:
    """The store that `start_ranks` made a folder for, another one for each attempt and each group; None elsewhere."""
    folder = os.environ.get(STORE_FOLDER, "")
    # A torchrun that a rank starts inherits the variable, and gives its own ranks another id.
    if not folder or os.environ.get("TORCHELASTIC_RUN_ID") != os.path.basename(folder):
        return None
    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{next(_groups_made)}"
    return dist.FileStore(os.path.join(folder, name), world_size)


def _keep_to_loopback() -> None:
    """Let gloo listen on this host's loopback interface alone, unless the user chose another."""
    if name := loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def spare_connections(world_size: int) -> None:
    """Let gloo connect ranks when they first talk, where they are many, unless the user chose otherwise.

    Else every rank reads the addresses of all pairs from the store, 8 n^2 bytes in each group, and connects to all ranks.
    """
    if world_size >= _MANY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The asked device with its number, or this rank's own."""
    if device is None:
        return default_device()
    asked = torch.device(device)
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={device!r}: this machine has no CUDA device")
    return default_device() if asked.type == "cuda" and asked.index is None else asked


def default_device() -> torch.device:
    """This rank's accelerator if the machine has one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def raise_file_limit() -> None:
    """Let this process and those that it starts open as many files as the system allows: ranks have many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox that forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
