"""What a rank's environments are made from, and what is known about them before the first conversation."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.environments.protocol import Schema
from shardproof.errors import ShardproofError, fail

START_S = 120.0  # what a worker may take to import the user's modules
LEAVE_S = 3.0  # what it may take to leave: to close environments, and for exit handlers
OLDEST_PYTHON = (3, 10)  # that runs the workers' code


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment by name, what it is made with, and the limits of its calls."""

    name: str  # as module:name
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 30.0
    max_seconds: float | None = None
    num_workers: int = 2
    max_reply_chars: int = 20_000
    python: str | None = None  # another interpreter for the workers


@dataclass(frozen=True)
class EnvironmentFacts:
    """What an environment says about itself."""

    roles: tuple[str, ...]
    tools: tuple[Schema, ...]
    replayable: bool


def require_python(python: str) -> str:
    """The interpreter that `environment.python` names; C001 unless workers can run under it."""
    python = os.path.expanduser(python)
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_S,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise _wrong_python(python, f"cannot be started: {error}") from error
    try:
        major, minor = map(int, done.stdout.split())
    except ValueError:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        problem = f"is not a Python interpreter that works: {''.join(said)[:300] or 'it says nothing'}"
        raise _wrong_python(python, problem) from None
    if (major, minor) < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        raise _wrong_python(python, f"is Python {major}.{minor}; workers need {needed} or newer")
    return python


def _wrong_python(python: str, problem: str) -> ShardproofError:
    fix = "name the interpreter of the environment's own virtual environment, such as ../envs/bin/python"
    return fail("C001", "environment", f"environment.python={python!r} {problem}.", fix=fix)
