"""From experience to updates: how a batch is divided among them, and what they report."""

from __future__ import annotations

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

    policy: StepResult
    critic: StepResult | None

    @property
    def steps(self) -> list[StepResult]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]


def update(
    policy: Trainer,
    critic: Trainer | None,
    algorithm: Algorithm,
    experience: Experience,
    num_updates: int,
    *,
    temperature: float,
    router_coef: float,
    **options: Any,
) -> list[Update]:
    """The step's updates of policy and critic; `options` are those of both steps. Collective: every rank."""
    share = policy.model.sequence_parallel
    updates = []
    for part in mini_batches(experience, num_updates):
        counted = int((part.counts() > 0).sum())
        moving = _moving(part) if algorithm.skips_zero_advantages else []
        rows = exchange([counted, len(moving)])
        num_sequences = sum(row[0] for row in rows) / share
        if not num_sequences:
            continue
        batch = algorithm.weigh(part, num_sequences, share)
        if any(row[1] for row in rows):
            batch = batch.select(moving)
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
    metrics = {
        "updates": float(sum(each.policy.stepped for each in updates)),
        "skipped": float(sum(not step.stepped for step in steps)),
    }
    if not updates:
        return metrics
    names = {"loss/total": "loss", "grad_norm": "grad_norm"}
    metrics |= combine([each.policy for each in updates], algorithm.loss.metrics, names)
    metrics["lr"] = updates[-1].policy.lr
    critics = [each.critic for each in updates if each.critic is not None]
    if critics:
        assert algorithm.value_loss is not None
        names = {"loss/value": "loss", "grad_norm/critic": "grad_norm"}
        metrics |= combine(critics, algorithm.value_loss.metrics, names)
    return metrics


def combine(
    results: Sequence[StepResult], reductions: Mapping[str, str], fields: Mapping[str, str]
) -> dict[str, float]:
    """One number for each metric of several updates: the mean over all their tokens, or the largest of the largest.

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
        if reductions.get(name, "mean") == "max":
            found[name] = largest(values)
        else:
            weighed = [v * result.num_tokens for v, result in zip(values, counted, strict=True)]
            found[name] = sum(weighed) / max(num_tokens, 1)
    for name, key in fields.items():
        found[name] = sum(getattr(result, key) for result in counted) / len(counted)
    return found
