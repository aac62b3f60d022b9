"""The programs of docs/environments.md that train with environments of others, run as the page's reader would run them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.docs.blocks import read_page
from tests.environments.adapters.played import LONG_S, PYTHON, ROOT
from tests.rl.runs import lines

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PORT = "8765"  # of the page's server
PROGRAMS = {
    block.saved_as: block.code
    for block in read_page(ROOT / "docs" / "environments.md").blocks
    if block.saved_as
}


def save(folder: Path, *names: str, port: str = PORT) -> None:
    """Write programs of the page into a folder that looks like a clone, with the environments that the page makes."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for name, package in (("envs", "verifiers"), ("envs-openenv", "openenv")):
        (folder / name).symlink_to(Path(PYTHON[package]).parents[1])
    for name in names:
        (folder / name).write_text(PROGRAMS[name].replace(PORT, port))


def check_training(folder: Path, recipe: str) -> dict[str, float]:
    """The last step's metrics of a recipe whose two steps and two evaluations must all have had conversations."""
    command = [sys.executable, "-m", "shardproof", "train", recipe]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Finished 2 steps. Held-out reward: " in done.stderr
    run = folder / "runs" / recipe.removesuffix(".toml")
    steps = {line["step"]: line["metrics"] for line in lines(run / "metrics.jsonl")}
    assert sorted(steps) == [0, 1, 2]
    assert all("eval/reward" in steps[step] for step in (0, 2))
    for step in (1, 2):
        assert steps[step]["environment/failed"] == 0.0 and steps[step]["environment/turns"] >= 1.0
    return steps[2]


@contextmanager
def serving(folder: Path, program: str, port: int) -> Iterator[None]:
    """A server of the page, from when it accepts connections on."""
    server = subprocess.Popen([PYTHON["openenv"], program], cwd=folder, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + LONG_S
        while True:
            assert server.poll() is None and time.monotonic() < until, "the server does not start"
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def test_tasks_of_reasoning_gym_train(tmp_path):
    save(tmp_path, "gym.toml")
    found = check_training(tmp_path, "gym.toml")
    # Wrong answers are followed by a second attempt.
    assert found["environment/turns"] > 1.0 and "environment/solved" in found


def test_a_taskset_of_verifiers_trains(tmp_path):
    save(tmp_path, "guess_taskset.py", "verifiers.toml")
    found = check_training(tmp_path, "verifiers.toml")
    assert found["environment/guesses"] == found["environment/turns"] > 1.0


def test_an_environment_of_openenv_trains(tmp_path):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    save(tmp_path, "game_server.py", "openenv.toml", port=str(port))
    with serving(tmp_path, "game_server.py", port):
        check_training(tmp_path, "openenv.toml")
