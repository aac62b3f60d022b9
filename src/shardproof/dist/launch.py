"""The process group: what torchrun started, or a group of one."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist import whereabouts


def init_distributed(device: str | torch.device | None = None, timeout_s: float = 600.0) -> None:
    """Join the process group that torchrun describes, or make a group of one; a no-op when one exists.

    Collective: every rank that torchrun started.
    """
    if not dist.is_initialized():
        _init_group(device, timeout_s)
    whereabouts.start()


def _init_group(device: str | torch.device | None, timeout_s: float) -> None:
    kind = torch.device(device).type if device is not None else default_device().type
    # gloo stays beside NCCL: offloaded tensors and the control plane live on the CPU.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        if kind == "cuda":
            torch.cuda.set_device(default_device())
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


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


def local_rank() -> int:
    """This rank's number on its own node."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))


class RankFailed(Exception):
    """A rank that `start_ranks` started ended with an error or died."""

    def __init__(self, rank: int, exit_code: int, message: str):
        self.rank, self.exit_code = rank, exit_code
        super().__init__(f"exit code {exit_code}: {message}")


def start_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    nnodes: str = "1",
    rdzv_endpoint: str = "localhost:0",
    rdzv_id: str = "shardproof",
    max_restarts: int = 0,
) -> dict[int, Any]:
    """What `function` returns on each rank of this node, started through torch's elastic agent.

    The agent also rendezvouses nodes and restarts. Raises `RankFailed` with the first rank that failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    low, _, high = nnodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(low),
        max_nodes=int(high or low),
        nproc_per_node=num_ranks,
        run_id=rdzv_id,
        rdzv_backend="c10d",
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
    )
    try:
        return elastic_launch(config, function)(*args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankFailed(rank, failure.exitcode, str(failure.message)) from None
