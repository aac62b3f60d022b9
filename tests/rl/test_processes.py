"""`shardproof train` as a user runs it: signals, a rank killed with -9, plain torchrun, exit codes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ranks import run_ranks
from tests.rl.runs import SMALL, TINY, lines, run_recipe, small_recipe, trajectory

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 24
SETTINGS = (f"train.steps={STEPS}", "output.save_every=3", "output.eval_every=0")


def start(*arguments: str, module: tuple[str, ...] = ("-m", "shardproof")) -> subprocess.Popen[str]:
    """The command in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, *module, "train", str(TINY), *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Whatever started the tests may ignore it, as nohup does, and a run that inherits that obeys.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the run did not end:\n{output}")
    return process.returncode, output


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    path = folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The rank processes: children of the agent that hold a connection between ranks."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(2, run_recipe, small_recipe(folder, *SETTINGS))
    return trajectory(folder)


def test_a_rank_killed_with_9_at_a_random_step_changes_nothing_in_the_end(tmp_path, uninterrupted):
    arguments = (*SETTINGS, f"output.folder={tmp_path}")
    process = start(*arguments)
    wait_for_step(process, tmp_path, random.Random(5).randrange(2, 9))
    ranks_of(process)[1].kill()
    code, output = finish(process)
    assert code not in (0, 2, 3), output
    assert len(lines(tmp_path / "metrics.jsonl")) < STEPS and not (tmp_path / "model").exists()
    code, output = finish(start(*arguments))
    assert code == 0, output
    assert trajectory(tmp_path) == uninterrupted
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_ranks_that_are_started_again_come_to_the_same_end(tmp_path, uninterrupted):
    process = start(*SETTINGS, f"output.folder={tmp_path}", "--max-restarts", "1")
    wait_for_step(process, tmp_path, 5)
    ranks_of(process)[1].kill()
    code, output = finish(process)
    assert code == 0, output
    assert trajectory(tmp_path) == uninterrupted


def test_sigterm_and_ctrl_c_save_and_stop_and_the_same_command_goes_on(tmp_path, uninterrupted):
    arguments = (*SETTINGS, "output.save_every=0", f"output.folder={tmp_path}")
    process = start(*arguments)
    wait_for_step(process, tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM and "rerun the same command to resume" in output, output
    stopped_at = len(lines(tmp_path / "metrics.jsonl"))
    assert 3 <= stopped_at < STEPS
    assert (tmp_path / "checkpoints" / f"step-{stopped_at:08d}").is_dir(), "nothing was lost"
    process = start(*arguments)
    wait_for_step(process, tmp_path, stopped_at + 2)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the agent and the ranks
    code, output = finish(process)
    assert code == 128 + signal.SIGINT, output
    assert stopped_at + 2 <= len(lines(tmp_path / "metrics.jsonl")) < STEPS
    plain = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "shardproof")
    code, output = finish(start(*arguments, module=plain))
    assert code == 0, output
    assert trajectory(tmp_path) == uninterrupted


def test_what_a_rank_refuses_reaches_the_shell(tmp_path):
    code, output = finish(start(f"output.folder={tmp_path}", "data.prompt_column=prompts"))
    assert code == 2 and output.count("C005 data:") == 1 and "Traceback" not in output, output
