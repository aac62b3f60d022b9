"""AdamW with running means in 8 bits: a quarter of their memory. See `moments_8bit` for what it computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import all_gather_flat
from shardproof.shard.optimizer_state import PerBlock, StateSpec
from shardproof.shard.torch_private import local_tensor
from shardproof.train.moments import Factors
from shardproof.train.moments_8bit import BLOCK, Given, Part8, float_step, maxima, num_blocks, plain_steps

logger = logging.getLogger(__name__)

MEAN, SQUARE, MEAN_SCALE, SQUARE_SCALE = "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"
SMALL = 4096  # elements of a whole tensor, below which its means are kept in float32
Step = Callable[[Sequence[Part8], Sequence[Given]], None]


@dataclass(frozen=True)
class Whereabouts:
    """Where this rank's elements of a parameter lie: the whole's shape, and the first element in its flat order."""

    shape: tuple[int, ...]
    start: int

    @property
    def is_small(self) -> bool:
        return prod(self.shape) < SMALL


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with running means in 8 bits. Its steps are collective where ranks share blocks: every rank of `group`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        places: Mapping[torch.Tensor, Whereabouts],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._places, self._group, self._device = dict(places), group, device
        self._shared: list[dict[int, int]] | None = (
            None  # of each parameter: blocks that ranks share, numbered
        )

    def declare_state(self, group: Mapping[str, Any], param: torch.Tensor) -> StateSpec:
        """Two means in 8 bits with their scales, of a small tensor in float32, and the number of steps."""
        if self._places[param].is_small:
            return {MEAN: torch.float32, SQUARE: torch.float32, "step": None}
        scale = PerBlock(torch.float32)
        kept = {MEAN: torch.uint8, SQUARE: torch.uint8}
        return {**kept, MEAN_SCALE: scale, SQUARE_SCALE: scale, "step": None}

    def _init_group(self, group: dict[str, Any]) -> None:
        """Make the missing state of a group."""
        for param in group["params"]:
            state = self.state[param] if param.grad is not None else {"step": 0}
            if not state:
                place, local = self._places[param], local_tensor(param)
                dtype = torch.float32 if place.is_small else torch.uint8
                state |= {key: torch.zeros_like(param, dtype=dtype) for key in (MEAN, SQUARE)}
                if not place.is_small:
                    count = num_blocks(place.start, place.start + local.numel())
                    state |= {
                        key: local.new_zeros(count, dtype=torch.float32) for key in (MEAN_SCALE, SQUARE_SCALE)
                    }
                state["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step. Collective: every rank of the shard group, where some block lies on two of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        if self._shared is None:
            self._shared = self._find_shared(params)
        for group in self.param_groups:
            self._init_group(group)
        parts = {
            param: self._part(group, param)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        }
        given = self._share(params, parts)
        kinds: dict[Any, list[tuple[Part8, Given]]] = {}
        for param, part in parts.items():
            if part.param.numel() and self._places[param].is_small:
                float_step(part)
            elif part.param.numel():
                key = (
                    part.param.device,
                    part.param.dtype,
                    part.grad.dtype,
                    part.factors.betas,
                    part.factors.eps,
                )
                kinds.setdefault(key, []).append((part, given.get(param, {})))
        for (device, *_), some in kinds.items():
            take = fused_step(device) if device.type == "cuda" else None
            (take or plain_steps)(*zip(*some, strict=True))
        return loss

    def _part(self, group: Mapping[str, Any], param: torch.Tensor) -> Part8:
        """What this step changes of a parameter, whose steps are counted."""
        state, place = self.state[param], self._places[param]
        state["step"] = int(state["step"]) + 1
        assert param.grad is not None
        flat, mean, square = (local_tensor(each).view(-1) for each in (param, state[MEAN], state[SQUARE]))
        scales = [state.get(key, flat[:0]) for key in (MEAN_SCALE, SQUARE_SCALE)]
        factors = Factors.of(group, state["step"], 0)
        grad = local_tensor(param.grad).reshape(-1)
        return Part8(flat, grad, mean, square, scales[0], scales[1], place.start, factors)

    def _find_shared(self, params: Sequence[torch.Tensor]) -> list[dict[int, int]]:
        """Of each parameter: {block that lies on several ranks: its number among all such}. Collective: the group."""
        if self._group is None or dist.get_world_size(self._group) == 1:
            return [{} for _ in params]
        starts = [self._places[param].start for param in params]
        stops = [start + local_tensor(param).numel() for start, param in zip(starts, params, strict=True)]
        local = torch.tensor([starts, stops], device=self._device).view(-1)
        ranges = torch.empty(
            dist.get_world_size(self._group) * local.numel(), dtype=torch.int64, device=self._device
        )
        all_gather_flat(local, ranges, self._group)
        rows = ranges.view(-1, 2, len(params)).permute(2, 0, 1).tolist()
        found: list[dict[int, int]] = []
        count = 0
        for param, row in zip(params, rows, strict=True):
            cuts = sorted({edge for start, stop in row if stop > start for edge in (start, stop)})[1:-1]
            blocks = (
                [] if self._places[param].is_small else sorted({cut // BLOCK for cut in cuts if cut % BLOCK})
            )
            found.append({block: count + index for index, block in enumerate(blocks)})
            count += len(blocks)
        return found

    def _share(
        self, params: Sequence[torch.Tensor], parts: Mapping[torch.Tensor, Part8]
    ) -> dict[torch.Tensor, Given]:
        """The scales of blocks that lie on several ranks: the largest magnitudes there. Collective: the group."""
        assert self._shared is not None
        count = sum(map(len, self._shared))
        if not count:
            return {}
        found = torch.zeros(2, count, dtype=torch.float32, device=self._device)
        mine = []
        for param, blocks in zip(params, self._shared, strict=True):
            part = parts.get(param)
            if part is None:
                continue
            for block, number in blocks.items():
                at = block - part.start // BLOCK
                if 0 <= at < len(part.mean_scale):
                    found[:, number] = torch.stack(maxima(part, at)).to(self._device)
                    mine.append((param, at, number))
        assert self._group is not None
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        given: dict[torch.Tensor, Given] = {}
        for param, at, number in mine:
            given.setdefault(param, {})[at] = (found[0, number], found[1, number])
        return given


@cache
def fused_step(device: torch.device) -> Step | None:
    """A step in one kernel on this GPU; None unless it was seen to compute what plain torch computes."""
    try:
        from shardproof.train.moment_8bit_kernels import step_on_gpu

        for dtype in (torch.float32, torch.bfloat16):
            if problem := difference(step_on_gpu, dtype, device):
                raise ValueError(problem)
    except Exception as error:
        logger.warning("the kernel for moments in 8 bits is not used, which makes updates slower: %s", error)
        return None
    return step_on_gpu


def difference(step: Step, dtype: torch.dtype, device: torch.device) -> str | None:
    """How a step differs from the plain one by more than the last bits; None if it does not."""
    found = []
    for take in (step, plain_steps):
        examples = [_example(*each, dtype, device) for each in ((40_000, 0), (7, 300), (3001, 2**33 + 5))]
        shared = torch.tensor(3e-3, device=device)
        take(examples, [{}, {}, {0: (shared, shared * shared)}])
        found.append(examples)
    names = ("weights", "grad", MEAN, SQUARE, MEAN_SCALE, SQUARE_SCALE)
    for ours, plain in zip(*found, strict=True):
        for name, one, other in zip(names, ours.tensors, plain.tensors, strict=True):
            limit = 1e-5 if name == "weights" else 1e-6 if "scale" in name else 0.0
            apart = (one.float() - other.float()).abs() > limit
            # A last bit of float32 decides about the rounding of one element in thousands.
            if int(apart.sum()) > 20:
                return f"{int(apart.sum())} of {len(apart)} elements of its {name} differ"
    return None


def _example(size: int, start: int, dtype: torch.dtype, device: torch.device) -> Part8:
    draw = torch.Generator().manual_seed(size)
    weights, grad = (torch.randn(size, generator=draw) for _ in range(2))
    mean, square = (torch.randint(256, (size,), generator=draw).to(torch.uint8) for _ in range(2))
    scales = [torch.rand(num_blocks(start, start + size), generator=draw) * 1e-3 for _ in range(2)]
    factors = Factors.of({"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}, 3, 0)
    rows = (weights.to(dtype), grad * 1e-3, mean, square, scales[0], scales[1] ** 2)
    param, grad, mean, square, of_mean, of_square = (row.to(device) for row in rows)
    return Part8(param, grad, mean, square, of_mean, of_square, start, factors)
