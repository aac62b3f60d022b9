"""What is said of ranks and hosts that were lost: the same words on every rank that knows the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardproof.dist.hosts import Hosts, known_hosts, list_ranks
from shardproof.text import printable


@dataclass(frozen=True)
class Wait:
    """What a rank waits for in, and for how long it may."""

    stage: str
    code: str
    seconds: float


@dataclass(frozen=True)
class Answers:
    """Where every rank that answered is. `wait` is that of the rank which asked."""

    wait: Wait
    places: dict[int, str]
    store_silent_s: float = (
        0.0  # for so long the store has not answered this rank, which knows of nobody else
    )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answers:
        places = {int(rank): printable(place) for rank, place in data["places"].items()}
        wait = data["wait"]
        return cls(Wait(str(wait["stage"]), str(wait["code"]), float(wait["seconds"])), places)


def explain(found: Answers, world_size: int, news: str | None = None) -> tuple[str, str | None]:
    """(who was lost and where the others are, what to do if it is not what the code says)."""
    hosts = known_hosts()
    several = hosts is not None and hosts.num > 1
    if news is not None:
        said = news
    elif found.store_silent_s:
        said = _cut_off(found, hosts if several else None)
    else:
        silent = [rank for rank in range(world_size) if rank not in found.places]
        said = _missing(silent, found.wait.seconds, hosts if several else None)
    fix = None
    if several and (news is not None or found.store_silent_s or len(found.places) < world_size):
        fix = (
            "look at that host and at the network between the hosts, then rerun the same command: it resumes "
            "from the last checkpoint"
        )
    return f"{said}. {summarise(found, world_size)}", fix


def _cut_off(found: Answers, hosts: Hosts | None) -> str:
    """What a rank says that cannot even ask for the others."""
    silence = f"no answer for {found.store_silent_s:.0f} s"
    if hosts is None:
        return f"the process group's store was lost: {silence}"
    if hosts.mine == 0:
        return f"host {hosts.name} lost its own store: {silence}"
    return (
        f"host {hosts.name} ({list_ranks(hosts.ranks_of(hosts.mine))}) lost the connection to host {hosts.names[0]} "
        f"({list_ranks(hosts.ranks_of(0))}), which holds the run's store: {silence}"
    )


def _missing(silent: list[int], seconds: float, hosts: Hosts | None) -> str:
    if not silent:
        return f"ranks waited for each other for more than {seconds:g} s"
    if hosts is None:
        its = "its process has" if len(silent) == 1 else "their processes have"
        return f"{list_ranks(silent)} did not answer: {its} died or {'is' if len(silent) == 1 else 'are'} stuck outside Python"
    whole = [host for host in range(hosts.num) if set(hosts.ranks_of(host)) <= set(silent)]
    single = [rank for rank in silent if hosts.of_rank[rank] not in whole]
    said = [
        *(f"host {hosts.names[host]} ({list_ranks(hosts.ranks_of(host))})" for host in whole),
        *([hosts.describe(single)] if single else []),
    ]
    return f"{' and '.join(said)} did not answer: cut off, frozen, died, or stuck outside Python"


def summarise(found: Answers, world_size: int) -> str:
    """The places in one line, with ranks at the same place grouped and ranks without an answer last."""
    hosts = known_hosts()
    by_place: dict[str, list[int]] = {}
    for rank in sorted(found.places):
        by_place.setdefault(found.places[rank], []).append(rank)
    name = hosts.describe if hosts is not None and len(hosts.of_rank) == world_size else list_ranks
    parts = [f"{name(ranks)} in {place}" for place, ranks in by_place.items()]
    silent = [rank for rank in range(world_size) if rank not in found.places]
    if silent and not found.store_silent_s:
        parts.append(f"{name(silent)} did not answer")
    said = "; ".join(parts)
    return said[:1].upper() + said[1:]
