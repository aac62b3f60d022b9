"""Evaluation: mean rewards on held-out prompts, with their standard error, before training goes on or beside it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from shardproof.dist.collectives import exchange, together
from shardproof.rl.background import BackgroundRollouts
from shardproof.rl.conversations.steps import starts_of
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import in_groups, known_rewards
from shardproof.rl.reward_failures import result_together, rewards_together
from shardproof.rl.rollouts import Sampler
from shardproof.rl.rounds import settle
from shardproof.rl.versions import check_usable, token_counts
from shardproof.rollout.engine import Sampling
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of


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
    metrics, _ = _measure(trajectories, num_samples, sampler.reward_names, share)
    return metrics


class RunningEvaluation:
    """What `evaluate` measures, while training goes on: its completions begin at once and are made in the background.

    Weights may change meanwhile, so the metrics say which wrote the completions: `eval/step` is the step after which
    the evaluation began, `eval/version` the version of the oldest weights, and `eval/version_last` that of the newest if
    there are several. Have one at a time: take the result of one before you begin the next.

    Collective: every rank makes it.
    """

    def __init__(
        self,
        background: BackgroundRollouts,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        num_samples: int,
        step: int,
        share: Share,
    ):
        self.step, self._sampler, self._num_samples, self._share = step, sampler, num_samples, share
        # Of ranks that share sequences, the first one has the completions made.
        leads = share.rank % share.sequence_parallel == 0
        mine = share.of(list(enumerate(prompts))) if leads else []
        self._started, self._seconds = time.perf_counter(), 0.0
        starts = starts_of(sampler.seed, mine, num_samples, -1 - step)
        with together("rollout"):  # a thread may not be had on one rank
            self._batch = background.begin(starts, sampling)

    @property
    def ready(self) -> bool:
        """Whether this rank's completions are there, or will never be. `result` waits for those of all ranks."""
        ready = not self._batch.num_in_progress
        if ready and not self._seconds:
            self._seconds = time.perf_counter() - self._started
        return ready

    def result(self) -> dict[str, float]:
        """The metrics, as soon as every rank's completions are there; raises on every rank what went wrong on one.

        Collective: every rank.
        """
        trajectories: list[Trajectory] = []

        def find() -> list[Reward]:
            trajectories.extend(made for _, made in sorted(self._batch.wait().items()))
            return [reward_of(made) for made in trajectories]

        assert self._sampler.rewards is not None, "nothing scores these completions"
        settle(self._batch)
        rewards_together(find, self._sampler.rewards.noticed)
        names = self._sampler.reward_names
        metrics, versions = _measure(trajectories, self._num_samples, names, self._share)
        metrics["eval/step"] = float(self.step)
        if versions:
            metrics["eval/version"] = float(min(versions))
        if len(versions) > 1:
            metrics["eval/version_last"] = float(max(versions))
        return metrics | {"time/evaluation": self._seconds or time.perf_counter() - self._started}

    def cancel(self) -> None:
        """Give up what is not there yet."""
        self._batch.cancel()


def _measure(
    trajectories: Sequence[Trajectory], num_samples: int, names: Sequence[str], share: Share
) -> tuple[dict[str, float], set[int]]:
    """(means over the held-out completions of all ranks, the versions of the weights that wrote them).

    A prompt is passed if a completion has 1 of the first reward. Collective: every rank.
    """
    mine = []
    for group in in_groups(trajectories):
        known = known_rewards(group)
        mine.append([[r.total for r in known], [dict(r.parts) for r in known], len(group) - len(known)])
    counts = [count for made in trajectories for count in token_counts(made.sampled)]
    written = sorted({version for num, version in counts if num and version is not None})
    rows = share.once(exchange([mine, written]))
    every = [group for groups, _ in rows for group in groups]
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
    metrics["eval/failed"] = float(sum(failed for _, _, failed in every))
    return metrics, {version for _, versions in rows for version in versions}


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of two or more values: their sample deviation over the root of their number.

    Completions of one prompt are not independent, so the values are the prompts' means.
    """
    return statistics.stdev(values) / math.sqrt(len(values))
