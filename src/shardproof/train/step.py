"""One update from one global batch, or nothing at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardproof.bounds import require_number
from shardproof.dist.collectives import exchange, raise_together, together
from shardproof.dist.deadline import deadline, mesh_groups
from shardproof.errors import fail
from shardproof.model.compiling import is_compiled
from shardproof.model.families import max_positions, num_experts
from shardproof.model.packing import to_device
from shardproof.model.roles import CRITIC, REFERENCE
from shardproof.model.router import balancing_loss
from shardproof.shard.attest import check_optimizer
from shardproof.shard.settings import FSDP1
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import (
    forget_partial_sums,
    reshard,
    set_last_micro_batch,
    staying_gathered,
)
from shardproof.train.batching import Batch, check_batch, spread, weigh
from shardproof.train.guard import Verdict, agree, find_bad_gradient, local_square_norm, scale_gradients
from shardproof.train.loss import Loss, Scored, find_loss
from shardproof.train.metrics import MetricSums
from shardproof.train.optim import FirstState
from shardproof.train.recompute import StepPlan, plan_recompute
from shardproof.train.score import (
    Scoring,
    check_same_in_group,
    score,
    scoring_context,
    scoring_of,
    vocabulary_size,
)

logger = logging.getLogger(__name__)

_DEADLINE_S = {"cpu": 60.0, "cuda": 600.0}


@dataclass(frozen=True)
class StepResult:
    """What a step did. Equal on every rank."""

    stepped: bool
    reason: str | None  # why not, if it did not
    rank: int | None  # where it went wrong
    micro_batch: int | None
    tensor: str | None
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    metrics: Mapping[str, float]
    version: int


def train_step(
    policy: ShardedModel,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    loss: str | Loss = "sft",
    micro_batch_tokens: int = 8192,
    max_grad_norm: float | None = 1.0,
    temperature: float = 1.0,
    router_coef: float = 0.0,
    max_consecutive_skips: int = 3,
    deadline_s: float | None = None,
) -> StepResult:
    """Apply one update from one global batch, or leave everything as it was.

    The loss is sum(weight * token_loss) over the global batch; without a `weights` column every counted token weighs
    the same. A loss or gradient that is not finite anywhere makes every rank skip.

    Collective: every rank of policy.mesh.
    """
    seconds = deadline_s if deadline_s is not None else _patience(policy)
    with deadline("train_step", "T308", seconds, _groups(policy)):
        work = _prepare(
            policy, batch, optimizer, loss, micro_batch_tokens, max_grad_norm, temperature, router_coef
        )
        try:
            verdict, tensor = _decide(policy, work, optimizer)
            lr = optimizer.param_groups[0]["lr"]
            if verdict.step:
                policy.before_change()
                scale_gradients(policy, verdict.grad_norm, max_grad_norm)
                _apply(optimizer, scheduler)
                policy.version += 1
                policy.num_updates += lr > 0 and verdict.grad_norm > 0
        finally:
            _drop_gradients(policy, optimizer)
    result = StepResult(
        stepped=verdict.step,
        reason=verdict.reason,
        rank=verdict.rank,
        micro_batch=verdict.micro_batch,
        tensor=tensor,
        loss=verdict.loss,
        grad_norm=verdict.grad_norm,
        lr=lr,
        num_tokens=work.num_tokens,
        metrics=verdict.metrics,
        version=policy.version,
    )
    _count_skips(policy, result, max_consecutive_skips)
    return result


def _patience(policy: ShardedModel) -> float:
    """The deadline where none is given; what is compiled is compiled in the first step."""
    plain = policy.device.type == "cpu" and not is_compiled(policy.model)
    return _DEADLINE_S["cpu" if plain else "cuda"]


@dataclass(frozen=True)
class _Work:
    """A checked step: what to score, how, and with which loss."""

    micro_batches: list[Batch]
    scoring: Scoring
    recompute: StepPlan | None
    loss: Loss
    temperature: float
    router_coef: float
    num_tokens: int  # counted predictions of the global batch
    stays_gathered: bool  # parameters are gathered once, for all micro-batches


def _drop_gradients(policy: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Forget every gradient, so that no later step adds to it."""
    optimizer.zero_grad()
    forget_partial_sums(policy.module)


def _groups(policy: ShardedModel) -> list[dist.ProcessGroup]:
    groups = mesh_groups(policy.mesh)
    return [*groups, policy.sequence_group.group] if policy.sequence_group is not None else groups


