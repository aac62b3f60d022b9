"""AdamW with the field's habits, and the learning-rate schedules that go with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from shardproof.errors import choose, fail
from shardproof.shard.sharded_model import ShardedModel

SCHEDULES = ("constant", "cosine")


def make_optimizer(
    policy: ShardedModel,
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; norms, biases and other vectors do not decay. Fused where torch has it.

    FSDP1 shows every parameter as a vector, so what decays is decided by the shape of the whole tensor.
    """
    shapes = {info.name: info.shape for info in policy.inventory.parameters}
    decay: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, param in policy.named_parameters():
        if param.requires_grad:
            (decay if len(shapes[name]) > 1 else rest).append(param)
    if not decay and not rest:
        raise fail("C001", "optimizer", f"the {policy.role} has no trainable parameter.")
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def make_schedule(
    optimizer: torch.optim.Optimizer,
    kind: str = "constant",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    final_ratio: float = 0.0,
) -> LambdaLR:
    """Linear warm-up, then a constant rate, or a cosine that reaches `final_ratio` of it at `total_steps`."""
    choose("schedule", "kind", kind, SCHEDULES)
    if kind == "cosine" and not total_steps:
        raise fail("C001", "schedule", "kind='cosine' needs total_steps.")

    def ratio(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if kind == "constant":
            return 1.0
        assert total_steps is not None
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, ratio)
