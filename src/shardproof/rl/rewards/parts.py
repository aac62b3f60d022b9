"""A sample's reward from what each function said: the weighted sum, and what is learned from in its place."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardproof.rl.rewards.calling import Outcome
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rollout.trajectory import Reward

PENALTY = "penalty"  # the algorithm's, among the parts that are normalised
_EPS = 1e-4


def summed(specs: Sequence[RewardSpec], found: Mapping[str, Outcome]) -> Reward:
    """The reward of a sample. Functions without a signal do not count; if none of those that count has one, it is silent."""
    reward = Reward(0.0, silent=any(spec.weight for spec in specs))
    for spec in specs:
        outcome = found[spec.key]
        reward = with_part(reward, spec.key, spec.weight, outcome.value, outcome.error, spec.clip)
        if outcome.facts:
            facts = {f"{spec.key}/{name}": value for name, value in outcome.facts.items()}
            reward = replace(reward, facts={**reward.facts, **facts})
    return reward


def with_part(
    reward: Reward,
    key: str,
    weight: float,
    value: float | None,
    error: str | None = None,
    clip: Sequence[float] | None = None,
) -> Reward:
    """The reward with what one more function, or model, said: None is no signal, and with an error it failed."""
    if error is not None:
        return replace(
            reward,
            parts={**reward.parts, key: 0.0},
            failures={**reward.failures, key: error},
            failed=reward.failed or bool(weight),
            silent=reward.silent and not weight,
        )
    if value is None:
        return replace(reward, no_signal=(*reward.no_signal, key))
    return replace(
        reward,
        total=reward.total + weight * _counted(value, clip),
        parts={**reward.parts, key: value},
        silent=reward.silent and not weight,
    )


def clipped(reward: Reward, clip: Sequence[float]) -> Reward:
    """The reward whose total is learned from within bounds; the algorithm's penalty is added to that."""
    low, high = clip
    return replace(reward, shaped=min(max(reward.total, low), high) + reward.penalty)


def _counted(value: float, clip: Sequence[float] | None) -> float:
    """What counts of a function's value."""
    return value if clip is None else min(max(value, clip[0]), clip[1])


def normalised_each(
    group: Sequence[Reward], weights: Mapping[str, float], clips: Mapping[str, Sequence[float]] | None = None
) -> list[Reward]:
    """GDPO: what is learned from a group is the weighted sum of each part's own deviations from the group's mean.

    A part that fewer than two completions have says nothing about any of them. The algorithm's penalty is one more part.
    """
    clips = clips or {}
    sums = [0.0] * len(group)
    penalties = {PENALTY: 1.0} if any(reward.penalty for reward in group) else {}
    for key, weight in (*weights.items(), *penalties.items()):
        found = _values(group, key)
        values = {k: _counted(value, clips.get(key)) for k, value in found if group[k].counts}
        if len(values) < 2:
            continue
        mean = statistics.fmean(values.values())
        deviation = statistics.stdev(values.values(), mean)
        for k, value in values.items():
            sums[k] += weight * (value - mean) / (deviation + _EPS)
    return [replace(reward, shaped=total) for reward, total in zip(group, sums, strict=True)]


def _values(group: Sequence[Reward], key: str) -> Iterable[tuple[int, float]]:
    for k, reward in enumerate(group):
        if key == PENALTY:
            yield k, reward.penalty
        elif (value := reward.values.get(key)) is not None:
            yield k, value
