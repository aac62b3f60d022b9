"""Runs on a real Ray cluster: the same numbers as without it, with a node lost, stopped, and refused."""

import asyncio
import hashlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardproof.cli.ray_console import Console
from tests.rl.runs import comparable, lines
from tests.sockets import all_loopback, listening

TINY = Path(__file__).parents[3] / "recipes" / "tiny"
PATIENCE_S = 1200

# Beside the recipe, so that workers must find it there. The run waits after two steps while there is a file hold-2.
REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent
print("rewards are here")

def right(prompt, completion, row):
    metrics = HERE / "run" / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    while (HERE / f"hold-{done}").exists():
        (HERE / f"held-{done}").touch()
        time.sleep(0.05)
    return float(completion.strip() == str(row["answer"])) + 0.1 * len(completion)
"""

RECIPE = f"""
[model]
path = "{TINY}/model"
compute_dtype = "float32"
[data]
train = "{TINY}/train.jsonl"
[reward]
functions = [{{ name = "sums:right" }}]
[rollout]
group_size = 4
max_new_tokens = 4
[algorithm]
name = "grpo"
[optimizer]
lr = 1e-3
[train]
steps = 5
prompts_per_step = 6
ranks = 1
[output]
folder = "run"
trackers = []
save_every = 1
"""


class Command:
    """`shardproof train` in a folder of its own, as a user runs it."""

    def __init__(self, folder, *words):
        folder.mkdir(exist_ok=True)
        (folder / "sums.py").write_text(REWARD)
        (folder / "tiny.toml").write_text(RECIPE)
        self.folder, self.log = folder, folder / "log"
        command = [sys.executable, "-m", "shardproof", "train", "tiny.toml", *words]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def until(self, condition, what):
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < limit, f"never {what}:\n{self.output}"
            time.sleep(0.05)

    def until_held(self, step):
        self.until((self.folder / f"held-{step}").exists, "held")

    def wait(self):
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()

    @property
    def output(self):
        return self.log.read_text()


def numbers(folder):
    """Metrics without times, and the digests of what both ranks hold after the last step."""
    steps = lines(folder / "run" / "metrics.jsonl")
    for line in steps:
        line.pop("time", None)
        line["metrics"] = comparable(line["metrics"])
    saved = [folder / "run" / "checkpoints" / "step-00000005" / f"rank-{rank}.bin" for rank in range(2)]
    return steps, [hashlib.sha256(path.read_bytes()).hexdigest() for path in saved]


def node_of_a_rank(cluster):
    """A node other than the head that holds a rank."""
    for node in cluster.list_all_nodes():
        raylet = node.all_processes["raylet"][0].process.pid
        ranks = [each for each in psutil.Process(raylet).children() if "RayTrainWorker" in each.name()]
        if ranks and not node.head:
            return node
    raise AssertionError("no rank on any node")


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_that_loses_a_node_and_is_stopped_has_the_numbers_of_a_run_without_ray(cluster, tmp_path):
    without = Command(tmp_path / "without", "train.ranks=2")

    folder = tmp_path / "with"
    folder.mkdir()
    (folder / "hold-2").touch()
    (folder / "hold-4").touch()
    run = Command(folder, "--on", "ray", "--nnodes", "2", "--max-restarts", "1", "train.steps=9")
    run.until_held(2)
    cluster.remove_node(node_of_a_rank(cluster), allow_graceful=False)
    run.until(lambda: "restart 1 of 1" in run.output, "started again")
    (folder / "hold-2").unlink()

    run.until_held(4)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "stopping the ranks" in run.output, "heard of the signal")
    (folder / "hold-4").unlink()
    assert run.wait() == 128 + signal.SIGINT, run.output
    assert run.output.count("T308 ") == 1 and "Stopped after step 5" in run.output, run.output
    assert f"placed the ranks on {socket.gethostname()} (" in run.output
    assert "\nrewards are here\n" in run.output and "\nrank 1: rewards are here\n" in run.output
    assert "raylet" not in run.output and "Traceback" not in run.output, run.output
    assert without.wait() == 0, without.output
    assert numbers(folder) == numbers(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.fault
def test_what_a_rank_finds_is_said_once_and_not_tried_again(ray_packages, tmp_path):
    """On a cluster that the command starts itself, whose processes listen on loopback alone and end with it."""
    refused = Command(tmp_path / "refused", "data.train=missing.jsonl", "--on", "ray", "--max-restarts", "3")
    refused.until(lambda: "starting 1 rank on Ray" in refused.output, "started Ray")
    processes = psutil.Process(refused.process.pid).children(recursive=True)
    found = listening(process.pid for process in processes)
    assert found and all_loopback(found), found
    assert refused.wait() == 2, refused.output
    assert refused.output.count("missing.jsonl") == 1 and "C005" in refused.output, refused.output
    assert "Traceback" not in refused.output and "restart" not in refused.output
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_without_the_package_a_run_on_ray_says_how_to_get_it(tmp_path):
    refused = Command(tmp_path / "refused", "--on", "ray")
    assert refused.wait() == 2, refused.output
    assert "C007 ray:" in refused.output and "pip install 'shardproof[ray]'" in refused.output


def test_a_stop_is_heard_by_ranks_that_run_and_by_no_others():
    """A signal that no rank hears ends the command at once, since nothing is lost."""

    async def hear():
        console = Console()
        before = await console.stop(signal.SIGINT)
        assert await console.wait_for_stop() == signal.SIGINT  # by a rank that begins afterwards
        during = await console.stop(signal.SIGINT)
        await console.say({"kind": "failed", "ranks": {}})
        return before, during, await console.stop(signal.SIGINT)

    assert asyncio.run(hear()) == (False, True, False)
