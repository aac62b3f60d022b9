"""What is measured of reward functions: their means, where they had nothing to say, and what they measured themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardproof.rollout.trajectory import Trajectory, reward_of


def reward_facts(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """What the metrics need of each trajectory beside its parts, JSON-able; nothing of those without any of it."""
    rewards = [reward_of(made) for made in trajectories]
    return [
        {"no_signal": list(reward.no_signal), "silent": reward.silent, "facts": dict(reward.facts)}
        for reward in rewards
        if reward.no_signal or reward.silent or reward.facts
    ]


def part_metrics(parts: Sequence[Mapping[str, float]], said: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each part over the completions that have it, of each fact likewise, and numbers without a signal.

    `reward/NAME/no_signal` and `reward/silent` are there in steps that have such completions.
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    for each in said:
        for name, value in each["facts"].items():
            values.setdefault(name, []).append(value)
    metrics = {f"reward/{name}": sum(values[name]) / len(values[name]) for name in sorted(values)}
    for name in sorted({name for each in said for name in each["no_signal"]}):
        metrics[f"reward/{name}/no_signal"] = float(sum(name in each["no_signal"] for each in said))
    if num_silent := sum(each["silent"] for each in said):
        metrics["reward/silent"] = float(num_silent)
    return metrics
