"""The folders that a run's checkpoints lie in: which are complete, how one is published, what is in its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from shardproof.errors import fail

STATE_NAME = "state.json"
PARTIAL = ".partial-"
_STEP_PATTERN = re.compile(r"step-(\d+)$")
_CHUNK_BYTES = 8 * 2**20


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP_PATTERN.match(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(folder: Path, which: str) -> Path:
    """The asked checkpoint's folder."""
    if (folder / STATE_NAME).exists():
        return folder
    found = list_checkpoints(folder) if folder.is_dir() else []
    if not found:
        raise fail("E407", "resume", f"{folder} holds no complete checkpoint.")
    if which == "latest":
        return found[-1]
    named = [path for path in found if path.name == which]
    if not named:
        raise fail(
            "E407", "resume", f"{folder} has no {which!r}; it has {', '.join(path.name for path in found)}."
        )
    return named[0]


def publish(root: Path, partial: Path, final: Path, keep: int | None) -> None:
    """Give a complete folder its name, in one rename, and drop what is no longer kept."""
    replaced = root / f"{PARTIAL}replaced-{final.name}"
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    _sync_folder(root)
    for old in list_checkpoints(root)[: -keep if keep else None] if keep is not None else []:
        # What is half removed must not look like a checkpoint.
        os.rename(old, root / f"{PARTIAL}old-{old.name}")
    for leftover in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def note_sums(folder: Path, rank: int) -> None:
    """Write down the checksums of the files that this rank wrote into a checkpoint."""
    files = sorted(folder.glob(f"__{rank}_*.distcp"))
    write_json(folder / f"sums-{rank}.json", {path.name: checksum(path) for path in files})


def check_sums(folder: Path, needed: set[str], rank: int, num_ranks: int) -> None:
    """Raise if a file's bytes are not those that were written. Each rank reads its share of the files."""
    noted: dict[str, int] = {}
    try:
        for path in folder.glob("sums-*.json"):
            noted.update(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise fail("E407", "resume", f"{folder.name}: its checksums cannot be read: {error}.") from error
    for name in sorted(needed)[rank::num_ranks]:
        if name not in noted:
            raise fail("E407", "resume", f"{folder.name}: no checksum of {name} was noted.", tensor=name)
        if checksum(folder / name) != noted[name]:
            message = f"{folder.name}: {name} holds other bytes than were written."
            raise fail("E407", "resume", message, tensor=name)


def checksum(path: Path) -> int:
    """CRC-32 of a file: as fast as memory, and it sees what disks and copies do; it is no defence against forgery."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def needed_files(folder: Path, metadata: Any) -> set[str]:
    """The files that a checkpoint's metadata names, each of which must be there and long enough."""
    needed: dict[str, int] = {}
    if not metadata.storage_data:
        raise fail("E407", "resume", f"{folder.name}: its metadata names no file.")
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        path = folder / name
        if not path.exists() or path.stat().st_size < size:
            found = path.stat().st_size if path.exists() else "no"
            raise fail("E407", "resume", f"{folder.name}: {name} has {found} bytes of {size}.")
    return set(needed)
