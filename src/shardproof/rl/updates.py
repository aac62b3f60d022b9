"""From experience to updates: how a batch is divided among them, and what they report."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardproof.bounds import largest
from shardproof.dist.collectives import exchange
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.experience import Experience
from shardproof.train.batching import Batch
from shardproof.train.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Update:
    """What one update did to the policy and, where there is one, to the critic."""

    policy: StepResult | None  # None: the critic alone was to learn
    critic: StepResult | None

    @property
    def steps(self) -> list[StepResult]:
        return [step for step in (self.policy, self.critic) if step is not None]


@dataclass(frozen=True)
class Schedule:
    """Which updates a step makes: `num_parts` of its batch in each of `num_epochs`, the later ones in another order."""

    num_parts: int = 1
    num_epochs: int = 1
    seed: int = 0
    trains_policy: bool = True  # False: the critic alone

    def order(self, step: int, epoch: int) -> list[int]:
        """The parts in the order in which an epoch takes them. The first takes them as they are."""
        parts = list(range(self.num_parts))
        if epoch:
            random.Random(f"{self.seed}/{step}/{epoch}").shuffle(parts)
        return parts


def update(
    policy: Trainer,
    critic: Trainer | None,
    algorithm: Algorithm,
    experience: Experience,
    schedule: Schedule,
    step: int,
    *,
    temperature: float,
    router_coef: float,
    **options: Any,
) -> list[Update]:
    """The step's updates of policy and critic; `options` are those of both steps. Collective: every rank."""
    share = policy.model.sequence_parallel
    updates = []
    parts = mini_batches(experience, schedule.num_parts)
    for number in (k for epoch in range(schedule.num_epochs) for k in schedule.order(step, epoch)):
        part = parts[number]
        counted = int((part.counts() > 0).sum())
        moving = _moving(part) if algorithm.skips_zero_advantages else []
        rows = exchange([counted, len(moving)])
        num_sequences = sum(row[0] for row in rows) / share
        if not num_sequences:
            continue
        batch = algorithm.weigh(part, num_sequences, share)
        if any(row[1] for row in rows):
            batch = batch.select(moving)
        stepped = None
        if schedule.trains_policy:
            stepped = policy.step(
                batch, loss=algorithm.loss, temperature=temperature, router_coef=router_coef, **options
            )
        value_loss = algorithm.value_loss
        valued = critic.step(batch, loss=value_loss, **options) if critic and value_loss else None
        updates.append(Update(stepped, valued))
    return updates


def mini_batches(experience: Experience, num: int) -> list[Batch]:
    """This rank's part of each update's batch: `num` runs of the step's prompts, in order, as equal as can be.

    Prompts are dealt to the ranks one by one, so every rank has its share of every run, and which prompts an update
    takes does not depend on the number of ranks.
    """
    if num == 1:
        return [experience.batch]
    places = {group: place for place, group in enumerate(experience.order)}
    bounds = [part * len(places) // num for part in range(num + 1)]
    return [
        experience.batch.select(
            [k for k, t in enumerate(experience.sequences) if first <= places[t.group] < end]
        )
        for first, end in pairwise(bounds)
    ]


def _moving(batch: Batch) -> list[int]:
    """The sequences that can move the policy: not those of groups whose rewards are all equal.

    The gradient of the others is zero, so the update is the same without them, and cheaper; weights are those of the
    whole batch, also where some sequences of a conversation are left out. Where no rank has any, nothing is left out.
    """
    return [i for i, row in enumerate(batch.columns["advantages"]) if bool(row.any())]


def step_metrics(algorithm: Algorithm, updates: Sequence[Update]) -> dict[str, float]:
    """A step's numbers from those of its updates: see `combine`. Counts say how many were made and skipped."""
    steps = [step for each in updates for step in each.steps]
    policies = [each.policy for each in updates if each.policy is not None]
    metrics = {
        "updates": float(sum(step.stepped for step in policies)),
        "skipped": float(sum(not step.stepped for step in steps)),
    }
    if policies:
        names = {"loss/total": "loss", "grad_norm": "grad_norm"}
        metrics |= combine(policies, algorithm.loss.metrics, names)
        metrics["lr"] = policies[-1].lr
    critics = [each.critic for each in updates if each.critic is not None]
    if critics:
        assert algorithm.value_loss is not None
        names = {"loss/value": "loss", "grad_norm/critic": "grad_norm"}
        metrics |= combine(critics, algorithm.value_loss.metrics, names)
    return metrics


def combine(
    results: Sequence[StepResult], reductions: Mapping[str, str], fields: Mapping[str, str]
) -> dict[str, float]:
    """One number for each metric of several updates: the mean over all their tokens, the sum, or the largest or smallest.

    `fields` names what a result has once, such as its loss: its mean over the updates. Updates that were skipped do not
    count, unless all of them were.
    """
    counted = [result for result in results if result.stepped] or list(results)
    if len(counted) == 1:
        (only,) = counted
        return {**only.metrics, **{name: getattr(only, key) for name, key in fields.items()}}
    num_tokens = sum(result.num_tokens for result in counted)
    found = {}
    for name in counted[0].metrics:
        values = [result.metrics[name] for result in counted]
        how = reductions.get(name, "mean")
        if how == "max":
            found[name] = largest(values)
        elif how == "min":
            found[name] = -largest(-value for value in values)
        elif how == "sum":
            found[name] = sum(values)
        else:
            weighed = [v * result.num_tokens for v, result in zip(values, counted, strict=True)]
            found[name] = sum(weighed) / max(num_tokens, 1)
    for name, key in fields.items():
        found[name] = sum(getattr(result, key) for result in counted) / len(counted)
    return found
