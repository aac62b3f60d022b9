"""What is measured of a step's trajectories: rewards, lengths, errors."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardproof.config.algorithm_dynamics import Dynamics
from shardproof.dist.collectives import combine
from shardproof.rl.conversations.measures import conversation_facts, environment_metrics
from shardproof.rl.data import Share
from shardproof.rl.rewards.measures import part_metrics, reward_facts
from shardproof.rl.sources.measures import source_facts, source_metrics
from shardproof.rl.versions import ahead_metrics
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of

_OF_TOTALS = ("reward/mean", "reward/std", "reward/group_std")
_MAX_ERRORS = 3  # different ones, of rewards and environments, that a rank reports per step


def in_groups(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each prompt, which follow each other."""
    return [list(members) for _, members in groupby(trajectories, key=lambda t: t.group)]


def known_rewards(trajectories: Iterable[Trajectory]) -> list[Reward]:
    """The rewards that did not fail, and that some function had something to say to."""
    return [reward for reward in map(reward_of, trajectories) if reward.known]


def value_of(reward: Reward, name: str | None) -> float | None:
    """What a reward function, or the total if None, says; None if the function failed or had nothing to say."""
    if name is None:
        return reward.total
    return reward.values.get(name)


@dataclass(frozen=True)
class Success:
    """From which value a completion is solved, and which reward function says it: the first that says something."""

    names: tuple[str, ...]  # empty: the total decides
    threshold: float = 1.0

    @classmethod
    def by(cls, settings: Dynamics, deciding: Sequence[str]) -> Success:
        """As the settings say; `deciding` are the rewards that decide where they name none."""
        return cls(tuple(settings.success_on) or tuple(deciding), settings.success_threshold)

    def value(self, reward: Reward) -> float | None:
        """What decides; None if the function failed or none has something to say."""
        if not self.names:
            return reward.total
        speaking = [name for name in self.names if name not in reward.no_signal]
        return value_of(reward, speaking[0]) if speaking else None

    def of(self, reward: Reward) -> bool:
        """Whether the completion is solved."""
        value = self.value(reward)
        return value is not None and value >= self.threshold


def measure(
    trajectories: Sequence[Trajectory],
    greedy: Sequence[Trajectory],
    share: Share,
    about: dict[str, Any] | None,
    success: Success,
) -> tuple[dict[str, float], list[str]]:
    """(metrics of rewards and lengths of the global batch, the first reward errors of every rank).

    Completions whose reward failed count in lengths, and of rewards only in the means of functions that did not fail;
    `greedy` ones count in nothing but `reward/greedy`.
    `about` are this rank's facts of running ahead.

    Collective: every rank.
    """
    known = known_rewards(trajectories)
    groups = in_groups(trajectories)
    spreads = [[reward.measured for reward in known_rewards(group)] for group in groups]
    errors = [error for trajectory in trajectories for error in reward_of(trajectory).errors]
    # Failures of environments are counted by their own metrics.
    num_broken = sum(trajectory.ended == "failed" for trajectory in trajectories)
    mine = {
        "rewards": [reward.measured for reward in known],
        "lengths": [trajectory.num_sampled for trajectory in trajectories],
        "finished": [trajectory.finished for trajectory in trajectories],
        "spread": [statistics.pstdev(spread) for spread in spreads if spread],
        "solved": [success.of(reward) for reward in known],
        "greedy": [reward.measured for reward in known_rewards(greedy)],
        "parts": [reward_of(trajectory).values for trajectory in trajectories],
        "num_errors": len(errors) - num_broken,
        "num_failed": sum(reward_of(made).failed for made in trajectories) - num_broken,
        "said": reward_facts(trajectories),
        "errors": list(dict.fromkeys(errors))[:_MAX_ERRORS],
        "conversations": conversation_facts(trajectories),
        "sources": source_facts(trajectories),
        **({} if about is None else {"ahead": about}),
    }
    metrics, first = combine("rollout", mine, lambda rows: _merged(share.once(rows)))
    return metrics, first


def without_totals(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics where no reward counts: without those of the weighted sum, which is 0 whatever the policy does."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in _OF_TOTALS and not name.startswith("reward/mean/")
    }


def _merged(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """The metrics and the errors of what ranks measured."""
    merged = {
        key: [value for row in rows for value in row[key]]
        for key in (
            *("rewards", "lengths", "finished", "spread", "solved", "greedy"),
            *("parts", "errors", "conversations", "sources", "said"),
        )
    }
    metrics = {
        "reward/mean": _mean(merged["rewards"]),
        "reward/std": statistics.pstdev(merged["rewards"]) if merged["rewards"] else 0.0,
        "reward/group_std": _mean(merged["spread"]),
        "reward/solved": _mean(merged["solved"]),
        "completion/length": _mean(merged["lengths"]),
        "completion/finished": _mean(merged["finished"]),
        "reward/errors": float(sum(row["num_errors"] for row in rows)),
        "reward/failed": float(sum(row["num_failed"] for row in rows)),
    }
    metrics |= part_metrics(merged["parts"], merged["said"])
    if merged["greedy"]:
        metrics["reward/greedy"] = _mean(merged["greedy"])
    if "ahead" in rows[0]:
        metrics |= ahead_metrics([row["ahead"] for row in rows])
    metrics |= source_metrics(merged["sources"])
    return metrics | environment_metrics(merged["conversations"]), sorted(set(merged["errors"]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
