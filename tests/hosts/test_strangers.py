"""Somebody in the training hosts' network who lacks the run's secret: no code of theirs runs, and no number changes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.cluster import PORT, Cluster, Program, tiny_run
from tests.hosts.preloaded import ROOT
from tests.rl.runs import trajectory
from tests.sockets import listening_ports

pytestmark = [pytest.mark.fault, pytest.mark.slow]

_LIMIT_S = 300  # for what takes seconds: nothing here is about time
_STEPS = 10_000  # more than anybody waits for
_STRANGER = str(Path(__file__).with_name("stranger.py"))


def stranger(cluster: Cluster, *words: str, host: str = "stranger") -> Program:
    return cluster[host].start("python", _STRANGER, *words)


def said(program: Program, name: str) -> Any:
    """What a stranger said under a name, once it has."""
    program.wait_for(f'{{"{name}":', _LIMIT_S)
    return next(row[name] for row in rows(program) if name in row)


def rows(program: Program) -> Iterator[dict[str, Any]]:
    for line in program.output().splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def promised() -> set[tuple[str, ...]]:
    """What docs/security.md says: who listens, where, at which port and with which secret, on hosts without a GPU."""
    text = (ROOT / "docs" / "security.md").read_text().partition("### Several nodes")[2]
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table]
    return {row for row in cells if len(row) == 5 and "GPU" not in row[0]}


def described(a: Program, b: Program) -> set[tuple[str, ...]]:
    """What listens on the two hosts of a run, in the words of that table."""
    found = set()
    for program in (a, b):
        assert program.process is not None
        for address, port in listening_ports([program.process.pid]):
            assert program is a and address == a.host.address, f"{program} listens at {address}:{port}"
            if port == PORT:
                words = ("the launcher of the endpoint's host", "rendezvous", "the endpoint's", "`--rdzv-id`")
            else:
                words = ("the launcher of rank 0's host", "torch's store", "a free one", "none")
            found.add((*words[:2], "the one that reaches the other hosts", *words[2:]))
        for rank in program.ranks():
            for address, _ in listening_ports([rank.pid]):
                assert address == program.host.address, f"a rank of {program} listens at {address}"
                found.add(
                    ("every rank", "gloo", "the one that reaches the other hosts", "a free one", "none")
                )
    return found


def ports_of(*programs: Program) -> dict[str, list[int]]:
    """The ports at which the launchers and ranks of each host listen."""
    found = {}
    for program in programs:
        assert program.process is not None
        pids = [program.process.pid, *(rank.pid for rank in program.ranks())]
        found[program.host.address] = sorted(port for _, port in listening_ports(pids))
    return found


def stop(programs: list[Program]) -> None:
    """As a scheduler stops a run: a signal to one host, all hosts save and end with that signal's code."""
    programs[0].send(signal.SIGTERM)
    assert [program.wait(_LIMIT_S) for program in programs] == [128 + signal.SIGTERM] * len(programs)


def test_a_stranger_runs_no_code_and_changes_no_number() -> None:
    with Cluster(3, hostnames=("a", "b", "stranger"), loopback_names=False) as cluster:
        assert cluster.shared is not None
        recipe = tiny_run(cluster.shared, steps=_STEPS, deadline_s=_LIMIT_S)
        a, b, _ = cluster.hosts
        mark = "/tmp/shared/mark"  # every host has that folder

        tap = stranger(cluster, "listen", str(PORT), host="b")
        said(tap, "listening")
        attack = stranger(
            cluster, "attack", mark, a.address, b.address
        )  # from before the hosts meet until the end
        words = (recipe, "output.save_every=1000000")
        programs = cluster.train(*words, f"output.folder={cluster.shared}/attacked", hosts=[a, b])
        programs[0].wait_for("step 1/", _LIMIT_S)

        assert described(*programs) == promised()
        replayed = stranger(cluster, "replay", a.address, str(PORT), said(tap, "said"))
        assert said(replayed, "answer") in ("", "00000000")  # nothing, or that it was not signed
        ports = ports_of(*programs)
        launcher = programs[0].process
        assert launcher is not None
        (store,) = (port for _, port in listening_ports([launcher.pid]) if port != PORT)
        vandal = stranger(cluster, "store", mark, a.address, str(store))
        assert vandal.wait(_LIMIT_S) == 0 and said(vandal, "keys")  # torch's store asks nobody who they are

        # Everything was tried at exactly the ports that are known to listen.
        end = time.monotonic() + _LIMIT_S
        while not any(row["open"] == ports for row in rows(attack)):
            assert attack.is_running and time.monotonic() < end, f"{ports}: {attack.output()}"
            time.sleep(0.1)
        stop(programs)
        assert not (cluster.shared / "mark").exists(), "what a stranger sent was unpickled"

        attack.close()
        numbers = trajectory(cluster.shared / "attacked")
        again = cluster.train(*words, f"output.folder={cluster.shared}/alone", hosts=[a, b])
        metrics = cluster.shared / "alone" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < len(numbers):
            assert again[0].is_running and time.monotonic() < end + _LIMIT_S
            time.sleep(0.1)
        stop(again)
        assert trajectory(cluster.shared / "alone")[: len(numbers)] == numbers
