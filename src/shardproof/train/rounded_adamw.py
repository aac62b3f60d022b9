"""AdamW with running means in bfloat16: half of their memory. See `moments` for what it computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardproof.shard.optimizer_state import StateSpec
from shardproof.shard.torch_private import local_tensor
from shardproof.train.moments import Factors, plain_step

logger = logging.getLogger(__name__)

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
# (parameter, gradient, both means, first element, factors): flat tensors, changed in place
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, Factors], None]


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
            for param in group["params"]:
                if param.grad is not None:
                    self._step(group, param)
        return loss

    def _step(self, group: Mapping[str, Any], param: torch.Tensor) -> None:
        state, place = self.state[param], self._places[param]
        state["step"] = int(state["step"]) + 1
        assert param.grad is not None
        flat, mean, square = (local_tensor(each).view(-1) for each in (param, state[MEAN], state[SQUARE]))
        grad = local_tensor(param.grad).reshape(-1)
        if flat.numel():
            take = (fused_step(flat.device) if flat.is_cuda else None) or plain_step
            take(flat, grad, mean, square, place.start, Factors.of(group, state["step"], place.number))


@cache
def fused_step(device: torch.device) -> Step | None:
    """A step in one kernel on this GPU; None unless it was seen to compute what plain torch computes."""
    try:
        from shardproof.train.moment_kernels import step_on_gpu

        for dtype, start in ((torch.float32, 5), (torch.bfloat16, 2**33 + 1)):
            if problem := _difference(step_on_gpu, dtype, start, device):
                raise ValueError(problem)
    except Exception as error:
        logger.warning(
            "the kernel for moments in bfloat16 is not used, which makes updates slower: %s", error
        )
        return None
    return step_on_gpu


def _difference(step: Step, dtype: torch.dtype, start: int, device: torch.device) -> str | None:
    """How a step differs from the plain one by more than the last bits; None if it does not."""
    draw = torch.Generator().manual_seed(start)
    weights, grad, mean, square = (torch.randn(3001, generator=draw) for _ in range(4))
    rows = (weights.to(dtype), grad * 1e-3, mean.bfloat16() * 1e-3, square.square().bfloat16() * 1e-6)
    found: list[list[torch.Tensor]] = []
    factors = Factors.of({"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}, 3, 7)
    for take in (step, plain_step):
        param, grad, mean, square = (row.to(device, copy=True) for row in rows)
        take(param, grad, mean, square, start, factors)
        found.append([param, mean, square])
    for name, ours, plain, tolerance in zip(("weights", MEAN, SQUARE), *found, (1e-5, 0.0, 0.0), strict=True):
        off = (ours.float() - plain.float()).abs() > tolerance + 2**-20 * plain.float().abs()
        # A last bit of float32 decides about the rounding of one element in tens of thousands.
        if int(off.sum()) > 3:
            return f"{int(off.sum())} of {len(off)} elements of its {name} differ"
    return None
