"""From experience to updates: how a batch is divided among them, and what they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardproof.bounds import largest
from shardproof.dist.collectives import exchange
from shardproof.rl.algorithms import ALGORITHMS, make_loss
from shardproof.rl.experience import Experience
from shardproof.rl.setup import Run, Trained
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import Loss, value
from shardproof.train.trainer import StepResult, train_step


@dataclass(frozen=True)
class Update:
    """What one update did to the policy and, where there is one, to the critic."""

    policy: StepResult
    critic: StepResult | None

    @property
    def steps(self) -> list[StepResult]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]


def update(run: Run, experience: Experience) -> list[Update]:
    """The step's updates of policy and critic. Collective: every rank."""
    settings, train_settings = run.recipe.algorithm, run.recipe.train
    (loss, value_loss), weights = _losses(run), ALGORITHMS[settings.name].weights
    options: dict[str, Any] = {
        "micro_batch_tokens": train_settings.micro_batch_tokens,
        "max_grad_norm": run.recipe.optimizer.max_grad_norm,
        "max_consecutive_skips": train_settings.max_consecutive_skips,
    }
    updates = []
    for part in mini_batches(experience, settings.updates_per_batch, run.recipe.rollout.group_size):
        counted = sum(bool(mask.any()) for mask in part.masks())
        num_sequences = sum(exchange(counted)) / run.policy.model.sequence_parallel
        if not num_sequences:
            continue
        constant = num_sequences * run.sampling.max_new_tokens
        weighed = weigh(part, weights, constant=constant, share=run.policy.model.sequence_parallel)
        weighed = _with_signal(run, weighed)
        stepped = _step(
            run.policy,
            weighed,
            loss=loss,
            temperature=run.sampling.temperature,
            router_coef=settings.router_coef,
            **options,
        )
        critic = _step(run.critic, weighed, loss=value_loss, **options) if run.critic is not None else None
        updates.append(Update(stepped, critic))
    return updates


def mini_batches(experience: Experience, num: int, group_size: int) -> list[Batch]:
    """This rank's part of each update's batch: `num` runs of the step's prompts, in order, as equal as can be.

    Prompts are dealt to the ranks one by one, so every rank has its share of every run, and which prompts an update
    takes does not depend on the number of ranks.
    """
    if num == 1:
        return [experience.batch]
    places = {index: place for place, index in enumerate(experience.order)}
    bounds = [part * len(places) // num for part in range(num + 1)]
    parts = []
    for first, end in pairwise(bounds):
        chosen = [k for k, group in enumerate(experience.groups) if first <= places[group.index] < end]
        parts.append(experience.batch.select([k * group_size + g for k in chosen for g in range(group_size)]))
    return parts


def _with_signal(run: Run, batch: Batch) -> Batch:
    """The batch without sequences that cannot move the policy: those of groups whose rewards are all equal.

    Their gradient is zero, so the update is the same and cheaper; weights are those of the whole batch. Where another
    term of the loss counts every token, or no sequence would be left, nothing is dropped. Collective: every rank.
    """
    settings = run.recipe.algorithm
    in_loss = settings.kl_coef if settings.kl_in == "loss" else 0.0
    if run.imitates or run.critic is not None or in_loss or settings.entropy_coef or settings.router_coef:
        return batch
    moving = [i for i, row in enumerate(batch.columns["advantages"]) if bool(row.any())]
    return batch.select(moving) if any(exchange(len(moving))) else batch


def _step(trained: Trained, batch: Batch, **options: Any) -> StepResult:
    return train_step(trained.model, batch, trained.optimizer, trained.scheduler, **options)


def _losses(run: Run) -> tuple[Loss, Loss]:
    """Of the policy and of the critic."""
    settings = run.recipe.algorithm
    return make_loss(settings, run.sampling.top_p), value(settings.value_clip)


def step_metrics(run: Run, updates: Sequence[Update]) -> dict[str, float]:
    """A step's numbers from those of its updates: see `combine`. Counts say how many were made and skipped."""
    steps = [step for each in updates for step in each.steps]
    metrics = {
        "updates": float(sum(each.policy.stepped for each in updates)),
        "skipped": float(sum(not step.stepped for step in steps)),
    }
    if not updates:
        return metrics
    loss, value_loss = _losses(run)
    metrics |= combine(
        [each.policy for each in updates], loss.metrics, {"loss/total": "loss", "grad_norm": "grad_norm"}
    )
    metrics["lr"] = updates[-1].policy.lr
    critics = [each.critic for each in updates if each.critic is not None]
    if critics:
        names = {"loss/value": "loss", "grad_norm/critic": "grad_norm"}
        metrics |= combine(critics, value_loss.metrics, names)
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
