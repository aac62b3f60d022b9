"""The ranks of a run on Ray: each is a worker of Ray Train, which starts them and starts them again."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.train
from ray.train import UserCallback
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from shardproof.cli.options import UNUSABLE, Options, exit_code_of
from shardproof.cli.ray_console import Printed, Sent
from shardproof.errors import ShardproofError, error_for
from shardproof.folder_lock import ATTEMPT
from shardproof.terminal import attached
from shardproof.text import printable, sanitise_logging

logger = logging.getLogger(__name__)

_refused: list[ShardproofError] = []  # what a node found that prevents the start; the same on all ranks


class RankEnded(Exception):
    """A rank ended with an exit code after which it may be started again, and with its finding."""

    def __init__(self, code: int, text: str):
        self.code, self.text = code, text
        super().__init__(code, text)


@dataclass
class RankConfig(TorchConfig):
    """What every worker is prepared with before it trains."""

    job: str = ""  # names this start of the run among others
    recipe: str = ""  # as JSON
    options: Options = field(default_factory=Options)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""  # in which the command was started
    console: Any = None

    @property
    def backend_cls(self) -> type[Backend]:
        return RankBackend

    def to_dict(self) -> dict[str, Any]:
        return {}  # Ray would export it, and the environment may hold tokens


class RankBackend(Backend):
    """Makes Ray's workers ranks like those of torchrun, and looks at every node before any rank loads something.

    Ray would also make the process group. Here ranks make their own, as they do everywhere, with the backends, deadlines
    and interfaces that the rest of the package relies on.
    """

    share_cuda_visible_devices = True  # so that LOCAL_RANK is the number of a rank's device

    def __init__(self) -> None:
        self.num_starts = 0

    def on_start(self, worker_group: Any, backend_config: RankConfig) -> None:
        places = worker_group.execute(_place)
        hosts = {host for host, _, _ in places}
        names = [f"{name} ({address})" for _, name, address in places]
        backend_config.console.say.remote({"kind": "placed", "hosts": names})
        shared = {
            "GROUP_WORLD_SIZE": str(len(hosts)),
            # Ranks on one host need no other interface than loopback.
            "MASTER_ADDR": places[0][2] if len(hosts) > 1 else "127.0.0.1",
            "MASTER_PORT": str(worker_group.execute_single(0, _free_port)),
            "TORCHELASTIC_RESTART_COUNT": str(self.num_starts),
            ATTEMPT: f"{backend_config.job}:{self.num_starts}",
        }
        self.num_starts += 1
        found = worker_group.execute(_prepare, backend_config, shared)
        errors = [error for error in found if error is not None]
        if errors:
            worker_group.execute(_refuse, errors)


class Watcher(UserCallback):
    """Says on the console which ranks failed, and how."""

    def __init__(self, console: Any):
        self._console = console

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        ray.get(self._console.say.remote({"kind": "failed", "ranks": describe_failures(worker_exceptions)}))


def describe_failures(failures: dict[int, Exception]) -> dict[int, tuple[int, str]]:
    """By rank: the exit code that its failure stands for, and what there is to say about it."""
    return {
        rank: (error.code, error.text) if isinstance(error, RankEnded) else (1, _in_short(error))
        for rank, error in failures.items()
    }


def _in_short(error: Exception) -> str:
    """The lines of an error that say why, without Ray's advice and without empty ones."""
    died = getattr(error, "health_check_failure", error)
    lines = [line.strip() for line in str(died).splitlines() if line.strip()]
    if died is error:
        return printable(f"{type(error).__name__}: {' '.join(lines)}")
    # Ray's first line says that the actor died, those with a tab name the actor, and the rest say why.
    why = " ".join(line for line in lines if ": " not in line[:24])
    why = re.sub(r"^The actor \w+ is unavailable: | rpc_code: .*", "", why)
    return printable(f"its node or its process was lost; Ray says: {why}")[:400]


def run_rank(config: dict[str, Any]) -> dict[str, Any]:
    """One rank's run: its exit code and finding, where all ranks end alike; raises `RankEnded` where it may start again."""
    from shardproof.cli.ranks import run_attached
    from shardproof.dist.signals import SIGNALLED

    rank, options = int(os.environ["RANK"]), config["options"]
    sanitise_logging()
    logging.getLogger().setLevel(logging.WARNING)  # Ray's was above it, to silence Ray
    printed = contextlib.redirect_stdout(Printed(config["console"], rank, sys.stdout))
    with printed, attached(options.quiet, rank, Sent(config["console"], rank)) as terminal:
        if _refused:
            error = error_for([finding for each in _refused for finding in each.findings])
            return {"code": exit_code_of(error), "text": str(error)}
        if rank == 0:
            _stop_with(config["console"])
        try:
            run_attached(config["recipe"], options, terminal)
            return {"code": 0, "text": ""}
        except SystemExit as end:
            code = int(end.code or 0)
            # It was raised instead of the error, which rank 0 alone has shown.
            text = str(end.__context__) if isinstance(end.__context__, ShardproofError) else ""
        except Exception:
            logger.error("%s", traceback.format_exc())
            raise
    if code == UNUSABLE or code > SIGNALLED:
        return {"code": code, "text": text}
    raise RankEnded(code, text)


def _stop_with(console: Any) -> None:
    """Stop this process's run when the starting terminal gets a signal. One rank is enough: they stop together."""
    from shardproof.rl.stopping import request_stop

    def wait() -> None:
        try:
            request_stop(ray.get(console.wait_for_stop.remote()))
        except Exception:  # the terminal is gone, and Ray ends what it started
            logger.debug("the console is gone", exc_info=True)

    threading.Thread(target=wait, daemon=True, name="shardproof-stop").start()


def _place() -> tuple[int, str, str]:
    """The number of this worker's host, and the host's name and address."""
    return ray.train.get_context().get_node_rank(), socket.gethostname(), ray.util.get_node_ip_address()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _prepare(config: RankConfig, shared: dict[str, str]) -> ShardproofError | None:
    """Make this worker a rank; returns what prevents a start on its host, found by one rank of it."""
    context = ray.train.get_context()
    os.environ.update(config.environment)
    os.environ.update(shared)
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        GROUP_RANK=str(context.get_node_rank()),
    )
    if os.path.isdir(config.folder):  # relative paths in a recipe, and users' modules
        os.chdir(config.folder)
    if context.get_local_rank() != 0:
        return None
    from shardproof.cli.readiness import require_start
    from shardproof.config.load import from_json

    try:
        require_start(from_json(config.recipe), config.options)
    except ShardproofError as error:
        return error
    return None


def _refuse(errors: list[ShardproofError]) -> None:
    _refused[:] = errors
