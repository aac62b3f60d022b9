"""The verdict: one decision for all ranks, from one exchange after the last micro-batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from shardproof.bounds import within
from shardproof.dist.collectives import combine, exchange
from shardproof.dist.mesh import replicate_size
from shardproof.errors import fail
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name, local_tensor
from shardproof.train.metrics import MetricSums, check_same_metrics, reduce_metrics


@dataclass(frozen=True)
class Verdict:
    """What all ranks know after a step's backward passes; equal on all of them, bit for bit."""

    step: bool
    reason: str | None
    rank: int | None
    micro_batch: int | None
    loss: float
    grad_norm: float
    metrics: dict[str, float]


def local_gradients(policy: ShardedModel) -> list[torch.Tensor]:
    """This rank's part of every gradient."""
    grads = [param.grad for param in policy.parameters() if param.requires_grad and param.grad is not None]
    return list(map(local_tensor, grads))


def local_square_norm(policy: ShardedModel) -> torch.Tensor:
    """The sum of squares of this rank's gradients, on the device, not waited for."""
    grads = [grad for grad in local_gradients(policy) if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=policy.device)
    return torch.stack(torch._foreach_norm(grads)).double().square().sum().to(policy.device)


def agree(
    policy: ShardedModel,
    losses: Sequence[torch.Tensor],
    sums: MetricSums,
    square_norm: torch.Tensor,
    problem: str | None = None,
) -> Verdict:
    """Reduce losses, gradient norm and metrics over every rank, and decide whether all of them step.

    A `problem` that any rank has with its optimizer's memory is raised on all. This is the step's only wait for the
    device. Rank 0 decides where there are many: what all of them measured would be most of a step's messages.
    Collective: every rank.
    """
    partial = sums.rows()
    device_row = torch.cat(
        [
            torch.stack([*losses, square_norm]).double(),
            *(part.double() for part in partial.values()),
        ]
    )
    numbers = iter(device_row.tolist())
    mine = {
        "losses": list(itertools.islice(numbers, len(losses))),
        "square_norm": next(numbers),
        "metrics": {name: list(itertools.islice(numbers, len(part))) for name, part in partial.items()},
        "problem": problem,
    }
    sizes = policy.sequence_parallel, replicate_size(policy.mesh)
    return Verdict(*combine("train_step", mine, lambda rows: astuple(_decide(rows, sums.reductions, *sizes))))


def _decide(
    rows: list[dict[str, Any]], reductions: Mapping[str, str], share: int, num_replicas: int
) -> Verdict:
    """The verdict on what every rank measured."""
    for rank, r in enumerate(rows):
        if r["problem"] is not None:
            message = f"the optimizer's state cannot be allocated ({r['problem']}); nothing was changed."
            raise fail("T309", "train_step", message, rank=rank)
    # Ranks of one sequence-parallel group report the same tokens; each group is counted once.
    counted = rows[::share]
    check_same_metrics([r["metrics"] for r in rows])
    metrics = reduce_metrics([r["metrics"] for r in counted], reductions)
    loss = sum(sum(r["losses"]) for r in counted)
    # Replicas hold the same gradient.
    grad_norm = math.sqrt(sum(r["square_norm"] for r in rows) / num_replicas)
    for index in range(len(rows[0]["losses"])):
        for rank, r in enumerate(rows):
            if not math.isfinite(r["losses"][index]):
                return Verdict(False, "the loss is not finite", rank, index, loss, grad_norm, metrics)
    if not math.isfinite(grad_norm):
        holder = next((i for i, r in enumerate(rows) if not math.isfinite(r["square_norm"])), None)
        return Verdict(False, "a gradient is not finite", holder, None, loss, grad_norm, metrics)
    return Verdict(True, None, None, None, loss, grad_norm, metrics)


def scale_gradients(policy: ShardedModel, grad_norm: float, max_grad_norm: float | None) -> None:
    """Scale gradients down to `max_grad_norm`; every rank has the same norm, so the same factor."""
    if max_grad_norm is None or within(grad_norm, max_grad_norm):
        return
    grads = [grad for grad in local_gradients(policy) if grad.numel()]
    if grads:
        torch._foreach_mul_(grads, max_grad_norm / (grad_norm + 1e-6))


def find_bad_gradient(
    policy: ShardedModel, num_micro_batches: int, replay: Callable[[int], object], clear: Callable[[], None]
) -> tuple[int | None, int | None, str | None]:
    """(rank, micro-batch, tensor) where a gradient first stops being finite, by running the batch again under hooks.

    The hooks look at the gradient of every module's output, before any reduction mixes the ranks.
    Collective: every rank.
    """
    clear()
    for index in range(num_micro_batches):
        with _watching(policy) as seen:
            replay(index)
        # Ranks pass through the same modules; the one that saw it earliest is where it began.
        rows = [[row[0], rank] for rank, row in enumerate(exchange(seen[:1])) if row]
        if rows:
            (_, name), rank = min(rows)
            clear()
            return rank, index, name
        names = exchange(_bad_parameters(policy)[:1])
        for rank, row in enumerate(names):
            if row:
                clear()
                return rank, index, row[0]
    clear()
    return None, None, None


def _bad_parameters(policy: ShardedModel) -> list[str]:
    """Parameters whose gradient shard on this rank is not finite."""
    found = []
    for name, param in policy.named_parameters():
        if param.grad is not None:
            grad = local_tensor(param.grad)
            if grad.numel() and not bool(torch.isfinite(grad).all()):
                found.append(name)
    return found


@contextmanager
def _watching(policy: ShardedModel) -> Iterator[list[tuple[int, str]]]:
    """(place in the backward pass, name) of the modules whose output's gradient was not finite, in that order."""
    seen: list[tuple[int, str]] = []
    place = itertools.count()

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(grad: torch.Tensor) -> None:
            here = next(place)
            if not bool(torch.isfinite(grad).all()):
                seen.append((here, name))

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(look)

        return hook

    handles = [
        module.register_forward_hook(watch(clean_name(name)))
        for name, module in policy.model.named_modules()
        if name
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
