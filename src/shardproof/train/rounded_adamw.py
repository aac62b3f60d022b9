"""AdamW with running means in bfloat16: half of their memory. See `moments` for what it computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardproof.shard.optimizer_state import StateSpec
from shardproof.shard.torch_private import local_tensor
from shardproof.train.moments import Factors, Part, plain_step

logger = logging.getLogger(__name__)

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
Step = Callable[[Sequence[Part]], None]


@dataclass(frozen=True)
class Place:
    """Where this rank's elements of a parameter lie: the parameter's number, and the first element in its flat order."""

    number: int
    start: int


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW with running means in bfloat16. `places` says where each parameter's elements lie."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        places: Mapping[torch.Tensor, Place],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._places = dict(places)

    def declare_state(self, group: Mapping[str, Any], param: torch.Tensor) -> StateSpec:
        """Two means in bfloat16, and the number of steps."""
        return {MEAN: torch.bfloat16, SQUARE: torch.bfloat16, "step": None}

    def _init_group(self, group: dict[str, Any]) -> None:
        """Make the missing state of a group."""
        for param in group["params"]:
            state = self.state[param] if param.grad is not None else {"step": 0}
            if not state:
                state |= {key: torch.zeros_like(param, dtype=torch.bfloat16) for key in (MEAN, SQUARE)}
                state["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._init_group(group)
            parts = [self._part(group, param) for param in group["params"] if param.grad is not None]
            kinds: dict[Any, list[Part]] = {}
            for part in parts:
                if part.param.numel():
                    kinds.setdefault((part.param.device, part.param.dtype, part.grad.dtype), []).append(part)
            for (device, *_), some in kinds.items():
                take = fused_step(device) if device.type == "cuda" else None
                (take or _plain_steps)(some)
        return loss

    def _part(self, group: Mapping[str, Any], param: torch.Tensor) -> Part:
        """What this step changes of a parameter, whose steps are counted."""
        state, place = self.state[param], self._places[param]
        state["step"] = int(state["step"]) + 1
        assert param.grad is not None
        flat, mean, square = (local_tensor(each).view(-1) for each in (param, state[MEAN], state[SQUARE]))
        factors = Factors.of(group, state["step"], place.number)
        return Part(flat, local_tensor(param.grad).reshape(-1), mean, square, place.start, factors)


def _plain_steps(parts: Sequence[Part]) -> None:
    for part in parts:
        plain_step(part)


@cache
def fused_step(device: torch.device) -> Step | None:
    """A step in one kernel on this GPU; None unless it was seen to compute what plain torch computes."""
    try:
        from shardproof.train.moment_kernels import step_on_gpu

        for dtype in (torch.float32, torch.bfloat16):
            if problem := _difference(step_on_gpu, dtype, device):
                raise ValueError(problem)
    except Exception as error:
        logger.warning(
            "the kernel for moments in bfloat16 is not used, which makes updates slower: %s", error
        )
        return None
    return step_on_gpu


def _difference(step: Step, dtype: torch.dtype, device: torch.device) -> str | None:
    """How a step differs from the plain one by more than the last bits; None if it does not."""
    found = []
    for take in (step, _plain_steps):
        parts = [
            _example(size, start, dtype, device) for size, start in ((40_000, 2**33 + 1), (7, 0), (3001, 5))
        ]
        take(parts)
        found.append(parts)
    for ours, plain in zip(*found, strict=True):
        for name, one, other in zip(
            ("weights", "grad", MEAN, SQUARE), ours.tensors, plain.tensors, strict=True
        ):
            apart = (one.float() - other.float()).abs() > (1e-5 if name == "weights" else 0.0)
            # A last bit of float32 decides about the rounding of one element in tens of thousands.
            if int(apart.sum()) > 20:
                return f"{int(apart.sum())} of {len(apart)} elements of its {name} differ"
    return None


def _example(size: int, start: int, dtype: torch.dtype, device: torch.device) -> Part:
    draw = torch.Generator().manual_seed(size)
    weights, grad, mean, square = (torch.randn(size, generator=draw) for _ in range(4))
    rows = (weights.to(dtype), grad * 1e-3, mean.bfloat16() * 1e-3, square.square().bfloat16() * 1e-6)
    factors = Factors.of({"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}, 3, size)
    param, grad, mean, square = (row.to(device) for row in rows)
    return Part(param, grad, mean, square, start, factors)
