"""Rewards and environments that fail: said on the terminal at once, and the end of the run where a whole batch failed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import torch.distributed as dist

from shardproof.dist.collectives import exchange_among, together
from shardproof.errors import fail
from shardproof.rl.conversations.measures import NAME, all_rewards
from shardproof.rl.rewards.runner import PendingRewards
from shardproof.rollout.trajectory import Reward, Trajectory
from shardproof.text import printable

logger = logging.getLogger(__name__)

_MAX_NOTICED = 20  # kinds of failures that the terminal shows in a run
_MAX_TEXT = 400
SILENT = "no signal"  # among the kinds that were noticed
_TURN = re.compile(r"turn [0-9]+: ")  # how an environment's errors begin, whatever failed


def result_together(
    pending: PendingRewards, trajectories: Sequence[Trajectory], share: int = 1
) -> list[Reward]:
    """The rewards of this rank's trajectories, environments' included: see `rewards_together`. Collective: every rank."""

    def find() -> list[Reward]:
        leads = dist.get_rank() % share == 0
        return all_rewards(trajectories, pending.result(), masks=False) if leads else []

    return rewards_together(find, pending.noticed, share)


def rewards_together(find: Callable[[], list[Reward]], noticed: set[str], share: int = 1) -> list[Reward]:
    """The rewards that `find` waits for. Rank 0 shows failures of a kind that is not among those `noticed` yet.

    Of `share` ranks that have the same trajectories, what the first one found counts: a function that is asked twice may
    say two things, and a group's ranks must train on the same. If a rank's `find` raises, or every sample of every rank
    failed, all ranks raise.

    Collective: every rank.
    """
    with together("reward") as message:
        scored = find()
        message.mine = [len(scored), sum(one.failed for one in scored), first_of_each_kind(scored)]
    rows = message.rows
    kinds = notice([found for _, _, found in rows], noticed)
    num_samples, num_failed = (sum(row[k] for row in rows) for k in (0, 1))
    if num_samples and num_samples == num_failed:
        errors = [f"rank {rank}: {name!r}: {error}" for rank, name, error in kinds.values()]
        of_environment = any(name == NAME for _, name, _ in kinds.values())
        raise fail(
            "R509" if of_environment else "R504",
            "rollout" if of_environment else "reward",
            f"the whole batch failed, no sample has a reward: {'; '.join(errors[:3])}.",
            fix=f"repair the {NAME if of_environment else 'reward'}, or the data that it reads",
        )
    if share > 1:
        (first, *_) = exchange_among([asdict(one) for one in scored], share)
        scored = [Reward.from_json(one) for one in first]
    return scored


def notice_silence(metrics: Mapping[str, float], noticed: set[str]) -> None:
    """Have rank 0 say, once in a run, that every reward function had nothing to say about some completions."""
    num = metrics.get("reward/silent", 0.0)
    if num and SILENT not in noticed:
        noticed.add(SILENT)
        if dist.get_rank() == 0:
            logger.warning(
                "every reward function returned None for %d completions: they are left out (docs/rewards.md#no-signal)",
                num,
            )


def first_of_each_kind(scored: Iterable[Reward]) -> dict[str, tuple[str, str]]:
    """{kind: (reward, error)}. The kind of an error is its reward and what stands before numbers, places and details.

    The turn of a conversation is no part of the kind.
    """
    found: dict[str, tuple[str, str]] = {}
    for one in scored:
        for name, error in one.failures.items():
            what = error[begin.end() :] if (begin := _TURN.match(error)) else error
            kind = f"{name}: {re.split(r'[:(]|[0-9]+', what, maxsplit=1)[0]}"
            found.setdefault(kind, (name, error[:_MAX_TEXT]))
    return found


def notice(
    found: Sequence[Mapping[str, tuple[str, str]]], noticed: set[str]
) -> dict[str, tuple[int, str, str]]:
    """{kind: (rank, reward, error)} of what each rank found; rank 0 shows the kinds that are not among those `noticed` yet."""
    kinds: dict[str, tuple[int, str, str]] = {}
    for rank, mine in enumerate(found):
        for kind, (name, error) in mine.items():
            kinds.setdefault(kind, (rank, name, error))
    for kind, (rank, name, error) in kinds.items():
        if kind in noticed or len(noticed) == _MAX_NOTICED:
            continue
        noticed.add(kind)
        if dist.get_rank() == 0:
            what = "the environment" if name == NAME else f"reward {name!r}"
            logger.warning("rank %d: %s failed: %s", rank, what, printable(error).replace("\n", " "))
    return kinds
