"""Links that are cut, hosts that freeze and networks that lose packets: a run ends with a name, on every host, or goes on."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from tests.hosts.cluster import DISK, Cluster, Program, tiny_run

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

LOST_AFTER_S = 5
FAILED = 3


def start_and_hold(
    cluster: Cluster, place: str, number: int, *words: str, deadline_s: float = 60, **options
) -> list[Program]:
    """A run whose ranks all stand still when they come to that place for the nth time."""
    assert cluster.shared is not None
    recipe = tiny_run(cluster.shared, steps=6, deadline_s=deadline_s)
    shutil.copy(Path(__file__).with_name("holding.py"), cluster.shared)
    env = {"HOLD": place, "HOLD_AT": str(number)}
    programs = cluster.train(recipe, 'optimizer.name="holding:Optimizer"', *words, env=env, **options)
    end = time.monotonic() + 120
    while not all(list(host.seen(DISK).glob("held-*")) for host in cluster.hosts):
        assert time.monotonic() < end, "the ranks did not come there"
        assert all(program.is_running for program in programs), "the run ended before"
        time.sleep(0.05)
    return programs


def let_go(cluster: Cluster) -> None:
    for host in cluster.hosts:
        (host.seen(DISK) / "go").touch()


def findings(program: Program) -> list[str]:
    """The findings that a host printed."""
    return re.findall(r"^[A-Z]\d{3} .*", program.output(), re.MULTILINE)


def end_of(programs: list[Program], since: float, limit_s: float) -> list[str]:
    """The one finding that each host printed, once all have ended, in time and with the same exit code."""
    codes = [program.wait(120) for program in programs]
    took = time.monotonic() - since
    assert codes == [FAILED] * len(programs)
    assert took < limit_s, f"{took:.0f} s"
    each = [findings(program) for program in programs]
    assert [len(found) for found in each] == [1] * len(programs), each
    return [found[0] for found in each]


@pytest.mark.parametrize("place, number", [("step", 3), ("sync", 4), ("reward", 3)])
def test_a_link_that_is_cut_is_named_on_both_hosts(two_hosts, place, number):
    """In a step and in a sync; and while every rank works for itself, for minutes, and waits for nobody."""
    programs = start_and_hold(two_hosts, place, number, f"--lost-after={LOST_AFTER_S}")
    cut_at = time.monotonic()
    two_hosts["b"].cut()
    if place != "reward":
        let_go(two_hosts)
    on_a, on_b = end_of(programs, cut_at, LOST_AFTER_S + 30)
    assert re.match(r"T308 \w+: host b was lost: not heard of for \d+ s\. ", on_a), on_a
    assert re.match(r"T308 \w+: host a was lost: not heard of for \d+ s\. ", on_b), on_b


def test_a_frozen_host_is_named_and_ends_when_it_thaws(two_hosts):
    programs = start_and_hold(two_hosts, "step", 3, "--lost-after=12", deadline_s=8, ranks=[2, 1])
    since = time.monotonic()
    two_hosts["b"].freeze()
    let_go(two_hosts)
    on_a = end_of(programs[:1], since, 8 + 30)[0]
    assert re.match(r"T308 \w+: host b \(rank 2\) did not answer: cut off", on_a), on_a
    assert "Ranks 0, 1 on host a in " in on_a
    since = time.monotonic()
    two_hosts["b"].thaw()
    on_b = end_of(programs[1:], since, 30)[0]
    assert "host a" in on_b, on_b


def test_a_run_whose_link_was_cut_in_a_save_goes_on_once_it_is_mended(two_hosts):
    programs = start_and_hold(two_hosts, "save", 2, f"--lost-after={LOST_AFTER_S}", max_restarts=1)
    two_hosts["b"].cut()
    let_go(two_hosts)
    for program, other in zip(programs, "ba", strict=True):
        program.wait_for(f"T308 save: host {other} was lost")
    two_hosts["b"].mend()
    assert [program.wait(120) for program in programs] == [0, 0]
    assert [len(findings(program)) for program in programs] == [1, 1]
    said = programs[0].output()
    assert "starting again on 2 hosts (a, b) from the newest checkpoint (restart 1 of 1)" in said
    assert "resuming from the checkpoint of step 1" in said
    assert "step 6/6" in said


def test_a_slow_network_that_loses_packets_ends_nothing(two_hosts):
    words = (
        "train.steps=2",
        "output.save_every=0",
        "output.save_model=false",
        f"--lost-after={LOST_AFTER_S}",
    )
    programs = start_and_hold(two_hosts, "reward", 2, *words)
    two_hosts["b"].shape(delay_ms=100, loss_percent=5)
    let_go(two_hosts)
    assert [program.wait(300) for program in programs] == [0, 0]
    assert [findings(program) for program in programs] == [[], []]
