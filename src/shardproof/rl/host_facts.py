"""What each host of a run has: devices, memory, disk and clock; as a table, and what to be warned of."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardproof.dist.collectives import gather_rows
from shardproof.dist.hosts import Hosts
from shardproof.rl.machine import available_memory, cpu_model, existing_folder

_GIB = 2**30
_CLOCK_LIMIT_S = 5.0
# A warning needs both: a small disk may be almost empty, and a large one almost full with much room left.
_LITTLE_SHARE, _LITTLE_DISK, _LITTLE_MEMORY = 0.1, 10 * _GIB, 2 * _GIB


def take_host_facts(folder: str) -> dict[str, Any]:
    """What this host has now; `folder` is the run's."""
    disk = shutil.disk_usage(existing_folder(Path(folder)))
    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    counts = {name: names.count(name) for name in names}
    return {
        "devices": ", ".join(f"{num} x {name}" for name, num in counts.items()) or cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_free_bytes": available_memory(),
        "disk_bytes": disk.total,
        "disk_free_bytes": disk.free,
    }


def compare_clocks(where: Hosts) -> list[float]:
    """By how many seconds each host's clock is ahead of rank 0's, to within the time that a message takes.

    Collective: every rank, all of which have just left another collective.
    """
    rows = gather_rows(torch.tensor([time.time_ns()]))
    first = int(rows[0][0])
    return [round((int(rows[where.leader_of(host)][0]) - first) / 1e9, 3) for host in range(where.num)]


def host_table(facts: Sequence[Mapping[str, Any]]) -> str:
    """The hosts of a run, a line for each."""
    head = ("host", "ranks", "devices", "cores", "free memory", "free disk", "clock")
    rows = [head, *(_row(each) for each in facts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
    return "\n".join([f"{len(facts)} hosts:", *(f"  {line}" for line in lines)])


def _row(facts: Mapping[str, Any]) -> tuple[str, ...]:
    ranks = facts["ranks"]
    is_run = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    free = facts["memory_free_bytes"]
    return (
        str(facts["name"]),
        f"{ranks[0]}-{ranks[-1]}" if is_run else ", ".join(map(str, ranks)),
        str(facts["devices"])[:40],
        str(facts["cores"]),
        "unknown" if free is None else _gib(free),
        _gib(facts["disk_free_bytes"]),
        f"{facts['clock_s']:+.1f} s",
    )


def host_warnings(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a run can live with, and its user should know: clocks apart, little memory, little disk, unlike devices."""
    first, found = facts[0], []
    for each in facts:
        name, memory = each["name"], each["memory_free_bytes"]
        if abs(each["clock_s"]) > _CLOCK_LIMIT_S:
            side = "ahead of" if each["clock_s"] > 0 else "behind"
            found.append(
                f"the clock of host {name} is {abs(each['clock_s']):.1f} s {side} that of host {first['name']}: times in "
                "logs and of files cannot be compared. Fix: synchronise the clocks of all hosts, for example with NTP"
            )
        room = len(each["ranks"]) * _LITTLE_MEMORY
        if memory is not None and memory < min(_LITTLE_SHARE * each["memory_bytes"], room):
            found.append(
                f"host {name} has {_gib(memory)} of memory free for {len(each['ranks'])} ranks{_others(facts, each, 'memory_free_bytes')}. "
                "Fix: end what else runs there, or start fewer ranks there"
            )
        if each["disk_free_bytes"] < min(_LITTLE_SHARE * each["disk_bytes"], _LITTLE_DISK):
            found.append(
                f"host {name} has {_gib(each['disk_free_bytes'])} free on the disk of output.folder{_others(facts, each, 'disk_free_bytes')}. "
                "Fix: free space there, or lower output.keep"
            )
        if each["devices"] != first["devices"]:
            found.append(
                f"host {name} has {each['devices']}, host {first['name']} has {first['devices']}: all wait for the slowest, "
                "and results are not those of hosts that are alike. Fix: none is needed if that is intended"
            )
    return found


def _others(facts: Sequence[Mapping[str, Any]], mine: Mapping[str, Any], key: str) -> str:
    """`; host a has 20.1 GiB`: of the host that has the most."""
    most = max((each for each in facts if each[key] is not None), key=lambda each: each[key])
    return "" if most is mine else f"; host {most['name']} has {_gib(most[key])}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
