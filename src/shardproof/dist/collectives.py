"""Every collective the project issues itself, and the rule that no rank raises alone."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardproof.errors import ShardproofError, error_for
from shardproof.findings import Finding, merge_findings

# What an error that nobody foresaw is called in each stage; tests/dist/test_together.py knows of every stage.
UNEXPECTED = {
    **dict.fromkeys(
        ("settings", "source", "skeleton", "adapters", "plan", "materialise", "data", "config", "reference"),
        "L100",
    ),
    **dict.fromkeys(("train_step", "score"), "T300"),
    **dict.fromkeys(("export", "save_pretrained", "save", "resume", "output"), "E400"),
    **dict.fromkeys(("rollout", "sync", "generate", "reward"), "R500"),
}

# Bytes of a message that travel at once, its length included. What fits, and almost all does, takes one collective.
_SLOT = 1024

# The gloo group beside an NCCL-only default group, by that group, and gone with it.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group() -> dist.ProcessGroup:
    """A group of all ranks that moves CPU tensors: the default one, or a gloo group beside an NCCL-only one.

    Collective: every rank, the first time.
    """
    known = known_control_group()
    if known is None:
        assert dist.group.WORLD is not None
        known = _control_groups[dist.group.WORLD] = dist.new_group(backend="gloo")
    return known


def known_control_group() -> dist.ProcessGroup | None:
    """The control group, if it was made already."""
    default = dist.group.WORLD
    assert default is not None
    return default if torch.device("cpu") in default._device_types else _control_groups.get(default)


@dataclass
class Traffic:
    """The control messages this rank has taken part in; weights, gradients and tokens are not counted."""

    messages: int = 0
    collectives: int = 0  # a message that is longer than a slot takes two
    bytes_received: int = 0

    def count(self, received: torch.Tensor) -> None:
        self.collectives += 1
        self.bytes_received += received.nbytes


traffic = Traffic()


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON-able `value`, in rank order, on every rank. No pickle is involved.

    `group` is another group of all ranks, for what runs beside training. Collective: every rank.
    """
    traffic.messages += 1
    mine = _encode(value)
    if dist.get_world_size() == 1:
        return [_decode(mine)]
    rows, size = mine.new_empty(dist.get_world_size(), 0), _SLOT
    while rows.shape[1] < size:  # once, and again if some rank's message is longer than a slot
        part = _part(mine, rows.shape[1], size)
        received = part.new_empty(len(rows), len(part))
        dist.all_gather(list(received), part, group=group or control_group())
        traffic.count(received)
        rows = torch.cat([rows, received], dim=1)
        size = max(_length(row) for row in rows)
    return [_decode(row) for row in rows]


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The JSON-able `value` of rank `source` on every rank; what other ranks pass is not looked at.

    `group` is another group of all ranks, for what runs beside training. Collective: every rank.
    """
    traffic.messages += 1
    mine = _encode(value if dist.get_rank() == source else None)
    if dist.get_world_size() == 1:
        return _decode(mine)
    message, size = mine.new_empty(0), _SLOT
    while len(message) < size:
        part = _part(mine, len(message), size)
        dist.broadcast(part, source, group=group or control_group())
        traffic.count(part)
        message = torch.cat([message, part])
        size = _length(message)
    return _decode(message)


def _encode(value: Any) -> torch.Tensor:
    """A message as bytes: how many there are, in eight of them, then JSON."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray((len(text) + 8).to_bytes(8, "little") + text), dtype=torch.uint8)


def _part(message: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes `start` to `stop` of a message, with zeros where it is shorter."""
    part = message.new_zeros(stop - start)
    part[: max(len(message) - start, 0)] = message[start:stop]
    return part


def _length(message: torch.Tensor) -> int:
    return int.from_bytes(bytes(message[:8].numpy()), "little")


def _decode(message: torch.Tensor) -> Any:
    return json.loads(bytes(message[8 : _length(message)].numpy()))


def gather_rows(row: torch.Tensor) -> torch.Tensor:
    """A [ranks, len(row)] matrix of every rank's int64 `row`; rows must have one length.

    Collective: every rank.
    """
    traffic.messages += 1
    if dist.get_world_size() == 1:
        return row[None].clone()
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows), row.contiguous(), group=control_group())
    traffic.count(rows)
    return rows


def all_gather_flat(local: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `received` with every rank's 1-D `local`, of one length, end to end in rank order.

    Collective: the group.
    """
    # torch 2.13 renamed it; the old name is all that 2.11 has.
    into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    into(received, local, group=group)


def gather_uneven(
    local: torch.Tensor, sizes: list[int], received: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Fill `received` with the first `sizes[rank]` elements of every rank's 1-D `local`, in rank order.

    Collective: the group.
    """
    at = 0
    for rank, size in enumerate(sizes):
        part = received[at : at + size]
        if rank == dist.get_rank(group):
            part.copy_(local[:size])
        if size:
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
        at += size


def share_findings(findings: list[Finding]) -> list[Finding]:
    """The findings of all ranks, the same list on each.

    Collective: every rank.
    """
    return _merge(exchange([finding.to_json() for finding in findings]))


def _merge(rows: list[list[dict[str, Any]]]) -> list[Finding]:
    """The findings of all ranks in one list, from every rank's as JSON."""
    per_rank = [[Finding.from_json(item) for item in row] for row in rows]
    common = set.intersection(*(set(row) for row in per_rank))
    # What is not wrong everywhere is said with the rank where it is.
    named = [
        [
            finding if finding.rank is not None or finding in common else replace(finding, rank=rank)
            for finding in row
        ]
        for rank, row in enumerate(per_rank)
    ]
    return merge_findings(named)


def raise_together(findings: list[Finding]) -> None:
    """Raise the same error on every rank if any rank has a finding.

    Collective: every rank.
    """
    merged = share_findings(findings)
    if merged:
        raise error_for(merged)


class Message:
    """What a rank says at the end of a block, `mine`, and then what all of them said, `rows` in rank order."""

    def __init__(self) -> None:
        self.mine: Any = None  # JSON-able
        self.rows: list[Any] = []


@contextmanager
def together(stage: str) -> Iterator[Message]:
    """Run a stage in which no rank may raise alone: the first error of any rank is raised on all of them.

    The message that carries the errors also carries what the block puts into `mine`, to all ranks.

    Collective: every rank, at the end of the block. The block itself must not issue collectives.
    """
    findings: list[Finding] = []
    cause: Exception | None = None
    message = Message()
    try:
        yield message
    except ShardproofError as error:
        findings, cause = error.findings, error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        code = UNEXPECTED.get(stage, "L100")
        findings, cause = [Finding(code, stage, detail, rank=dist.get_rank())], error
    rows = exchange([[finding.to_json() for finding in findings], message.mine if not findings else None])
    merged = _merge([row[0] for row in rows])
    if merged:
        raise error_for(merged) from cause
    message.rows = [row[1] for row in rows]
