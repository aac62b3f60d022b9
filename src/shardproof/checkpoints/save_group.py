"""What ranks tell each other during a save, on the group of its own that it uses beside training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardproof.dist.collectives import exchange
from shardproof.errors import ShardproofError, error_for
from shardproof.findings import Finding

_TEXT_CHARACTERS = 400


def share(group: dist.ProcessGroup, value: Any = None, problem: Exception | None = None) -> list[Any]:
    """Every rank's JSON-able value; if a rank has a problem, the first one's is raised on all of them.

    Collective: every rank, on the checkpoint group.
    """
    mine = {"value": value} if problem is None else {"problem": _finding(problem).to_json()}
    rows = exchange(mine, group)
    for row in rows:
        if "problem" in row:
            raise error_for([Finding.from_json(row["problem"])]) from problem
    return [row["value"] for row in rows]


def _finding(problem: Exception) -> Finding:
    if isinstance(problem, ShardproofError):
        return problem.findings[0]
    text = " ".join(str(problem).split())[:_TEXT_CHARACTERS]
    message = f"the checkpoint was not published: {type(problem).__name__}: {text}"
    return Finding("E408", "save", message, rank=dist.get_rank())
