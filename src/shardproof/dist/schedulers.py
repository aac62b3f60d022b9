"""What a scheduler's variables say about the hosts of a run: SLURM's, and those of Kubernetes operators."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardproof.errors import fail

_MAX_HOSTS = 65536  # that a list of hosts may expand to
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below the ports that systems give away themselves
_PORT = 29500  # torch's


@dataclass(frozen=True)
class Places:
    """How many hosts a run has and where they meet, as far as variables say so."""

    nnodes: str | None = None
    endpoint: str | None = None
    said_by: str = ""  # whose variables these are
    warning: str = ""


def is_rank() -> bool:
    """Whether torchrun, or a launcher like it, started this process as a rank."""
    # Kubernetes' operators give pods a RANK too, but start no ranks.
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


def find_places(environ: Mapping[str, str]) -> Places:
    """What the scheduler's variables say. Raises C001 for a start that would run the training once per task."""
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    return _of_operator(environ)


def _of_slurm(environ: Mapping[str, str]) -> Places:
    """One task per node joins the others; a command outside of `srun` runs on its own node alone."""
    job_nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
        if job_nodes > 1:
            return Places(
                warning=f"this job has {job_nodes} nodes, but the command was not started by srun: it uses one node"
            )
        return Places()
    num_nodes = int(environ.get("SLURM_STEP_NUM_NODES") or job_nodes)
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or num_nodes)
    if num_tasks != num_nodes:
        message = (
            f"srun started {num_tasks} tasks on {num_nodes} node{'s' * (num_nodes > 1)}; each would train by itself, "
            "because `shardproof train` starts the ranks of a node."
        )
        fix = "start one task per node: srun --ntasks-per-node=1 shardproof train ..."
        raise fail("C001", "launch", message, fix=fix)
    if num_nodes == 1:
        return Places("1", None, "SLURM")
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    first = next(iter(expand_hostlist(names)), "")
    if not first:
        raise fail(
            "C001", "launch", "SLURM_STEP_NODELIST names no host.", fix="pass --rdzv-endpoint HOST:PORT"
        )
    # Jobs that share a node must not share a port.
    port = _FIRST_PORT + int(re.sub(r"\D", "", environ["SLURM_JOB_ID"]) or 0) % _NUM_PORTS
    return Places(str(num_nodes), f"{first}:{port}", "SLURM")


def _of_operator(environ: Mapping[str, str]) -> Places:
    """What a PyTorchJob sets: PET_* with an elastic policy, else MASTER_ADDR and, per pod, WORLD_SIZE."""
    endpoint = environ.get("PET_RDZV_ENDPOINT") or None
    address = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")
    if endpoint is None and address:
        if address == "localhost":  # what some operators tell the master's own pod
            address = socket.gethostname()
        port = environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT") or _PORT
        endpoint = f"{address}:{port}"
    elif endpoint is not None and ":" not in endpoint:
        endpoint = f"{endpoint}:{_PORT}"
    nnodes = environ.get("PET_NNODES") or (environ.get("WORLD_SIZE") if address else None) or None
    if nnodes is None or endpoint is None:
        return Places()
    return Places(nnodes, endpoint, "PET_* and MASTER_* variables")


def expand_hostlist(text: str) -> list[str]:
    """The hosts of SLURM's short form: `gpu[01-03,7],login` means gpu01, gpu02, gpu03, gpu7 and login."""
    found: list[str] = []
    for word in _split(text):
        parts = [_expand_part(part) for part in re.split(r"(\[[^\]]*\])", word) if part]
        found += map("".join, itertools.islice(itertools.product(*parts), _MAX_HOSTS + 1))
        if len(found) > _MAX_HOSTS:
            raise _bad_list(text, f"it names more than {_MAX_HOSTS} hosts")
    return found


def _split(text: str) -> Iterator[str]:
    """The words between commas that are not in brackets."""
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", text):
        if word in "[]":
            raise _bad_list(text, "a bracket is missing")
        yield word.strip()


def _expand_part(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for span in part[1:-1].split(","):
        low, _, high = span.strip().partition("-")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < int(low) + _MAX_HOSTS):
            raise _bad_list(part, f"{span!r} is no range of numbers")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _bad_list(text: str, why: str) -> Exception:
    message = f"SLURM's list of hosts {text[:200]!r} cannot be read: {why}."
    return fail("C001", "launch", message, fix="pass --nnodes and --rdzv-endpoint HOST:PORT")
