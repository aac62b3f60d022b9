"""What hosts must have alike, on hosts that do not: everything that differs is named at once, with both hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from tests.hosts.cluster import PORT, Cluster, Host, Program, tiny_run
from tests.hosts.test_layouts import finish

_LIMIT_S = 300  # for a run of seconds: nothing here is about time

pytestmark = [pytest.mark.fault, pytest.mark.slow]

# What Python runs first on a host with another library and a clock that is ahead.
_OTHER_VERSION = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # one who only asks does not import it
        execute = spec.loader.exec_module

        def run(module):
            execute(module)
            type(sys.modules[name]).__version__ = "9.9.9"  # the module itself is replaced later

        spec.loader.exec_module = run
        return spec

sys.meta_path.insert(0, Finder())
"""
_OTHER_CLOCK = """
import time

now = time.time_ns
time.time_ns = lambda: now() + 120_000_000_000
"""
_REWARD = "def score(prompt, completion, row):\n    return float(completion == row['answer'])\n"


def prepare(host: Host) -> Path:
    """A run's recipe on a host's own disk, with all that it names."""
    recipe = tiny_run(host.folder)
    (host.folder / "marks.py").write_text(_REWARD)
    return recipe


def start(cluster: Cluster, *words: str, **others: str) -> list[Program]:
    """The documented command on both hosts; `others` are words that host b has by itself. It runs what it is given first."""
    programs = []
    for host in cluster.hosts:
        is_real = (host.folder / "sitecustomize.py").exists()
        command = ["shardproof", "train", str(host.folder / "tiny.toml"), *words]
        command += others.values() if host.name == "b" else ()
        command += ["reward.functions=[{name='marks:score'}]", f"output.folder={cluster.shared}/run"]
        command += ["--nnodes", "2", "--rdzv-endpoint", f"a:{PORT}"]
        env = {"SHARDPROOF_RDZV_ID": cluster.secret, "PYTHONPATH": str(host.folder)}
        programs.append(host.start(*command, env=env, real=is_real))
    return programs


def test_everything_that_differs_is_named_with_both_hosts(two_hosts: Cluster) -> None:
    for host in two_hosts.hosts:
        prepare(host)
    other = two_hosts["b"].folder
    (other / "sitecustomize.py").write_text(_OTHER_VERSION)
    (other / "marks.py").write_text(_REWARD.replace("==", "!="))
    rows = (other / "train.jsonl").read_text().splitlines(keepends=True)
    (other / "train.jsonl").write_text("".join(rows[1:]))
    tokenizer = other / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    programs = start(two_hosts, lr="optimizer.lr=0.25")
    assert [program.wait(_LIMIT_S) for program in programs] == [2, 2]
    said = programs[0].output()
    on = r"on host b \(rank 1\)", r"on host a \(rank 0\)"
    digest = "(sha256 )?[0-9a-f]{12}"
    for pattern in (
        f"same versions: transformers is 9.9.9 {on[0]}, {transformers.__version__} {on[1]}.",
        f"same recipe: optimizer.lr is 0.25 {on[0]}, 0.001 {on[1]}.",
        f"same tokenizer: tokenizer.json is {digest} {on[0]}, {digest} {on[1]}.",
        f"same data: data.train is {digest} {on[0]}, {digest} {on[1]}.",
        f"same rewards: source of marks:score is {digest} {on[0]}, {digest} {on[1]}.",
    ):
        assert re.search(pattern, said), pattern
    assert "L111" not in said and "the same code" not in said
    assert not list(two_hosts.shared.iterdir()), "nothing has begun"


def test_a_clock_that_is_ahead_is_warned_of_and_hosts_are_listed(two_hosts: Cluster) -> None:
    for host in two_hosts.hosts:
        prepare(host)
    (two_hosts["b"].folder / "sitecustomize.py").write_text(_OTHER_CLOCK)
    programs = start(two_hosts, "train.steps=1")
    finish(programs)
    said = programs[0].output()
    assert re.search(r"2 hosts:\n +host +ranks +devices +cores +free memory +free disk +clock\n", said)
    assert re.search(r"\n +b +1 .* GiB +[\d.]+ GiB +\+1[12]\d\.\d s\n", said)
    assert re.search(
        r"the clock of host b is 1[12]\d\.\d s ahead of that of host a: .* Fix: synchronise", said
    )
    facts = json.loads((two_hosts.shared / "run" / "run.json").read_text())
    assert [(host["name"], host["ranks"]) for host in facts["hosts"]] == [("a", [0]), ("b", [1])]
    assert facts["nodes"] == 2 and facts["hosts"][1]["clock_s"] > 100
    assert {*facts["hosts"][0]} >= {"devices", "cores", "memory_free_bytes", "disk_free_bytes"}
