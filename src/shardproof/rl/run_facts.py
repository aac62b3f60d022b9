"""`run.json`: what a run was started with, on which machine, with which versions, and how it ended."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.config.defaults import differences_from_defaults
from shardproof.config.schema import Recipe
from shardproof.files import write_atomic
from shardproof.report.read import FACTS_NAME
from shardproof.rl.machine import cpu_model
from shardproof.text import without_secrets
from shardproof.version import __version__

COMMAND = "SHARDPROOF_COMMAND"  # the environment variable in which the launcher leaves its command line
_PACKAGES = ("torch", "transformers", "safetensors", "peft", "vllm", "numpy")


def take_facts(recipe: Recipe, hosts: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The facts of a run that starts now, as rank 0 sees them; `hosts` are those of its ranks, where there are several."""
    return {
        "shardproof": __version__,
        "commit": _commit(),
        "command": shlex.join(without_secrets(shlex.split(os.environ.get(COMMAND) or shlex.join(sys.argv)))),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "hardware": _hardware(),
        "ranks": dist.get_world_size(),
        "nodes": max(len(hosts), 1),
        **({"hosts": [dict(each) for each in hosts]} if hosts else {}),
        "changed": without_secrets(differences_from_defaults(recipe)),
    }


def write_facts(folder: Path, facts: Mapping[str, Any], status: str, step: int) -> None:
    """Write `run.json`; `status` is "running", "finished", "stopped" or "failed"."""
    text = json.dumps({**facts, "status": status, "step": step}, indent=2, default=str)
    write_atomic(folder / FACTS_NAME, text + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the working directory, marked where files differ from it; None outside of a repository."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }
