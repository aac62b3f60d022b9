"""What an optimizer keeps for each parameter, as it declares it before anything is allocated.

Checkpoints compare what they hold with it, and estimates of memory count it. An optimizer declares its state by a method
`declare_state(group, param)`; those of torch that this file knows are declared here. An optimizer that does neither is
looked into once it has state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardproof.errors import fail
from shardproof.shard.torch_private import local_tensor

# The dtype of a tensor that has the parameter's shape and is split over the ranks as the parameter is; None: one number.
StateSpec = Mapping[str, torch.dtype | None]

_ASSUMED_TENSORS = 2  # of an optimizer that declares nothing: as many as AdamW


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
        isinstance(key, str) and (dtype is None or isinstance(dtype, torch.dtype))
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
        else [d for d in spec.values() if d is not None]
        for param, spec in state_specs(optimizer).items()
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that the optimizer keeps on this rank, once it has taken a step."""
    return sum(
        local_tensor(param).numel() * dtype.itemsize
        for param, dtypes in tensor_dtypes(optimizer).items()
        for dtype in dtypes
    )
