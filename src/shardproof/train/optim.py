"""AdamW with the field's habits, the learning-rate schedules that go with it, and the memory of a first step."""

from __future__ import annotations

import inspect
import math
from types import TracebackType
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from shardproof.bounds import require_number
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
    for key, number in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        require_number("optimizer", key, number, at_least=0)
    for index, beta in enumerate(betas):
        require_number("optimizer", f"betas[{index}]", beta, at_least=0, below=1)
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
    require_number("schedule", "warmup_steps", warmup_steps, at_least=0)
    require_number("schedule", "final_ratio", final_ratio, at_least=0, at_most=1)
    if total_steps is not None:
        require_number("schedule", "total_steps", total_steps, at_least=0)
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


class FirstState:
    """State that an optimizer would allocate inside its first step, allocated before the ranks decide on that step.

    A rank on which it does not fit can then say so while nothing has changed anywhere. What was allocated is given back
    at the end of the block unless it is kept. An optimizer that cannot be asked for its state allocates it in its step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._held = {param for param, state in optimizer.state.items() if state}
        self._kept = False
        self.problem: str | None = None  # why it does not fit on this rank

    def __enter__(self) -> FirstState:
        try:
            with torch.no_grad():
                for group in self._optimizer.param_groups:
                    if any(param.grad is not None and param not in self._held for param in group["params"]):
                        _allocate(self._optimizer, group)
        except Exception as error:  # whatever an allocator raises, and whatever a step would have raised
            self.problem = f"{type(error).__name__}: {error}"
        return self

    def keep(self) -> None:
        """Leave the state with the optimizer, whose step comes next."""
        self._kept = True

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self._kept:
            for param in [param for param in self._optimizer.state if param not in self._held]:
                del self._optimizer.state[param]


def _allocate(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """What torch's optimizers do first in a step: make the missing state of a group, and sort it into lists.

    Of an optimizer from elsewhere it is not known whether a call beside its step changes anything.
    """
    init_group = getattr(type(optimizer), "_init_group", None)
    if init_group is not None and init_group.__module__.startswith("torch.optim."):
        _, _, *lists = inspect.signature(init_group).parameters
        init_group(optimizer, group, *([] for _ in lists))
