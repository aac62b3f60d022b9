"""Which ranks see the same folder, proved by random tokens that are written into it.

Two hosts may have a path in common and not what lies there, or one folder under two paths. So a rank of each host writes
a file with a random name, and every rank looks for all of them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardproof.dist.collectives import together
from shardproof.dist.hosts import Hosts, hosts
from shardproof.errors import fail

_TOKEN = ".seen-by-"


@dataclass(frozen=True)
class Places:
    """The folders that lie behind one path, the same on every rank but for `rank`. Place 0 is the folder of rank 0."""

    of_rank: tuple[int, ...]  # the place of each rank
    names: tuple[str, ...] = ("",)  # per place, for people: its hosts
    rank: int = 0  # this process's

    @property
    def num(self) -> int:
        return len(self.names)

    @property
    def are_shared(self) -> bool:
        """Whether all ranks see one folder."""
        return self.num == 1

    @property
    def mine(self) -> int:
        """The number of this rank's place."""
        return self.of_rank[self.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this is the lowest rank of its place; it does what is done once in a folder."""
        return self.leader_of(self.mine) == self.rank

    def ranks_of(self, place: int) -> tuple[int, ...]:
        return tuple(rank for rank, its in enumerate(self.of_rank) if its == place)

    def leader_of(self, place: int) -> int:
        """The lowest rank of a place."""
        return self.of_rank.index(place)

    def of_leaders(self, rows: Sequence[Any]) -> list[Any]:
        """What the leaders said, in the order of places, of what all ranks said."""
        return [rows[self.leader_of(place)] for place in range(self.num)]


def one_place() -> Places:
    """A folder that all ranks see, or are taken to see. Not a collective."""
    return Places((0,) * dist.get_world_size(), rank=dist.get_rank())


def find_places(folder: Path, stage: str) -> Places:
    """The places behind `folder`, which may have another path on each host; it is created where it does not exist.

    Collective: every rank. Two messages, or none on one host.
    """
    found = hosts()
    if found.num == 1:
        return one_place()
    token = secrets.token_hex(16)
    try:
        with together(stage) as told, _usable(folder, stage, found):
            if found.is_leader:
                folder.mkdir(parents=True, exist_ok=True)
                write_token(folder, token)
                told.mine = token
        tokens = [str(told.rows[found.leader_of(host)]) for host in range(found.num)]
        with together(stage) as seen:
            # A network's disk looks up a name anew that nobody has asked it for before.
            seen.mine = next((host for host, each in enumerate(tokens) if has_token(folder, each)), None)
            if seen.mine is None:
                message = f"{folder} is not the folder that another rank on host {found.name} sees there."
                fix = "give all ranks of a host the same output.folder and working directory"
                raise fail("C007", stage, message, rank=found.rank, fix=fix)
    finally:
        remove_token(folder, token)
    return _number(found, [int(host) for host in seen.rows])


def write_token(folder: Path, token: str) -> None:
    """Leave a random token in a folder, for others to prove that they see this one."""
    (folder / f"{_TOKEN}{token}").write_text(token)


def remove_token(folder: Path, token: str) -> None:
    with contextlib.suppress(OSError):
        (folder / f"{_TOKEN}{token}").unlink(missing_ok=True)


def has_token(folder: Path, token: str) -> bool:
    """Whether this rank sees the folder that a token was left in."""
    try:
        return (folder / f"{_TOKEN}{token}").read_text() == token
    except OSError:
        return False


def _number(found: Hosts, seen: Sequence[int]) -> Places:
    """Places in the order of their lowest ranks, from the lowest host whose token each rank saw."""
    numbers = {host: place for place, host in enumerate(dict.fromkeys(seen))}
    of_rank = tuple(numbers[host] for host in seen)
    names = []
    for place in range(len(numbers)):
        its = dict.fromkeys(found.of_rank[rank] for rank, each in enumerate(of_rank) if each == place)
        names.append(", ".join(found.names[host] for host in its))
    return Places(of_rank, tuple(names), found.rank)


@contextlib.contextmanager
def _usable(folder: Path, stage: str, found: Hosts) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{folder} on host {found.name} cannot be written: {error.strerror or error}."
        fix = "use an output.folder that you can write to on every host"
        raise fail("C007", stage, message, rank=found.rank, fix=fix) from error
