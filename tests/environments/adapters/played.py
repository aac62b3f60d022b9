"""Conversations of adapted environments, in workers that run under the interpreters that have their packages."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardproof.environments.pool import EnvironmentPool
from shardproof.environments.protocol import Answer, ToolCall, Turn
from shardproof.environments.registry import resolve
from shardproof.environments.spec import EnvironmentSpec

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(__file__).resolve().parent / "packages"
PYTHON = {
    "verifiers": str(ROOT / ".venv-verifiers/bin/python"),
    "openenv": str(ROOT / ".venv-openenv/bin/python"),
}
LONG_S = 120.0  # longer than anything here takes, unless it waits for what never comes


def turn(text: str, *calls: ToolCall, number: int = 1, **how: Any) -> Turn:
    return Turn(text, text, calls=calls, number=number, **how)


@contextmanager
def pool_of(name: str, options: dict[str, Any], **settings: Any) -> Iterator[EnvironmentPool]:
    given = {"timeout_s": LONG_S, "num_workers": 1, "python": PYTHON.get(name), **settings}
    with EnvironmentPool(EnvironmentSpec(resolve(name), options, **given)) as pool:
        yield pool


def play(pool: EnvironmentPool, row: dict[str, Any], *turns: Turn, key: int = 0) -> list[Answer]:
    """The opening of a conversation, and the answer to each turn."""
    pool.open(key, row, 0)
    answers = [answer for _, answer in pool.answers()]
    for each in turns:
        pool.step(key, each)
        answers += [answer for _, answer in pool.answers()]
    pool.release(key)
    return answers


def play_all(pool: EnvironmentPool, rows: Sequence[dict[str, Any]], turns: Sequence[Turn]) -> list[Answer]:
    """The answers to one turn each, of conversations that go on at the same time."""
    for key, row in enumerate(rows):
        pool.open(key, row, key)
    dict(pool.answers())
    for key, each in enumerate(turns):
        pool.step(key, each)
    found = dict(pool.answers())
    for key in range(len(rows)):
        pool.release(key)
    return [found[key] for key in range(len(rows))]


@contextmanager
def game_server(folder: Path, kind: str = "guess") -> Iterator[str]:
    """The URL of an OpenEnv server that runs while this does."""
    port = folder / f"port-{kind}"
    command = [PYTHON["openenv"], str(PACKAGES / "game_server.py"), str(port), kind]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + LONG_S
        while not port.exists():
            assert server.poll() is None and time.monotonic() < until, "the server does not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        server.kill()
        server.wait()
