"""The process group: ranks that are started here, ranks that torchrun started, or a group of one."""

from __future__ import annotations

import ctypes
import datetime
import itertools
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardproof.dist import stacks
from shardproof.dist.collectives import control_group
from shardproof.dist.hosts import hosts
from shardproof.errors import ShardproofError, fail
from shardproof.text import printable

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from shardproof.dist.agent import Agent

logger = logging.getLogger(__name__)

_STORE_FOLDER = "SHARDPROOF_STORE_FOLDER"
_MIN_SECRET = 16  # characters
_GRACE_S = "180"  # for the step and the checkpoint that ranks finish after a signal
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_AGENT_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)
# What torch's agent says whenever it ends ranks. Why it ends them is said by those who ask it to.
_ROUTINE = re.compile(r"Received \d+ death signal|(Closing|Sending|Terminating) process \d+")

_groups_made = itertools.count()


def init_distributed(device: str | torch.device | None = None, timeout_s: float = 600.0) -> None:
    """Join torchrun's process group, or create a group of one process; does nothing if a group exists.

    Collective: every rank that torchrun started.
    """
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
        _keep_to_loopback("GLOO_SOCKET_IFNAME")
    if started and kind == "cuda":
        torch.cuda.set_device(default_device())
    store = _file_store(world_size) if started else dist.HashStore()
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _file_store(world_size: int) -> dist.Store | None:
    """The store that `start_ranks` made a folder for, another one for each attempt and each group; None elsewhere."""
    folder = os.environ.get(_STORE_FOLDER, "")
    # A torchrun that a rank starts inherits the variable, and gives its own ranks another id.
    if not folder or os.environ.get("TORCHELASTIC_RUN_ID") != os.path.basename(folder):
        return None
    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{next(_groups_made)}"
    return dist.FileStore(os.path.join(folder, name), world_size)


def _keep_to_loopback(variable: str) -> None:
    """Let a backend listen on this host's loopback interface alone, unless the user chose another."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:  # a namespace whose loopback is down
            return
    if names:
        os.environ.setdefault(variable, names.pop())


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


class RankFailed(Exception):
    """A rank that `start_ranks` started ended with an error or died."""

    def __init__(self, rank: int, exit_code: int, message: str):
        self.rank, self.exit_code = rank, exit_code
        super().__init__(f"exit code {exit_code}: {message}")


class RanksKilled(Exception):
    """A second interrupt ended the ranks at once; what they had not saved is lost."""


def start_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    nnodes: str = "1",
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
    final_exit_codes: Collection[int] = (),
    loopback_only: bool = True,
) -> dict[int, Any]:
    """What `function` returns on each rank of this node, started through torch's elastic agent.

    The agent also connects nodes and restarts ranks, except after one of `final_exit_codes`. On one node nothing
    listens beyond loopback; `loopback_only=False` lets NCCL reach other hosts, such as those of an inference server. The
    ranks do not outlive this process. Raises `RankFailed` with the first rank that failed.
    """
    from shardproof.dist.agent import Agent, OneNode, make_spec

    for name in _AGENT_LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _signals_to_handle()
    grace_s = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_S))
    min_nodes, max_nodes = node_range(nnodes)
    handler: RendezvousHandler
    with tempfile.TemporaryDirectory(prefix="shardproof-ranks-", ignore_cleanup_errors=True) as folder:
        if max_nodes == 1:
            handler, environment = OneNode(os.path.basename(folder)), {_STORE_FOLDER: folder}
        else:
            handler, environment = _rendezvous(min_nodes, max_nodes, rdzv_endpoint, rdzv_id), {}
        # The agent would expand strings among the arguments as templates, in which "$$" means "$".
        rank_args = (os.getpid(), environment, loopback_only and max_nodes == 1, function, args)
        spec = make_spec(handler, _run_rank, rank_args, num_ranks, max_restarts)
        return _results(Agent(spec, folder, final_exit_codes, grace_s), handler)


def _is_news(record: logging.LogRecord) -> bool:
    return _ROUTINE.match(record.getMessage()) is None


def _results(agent: Agent, handler: RendezvousHandler) -> dict[int, Any]:
    """What the agent's ranks returned, or the error that says how they ended."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        result = agent.run()
    except SignalException:
        # The rendezvous stays open: other nodes continue, or this one is started again.
        if agent.killed:
            raise RanksKilled from None
        raise
    except RendezvousError as error:
        handler.shutdown()
        raise _rendezvous_error(error, agent.started) from error
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()
    if result is not None and result.is_failed():
        rank, failure = ChildFailedError("rank", result.failures).get_first_failure()
        raise RankFailed(rank, failure.exitcode, printable(failure.message))
    return {} if result is None else result.return_values


def _rendezvous_error(error: Exception, started: bool) -> ShardproofError:
    """The error for nodes that could not connect, or lost their connection."""
    message = f"the nodes {'lost their connection' if started else 'could not connect'}: {printable(error)}"
    if started:
        return fail("T308", "launch", message, fix="read the other nodes' logs, then rerun the same command")
    fix = "make sure that every node can reach --rdzv-endpoint and has the same --rdzv-id"
    return fail("C002", "launch", message, fix=fix)


def node_range(nnodes: str) -> tuple[int, int]:
    """The smallest and the largest number of nodes that `--nnodes 2` or `--nnodes 1:4` allows."""
    low, _, high = nnodes.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        message = f"--nnodes {nnodes!r} is neither a number of nodes nor a range."
        raise fail("C001", "launch", message, fix="write it like --nnodes 2 or --nnodes 1:4")
    return int(low), int(high or low)


def _rendezvous(
    min_nodes: int, max_nodes: int, endpoint: str | None, secret: str | None
) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous import RendezvousError

    from shardproof.dist.agent import several_nodes

    if endpoint is None:
        message = "a run on several nodes needs --rdzv-endpoint, the address of one of them."
        raise fail("C001", "launch", message, fix="pass --rdzv-endpoint HOST:PORT on every node")
    if secret is None or len(secret) < _MIN_SECRET:
        message = f"a run on several nodes needs --rdzv-id, a secret of at least {_MIN_SECRET} characters."
        fix = "make one with `openssl rand -hex 16`, and pass it on every node, or as SHARDPROOF_RDZV_ID"
        raise fail("C001", "launch", message, fix=fix)
    logger.warning(
        "this node accepts connections from other machines: use a private network; see docs/multi-node.md"
    )
    try:
        return several_nodes(min_nodes, max_nodes, endpoint, secret)
    except ValueError as error:  # not a valid endpoint
        message = f"--rdzv-endpoint {endpoint!r}: {printable(error)}"
        raise fail("C001", "launch", message, fix="write it as HOST:PORT") from error
    except RendezvousError as error:
        raise _rendezvous_error(error, started=False) from error


def _signals_to_handle() -> str:
    """The signals that the agent forwards to the ranks; SIGHUP stays ignored under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return "SIGTERM,SIGINT,SIGQUIT" if ignored else "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def _run_rank(
    parent: int,
    environment: dict[str, str],
    loopback_only: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """What each rank's process runs."""
    _die_with_parent(parent)
    os.environ.update(environment)
    if loopback_only:
        _keep_to_loopback("NCCL_SOCKET_IFNAME")
    return function(*args)


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the one that started it is gone, however that one ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
