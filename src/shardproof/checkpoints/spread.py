"""Checkpoints whose files lie on hosts that share no folder: who holds what, and how a host gets what it lacks.

Each place keeps the files of its own ranks in a folder of the checkpoint's name, and beside them the description of the
whole checkpoint: state, index, checksums and `hosts.json`, which says who wrote which file. Copied into one folder, the
parts are an ordinary checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.checkpoints.folders import (
    CHECKSUMS_NAME,
    HOSTS_NAME,
    STATE_NAME,
    files_of,
    list_checkpoints,
    name_of,
    read_hosts,
    read_noted,
    step_of,
    sums_of,
)
from shardproof.checkpoints.ranges import INDEX_NAME
from shardproof.dist.collectives import together
from shardproof.dist.sharing import Places
from shardproof.dist.transfer import Transfer, transfer_files
from shardproof.errors import ShardproofError, fail
from shardproof.files import PARTIAL, current_folder, replace_folder

DESCRIPTION = (STATE_NAME, INDEX_NAME, HOSTS_NAME, CHECKSUMS_NAME)
_MARK = ".folder-"  # and a random id: by it a checkpoint knows the folders that its parts were written to
_MAX_NAMES = 4  # of files in a message
_UNREADABLE = ""  # the digest of a part whose list of files cannot be read


def mark_folder(root: Path) -> None:
    """Give the folder an id if it has none. One rank of each place."""
    if not folder_ids(root):
        (root / f"{_MARK}{secrets.token_hex(8)}").touch()


def folder_ids(root: Path) -> list[str]:
    """The ids of a folder: several if others were copied into it."""
    return sorted(path.name.removeprefix(_MARK) for path in root.glob(f"{_MARK}*")) if root.is_dir() else []


def describe_hosts(places: Places, ids: Sequence[str], files: Sequence[Sequence[str]]) -> str:
    """The content of `hosts.json`, from the id of the folder that each rank wrote to and the files that it wrote."""
    rows = []
    for place, name in enumerate(places.names):
        its = [file for rank in places.ranks_of(place) for file in files[rank]]
        rows.append({"host": name, "folder": ids[places.leader_of(place)], "files": its})
    return json.dumps(rows, indent=1)


class Part(NamedTuple):
    """What one place holds of a checkpoint."""

    digest: str  # of the checksums of all its files, so two checkpoints of one step are told apart
    num_files: int  # with content, of the whole checkpoint
    files: Sequence[str]  # of these, that are here in full size
    is_spread: bool  # it was written to several folders


@dataclass(frozen=True)
class Stock:
    """The checkpoints in all places, the same on every rank."""

    parts: tuple[Mapping[str, Part], ...]  # per place: of each checkpoint, by its name
    folders: tuple[frozenset[str], ...] = ()  # per place: the ids of its folder

    @property
    def names(self) -> list[str]:
        """Of all checkpoints that some place holds a part of, oldest first."""
        found = {name for parts in self.parts for name in parts}
        return sorted(found, key=lambda name: step_of(Path(name)))

    @property
    def complete(self) -> list[str]:
        """The names of the checkpoints of which all files exist somewhere."""
        return [name for name in self.names if self.digest_of(name) is not None]

    def digest_of(self, name: str) -> str | None:
        """Of the checkpoint of this name that is complete; of two, the one that the first place holds."""
        for digest in dict.fromkeys(parts[name].digest for parts in self.parts if name in parts):
            its = [self.parts[place][name] for place in self.places_of(name, digest)]
            # What is missing of a checkpoint that was written into one folder is damage; reading it says so.
            if not its[0].is_spread and (digest or len(self.parts) == 1):
                return digest
            if digest and len({file for part in its for file in part.files}) == its[0].num_files:
                return digest
        return None

    def places_of(self, name: str, digest: str) -> list[int]:
        """The places that hold a part of a checkpoint."""
        return [n for n, parts in enumerate(self.parts) if name in parts and parts[name].digest == digest]


def take_stock(root: Path, places: Places, stage: str) -> Stock:
    """What all places hold. Collective: every rank, unless all see one folder; then rank 0 alone looks."""
    if places.are_shared:
        return _stock([_held(root)]) if places.is_leader else Stock(())
    with together(stage) as told:
        told.mine = _held(root) if places.is_leader else None
    return _stock(places.of_leaders(told.rows))


def _held(root: Path) -> dict[str, Any]:
    """The checkpoints in this folder, as JSON."""
    found = {}
    for path in list_checkpoints(root) if root.is_dir() else []:
        found[path.name] = _part(current_folder(path))
    return {"folders": folder_ids(root), "parts": found}


def _part(folder: Path) -> Part:
    """What a folder holds of a checkpoint."""
    try:
        noted = read_noted(folder)
        raw = (folder / CHECKSUMS_NAME).read_bytes()
    except (ShardproofError, OSError):
        return Part(_UNREADABLE, 0, (), False)
    digest = hashlib.sha256(raw).hexdigest()
    num_files = sum(size > 0 for size, _ in noted.values())
    return Part(digest, num_files, sorted(files_of(folder, noted)), HOSTS_NAME in noted)


def _stock(rows: Sequence[Any]) -> Stock:
    parts = tuple({name: Part(*part) for name, part in row["parts"].items()} for row in rows)
    return Stock(parts, tuple(frozenset(row["folders"]) for row in rows))


class Missing(NamedTuple):
    """What is not there of a checkpoint."""

    name: str
    files: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # that wrote them, of which no folder is here
    damaged: tuple[str, ...] = ()  # hosts whose folder has a part, but not all of the files that it wrote

    @property
    def is_interrupted(self) -> bool:
        """Whether a folder that is here never got its part, because the save ended before."""
        return not self.hosts and not self.damaged

    def error(self, stage: str, complete: Iterable[str]) -> ShardproofError:
        """E407 with the files, the hosts that wrote them, and the older steps that can be taken instead."""
        more = f" and {len(self.files) - _MAX_NAMES} more" if len(self.files) > _MAX_NAMES else ""
        what = ", ".join(self.files[:_MAX_NAMES]) + more or CHECKSUMS_NAME
        message, names = f"{self.name} lacks {what}", [*self.hosts, *self.damaged]
        fixes = [f"copy what is missing into {self.name} on one of the hosts"]
        if names:
            who = " and ".join(f"host {name}" for name in names)
            message += f", which {who} kept in {'its' if len(names) == 1 else 'their'} own output.folder"
        if self.hosts:
            fixes.insert(0, f"start the run with {' and '.join(self.hosts)} again")
        older = [step_of(Path(name)) for name in complete if step_of(Path(name)) < step_of(Path(self.name))]
        if older:
            fixes.append(f"go on from an older step that is whole: --from {older[-1]}")
        fix = ", or ".join(fixes)
        return fail("E407", stage, f"{message}.", tensor=self.files[0] if self.files else None, fix=fix)


def find_missing(root: Path, name: str, stock: Stock, places: Places, stage: str) -> Missing:
    """What a checkpoint lacks that is not complete. Collective: every rank, unless all see one folder."""
    unreadable = tuple(places.names[place] for place in stock.places_of(name, _UNREADABLE))
    if unreadable:
        return Missing(name, (), (), unreadable)
    holder = next(place for place, parts in enumerate(stock.parts) if name in parts)
    its = stock.places_of(name, stock.parts[holder][name].digest)
    there = {file for place in its for file in stock.parts[place][name].files}
    if places.are_shared:
        row = _described(root, name)
    else:
        with together(stage) as told:
            told.mine = _described(root, name) if places.rank == places.leader_of(holder) else None
        row = told.rows[places.leader_of(holder)]
    lacking = [file for file in row["files"] if file not in there]
    hosts, damaged = [], []
    for each in row["hosts"]:
        if set(lacking).isdisjoint(each["files"]):
            continue
        theirs = [place for place, ids in enumerate(stock.folders) if each["folder"] in ids]
        if not theirs:
            hosts.append(each["host"])
        elif set(theirs) & set(its):
            damaged.append(each["host"])
    return Missing(name, tuple(sorted(lacking, key=_natural)), tuple(hosts), tuple(damaged))


def _described(root: Path, name: str) -> dict[str, Any]:
    folder = current_folder(root / name)
    try:
        return {
            "files": [name for name, (size, _) in read_noted(folder).items() if size],
            "hosts": read_hosts(folder),
        }
    except (ShardproofError, OSError):
        return {"files": [], "hosts": []}


def _natural(name: str) -> tuple[int, str]:
    return len(name), name


def open_part(root: Path, which: str, places: Places) -> Path:
    """The folder of a checkpoint in this rank's place, with the description of the whole checkpoint.

    Collective: every rank.
    """
    stock = take_stock(root, places, "resume")
    name = which
    for name in reversed(stock.names) if which == "latest" else ():
        # A save that was interrupted is passed over; what is lost otherwise is not.
        if stock.digest_of(name) or not find_missing(root, name, stock, places, "resume").is_interrupted:
            break
    if name not in stock.names:
        there = f"; it has {', '.join(stock.names)}" if stock.names else ""
        raise fail("E407", "resume", f"{root} has no checkpoint {which!r} on any host{there}.")
    digest = stock.digest_of(name)
    if digest is None:
        raise find_missing(root, name, stock, places, "resume").error("resume", stock.complete)
    _share_description(root, name, stock.places_of(name, digest), places)
    return current_folder(root / name)


def _share_description(root: Path, name: str, holders: Sequence[int], places: Places) -> None:
    """Give a folder with the checkpoint's description to the places that have none. Collective: every rank."""
    lacking = [place for place in range(places.num) if place not in holders]
    if not lacking:
        return
    source = places.leader_of(holders[0])
    partial = root / f"{PARTIAL}{name}-{secrets.token_hex(4)}"
    is_target = places.is_leader and places.mine in lacking
    with together("resume"):
        if is_target:
            partial.mkdir(parents=True)
    folder = partial if is_target else current_folder(root / name)
    with together("resume") as told:
        if places.rank == source:
            told.mine = sums_of(folder, [each for each in DESCRIPTION if (folder / each).is_file()])
    transfers = [
        Transfer(file, size, crc, source, places.leader_of(place))
        for place in lacking
        for file, size, crc in told.rows[source]
    ]
    transfer_files(transfers, lambda file: folder / file, "resume")
    with together("resume"):
        if is_target:
            put_aside(root, name, "superseded-")  # what is there is another checkpoint of the same step
            replace_folder(partial, root / name)


