"""Evaluation: mean rewards on held-out prompts, with their standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from shardproof.dist.collectives import exchange
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import in_groups, known_rewards
from shardproof.rl.reward_failures import result_together
from shardproof.rl.rollouts import Sampler
from shardproof.rl.versions import check_usable
from shardproof.rollout.engine import Sampling
from shardproof.rollout.trajectory import Trajectory


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    num_samples: int,
    step: int,
    share: Share,
) -> dict[str, float]:
    """Mean rewards, the standard error of their total, and pass@k on held-out prompts.

    Rewards are what the functions return. Penalties are left out: they shape training and do not measure quality.

    Collective: every rank.
    """
    mine = share.of(list(enumerate(prompts)))
    with sampler.pending() as pending:
        # A step number that training never has keeps evaluation's draws apart from training's.
        trajectories = sampler.roll_out(mine, num_samples, -1 - step, sampling, pending)
        check_usable(trajectories, sampler.versions, 0)
        rewards = result_together(pending, trajectories)
    trajectories = [replace(made, reward=reward) for made, reward in zip(trajectories, rewards, strict=True)]
    return _metrics(trajectories, num_samples, sampler.reward_names, share)


def _metrics(
    trajectories: Sequence[Trajectory], num_samples: int, names: Sequence[str], share: Share
) -> dict[str, float]:
    """Means over the held-out completions of all ranks. A prompt is passed if a completion has 1 of the first reward.

    Collective: every rank.
    """
    mine = []
    for group in in_groups(trajectories):
        known = known_rewards(group)
        mine.append([[r.total for r in known], [dict(r.parts) for r in known], len(group) - len(known)])
    every = [group for row in share.once(exchange(mine)) for group in row]
    totals = [total for known, _, _ in every for total in known]
    parts = [part for _, known, _ in every for part in known]
    passed = [any(part[names[0]] >= 1.0 for part in known) for _, known, _ in every]
    num = max(len(totals), 1)
    metrics = {"eval/reward": sum(totals) / num}
    per_prompt = [statistics.fmean(known) for known, _, _ in every if known]
    if len(per_prompt) > 1:
        metrics["eval/reward_se"] = standard_error(per_prompt)
    metrics |= {f"eval/{name}": sum(part[name] for part in parts) / num for name in names}
    metrics[f"eval/pass@{num_samples}"] = sum(passed) / len(passed)
    return metrics | {"eval/failed": float(sum(failed for _, _, failed in every))}


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of two or more values: their sample deviation over the root of their number.

    Completions of one prompt are not independent, so the values are the prompts' means.
    """
    return statistics.stdev(values) / math.sqrt(len(values))
