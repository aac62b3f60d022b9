"""Ranks and hosts that die, come back and join: a run goes on by itself, to the bits of an undisturbed run."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.cluster import DISK, PORT, Cluster, Host, Program, tiny_run
from tests.rl.runs import numbers, trajectory

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

STEPS = 4
_LIMIT_S = 300  # for a run of seconds: nothing here is about time
_LOST_AFTER = "--lost-after=5"
_OPTIMIZER = 'optimizer.name="holding:Optimizer"'


def prepare(cluster: Cluster) -> Path:
    assert cluster.shared is not None
    shutil.copy(Path(__file__).with_name("holding.py"), cluster.shared)
    return tiny_run(cluster.shared, steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed(_two_hosts: Cluster) -> Iterator[tuple[Any, str]]:
    finish(_two_hosts.train(prepare(_two_hosts), _OPTIMIZER))
    found = numbers(_two_hosts.shared / "run")
    _two_hosts.reset()
    yield found


def begin(cluster: Cluster, *words: str, **options: Any) -> list[Program]:
    """A run whose ranks stand still in their second update: the checkpoint of step 1 is there."""
    env = {"HOLD": "step", "HOLD_AT": "2"}
    programs = cluster.train(prepare(cluster), _OPTIMIZER, _LOST_AFTER, *words, env=env, **options)
    for program in programs:
        await_held(program)
    return programs


def await_held(program: Program) -> None:
    """Until a host's ranks stand still."""
    end = time.monotonic() + _LIMIT_S
    while not list(program.host.seen(DISK).glob("held-*")):
        assert program.is_running, "the run ended before"
        assert time.monotonic() < end, "the ranks did not come there"
        time.sleep(0.02)


def let_go(*hosts: Host) -> None:
    for host in hosts:
        (host.seen(DISK) / "go").touch()


def again(cluster: Cluster, program: Program) -> Program:
    """The same command on the same host once more."""
    return program.host.start(*program.command, env={"SHARDPROOF_RDZV_ID": cluster.secret})


def finish(programs: Sequence[Program], code: int = 0) -> None:
    """Wait until they have ended, all with this exit code."""
    codes = {str(program.host): program.wait(_LIMIT_S) for program in programs}
    assert set(codes.values()) == {code}, f"exit codes {codes}"


def test_a_rank_that_is_killed_is_started_again_with_all_others(two_hosts, undisturbed):
    a, b = begin(two_hosts, max_restarts=1)
    let_go(*two_hosts.hosts)
    b.ranks()[0].kill()
    finish([a, b])
    assert numbers(two_hosts.shared / "run") == undisturbed
    assert "starting again on 2 hosts (a, b) from the newest checkpoint (restart 1 of 1)" in a.output()
    assert a.output().count("resuming from the checkpoint of step 1") == 1


def test_without_restarts_all_hosts_say_why_the_run_ended(two_hosts):
    a, b = begin(two_hosts)
    let_go(*two_hosts.hosts)
    b.ranks()[0].kill()
    codes = {a.wait(_LIMIT_S), b.wait(_LIMIT_S)}
    assert len(codes) == 1 and codes <= {1, 3}, codes
    said = [re.findall(r"SIGKILL ended process|T308 .*", program.output()) for program in (a, b)]
    assert [len(each) for each in said] == [1, 1], said


def test_a_host_that_cannot_start_tells_those_that_wait_for_it(two_hosts):
    tiny_run(two_hosts["a"].folder)  # and host b has no recipe
    a, b = two_hosts.train(f"{DISK}/tiny.toml", f"output.folder={DISK}/run")
    finish([a, b], code=2)
    assert "host b: C001 " in a.output() and "C001 " in b.output()


def test_a_host_that_died_comes_back_with_the_same_command(two_hosts, undisturbed):
    a, b = begin(two_hosts, max_restarts=1)
    let_go(*two_hosts.hosts)
    two_hosts["b"].die()
    a.wait_for("host b was lost")
    two_hosts["b"].mend()
    finish([a, again(two_hosts, b)])
    assert numbers(two_hosts.shared / "run") == undisturbed


def test_host_0_may_die_where_hosts_meet_somewhere_else(two_hosts, undisturbed):
    place = f"b:{PORT}"
    meeting = two_hosts["b"].start(
        "shardproof", "rendezvous", "--rdzv-endpoint", place, env={"SHARDPROOF_RDZV_ID": two_hosts.secret}
    )
    meeting.wait_for("hosts can meet at")
    lose_host_0(two_hosts, place)
    assert numbers(two_hosts.shared / "run") == undisturbed
    meeting.send(signal.SIGTERM)
    assert meeting.wait(_LIMIT_S) == 0


def test_host_0_may_die_with_the_rendezvous_if_it_comes_back(two_hosts, undisturbed):
    lose_host_0(two_hosts, f"a:{PORT}")
    assert numbers(two_hosts.shared / "run") == undisturbed


def lose_host_0(cluster: Cluster, endpoint: str) -> None:
    """Lose host a, start the same command on it again, and wait for the end."""
    a, b = begin(cluster, max_restarts=1, endpoint=endpoint)
    let_go(*cluster.hosts)
    cluster["a"].die()
    b.wait_for("host a was lost")
    cluster["a"].mend()
    finish([again(cluster, a), b])
    assert "starting again on 2 hosts (a, b) from the newest checkpoint (restart 1 of 1)" in b.output()


def test_a_run_goes_on_with_a_host_fewer_and_takes_in_one_that_joins(two_hosts, undisturbed):
    a, b = begin(two_hosts, "--host-wait=5", nnodes="1:2", max_restarts=1)
    (two_hosts["a"].seen(DISK) / "held-0").unlink()
    two_hosts["b"].die()
    await_held(a)  # again in its second update, which is step 3
    assert "starting again on 1 host (a) from the newest checkpoint (restart 1 of 1)" in a.output()
    two_hosts["b"].mend()
    b = again(two_hosts, b)
    a.wait_for("host b (10.77.0.2) joined: saving, then ending this host's ranks")
    let_go(*two_hosts.hosts)
    finish([a, b])
    assert "starting again on 2 hosts (a, b) from the newest checkpoint\n" in a.output()
    rows, _ = numbers(two_hosts.shared / "run")
    assert len(rows) == STEPS and rows[0] == undisturbed[0][0]


@pytest.mark.parametrize("target", ["agent", "rank"])
def test_sigterm_to_one_agent_or_one_rank_stops_the_run_everywhere_and_is_no_failure(
    two_hosts, undisturbed, target
):
    a, b = begin(two_hosts, max_restarts=3)
    if target == "agent":
        b.send(signal.SIGTERM)
        b.wait_for("stopping the ranks")
    else:
        b.ranks()[0].send_signal(signal.SIGTERM)
    let_go(*two_hosts.hosts)
    finish([a, b], code=128 + signal.SIGTERM)
    assert "starting again" not in a.output() + b.output()
    assert len(trajectory(two_hosts.shared / "run")) == 2, "the step was finished and saved"
    if target == "agent":
        finish([again(two_hosts, a), again(two_hosts, b)])
        assert numbers(two_hosts.shared / "run") == undisturbed
