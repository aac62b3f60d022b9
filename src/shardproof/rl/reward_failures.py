"""Rewards that fail: said on the terminal at once, and the end of the run where a whole batch failed."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import torch.distributed as dist

from shardproof.dist.collectives import together
from shardproof.errors import fail
from shardproof.rl.rewards import PendingRewards
from shardproof.rollout.trajectory import Reward
from shardproof.text import printable

logger = logging.getLogger(__name__)

_MAX_NOTICED = 20  # kinds of failures that the terminal shows in a run
_MAX_TEXT = 400


def result_together(pending: PendingRewards) -> list[Reward]:
    """This rank's rewards, in the order of the samples. Rank 0 shows failures of a new kind.

    If a rank's rewards raise, or every sample of every rank failed, all ranks raise.

    Collective: every rank.
    """
    with together("reward") as message:
        scored = pending.result()
        message.mine = [len(scored), sum(one.failed for one in scored), _first_of_each_kind(scored)]
    rows = message.rows
    kinds: dict[str, tuple[int, str, str]] = {}
    for rank, (_, _, found) in enumerate(rows):
        for kind, (name, error) in found.items():
            kinds.setdefault(kind, (rank, name, error))
    _notice(kinds, pending.noticed)
    num_samples, num_failed = (sum(row[k] for row in rows) for k in (0, 1))
    if num_samples and num_samples == num_failed:
        errors = [f"rank {rank}: {name!r}: {error}" for rank, name, error in kinds.values()]
        raise fail(
            "R504",
            "reward",
            f"the whole batch failed, no sample has a reward: {'; '.join(errors[:3])}.",
            fix="repair the reward, or the data that it reads",
        )
    return scored


def _first_of_each_kind(scored: Sequence[Reward]) -> dict[str, tuple[str, str]]:
    """{kind: (reward, error)}. The kind of an error is its reward and what stands before numbers, places and details."""
    found: dict[str, tuple[str, str]] = {}
    for one in scored:
        for name, error in one.failures.items():
            kind = f"{name}: {re.split(r'[:(]|[0-9]+', error, maxsplit=1)[0]}"
            found.setdefault(kind, (name, error[:_MAX_TEXT]))
    return found


def _notice(kinds: dict[str, tuple[int, str, str]], noticed: set[str]) -> None:
    for kind, (rank, name, error) in kinds.items():
        if kind in noticed or len(noticed) == _MAX_NOTICED:
            continue
        noticed.add(kind)
        if dist.get_rank() == 0:
            logger.warning("rank %d: reward %r failed: %s", rank, name, printable(error).replace("\n", " "))
