"""What a run leaves open and behind: nothing listens beyond loopback, nothing outlives its parent, signals end it."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.integration.runs import lines, write_rows
from tests.integration.test_processes import SETTINGS, STEPS, finish, ranks_of, start, wait_for_step
from tests.models import tiny_config

LONG_S = 60.0  # longer than anything here takes, unless it never comes


def tree_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses that these processes listen on, over IPv4 and IPv6."""
    inodes = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:  # closed, or gone with its process
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(str(_address(fields[1].split(":")[0])))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As the kernel prints it: words of 32 bits in the host's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def all_loopback(addresses: Iterable[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def wait_until(condition, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


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
        "reward.functions=[{name='tests.integration.user_rewards:never_ends'}]",
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
    addresses = listening(processes)
    assert addresses and all_loopback(addresses), addresses
    hanging.kill()
    _, alive = psutil.wait_procs(processes, timeout=LONG_S)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_a_second_interrupt_ends_a_run_that_hangs(hanging):
    os.killpg(hanging.pid, signal.SIGINT)
    time.sleep(
        2.0
    )  # a terminal's one Ctrl-C may reach a process twice, hence the second one must be told apart
    assert hanging.poll() is None, "the first one waits for the end of the step"
    os.killpg(hanging.pid, signal.SIGINT)
    code, output = finish(hanging)
    assert code == 128 + signal.SIGINT and "interrupted again; the same command goes on" in output, output
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
        addresses |= listening(tree_of(process))
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
    assert code == 128 + signal.SIGTERM and "the same command goes on" in output, output
    first = len(lines(tmp_path / "metrics.jsonl"))
    assert 2 <= first < STEPS and (tmp_path / "checkpoints" / f"step-{first:08d}").is_dir()
    process = start(*arguments)
    wait_for_step(process, tmp_path, first + 2)
    process.send_signal(signal.SIGHUP)  # the terminal is closed
    code, output = finish(process)
    assert code == 128 + signal.SIGHUP and "the same command goes on" in output, output
    second = len(lines(tmp_path / "metrics.jsonl"))
    assert first + 2 <= second < STEPS and (tmp_path / "checkpoints" / f"step-{second:08d}").is_dir()
