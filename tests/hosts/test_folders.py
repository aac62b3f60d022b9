"""Output folders on hosts that share one, and on hosts that share none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.cluster import DISK, PORT, Cluster, Host, Program, tiny_run
from tests.hosts.test_restarts import await_held, let_go, prepare
from tests.rl.runs import lines, numbers, trajectory

_LIMIT_S = 200  # for a run of seconds: nothing here is about time
_DESCRIPTION = {"checksums.txt", "hosts.json", "index.json", "state.json"}
_LEFT_BYTES = 128 * 1024

pytestmark = [pytest.mark.fault, pytest.mark.slow]


def on_own_disks(cluster: Cluster) -> str:
    """The recipe's path: the same on every host, of files that each has for itself."""
    for host in cluster.hosts:
        recipe = tiny_run(host.folder)
        recipe.write_text(recipe.read_text().replace(str(host.folder), DISK))
    return f"{DISK}/tiny.toml"


def train(hosts: Sequence[Host], recipe: str, *words: str, ranks: int = 1) -> list[Program]:
    """Start the run; the first host is host 0."""
    start = ["--nnodes", str(len(hosts)), "--rdzv-endpoint", f"{hosts[0].name}:{PORT}"]
    start = start if len(hosts) > 1 else []
    secret = {"SHARDPROOF_RDZV_ID": "0123456789abcdef0123456789abcdef"}
    command = ("shardproof", "train", recipe, *words, f"train.ranks={ranks}", *start)
    return [host.start(*command, env=secret) for host in hosts]


def finish(programs: Sequence[Program]) -> None:
    codes = {str(program.host): program.wait(_LIMIT_S) for program in programs}
    assert set(codes.values()) == {0}, f"exit codes {codes}"


def failed(programs: Sequence[Program]) -> list[str]:
    """What each host printed, once all have ended with one and the same exit code, which is not 0."""
    codes = [program.wait(_LIMIT_S) for program in programs]
    assert len(set(codes)) == 1 and codes[0] > 0, codes
    return [program.output() for program in programs]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_each_host_keeps_its_own_and_any_hosts_go_on(two_hosts: Cluster) -> None:
    """Two ranks, which in each part of the run are on other hosts, come to what two ranks on one host come to."""
    recipe = on_own_disks(two_hosts)
    a, b = two_hosts["a"], two_hosts["b"]
    alone = train([a], recipe, "train.steps=4", f"output.folder={DISK}/alone", ranks=2)
    first = train([a, b], recipe, "train.steps=1")
    finish([*alone, *first])
    assert "host b does not see the folder of host a" in first[0].output()
    step = Path("run", "checkpoints", "step-00000001")
    assert files(a.folder / step) == _DESCRIPTION | {"rank-0.bin"}
    assert files(b.folder / step) == _DESCRIPTION | {"rank-1.bin"}
    assert {"metrics.jsonl", "events.jsonl", "run.json", "report.html", "model"} < files(a.folder / "run")
    assert files(b.folder / "run") == {"checkpoints", "config.json"}

    again = train([a, b], recipe, "train.steps=1")
    finish(again)
    assert "This run is complete" in again[0].output()
    assert "host a: This run is complete" in again[1].output(), "host b alone could not know"

    swapped = train([b, a], recipe, "train.steps=2")
    finish(swapped)
    assert "fetching the run's metrics and settings from host a" in swapped[0].output()

    (said,) = failed(train([b], recipe, "train.steps=3", ranks=2))
    assert (
        "E407" in said
        and "step-00000002 lacks rank-1.bin, which host a kept in its own output.folder" in said
    )
    step = Path("run", "checkpoints", "step-00000002")
    shutil.copy(a.folder / step / "rank-1.bin", b.folder / step)  # as the error's fix says
    finish(train([b], recipe, "train.steps=3", ranks=2))

    finish(train([b, a], recipe, "train.steps=4"))
    assert numbers(b.folder / "run") == numbers(a.folder / "alone")


