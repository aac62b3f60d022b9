"""One step's experience: trajectories with rewards, the batch that is made of them, and what is measured on the way."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from shardproof.dist.collectives import combine, exchange
from shardproof.errors import fail
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.batches import make_batch
from shardproof.rl.buffer import Buffer
from shardproof.rl.conversations.measures import conversation_facts, environment_metrics
from shardproof.rl.data import Share
from shardproof.rl.rollouts import await_rewards
from shardproof.rl.versions import ahead_metrics, check_usable
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.trajectory import Reward, Trajectory, reward_of
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.score import logprobs, values

_MAX_ROUNDS = 4  # of sampling, when groups without a signal are dropped
_MAX_ERRORS = 3  # different ones, of rewards and environments, that a rank reports per step


@dataclass(frozen=True)
class Experience:
    """This rank's part of a step's experience, and the metrics of the whole of it."""

    trajectories: list[Trajectory]  # conversations, in the batch's order; none where completions are given
    batch: Batch
    metrics: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # of rewards, the first few of every rank
    order: list[int] = field(default_factory=list)  # the groups of all ranks that are trained on

    @property
    def sequences(self) -> list[Trajectory]:
        """The batch's rows: a trajectory each, of which a conversation may have several."""
        return sequences_of(self.trajectories)


@dataclass(frozen=True)
class Scorers:
    """The models whose opinion of a batch an algorithm may need, and how they are asked."""

    policy: ShardedModel
    reference: ShardedModel | None  # None: the policy's base with adapters off
    critic: ShardedModel | None
    temperature: float
    micro_batch_tokens: int
    replay: ExpertShape | None = None  # what the policy routes, if it is to choose the engine's experts

    def scored(self, batch: Batch, columns: Iterable[str]) -> Batch:
        """The batch with the log-probs and values that are named in `columns`. Collective: every rank.

        Experts are replayed by the policy alone: what a reference or a critic says is defined by its own routers.
        """
        size, wanted = self.micro_batch_tokens, set(columns)
        if "ref_logps" in wanted:
            # One temperature for policy and reference: a KL between differently scaled distributions means nothing.
            model, adapters = self.reference or self.policy, self.reference is not None
            found = logprobs(model, batch.sequences, self.temperature, adapters, micro_batch_tokens=size)
            batch = batch.with_column("ref_logps", _on_host(found))
        if "old_logps" in wanted:
            found = logprobs(
                self.policy,
                batch.sequences,
                self.temperature,
                micro_batch_tokens=size,
                experts=batch.experts,
            )
            batch = batch.with_column("old_logps", _on_host(found))
        if "values" in wanted:
            assert self.critic is not None, "an algorithm that needs values has a critic"
            found = values(self.critic, batch.sequences, micro_batch_tokens=size)
            batch = batch.with_column("values", _on_host(found))
        return batch


def _on_host(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row.cpu() for row in rows]


def collect(buffer: Buffer, scorers: Scorers, algorithm: Algorithm, *, step: int) -> Experience:
    """One step's experience: its prompts' trajectories, scored and weighed; sampling goes on for later steps as is allowed.

    Collective: every rank.
    """
    sampler, share = buffer.means.sampler, buffer.means.share
    assert sampler.rewards is not None, "nothing scores these completions"
    num_prompts, noticed = buffer.num_prompts, sampler.rewards.noticed
    seen: list[Trajectory] = []
    num_seen, waited_s, environment_s = 0, 0.0, sampler.waited_s
    kept: list[int] = []
    batch: Batch | None = None
    drops = algorithm.drops_equal_rewards
    buffer.begin(step)
    for _ in range(_MAX_ROUNDS if drops else 1):
        taken = buffer.take(step, num_prompts - len(kept))
        fresh = taken.trajectories
        check_usable(fresh, sampler.versions, buffer.ahead)
        if not drops:
            # Every group stays, so the models score them all while rewards run.
            batch = scorers.scored(make_batch(sequences_of(fresh), scorers.replay), algorithm.columns)
        fresh, seconds = await_rewards(fresh, taken.rewards, noticed, algorithm)
        seen += fresh
        num_seen += len(taken.groups)
        waited_s += seconds
        kept += _with_signal(fresh) if drops else taken.groups
        if len(kept) >= num_prompts:
            break
    buffer.end_step(step)
    # The last round may give more than a batch: which groups stay must not depend on the number of ranks.
    order = sorted(kept)[:num_prompts]
    chosen = set(order)
    trajectories = [trajectory for trajectory in seen if trajectory.group in chosen]
    if batch is None:
        batch = scorers.scored(make_batch(sequences_of(trajectories), scorers.replay), algorithm.columns)
    about = buffer.facts(trajectories) if buffer.is_ahead else None
    metrics, errors = _measure(seen, share, about)
    metrics |= {"prompts/kept": len(order) / num_seen, "time/reward": waited_s}
    if buffer.means.background is not None:
        metrics["time/trainer_idle"] = buffer.waited_s
    if sampler.conversations is not None:
        metrics["time/environment"] = sampler.waited_s - environment_s
    batch = algorithm.advantages(batch, sequences_of(trajectories))
    if not isinstance(batch, Batch) or "advantages" not in batch.columns:
        found = f"columns {', '.join(batch.columns)}" if isinstance(batch, Batch) else type(batch).__name__
        message = (
            f"{type(algorithm).__name__}.advantages returned {found}; expected the batch with 'advantages'."
        )
        raise fail("C001", "rollout", message, fix="see docs/extending.md#an-algorithm")
    return Experience(trajectories, batch, metrics, errors, order)


