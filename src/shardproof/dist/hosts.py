"""Which rank is on which host, proved by memory that the ranks of one host can map and nobody else can.

A hostname proves nothing: copies of one image share it, and so do containers. A process id proves nothing either. Every
rank therefore shows the others a page of memory with a random token (see region.py); ranks that can map it run under the
same kernel, in the same process namespace and for the same user, so they can share memory and what lies on that host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardproof.dist.addresses import address_towards, is_loopback
from shardproof.dist.collectives import exchange, gather_rows
from shardproof.dist.region import NotOurs, RegionAddress, create_region, map_region
from shardproof.text import printable

_TOKEN_BYTES = 16
_MAX_RANKS, _MAX_HOSTS, _MAX_CHARACTERS = 8, 4, 80  # of a list and of a value in one message

# By default group, and gone with it.
_known: WeakKeyDictionary[dist.ProcessGroup, Hosts] = WeakKeyDictionary()


@dataclass(frozen=True)
class Hosts:
    """The hosts of all ranks, the same on every rank but for `rank`. Host 0 is rank 0's."""

    names: tuple[str, ...]  # per host, for people; no two are the same
    of_rank: tuple[int, ...]  # the host of each rank
    rank: int = 0  # this process's

    @property
    def num(self) -> int:
        return len(self.names)

    @property
    def mine(self) -> int:
        """The number of this rank's host."""
        return self.of_rank[self.rank]

    @property
    def name(self) -> str:
        """The name of this rank's host."""
        return self.names[self.mine]

    @property
    def is_leader(self) -> bool:
        """Whether this is the lowest rank of its host."""
        return self.leader_of(self.mine) == self.rank

    def ranks_of(self, host: int) -> tuple[int, ...]:
        return tuple(rank for rank, its in enumerate(self.of_rank) if its == host)

    def leader_of(self, host: int) -> int:
        """The lowest rank of a host."""
        return self.of_rank.index(host)

    def describe(self, ranks: Iterable[int]) -> str:
        """`rank 2 on host b`, `ranks 2, 3 on host b and rank 5 on host c`; where there is one host, just the ranks."""
        return self._say(ranks, "{ranks} on host {host}")

    def place(self, ranks: Iterable[int]) -> str:
        """`host b (ranks 2, 3) and host c (rank 5)`; where there is one host, just the ranks."""
        return self._say(ranks, "host {host} ({ranks})")

    def _say(self, ranks: Iterable[int], form: str) -> str:
        by_host: dict[int, list[int]] = {}
        for rank in sorted(set(ranks)):
            by_host.setdefault(self.of_rank[rank], []).append(rank)
        if not by_host:
            return "no rank"
        if self.num == 1:
            return list_ranks(by_host[0])
        said = [
            form.format(ranks=list_ranks(theirs), host=self.names[host]) for host, theirs in by_host.items()
        ]
        if len(said) > _MAX_HOSTS:
            said[_MAX_HOSTS - 1 :] = [f"{len(said) - _MAX_HOSTS + 1} more hosts"]
        return f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]


def list_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 2, 3`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 24 more`."""
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"


def describe_difference(
    name: str, values: Sequence[str | None], where: Hosts, ranks: Iterable[int] | None = None
) -> str:
    """`torch is 2.12.0 on host b (rank 1), 2.13.0 on host a (rank 0)`: every rank's value, or some's; the rarer first."""
    by_value: dict[str | None, list[int]] = {}
    for rank in range(len(values)) if ranks is None else ranks:
        by_value.setdefault(values[rank], []).append(rank)
    # A tie is decided against the later ranks: rank 0 is the one whose output the user sees.
    groups = sorted(by_value.items(), key=lambda item: (len(item[1]), -item[1][0]))
    return f"{name} is {', '.join(f'{_short(value)} on {where.place(theirs)}' for value, theirs in groups)}"


def _short(value: str | None) -> str:
    text = "missing" if value is None else value
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def hosts() -> Hosts:
    """The hosts of the default group's ranks; `init_distributed` finds them out.

    Collective: every rank, the first time.
    """
    known = known_hosts()
    if known is None:
        assert dist.group.WORLD is not None
        known = _known[dist.group.WORLD] = _find_hosts()
    return known


def known_hosts() -> Hosts | None:
    """The hosts if they were found out already. Never a collective, so an error path may ask."""
    return _known.get(dist.group.WORLD) if dist.is_initialized() and dist.group.WORLD is not None else None


def _find_hosts() -> Hosts:
    """Collective: every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Ranks that one launcher started in one place need no address to be told apart.
    in_one_place = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world_size
    address = address_towards(os.environ.get("MASTER_ADDR", ""))
    told = {
        "name": printable(socket.gethostname()) or "unnamed",
        "address": "" if in_one_place or is_loopback(address) else address,
    }
    if world_size == 1:
        return Hosts((told["name"],), (0,))
    descriptor, page = -1, None
    if hasattr(os, "memfd_create"):
        descriptor, made = create_region(_TOKEN_BYTES)
        page = made.to_json()
    try:
        rows = exchange({**told, "page": page})
        if page is None:  # not Linux: the launcher's word is all there is
            leader = 0 if in_one_place else rank
        else:
            leader = next(other for other, row in enumerate(rows) if other == rank or _can_map(row["page"]))
        # By this exchange every rank has looked for every page, before any of them is closed.
        leaders = [int(row[0]) for row in gather_rows(torch.tensor([leader]))]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return _number(rank, rows, leaders)


def _can_map(page: Mapping[str, Any] | None) -> bool:
    if page is None:
        return False
    try:
        map_region(RegionAddress.from_json(page))
    except NotOurs:
        return False
    return True


def _number(rank: int, rows: Sequence[Mapping[str, Any]], leaders: Sequence[int]) -> Hosts:
    """Hosts in the order of their lowest ranks; `leaders` are, by rank, the lowest rank whose page it could map."""
    of_rank: list[int] = []
    first: list[int] = []
    for each, leader in enumerate(leaders):
        # A leader is never a higher rank, so its host is known already.
        of_rank.append(len(first) if leader == each else of_rank[leader])
        first += [each] * (leader == each)
    told = [str(rows[each]["name"]) for each in first]
    addresses = [str(rows[each]["address"]) for each in first]
    names = []
    for number, (name, address) in enumerate(zip(told, addresses, strict=True)):
        if told.count(name) > 1:
            # Those who share an image share a hostname.
            name = (
                f"{name} ({address})"
                if addresses.count(address) == 1 and address
                else f"{name} (number {number})"
            )
        names.append(name)
    return Hosts(tuple(names), tuple(of_rank), rank)
