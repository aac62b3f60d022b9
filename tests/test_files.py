"""A run's files are whole at every instant; a folder has one owner; strangers' files are opened with care."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof import files
from shardproof.bounds import largest, require_number, within
from shardproof.errors import ShardproofError
from shardproof.files import append_line, current_folder, replace_folder, write_atomic
from shardproof.folder_lock import LOCK_NAME, FolderLock, claim_is_dead
from shardproof.foreign import open_foreign, read_foreign, read_json
from shardproof.text import printable


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def fail_to_sync(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail_to_sync)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_line_after_a_torn_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "met')
    append_line(path, {"step": 3})
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1}
    assert json.loads(lines[2]) == {"step": 3}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_replaced_folder_is_findable_at_every_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    final, seen = tmp_path / "step-1", []
    real_rename, real_remove = os.rename, files.shutil.rmtree

    def look() -> None:
        seen.append((current_folder(final) / "name").read_text())

    def rename(*args: object, **kwargs: object) -> None:
        look()
        real_rename(*args, **kwargs)  # type: ignore[arg-type]
        look()

    def remove(*args: object, **kwargs: object) -> None:
        look()
        real_remove(*args, **kwargs)  # type: ignore[arg-type]

    for folder, text in ((final, "old"), (tmp_path / ".partial-1", "new")):
        folder.mkdir()
        (folder / "name").write_text(text)
    monkeypatch.setattr(files.os, "rename", rename)
    monkeypatch.setattr(files.shutil, "rmtree", remove)
    replace_folder(tmp_path / ".partial-1", final)
    assert set(seen) <= {"old", "new"} and seen
    assert (final / "name").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_folder_has_one_owner_and_a_dead_owner_is_none(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from shardproof.folder_lock import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).acquire('output'); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    lock = FolderLock(tmp_path)
    with pytest.raises(ShardproofError, match=f"process {holder.pid} on host "):
        lock.acquire("output")
    holder.kill()
    holder.wait()
    lock.acquire("output")
    lock.release()
    FolderLock(tmp_path).acquire("output")


def test_an_owner_learns_that_its_folder_is_gone(tmp_path: Path) -> None:
    """Removed, made again, and claimed by somebody else: the kernel's lock says nothing about it."""
    folder = tmp_path / "run"
    folder.mkdir()
    first, second = FolderLock(folder), FolderLock(folder)
    first.acquire("output")
    assert not first.is_lost()
    shutil.rmtree(folder)
    assert first.is_lost()
    folder.mkdir()
    assert first.is_lost()
    (folder / LOCK_NAME).write_text("process 1 on host other\n")
    second.acquire("output")
    assert first.is_lost() and not second.is_lost()
    for lock in (first, second):
        lock.release()


def test_a_lock_empties_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK_NAME).symlink_to(precious)
    with pytest.raises(OSError):
        FolderLock(folder).acquire("output")
    assert precious.read_text() == "data"


def test_strangers_files_must_be_plain_files_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "latin.json").write_bytes(b'"\xe9"')
    with pytest.raises(ShardproofError, match="not a regular file"):
        open_foreign(folder / "pipe", "read")
    with pytest.raises(ShardproofError, match="L110"):
        open_foreign(folder / "link", "read", inside=folder)
    with pytest.raises(ShardproofError, match="the limit is 10"):
        read_foreign(folder / "deep.json", "read", max_bytes=10)
    for name in ("deep.json", "latin.json"):
        with pytest.raises(ShardproofError, match=f"{name} is not valid JSON"):
            read_json(folder / name, "read", inside=folder)


def test_a_hub_caches_links_are_inside(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "1234")
    assert read_json(snapshot / "config.json", "read", inside=snapshot) == {}


def test_nan_is_within_no_bound() -> None:
    assert within(1.0, 1.0) and not within(1.1, 1.0)
    assert not within(math.nan, 1.0) and not within(0.0, math.nan)
    assert math.isnan(largest([0.1, math.nan])) and math.isnan(largest([math.nan, 0.1]))
    assert largest([0.1, 0.3]) == 0.3 and largest([]) == 0.0
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ShardproofError, match=r"lr=.* must be a finite number above 0"):
            require_number("optimizer", "lr", bad, above=0.0)


def test_a_terminal_is_not_told_what_to_do() -> None:
    assert (
        printable("a\x1b]0;title\x07b\x9b31m\u202eevil\r\ud800")
        == r"a\x1b]0;title\x07b\x9b31m\u202eevil\r\ud800"
    )
    assert printable("naïve 漢字\n\tnext") == "naïve 漢字\n\tnext"
    assert printable("x" * 50, limit=10) == "x" * 10 + "..."


@pytest.mark.fault
def test_a_claim_is_dead_only_if_its_process_was_killed(tmp_path: Path) -> None:
    assert not claim_is_dead(tmp_path)  # nobody ever claimed it
    script = (
        "import os, sys; from pathlib import Path; from shardproof.folder_lock import FolderLock, claim_is_dead\n"
        "folder = Path(sys.argv[1]); lock = FolderLock(folder); lock.acquire('test')\n"
        "assert not claim_is_dead(folder)\n"
        "lock.release() if sys.argv[2] == 'release' else os.kill(os.getpid(), 9)"
    )
    for end, dead in (("release", False), ("kill", True), ("release", False)):
        subprocess.run([sys.executable, "-c", script, str(tmp_path), end], check=not dead)
        assert claim_is_dead(tmp_path) is dead
    lock_file = tmp_path / LOCK_NAME
    subprocess.run([sys.executable, "-c", script, str(tmp_path), "kill"], check=False)
    first, proof = lock_file.read_text().splitlines()
    kernel, namespace, start, token = proof.split(" ")
    here = f"process {os.getpid()} on host {socket.gethostname()} since now"
    for holder, dead in (
        (f"{first}\n{proof}\n", True),
        (f"{first}\n{kernel} pid:[1] {start} {token}\n", True),  # of a container on this kernel
        (f"{here}\n{kernel} {namespace} {start} {token}\n", True),  # its number is used again
        (f"{first}\n{'0' * 36} {namespace} {start} {token}\n", False),  # of a host of the same name
    ):
        lock_file.write_text(holder)
        assert claim_is_dead(tmp_path) is dead
    for holder in (first, "process 999999999 on host elsewhere since now", "process x on host y", "\udcff\0"):
        lock_file.write_bytes(holder.encode("utf-8", "surrogateescape"))
        assert not claim_is_dead(tmp_path)


@pytest.mark.fault
def test_a_claim_that_a_container_holds_is_alive(tmp_path: Path) -> None:
    """Its process has a number that this one does not know; the lock says that it lives."""
    lock = FolderLock(tmp_path)
    lock.acquire("test")
    text = (tmp_path / LOCK_NAME).read_text()
    (tmp_path / LOCK_NAME).write_text(text.replace(str(os.getpid()), "999999999"))
    assert not claim_is_dead(tmp_path)
    lock.release()
