"""Claims on folders between hosts and between attempts of one job: who is refused, who takes over, who finds out."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof import folder_lock
from shardproof.errors import ShardproofError
from shardproof.folder_lock import ATTEMPT, LOCK_NAME, FolderLock
from tests.claims import leave_claim

pytestmark = pytest.mark.fault

ELSEWHERE = "0f" * 18  # the name of another host's kernel


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders that touch their files often, and are watched for a short while."""
    monkeypatch.setattr(folder_lock, "_BEAT_S", 0.05)
    monkeypatch.setattr(folder_lock, "_WATCH_S", 1.0)


def claimed(folder: Path, monkeypatch: pytest.MonkeyPatch, attempt: str | None) -> FolderLock:
    """A claim by a process of this attempt."""
    if attempt is None:
        monkeypatch.delenv(ATTEMPT, raising=False)
    else:
        monkeypatch.setenv(ATTEMPT, attempt)
    lock = FolderLock(folder)
    lock.acquire("output")
    return lock


def test_a_later_attempt_takes_the_folder_from_one_that_only_seemed_dead(tmp_path, monkeypatch):
    """The earlier one was frozen, say. When it goes on, it finds out, and what it gives up is its own claim alone."""
    first = claimed(tmp_path, monkeypatch, "job:0")
    third = claimed(tmp_path, monkeypatch, "job:2")
    assert first.is_lost() and not third.is_lost()
    first.release()
    assert not third.is_lost()
    with pytest.raises(ShardproofError, match=r"C006 .* is in use by process"):
        claimed(tmp_path, monkeypatch, "job:1")
    third.release()
    claimed(tmp_path, monkeypatch, "job:1").release()
    assert os.listdir(tmp_path) == [LOCK_NAME]


@pytest.mark.parametrize("other", ["job:0", "other:1", "job2:5", None, "job:", "job:x", ":3"])
def test_nobody_else_takes_it(tmp_path, monkeypatch, other):
    first = claimed(tmp_path, monkeypatch, "job:0")
    with pytest.raises(ShardproofError, match="is in use by process"):
        claimed(tmp_path, monkeypatch, other)
    assert not first.is_lost()
    first.release()


def test_a_claim_without_an_attempt_is_taken_by_none(tmp_path, monkeypatch):
    first = claimed(tmp_path, monkeypatch, None)
    with pytest.raises(ShardproofError, match="is in use by process"):
        claimed(tmp_path, monkeypatch, "job:7")
    first.release()


def test_a_claim_of_another_host_that_is_kept_up_is_respected(tmp_path, monkeypatch, quick):
    """As on a network's disk whose locks reach no other host."""
    with monkeypatch.context() as there:
        there.setattr(folder_lock, "_kernel", lambda: ELSEWHERE)
        there.setattr(fcntl, "flock", lambda *_: None)
        first = claimed(tmp_path, monkeypatch, None)
    with pytest.raises(ShardproofError, match="is in use by process"):
        claimed(tmp_path, monkeypatch, None)
    first.release()
    claimed(tmp_path, monkeypatch, None).release()


def test_a_claim_of_another_host_that_nobody_keeps_up_is_void(tmp_path, monkeypatch, quick):
    with monkeypatch.context() as there:
        there.setattr(folder_lock, "_kernel", lambda: ELSEWHERE)
        leave_claim(tmp_path)
    lock = claimed(tmp_path, monkeypatch, None)
    assert not lock.is_lost()
    lock.release()


def test_a_later_attempt_does_not_watch_a_dead_hosts_claim(tmp_path, monkeypatch):
    monkeypatch.setenv(ATTEMPT, "job:0")
    with monkeypatch.context() as there:
        there.setattr(folder_lock, "_kernel", lambda: ELSEWHERE)
        leave_claim(tmp_path)

    def watch(_: FolderLock) -> bool:
        raise AssertionError("it was watched")

    monkeypatch.setattr(FolderLock, "_beats", watch)
    claimed(tmp_path, monkeypatch, "job:1").release()


def test_a_file_system_without_locks(tmp_path, monkeypatch, quick):
    """What the holder has noted takes the lock's place."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = claimed(tmp_path, monkeypatch, "job:0")
    with pytest.raises(ShardproofError, match="is in use by process"):
        claimed(tmp_path, monkeypatch, "other:0")
    second = claimed(tmp_path, monkeypatch, "job:1")
    assert first.is_lost() and not second.is_lost()
    second.release()
    claimed(tmp_path, monkeypatch, None).release()
    leave_claim(tmp_path)
    claimed(tmp_path, monkeypatch, None).release()


def test_of_many_that_find_a_dead_claim_one_gets_the_folder(tmp_path):
    leave_claim(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from shardproof.errors import ShardproofError; from shardproof.folder_lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.readline()\n"
        "try: lock.acquire('output'); print('held', lock.is_lost(), flush=True)\n"
        "except ShardproofError: print('refused', flush=True)\n"
        "sys.stdin.read()"
    )
    start = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    everyone = [subprocess.Popen(start, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    for each in everyone:
        assert each.stdout.readline() == "ready\n"
    for each in everyone:
        each.stdin.write("\n")
        each.stdin.flush()
    said = sorted(each.stdout.readline() for each in everyone)
    for each in everyone:
        each.communicate("")
    assert said == ["held False\n"] + ["refused\n"] * 5
