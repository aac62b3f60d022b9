"""The folders that a run's checkpoints lie in: which are complete, how one is published, what its files must hold."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardproof.errors import ShardproofError, fail
from shardproof.files import (
    PARTIAL,
    REMOVED,
    REPLACED,
    current_folder,
    remove_folder,
    replace_folder,
    write_atomic,
)
from shardproof.foreign import open_foreign, read_foreign, read_json

STATE_NAME = "state.json"
CHECKSUMS_NAME = "checksums.txt"
HOSTS_NAME = "hosts.json"  # who wrote which file, if not all were written into one folder
_PICKLED_INDEX = ".metadata"  # of torch DCP's own checkpoints
_STEP_PATTERN = re.compile(r"step-(\d{1,18})")
_CHUNK_BYTES = 8 * 2**20

Sum = tuple[str, int, int]  # a file's name, its size, its checksum


def checkpoint_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint that `list_checkpoints` found."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first, under their names; `current_folder` says where each lies."""
    names = {path.name.removeprefix(REPLACED) for path in root.iterdir() if path.is_dir()}
    found = [(int(match[1]), root / name) for name in names if (match := _STEP_PATTERN.fullmatch(name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(folder: Path, which: str) -> Path:
    """The asked checkpoint's folder."""
    itself = current_folder(folder)
    is_one = any((itself / name).exists() for name in (STATE_NAME, CHECKSUMS_NAME))
    if is_one or (_STEP_PATTERN.fullmatch(folder.name) and itself.is_dir()):
        return itself
    found = list_checkpoints(folder) if folder.is_dir() else []
    if not found:
        raise fail("E407", "resume", f"{folder} holds no complete checkpoint.")
    if which == "latest":
        return current_folder(found[-1])
    named = [path for path in found if path.name == which]
    if not named:
        raise fail(
            "E407", "resume", f"{folder} has no {which!r}; it has {', '.join(path.name for path in found)}."
        )
    return current_folder(named[0])


def name_of(folder: Path) -> str:
    """A checkpoint's name, wherever it lies."""
    return folder.name.removeprefix(REPLACED)


def clear_leftovers(root: Path) -> None:
    """Remove what interrupted saves left, and restore a checkpoint that one had set aside. The caller holds the lock."""
    for path in list(root.iterdir()):
        if path.name.startswith((PARTIAL, REMOVED)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        elif path.name.startswith(REPLACED):
            final = root / name_of(path)
            if final.exists():
                remove_folder(path)
            else:
                os.rename(path, final)


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its name."""
    sums = (partial / CHECKSUMS_NAME).read_bytes()
    try:
        replace_folder(partial, final)
    except OSError:
        if not holds(final, sums):
            raise


def drop_old(root: Path, kept: Collection[str], final: Path) -> None:
    """Remove all checkpoints but those of the names in `kept`, and the one that was just written.

    A failure to remove an old checkpoint does not fail the new one: the next save tries again.
    """
    with contextlib.suppress(OSError):
        for old in list_checkpoints(root):
            if old.name not in kept and old != final:
                remove_folder(old)


def holds(folder: Path, sums: bytes) -> bool:
    """Whether a folder is the checkpoint with these checksums."""
    try:
        return (folder / CHECKSUMS_NAME).read_bytes() == sums
    except OSError:
        return False


# Checksums.


def sums_of(folder: Path, names: Iterable[str]) -> list[Sum]:
    """Size and checksum of files as they lie on disk."""
    return [(name, (folder / name).stat().st_size, checksum(folder / name)) for name in sorted(names)]


def write_sums(folder: Path, sums: Iterable[Sum]) -> None:
    """Note the sums of all other files, and in the last line the sum of the lines before it."""
    lines = "".join(f"{crc:08x} {size} {name}\n" for name, size, crc in sorted(sums))
    write_atomic(folder / CHECKSUMS_NAME, lines + _last_line(lines.encode()))


def _last_line(raw: bytes) -> str:
    return f"{zlib.crc32(raw):08x} {len(raw)} {CHECKSUMS_NAME}\n"


def read_sums(folder: Path, is_part: bool = False) -> dict[str, tuple[int, int]]:
    """{file: (size, checksum)} as noted, if the note is whole and the folder has just these files, of these sizes.

    A folder that is a part of a checkpoint may lack some of them.
    """
    noted = read_noted(folder)
    _check_listing(folder, noted, is_part)
    return noted


def read_noted(folder: Path) -> dict[str, tuple[int, int]]:
    """{file: (size, checksum)} as noted, if the note is whole."""
    label = name_of(folder)
    if (folder / _PICKLED_INDEX).exists():
        message = (
            f"{label}: its index {_PICKLED_INDEX} is a pickle, which could run code, so it was not read."
        )
        raise fail("E409", "resume", message)
    if not (folder / CHECKSUMS_NAME).exists():
        message = (
            f"{label}: {CHECKSUMS_NAME} is missing: the checkpoint is damaged, or older than version 0.1.0."
        )
        raise fail("E407", "resume", message)
    raw = read_foreign(folder / CHECKSUMS_NAME, "resume", code="E407")
    body = raw[: raw.rfind(b"\n", 0, -1) + 1]
    if raw[len(body) :] != _last_line(body).encode():
        raise fail("E407", "resume", f"{label}: {CHECKSUMS_NAME} does not match its own checksum.")
    rows = [line.split(" ", 2) for line in body.decode(errors="replace").splitlines()]
    try:
        return {name: (int(size), int(crc, 16)) for crc, size, name in rows}
    except ValueError as error:
        raise fail("E407", "resume", f"{label}: {CHECKSUMS_NAME} cannot be read: {error}.") from error


def files_of(folder: Path, noted: Mapping[str, tuple[int, int]]) -> set[str]:
    """The noted files with content that are in a folder, in their full size."""
    if not folder.is_dir():
        return set()
    found = {path.name: path for path in folder.iterdir()}
    return {
        name
        for name, (size, _) in noted.items()
        if size and name in found and found[name].stat().st_size == size
    }


def _check_listing(folder: Path, noted: dict[str, tuple[int, int]], is_part: bool) -> None:
    label, found = name_of(folder), {path.name for path in folder.iterdir()} - {CHECKSUMS_NAME}
    for name in sorted(found - noted.keys()):
        if not name.startswith(PARTIAL):  # of a transfer between hosts that was cut short
            raise fail("E407", "resume", f"{label}: {name} has no recorded checksum.", tensor=name)
    for name, (size, _) in sorted(noted.items()):
        # A rank that writes no tensors, because another has the same, leaves an empty file on its own host.
        if name not in found and (is_part or (not size and HOSTS_NAME in noted)):
            continue
        there = (folder / name).stat().st_size if name in found else None
        if there != size:
            if there is None:
                host = writer_of(folder, name)
                message = f"{label}: {name} is missing{f'; host {host} has written it' if host else ''}."
                fix = f"copy {name} from that host into this folder" if host else None
                raise fail("E407", "resume", message, tensor=name, fix=fix)
            message = f"{label}: {name} has {there} bytes, expected {size}."
            raise fail("E407", "resume", message, tensor=name)


def read_hosts(folder: Path) -> list[dict[str, Any]]:
    """Who wrote which files of a checkpoint; empty if one folder held all of them, or the list is damaged."""
    if not (folder / HOSTS_NAME).is_file():
        return []
    found = read_json(folder / HOSTS_NAME, "resume", code="E407", inside=folder)
    rows = found if isinstance(found, list) else []
    keys = {"host": str, "folder": str, "files": list}
    return [
        row
        for row in rows
        if isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in keys.items())
    ]


def writer_of(folder: Path, name: str) -> str | None:
    """The host that wrote a file of a checkpoint, if that was written on several."""
    try:
        return next((row["host"] for row in read_hosts(folder) if name in row["files"]), None)
    except ShardproofError:
        return None


def check_sums(folder: Path, noted: dict[str, tuple[int, int]], rank: int, num_ranks: int) -> None:
    """Raise if a file's bytes are not those that were written. Each rank reads its share of the files that are here."""
    for name in sorted(name for name in noted if (folder / name).exists())[rank::num_ranks]:
        _compare(folder, name, checksum(folder / name), noted)


def read_checked(folder: Path, name: str, noted: dict[str, tuple[int, int]]) -> bytes:
    """A file's content, compared with its checksum: what is read here is what is used."""
    if name not in noted:
        raise fail("E407", "resume", f"{name_of(folder)}: {name} is missing.", tensor=name)
    raw = read_foreign(folder / name, "resume", code="E407", inside=folder)
    _compare(folder, name, zlib.crc32(raw), noted)
    return raw


def _compare(folder: Path, name: str, crc: int, noted: dict[str, tuple[int, int]]) -> None:
    if crc != noted[name][1]:
        message = f"{name_of(folder)}: {name} does not match its checksum."
        raise fail("E407", "resume", message, tensor=name)


def checksum(path: Path) -> int:
    """CRC-32 of a file: as fast as memory, and it sees what disks and copies do; it is no defence against forgery."""
    value = 0
    with open_foreign(path, "checkpoint", code="E407", inside=path.parent) as file:
        try:
            while chunk := file.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
        except OSError as error:
            raise fail("E407", "resume", f"{path} cannot be read: {error.strerror}.") from error
    return value
