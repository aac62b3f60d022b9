"""Every collective the project issues itself, and the rule that no rank raises alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.messages import (
    answer_all,
    any_rank,
    broadcast,
    control_group,
    exchange,
    exchange_among,
    gather,
    gather_rows,
    known_control_group,
    rows_on_first,
    sum_rows,
)
from shardproof.dist.traffic import traffic, tree_sends
from shardproof.errors import ShardproofError, error_for
from shardproof.findings import Finding, merge_findings

__all__ = [
    "Message",
    "all_gather_flat",
    "any_rank",
    "broadcast",
    "combine",
    "control_group",
    "exchange",
    "exchange_among",
    "gather",
    "gather_rows",
    "gather_uneven",
    "known_control_group",
    "raise_together",
    "rows_on_first",
    "share_findings",
    "sum_rows",
    "together",
    "wait_for_group",
]

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


def all_gather_flat(local: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `received` with every rank's 1-D `local`, of one length, end to end in rank order.

    Collective: the group.
    """
    # torch 2.13 renamed it; the old name is all that 2.11 has.
    into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    into(received, local, group=group)
    others = (dist.get_world_size(group) - 1) * local.nbytes
    traffic.count_data("weights", others, others)


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
            sent = tree_sends(dist.get_rank(group), rank, len(sizes)) * part.nbytes
            traffic.count_data("weights", sent, 0 if rank == dist.get_rank(group) else part.nbytes)
        at += size


def wait_for_group(group: dist.ProcessGroup) -> None:
    """Return when every rank of the group has come here. Collective: the group."""
    token = torch.zeros(1)
    dist.all_reduce(token, group=group)
    steps = 2 * (dist.get_world_size(group) - 1)
    traffic.count_control("all_reduce", steps * token.nbytes, steps * token.nbytes)


def combine(stage: str, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
    """What `merge` makes of every rank's JSON-able `value`, itself JSON-able, on every rank.

    With many ranks only rank 0 merges: the others receive the result alone. If `merge` raises, all ranks raise the same
    error. Collective: every rank.
    """
    causes: list[Exception] = []

    def merge_or_say(rows: list[Any]) -> list[Any]:
        try:
            return [[], merge(rows)]
        except Exception as error:
            causes.append(error)
            return [[finding.to_json() for finding in _findings_of(error, stage, rank=0)], None]

    found, merged = answer_all(value, merge_or_say)
    if found:
        raise error_for([Finding.from_json(each) for each in found]) from (causes[0] if causes else None)
    return merged


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
    except Exception as error:
        findings, cause = _findings_of(error, stage, dist.get_rank()), error
    rows = exchange([[finding.to_json() for finding in findings], message.mine if not findings else None])
    merged = _merge([row[0] for row in rows])
    if merged:
        raise error_for(merged) from cause
    message.rows = [row[1] for row in rows]


def _findings_of(error: Exception, stage: str, rank: int) -> list[Finding]:
    """The findings of an error: its own, or one that describes an error that nobody foresaw."""
    if isinstance(error, ShardproofError):
        return error.findings
    where = traceback.extract_tb(error.__traceback__)[-1]
    detail = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return [Finding(UNEXPECTED.get(stage, "L100"), stage, detail, rank=rank)]
