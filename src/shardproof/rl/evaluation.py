"""Evaluation: what held-out prompts say of the policy, before training goes on or beside it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.dist.collectives import exchange, together
from shardproof.rl.background import BackgroundBatch, BackgroundRollouts
from shardproof.rl.conversations.measures import answer_of
from shardproof.rl.conversations.steps import starts_of
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience_metrics import Success, in_groups
from shardproof.rl.held_out_measures import Answered, Reader, measure, reader
from shardproof.rl.rewards.failures import result_together, rewards_together
from shardproof.rl.rollouts import Sampler
from shardproof.rl.rounds import settle
from shardproof.rl.versions import check_usable, token_counts
from shardproof.rollout.engine import Sampling
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of


@dataclass(frozen=True)
class HeldOutTask:
    """Held-out prompts, how they are completed, and what is measured."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    num_samples: int
    pass_at: tuple[int, ...]
    success: Success  # which completions are right
    majority: str = "auto"  # how answers are read for the vote
    prefix: str = "eval/"  # of the metrics


def evaluate(sampler: Sampler, task: HeldOutTask, step: int, share: Share) -> dict[str, float]:
    """Mean rewards with their standard error, pass@k and votes on held-out prompts.

    Rewards are what the functions return. Penalties are left out: they shape training and do not measure quality.

    Collective: every rank.
    """
    mine = share.of(list(enumerate(task.prompts)))
    with sampler.pending() as pending:
        # A step number that training never has keeps evaluation's draws apart from training's.
        trajectories = sampler.roll_out(mine, task.num_samples, -1 - step, task.sampling, pending)
        check_usable(trajectories, sampler.versions, 0)
        rewards = sampler.judged(trajectories, result_together(pending, trajectories, sampler.share))
    trajectories = [replace(made, reward=reward) for made, reward in zip(trajectories, rewards, strict=True)]
    metrics, _ = _measure(trajectories, task, sampler, share)
    return metrics


class RunningEvaluation:
    """What `evaluate` measures of several tasks, while training goes on: completions begin at once, in the background.

    Weights may change meanwhile, so the metrics say which wrote the completions: `eval/step` is the step after which
    the evaluation began, `eval/version` the version of the oldest weights, and `eval/version_last` that of the newest if
    there are several. Have one at a time: take the result of one before you begin the next.

    Collective: every rank makes it.
    """

    def __init__(
        self,
        background: BackgroundRollouts,
        sampler: Sampler,
        tasks: Sequence[HeldOutTask],
        step: int,
        share: Share,
    ):
        self.step, self._sampler, self._tasks, self._share = step, sampler, tasks, share
        # Of ranks that share sequences, the first one has the completions made.
        leads = share.rank % share.sequence_parallel == 0
        self._started, self._seconds = time.perf_counter(), 0.0
        with together("rollout"):  # a thread may not be had on one rank
            self._batches = []
            for task in tasks:
                mine = share.of(list(enumerate(task.prompts))) if leads else []
                starts = starts_of(sampler.seed, mine, task.num_samples, -1 - step)
                self._batches.append(background.begin(starts, task.sampling))

    @property
    def ready(self) -> bool:
        """Whether this rank's completions are there, or will never be. `result` waits for those of all ranks."""
        ready = not any(batch.num_in_progress for batch in self._batches)
        if ready and not self._seconds:
            self._seconds = time.perf_counter() - self._started
        return ready

    def result(self) -> dict[str, float]:
        """The metrics, as soon as every rank's completions are there; raises on every rank what went wrong on one.

        Collective: every rank.
        """
        metrics: dict[str, float] = {"eval/step": float(self.step)}
        versions: set[int] = set()
        for task, batch in zip(self._tasks, self._batches, strict=True):
            found, written = self._result(task, batch)
            metrics |= found
            versions |= written
        if versions:
            metrics["eval/version"] = float(min(versions))
        if len(versions) > 1:
            metrics["eval/version_last"] = float(max(versions))
        return metrics | {"time/evaluation": self._seconds or time.perf_counter() - self._started}

    def _result(self, task: HeldOutTask, batch: BackgroundBatch) -> tuple[dict[str, float], set[int]]:
        trajectories: list[Trajectory] = []

        def find() -> list[Reward]:
            trajectories.extend(made for _, made in sorted(batch.wait().items()))
            return [reward_of(made) for made in trajectories]

        assert self._sampler.rewards is not None, "nothing scores these completions"
        settle(batch)
        rewards = self._sampler.judged(trajectories, rewards_together(find, self._sampler.rewards.noticed))
        trajectories = [
            replace(made, reward=reward) for made, reward in zip(trajectories, rewards, strict=True)
        ]
        return _measure(trajectories, task, self._sampler, self._share)

    def cancel(self) -> None:
        """Give up what is not there yet."""
        for batch in self._batches:
            batch.cancel()


