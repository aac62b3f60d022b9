"""What an optimizer keeps for each parameter, as it declares it before anything is allocated.

Checkpoints compare what they hold with it, and estimates of memory count it. An optimizer declares its state by a method
`declare_state(group, param)`; those of torch that this file knows are declared here. An optimizer that does neither is
looked into once it has state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.errors import fail
from shardproof.shard.local import LocalShard
from shardproof.shard.torch_private import local_tensor

BLOCK = 256  # elements of a whole parameter, in its flat order, that share one number of block-wise state


@dataclass(frozen=True)
class PerBlock:
    """State that has one number for each block of a parameter; a rank holds those of its elements' blocks."""

    dtype: torch.dtype


# The dtype of a tensor that has the parameter's shape and is split over the ranks as the parameter is, or of one that has a
# number for each block; None: one number.
StateSpec = Mapping[str, torch.dtype | PerBlock | None]


def num_blocks(numel: int) -> int:
    """The blocks of a whole parameter."""
    return -(-numel // BLOCK)


_ASSUMED_TENSORS = 2  # of an optimizer that declares nothing: as many as AdamW


def blocks_of(shard: LocalShard, numbers: torch.Tensor | None = None, *, owned: bool = False) -> LocalShard:
    """The blocks that a shard has elements of, as a part of all blocks, with their numbers if they are given.

    With `owned`, those alone whose first element it has: ranks that share a block hold the same number for it.
    """
    start, stop = shard.flat_range or (0, 0)
    first, last = (start // BLOCK, num_blocks(stop)) if stop > start else (0, 0)
    skipped = int(owned and stop > start and start % BLOCK > 0)
    flat = shard.flat[:0] if numbers is None else numbers[skipped:]
    return LocalShard.of_range(shard.name, (num_blocks(shard.numel),), first + skipped, last, flat)


def declared_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor
) -> StateSpec | None:
    """What the optimizer keeps for a parameter of one of its groups; None if it does not say."""
    declare = getattr(optimizer, "declare_state", None)
    if declare is None:
        known = _OF_TORCH.get(type(optimizer))
        return None if known is None else known(group, param)
    spec = declare(group, param)
    if not isinstance(spec, Mapping) or not all(
        isinstance(key, str) and (dtype is None or isinstance(dtype, torch.dtype | PerBlock))
        for key, dtype in spec.items()
    ):
        message = f"{type(optimizer).__name__}.declare_state returned {spec!r}."
        raise fail("C001", "optimizer", message, fix="return {key: dtype, or None for one number}")
    return spec


def adam_state(group: Mapping[str, Any], param: torch.Tensor) -> StateSpec:
    """Two moments like the parameter, a third with AMSGrad, and the number of steps."""
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    return dict.fromkeys(moments, param.dtype) | {"step": None}


def _sgd_state(group: Mapping[str, Any], param: torch.Tensor) -> StateSpec:
    return {"momentum_buffer": param.dtype} if group["momentum"] else {}


_OF_TORCH = {torch.optim.Adam: adam_state, torch.optim.AdamW: adam_state, torch.optim.SGD: _sgd_state}


def state_specs(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, StateSpec | None]:
    """What the optimizer keeps for each of its parameters; None where it does not say."""
    return {
        param: declared_state(optimizer, group, param)
        for group in optimizer.param_groups
        for param in group["params"]
    }


def tensor_dtypes(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, list[torch.dtype]]:
    """Of each parameter, the dtypes of the tensors like it that the optimizer keeps, or is taken to keep."""
    return {
        param: [param.dtype] * _ASSUMED_TENSORS
        if spec is None
        else [d for d in spec.values() if isinstance(d, torch.dtype)]
        for param, spec in state_specs(optimizer).items()
    }


def block_dtypes(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, list[torch.dtype]]:
    """Of each parameter, the dtypes of the tensors with a number for each block that the optimizer keeps."""
    return {
        param: [kind.dtype for kind in (spec or {}).values() if isinstance(kind, PerBlock)]
        for param, spec in state_specs(optimizer).items()
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that the optimizer keeps on this rank, once it has taken a step."""
    like = sum(
        local_tensor(param).numel() * dtype.itemsize
        for param, dtypes in tensor_dtypes(optimizer).items()
        for dtype in dtypes
    )
    return like + sum(
        num_blocks(local_tensor(param).numel()) * dtype.itemsize
        for param, dtypes in block_dtypes(optimizer).items()
        for dtype in dtypes
    )