def test_a_disk_that_is_full_on_one_host_ends_the_run_on_all_and_costs_no_checkpoint(
    two_hosts: Cluster,
) -> None:
    recipe = on_own_disks(two_hosts)
    a, b = two_hosts.hosts
    programs = train([a, b], recipe, "train.steps=400", "--max-restarts", "1")
    programs[0].wait_for("step 2/400", _LIMIT_S)
    while any(program.is_running for program in programs):
        _fill(b.folder)
        time.sleep(0.02)
    for said in failed(programs):
        assert f"E408 save: rank 1: host b: {DISK}/run/checkpoints cannot be written: No space left" in said
    assert programs[0].output().count("starting again") == 1
    kept = [files(host.folder / "run" / "checkpoints") for host in two_hosts.hosts]
    assert kept[0] == kept[1]
    (b.folder / "filler").unlink()
    last = max(int(name.removeprefix("step-")) for name in kept[0])
    finish(train([a, b], recipe, f"train.steps={last + 1}"))
    assert len(trajectory(a.folder / "run")) == last + 1


def _fill(disk: Path) -> None:
    """Leave too little of a disk for a checkpoint, and enough for what else a host writes."""
    found = os.statvfs(disk)
    free = found.f_bavail * found.f_frsize - _LEFT_BYTES
    if free > 0:
        with (disk / "filler").open("ab") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)


def test_a_folder_that_hosts_share_has_one_run(two_hosts: Cluster) -> None:
    """It lies behind a link on each host's own disk; what is in it proves that it is one. A second run is refused."""
    assert two_hosts.shared is not None
    recipe = str(tiny_run(two_hosts.shared))
    a, b = two_hosts.hosts
    (a.folder / "out").symlink_to(two_hosts.shared)
    (b.folder / "out").symlink_to(two_hosts.shared)
    folder = f"output.folder={DISK}/out/run"
    programs = train([a, b], recipe, "train.steps=400", "output.save_every=0", folder)
    programs[0].wait_for("step 1/400", _LIMIT_S)
    (said,) = failed(train([b], recipe, "train.steps=400", "output.save_every=0", folder))
    assert "C006" in said and "on host a since" in said, said
    for program in programs:
        program.send(signal.SIGTERM)
    codes = [program.wait(_LIMIT_S) for program in programs]
    assert codes[0] == codes[1] > 0
    run = two_hosts.shared / "run"
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
    (step,) = (run / "checkpoints").glob("step-*")
    assert files(step) == {"checksums.txt", "index.json", "state.json", "rank-0.bin", "rank-1.bin"}


def test_a_host_that_was_frozen_writes_nothing_into_the_run_that_went_on_without_it(
    two_hosts: Cluster,
) -> None:
    """Host a, with rank 0, stands still in the save of step 2 until host b has finished the run alone."""
    assert two_hosts.shared is not None
    recipe = prepare(two_hosts)
    a, b = two_hosts.hosts
    secret, place = {"SHARDPROOF_RDZV_ID": two_hosts.secret}, f"b:{PORT}"
    meeting = b.start("shardproof", "rendezvous", "--rdzv-endpoint", place, env=secret)
    meeting.wait_for("hosts can meet at", _LIMIT_S)
    words = ('optimizer.name="holding:Optimizer"', "--lost-after=5", "--host-wait=5")
    hold = {"HOLD": "save", "HOLD_AT": "2"}
    first, second = two_hosts.train(
        recipe, *words, nnodes="1:2", max_restarts=1, endpoint=place, env={**secret, **hold}
    )
    await_held(first)
    await_held(second)
    a.freeze()
    let_go(a, b)
    finish([second])
    assert "starting again on 1 host (b)" in second.output()
    run = two_hosts.shared / "run"
    before = _digests(run)
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    meeting.send(signal.SIGKILL)
    a.thaw()
    end = time.monotonic() + _LIMIT_S
    while first.ranks():
        assert time.monotonic() < end, "the ranks of host a did not end"
        time.sleep(0.05)
    assert _digests(run) == before


def _digests(folder: Path) -> dict[str, str]:
    """Of all files in a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_a_host_that_is_emptied_leaves_what_it_sees_of_this_machine(monkeypatch):
    """A source tree in /tmp is mounted into a host's own /tmp, and no test may delete it."""
    tree = Path(tempfile.mkdtemp(prefix="tree-", dir="/tmp")) / "main"
    try:
        (tree / "src").mkdir(parents=True)
        monkeypatch.setattr("tests.hosts.host._KEPT", [str(tree)])
        with Cluster(1) as cluster:
            (host,) = cluster.hosts
            host.seen("/tmp/left").mkdir()
            host.reset()
            assert not host.seen("/tmp/left").exists() and host.seen(tree / "src").exists()
        assert (tree / "src").exists()
    finally:
        shutil.rmtree(tree.parent)