def sequences_of(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The sequences of all conversations, in order."""
    return [sequence for trajectory in trajectories for sequence in trajectory.sequences]


def in_groups(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each prompt, which follow each other."""
    return [list(members) for _, members in groupby(trajectories, key=lambda t: t.group)]


def known_rewards(trajectories: Iterable[Trajectory]) -> list[Reward]:
    """The rewards that did not fail."""
    return [reward for reward in map(reward_of, trajectories) if not reward.failed]


def _with_signal(trajectories: Sequence[Trajectory]) -> list[int]:
    """The groups of all ranks whose completions the reward functions tell apart. Penalties do not count: they always do.

    Collective: every rank.
    """
    groups = in_groups(trajectories)
    mine = [g[0].group for g in groups if len({r.total for r in map(reward_of, g) if r.counts}) > 1]
    return sorted({group for row in exchange(mine) for group in row})


def _measure(
    trajectories: Sequence[Trajectory], share: Share, about: dict[str, Any] | None
) -> tuple[dict[str, float], list[str]]:
    """(metrics of rewards and lengths of the global batch, the first reward errors of every rank).

    Completions whose reward failed count in lengths and not in rewards. `about` are this rank's facts of running ahead.

    Collective: every rank.
    """
    known = known_rewards(trajectories)
    groups = in_groups(trajectories)
    spreads = [[reward.trained for reward in known_rewards(group)] for group in groups]
    errors = [error for trajectory in trajectories for error in reward_of(trajectory).errors]
    # Failures of environments are counted by their own metrics.
    num_broken = sum(trajectory.ended == "failed" for trajectory in trajectories)
    mine = {
        "rewards": [reward.trained for reward in known],
        "lengths": [trajectory.num_sampled for trajectory in trajectories],
        "finished": [trajectory.finished for trajectory in trajectories],
        "spread": [statistics.pstdev(spread) for spread in spreads if spread],
        "parts": [dict(reward.parts) for reward in known],
        "num_errors": len(errors) - num_broken,
        "num_failed": len(trajectories) - len(known) - num_broken,
        "errors": list(dict.fromkeys(errors))[:_MAX_ERRORS],
        "conversations": conversation_facts(trajectories),
        **({} if about is None else {"ahead": about}),
    }
    metrics, first = combine("rollout", mine, lambda rows: _merged(share.once(rows)))
    return metrics, first


def _merged(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """The metrics and the errors of what ranks measured."""
    merged = {
        key: [value for row in rows for value in row[key]]
        for key in ("rewards", "lengths", "finished", "spread", "parts", "errors", "conversations")
    }
    metrics = {
        "reward/mean": _mean(merged["rewards"]),
        "reward/std": statistics.pstdev(merged["rewards"]) if merged["rewards"] else 0.0,
        "reward/group_std": _mean(merged["spread"]),
        "completion/length": _mean(merged["lengths"]),
        "completion/finished": _mean(merged["finished"]),
        "reward/errors": float(sum(row["num_errors"] for row in rows)),
        "reward/failed": float(sum(row["num_failed"] for row in rows)),
    }
    for name in sorted({name for part in merged["parts"] for name in part}):
        metrics[f"reward/{name}"] = _mean([part.get(name, 0.0) for part in merged["parts"]])
    if "ahead" in rows[0]:
        metrics |= ahead_metrics([row["ahead"] for row in rows])
    return metrics | environment_metrics(merged["conversations"]), sorted(set(merged["errors"]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
