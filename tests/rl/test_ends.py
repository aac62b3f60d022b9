"""What a run leaves open and behind: nothing listens beyond loopback, nothing outlives its parent, signals end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.models import tiny_config
from tests.rl.runs import lines, write_rows
from tests.rl.test_processes import SETTINGS, STEPS, finish, ranks_of, start, wait_for_step
from tests.sockets import all_loopback, listening

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LONG_S = 60.0  # what nothing may outlive its parent by
START_S = 300.0  # longer than any start takes, on a busy machine too


def tree_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def addresses_of(process: subprocess.Popen[str]) -> set[str]:
    """Where a process and everything that it started listen."""
    return listening(each.pid for each in tree_of(process))


def wait_until(condition, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.fixture
def hanging(tmp_path):
    """A run of two ranks, both of which wait for rewards that never come."""
    marks = [tmp_path / f"begun-{n}" for n in range(6)]
    rows = [
        {"prompt": f"{n}+{n}=", "answer": str(2 * n), "signal": str(mark)} for n, mark in enumerate(marks)
    ]
    process = start(
        f"output.folder={tmp_path / 'run'}",
        f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}",
        "reward.functions=[{name='tests.rl.user_rewards:never_ends'}]",
        "reward.timeout_s=1000",
        "reward.num_workers=1",
        "output.eval_every=0",
    )
    # With one worker each, the ranks are at one prompt each.
    wait_until(lambda: sum(mark.exists() for mark in marks) == 2, process)
    processes = tree_of(process)
    yield process
    for each in processes:
        if each.is_running():
            each.kill()
    process.communicate()


def test_a_run_listens_on_loopback_alone_and_nothing_outlives_its_parent(hanging):
    processes = tree_of(hanging)
    addresses = addresses_of(hanging)
    assert addresses and all_loopback(addresses), addresses
    hanging.kill()
    _, alive = psutil.wait_procs(processes, timeout=LONG_S)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_a_second_interrupt_ends_a_run_that_hangs(hanging):
    os.killpg(hanging.pid, signal.SIGINT)
    # One Ctrl-C of a terminal may reach a process twice, within a second; on a busy machine a later one is told apart.
    assert not ends_within(hanging, 2.0), "the first one waits for the end of the step"
    for _ in range(6):
        os.killpg(hanging.pid, signal.SIGINT)
        if ends_within(hanging, LONG_S / 6):
            break
    code, output = finish(hanging)
    assert code == 128 + signal.SIGINT and "interrupted again" in output, output
    assert "Traceback" not in output, output


def test_a_doctor_listens_on_loopback_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    options = (
        "--config",
        str(tmp_path / "config.json"),
        "--ranks",
        "2",
        "--dtypes",
        "fp32",
        "--seq-len",
        "16",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "shardproof", "doctor", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    addresses: set[str] = set()
    while process.poll() is None:
        addresses |= addresses_of(process)
        time.sleep(0.01)
    code, output = finish(process)
    assert code == 0, output
    assert addresses and all_loopback(addresses), addresses


def test_a_signal_stops_a_run_that_would_restart_lost_ranks(tmp_path):
    arguments = (*SETTINGS, "output.save_every=0", f"output.folder={tmp_path}", "--max-restarts", "2")
    process = start(*arguments)
    wait_for_step(process, tmp_path, 2)
    ranks_of(process)[1].terminate()  # one rank alone, as a scheduler that knows no agent does
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM and "rerun the same command to resume" in output, output
    first = len(lines(tmp_path / "metrics.jsonl"))
    assert 2 <= first < STEPS and (tmp_path / "checkpoints" / f"step-{first:08d}").is_dir()
    process = start(*arguments)
    wait_for_step(process, tmp_path, first + 2)
    process.send_signal(signal.SIGHUP)  # the terminal is closed
    code, output = finish(process)
    assert code == 128 + signal.SIGHUP and "rerun the same command to resume" in output, output
    second = len(lines(tmp_path / "metrics.jsonl"))
    assert first + 2 <= second < STEPS and (tmp_path / "checkpoints" / f"step-{second:08d}").is_dir()