def put_aside(root: Path, name: str, prefix: str) -> Path | None:
    """Rename a checkpoint so that nobody takes it; returns its new place, None if there is none of this name."""
    old, aside = current_folder(root / name), root / f"{prefix}{name}"
    if not old.is_dir():
        return None
    replace_folder(old, aside)
    return aside


def fetch(
    folder: Path, wanted: Collection[str], noted: Mapping[str, tuple[int, int]], places: Places
) -> None:
    """Bring the files that this rank reads, and its place lacks, into its place's folder of the checkpoint.

    Each comes from a place that has it, checked by its checksum. Collective: every rank.
    """
    if places.are_shared:
        return
    with together("resume") as told:
        here = files_of(folder, noted)
        told.mine = [sorted(set(wanted) - here), sorted(here) if places.is_leader else []]
    lacking: list[set[str]] = [set() for _ in range(places.num)]
    for rank, (names, _) in enumerate(told.rows):
        lacking[places.of_rank[rank]].update(names)
    held = [set(row[1]) for row in (told.rows[places.leader_of(place)] for place in range(places.num))]
    transfers = []
    for place, names in enumerate(lacking):
        for name in sorted(names, key=_natural):
            sources = [each for each in range(places.num) if name in held[each]]
            if not sources:
                raise fail(
                    "E407", "resume", f"{name_of(folder)}: {name} is missing on every host.", tensor=name
                )
            source = sources[place % len(sources)]
            transfers.append(Transfer(name, *noted[name], places.leader_of(source), places.leader_of(place)))
    if transfers:
        transfer_files(transfers, lambda name: folder / name, "resume")