def _measure(
    trajectories: Sequence[Trajectory], task: HeldOutTask, sampler: Sampler, share: Share
) -> tuple[dict[str, float], set[int]]:
    """(what the held-out completions of all ranks say, the versions of the weights that wrote them).

    Completions whose reward failed or had nothing to say are left out of the mean reward, and are not right; each
    function's own mean is over those that it has a value of. A mean of nothing is NaN, which is no best. Collective: every rank.
    """
    names = sampler.reward_names
    read = reader(task.majority, sampler.function_of(task.success.names[0])) if task.num_samples > 1 else None
    mine = [_told(group, task.success, read) for group in in_groups(trajectories)]
    counts = [count for made in trajectories for count in token_counts(made.sampled)]
    written = sorted({version for num, version in counts if num and version is not None})
    rows = share.once(exchange([mine, written]))
    every = [group for groups, _ in rows for group in groups]
    per_prompt = [statistics.fmean(group["totals"]) for group in every if group["totals"]]
    totals = [total for group in every for total in group["totals"]]
    metrics = {"reward": _mean(totals)} if sampler.is_rewarded else {}
    if metrics and len(per_prompt) > 1:
        metrics["reward_se"] = standard_error(per_prompt)
    parts = [part for group in every for part in group["parts"]]
    for name in names:
        values = [part[name] for part in parts if name in part]
        metrics[name] = _mean(values)
    answered = [Answered(tuple(group["scores"]), tuple(group["answers"])) for group in every]
    metrics |= measure(answered, task.pass_at, task.success.threshold, read is not None, task.num_samples)
    metrics["failed"] = float(sum(group["failed"] for group in every))
    if num_silent := sum(group["silent"] for group in every):
        metrics["silent"] = float(num_silent)
    named = {f"{task.prefix}{name}": value for name, value in metrics.items()}
    return named, {version for _, versions in rows for version in versions}


def _told(group: Sequence[Trajectory], success: Success, read: Reader | None) -> dict[str, Any]:
    """What other ranks must know of one prompt's completions."""
    rewards = [reward_of(made) for made in group]
    known = [reward for reward in rewards if reward.known]
    return {
        "totals": [reward.total for reward in known],
        "parts": [reward.values for reward in rewards],
        "failed": sum(reward.failed for reward in rewards),
        "silent": sum(reward.silent and not reward.failed for reward in rewards),
        "scores": [success.value(reward) if reward.known else None for reward in rewards],
        "answers": [_answer(made, read) for made in group] if read is not None else [],
    }


def _answer(made: Trajectory, read: Reader) -> str | None:
    """The answer as the vote reads it, where rewards read theirs; a conversation whose environment failed has none."""
    return None if made.ended == "failed" else read(answer_of(made))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of two or more values: their sample deviation over the root of their number.

    Completions of one prompt are not independent, so the values are the prompts' means.
    """
    return statistics.stdev(values) / math.sqrt(len(values))