def _prepare(
    policy: ShardedModel,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    loss: str | Loss,
    micro_batch_tokens: int,
    max_grad_norm: float | None,
    temperature: float,
    router_coef: float,
) -> _Work:
    """Check everything before the first forward; every rank raises the same error. Collective: every rank."""
    with together("train_step"):
        policy.check_resident("train_step")
        _check_numbers(micro_batch_tokens, max_grad_norm, temperature, router_coef)
        loss = find_loss(loss)
        _check_request(policy, batch, loss, router_coef)
    assert isinstance(loss, Loss)
    check_same_in_group(policy, batch)
    # Checked once for each optimizer: its groups do not change between steps.
    if policy.checked_optimizer is not optimizer:
        reshard(policy.module)
        raise_together(check_optimizer(policy.module, optimizer, dist.get_rank()))
        policy.checked_optimizer = optimizer
    # A rank without sequences has whatever columns the others have.
    weighted = {"weights" in row for num, row in exchange([len(batch), sorted(batch.columns)]) if num}
    if len(weighted) > 1:
        raise fail("C004", "train_step", "some ranks have a `weights` column and others do not.")
    if weighted == {True}:
        batch = batch if len(batch) else batch.with_column("weights", [])
    else:
        batch = weigh(batch, share=policy.sequence_parallel)
    num_counted = int((batch.flat("weights") != 0).sum()) if len(batch) else 0
    counts = exchange([len(batch), num_counted])
    if not any(count[0] for count in counts):
        raise fail(
            "C004", "train_step", "no rank has a sequence.", fix="pass at least one sequence on some rank"
        )
    scoring = scoring_of(policy)
    micro_batches = [part for part, _ in spread(batch, micro_batch_tokens, one_by_one=not scoring.packed)]
    if policy.strategy == FSDP1 and policy.settings.cpu_offload and len(micro_batches) > 1:
        message = f"strategy='fsdp1' with cpu_offload=True cannot add up {len(micro_batches)} micro-batches."
        raise fail("C001", "train_step", message, fix="raise micro_batch_tokens, or use strategy='fsdp2'")
    recompute = plan_recompute(policy, micro_batches, optimizer, scoring, every_token=bool(router_coef))
    num_tokens = sum(count[1] for count in counts) // policy.sequence_parallel
    stays = policy.settings.reshard_after_forward is False or (recompute is not None and recompute.stays_gathered)
    return _Work(micro_batches, scoring, recompute, loss, temperature, router_coef, num_tokens, stays)


def _check_numbers(
    micro_batch_tokens: int, max_grad_norm: float | None, temperature: float, router_coef: float
) -> None:
    """Raise for numbers with which a step would go uphill, go nowhere, or turn everything into NaN."""
    require_number("train_step", "micro_batch_tokens", micro_batch_tokens, above=0)
    require_number("train_step", "temperature", temperature, above=0)
    require_number("train_step", "router_coef", router_coef, at_least=0)
    if max_grad_norm is not None:
        require_number("train_step", "max_grad_norm", max_grad_norm, above=0)


def _check_request(policy: ShardedModel, batch: Batch, loss: Loss, router_coef: float) -> None:
    config = policy.model.config
    if policy.role == REFERENCE:
        raise fail("C001", "train_step", "a reference is frozen; load it with role='policy' to train it.")
    if policy.role != loss.role:
        raise fail("C001", "train_step", f"loss {loss.name!r} is for a {loss.role}, this is a {policy.role}.")
    if router_coef and policy.role == CRITIC:
        raise fail(
            "C001",
            "train_step",
            f"router_coef={router_coef} is for a policy; a critic's router is not balanced.",
        )
    if router_coef and not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        why = (
            "has no router"
            if num_experts(config) is None
            else "balances its router by other means than a loss"
        )
        raise fail("C001", "train_step", f"router_coef={router_coef}: {config.model_type!r} {why}.")
    missing = [name for name in loss.columns if name not in batch.columns]
    if missing and len(batch):
        raise fail("C004", "train_step", f"loss {loss.name!r} needs the columns {missing}.")
    check_batch(batch, vocabulary=vocabulary_size(policy), max_length=max_positions(config))


