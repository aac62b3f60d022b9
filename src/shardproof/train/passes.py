"""The forward and backward passes of a step, one micro-batch after the other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from shardproof.model.packing import to_device
from shardproof.model.roles import VALUED
from shardproof.model.router import balancing_loss
from shardproof.shard.settings import FSDP2
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import (
    add_up_in_place,
    forget_partial_sums,
    set_last_micro_batch,
    staying_gathered,
)
from shardproof.train.batching import Batch
from shardproof.train.forward import score
from shardproof.train.guard import Verdict, find_bad_gradient
from shardproof.train.loss import Scored
from shardproof.train.metrics import MetricSums
from shardproof.train.prepare import Work


def accumulate(policy: ShardedModel, work: Work, sums: MetricSums) -> list[torch.Tensor]:
    """Add up all micro-batches' gradients; returns their losses. Collective: every rank."""
    with staying_gathered(policy.module) if work.stays_gathered else nullcontext():
        return [backward(policy, work, index, sums) for index in range(len(work.micro_batches))]


def backward(policy: ShardedModel, work: Work, index: int, sums: MetricSums) -> torch.Tensor:
    """Add one micro-batch's gradients; returns its loss, on the device, not waited for.

    Collective: every rank.
    """
    micro_batch = work.micro_batches[index]
    set_last_micro_batch(policy.module, index == len(work.micro_batches) - 1)
    with work.recompute.forward(index) if work.recompute is not None else nullcontext():
        scored, router = score(
            policy,
            micro_batch,
            work.scoring,
            temperature=work.temperature,
            want_entropy=work.loss.want_entropy,
            want_router=bool(work.router_coef),
            routers=work.routers,
        )
    row = scored.values if policy.role in VALUED else scored.logps
    if len(micro_batch):
        total = _weighted_loss(policy, micro_batch, work, scored, router, sums)
    else:
        # Nothing to learn from, but every collective of the backward pass needs this rank.
        total = row.sum()
        sums.add(
            {name: row.new_zeros(1) for name in work.loss.metrics},
            torch.zeros(1, dtype=torch.bool, device=row.device),
        )
    if _is_alone(policy):
        add_up_in_place(policy.module)
    total.backward()
    return total.detach().float()


def _is_alone(policy: ShardedModel) -> bool:
    """Whether there is no other rank to reduce gradients with, and copies that FSDP2 would make all the same."""
    settings = policy.settings
    on_device = policy.device.type == "cuda" and not settings.cpu_offload
    return on_device and policy.strategy == FSDP2 and dist.get_world_size() == 1


def _weighted_loss(
    policy: ShardedModel,
    micro_batch: Batch,
    work: Work,
    scored: Scored,
    router: torch.Tensor | None,
    sums: MetricSums,
) -> torch.Tensor:
    columns, counted = columns_of(micro_batch, policy.device)
    weights = columns["weights"]
    token_loss, metrics = work.loss.function(scored, columns)
    total = torch.where(counted, weights * token_loss, 0.0).sum()
    if router is not None:
        aux = balancing_loss(router, policy.model.config)
        total = total + work.router_coef * weights.sum() * aux
    sums.add(metrics, counted)
    return total


def columns_of(batch: Batch, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what a loss is told about the predictions of a batch with `weights`, which of them count)."""
    columns = {name: to_device(batch.flat(name), device) for name in batch.columns}
    counted = columns["weights"] != 0
    # A token that does not count must not count as NaN either, nor its gradient: zero times NaN is NaN.
    columns = {name: torch.where(counted, column, 0.0) for name, column in columns.items()}
    columns.setdefault("mask", counted.float())
    columns["sequence"] = to_device(batch.sequence_indices(), device)
    columns["conversation"] = to_device(batch.conversation_indices(), device)
    return columns, counted


def locate(
    policy: ShardedModel, work: Work, verdict: Verdict, optimizer: torch.optim.Optimizer
) -> tuple[Verdict, str | None]:
    """The verdict with the culprit's name: the loss itself, or the first module whose gradient went bad.

    Collective: every rank.
    """
    if verdict.micro_batch is not None:
        return verdict, f"loss/{work.loss.name}"
    sums = MetricSums(work.loss.metrics)
    rank, micro_batch, tensor = find_bad_gradient(
        policy,
        len(work.micro_batches),
        lambda index: backward(policy, work, index, sums),
        lambda: drop_gradients(policy, optimizer),
    )
    if tensor is None:
        return replace(
            verdict, reason="a gradient was not finite, but was finite when the batch was run again"
        ), None
    return replace(verdict, rank=rank, micro_batch=micro_batch), tensor


def drop_gradients(policy: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Forget every gradient, so that no later step adds to it."""
    optimizer.zero_grad()
    forget_partial_sums(policy.module)