def _decide(
    policy: ShardedModel, work: _Work, optimizer: torch.optim.Optimizer
) -> tuple[Verdict, str | None]:
    """The verdict on a step whose gradients are then there, and the culprit's name if it is not taken.

    Collective: every rank.
    """
    with scoring_context(policy, work.scoring):
        sums = MetricSums(work.loss.metrics)
        losses = _accumulate(policy, work, sums)
        with FirstState(optimizer) as state:
            verdict = agree(policy, losses, sums, local_square_norm(policy), state.problem)
            if verdict.step:
                state.keep()
                return verdict, None
        return _locate(policy, work, verdict, optimizer)


def _apply(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Take the step that all ranks agreed on. What fails on one rank is raised on all, none of which may go on.

    Collective: every rank.
    """
    problem: str | None = None
    cause: Exception | None = None
    try:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    except Exception as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    for rank, said in enumerate(exchange(problem)):
        if said is not None:
            message = f"the optimizer's step failed ({said}); other ranks have taken it, so weights no longer fit together."
            fix = "remove the cause, then load the model again and resume from the last checkpoint"
            raise fail("T309", "train_step", message, rank=rank, fix=fix) from cause


def _accumulate(policy: ShardedModel, work: _Work, sums: MetricSums) -> list[torch.Tensor]:
    """Add up all micro-batches' gradients; returns their losses. Collective: every rank."""
    with staying_gathered(policy.module) if work.stays_gathered else nullcontext():
        return [_backward(policy, work, index, sums) for index in range(len(work.micro_batches))]


def _backward(policy: ShardedModel, work: _Work, index: int, sums: MetricSums) -> torch.Tensor:
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
        )
    row = scored.values if policy.role == CRITIC else scored.logps
    if len(micro_batch):
        total = _weighted_loss(policy, micro_batch, work, scored, router, sums)
    else:
        # Nothing to learn from, but every collective of the backward pass needs this rank.
        total = row.sum()
        sums.add(
            {name: row.new_zeros(1) for name in work.loss.metrics},
            torch.zeros(1, dtype=torch.bool, device=row.device),
        )
    total.backward()
    return total.detach().float()


def _weighted_loss(
    policy: ShardedModel,
    micro_batch: Batch,
    work: _Work,
    scored: Scored,
    router: torch.Tensor | None,
    sums: MetricSums,
) -> torch.Tensor:
    columns = {name: to_device(micro_batch.flat(name), policy.device) for name in micro_batch.columns}
    weights = columns["weights"]
    counted = weights != 0
    # A token that does not count must not count as NaN either, nor its gradient: zero times NaN is NaN.
    columns = {name: torch.where(counted, column, 0.0) for name, column in columns.items()}
    columns.setdefault("mask", counted.float())
    columns["sequence"] = to_device(micro_batch.sequence_indices(), policy.device)
    token_loss, metrics = work.loss.function(scored, columns)
    total = torch.where(counted, weights * token_loss, 0.0).sum()
    if router is not None:
        aux = balancing_loss(router, policy.model.config)
        total = total + work.router_coef * weights.sum() * aux
    sums.add(metrics, counted)
    return total


def _locate(
    policy: ShardedModel, work: _Work, verdict: Verdict, optimizer: torch.optim.Optimizer
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
        lambda index: _backward(policy, work, index, sums),
        lambda: _drop_gradients(policy, optimizer),
    )
    if tensor is None:
        return replace(
            verdict, reason="a gradient was not finite, and was when the batch was run again"
        ), None
    return replace(verdict, rank=rank, micro_batch=micro_batch), tensor


def _count_skips(policy: ShardedModel, result: StepResult, limit: int) -> None:
    """Count skips in a row, say so once, and raise the same fault everywhere when there are too many."""
    if result.stepped:
        policy.num_skipped = 0
        logger.log(
            logging.INFO if dist.get_rank() == 0 else logging.DEBUG,
            "step %d: loss %.6g, grad norm %.4g, lr %.3g, %d tokens",
            result.version,
            result.loss,
            result.grad_norm,
            result.lr,
            result.num_tokens,
        )
        return
    policy.num_skipped += 1
    where = f"rank {result.rank}, micro-batch {result.micro_batch}, {result.tensor}"
    logger.log(
        logging.WARNING if dist.get_rank() == 0 else logging.DEBUG,
        "step skipped: %s (%s)",
        result.reason,
        where,
    )
    if policy.num_skipped >= limit:
        message = (
            f"{policy.num_skipped} steps in a row were skipped; the last because {result.reason} ({where})."
        )
        raise fail("T302", "train_step", message, rank=result.rank, tensor=result.tensor)
