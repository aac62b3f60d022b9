"""Linear weights held in 4 bits (NF4), for a frozen base under adapters.

A weight of [rows, columns] becomes [rows, width] bytes. A row holds the codes of its elements, two to a byte, the first in
the high half, and then one float32 scale for each block of 64 elements: the largest magnitude in it. The parameter that has
the bytes says that they are numbers of the dtype that is computed in, which FSDP2 gathers as they are: torch 2.11 takes no
parameters of integers, and casts them.
Rows do not share blocks, so a weight can be cut between any two rows, as FSDP2 cuts it, and each rank quantises its own.
Where columns are a multiple of 64, as in nearly all models, codes and scales are those of bitsandbytes.

A weight is dequantised in each forward and again in each backward pass; neither keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardproof.errors import fail
from shardproof.model.families import num_experts
from shardproof.model.nf4_layout import BLOCK, CODE, code_bytes, num_blocks, width
from shardproof.model.replace import replace_parameters

logger = logging.getLogger(__name__)

NF4 = "nf4"
_CHUNK = 1 << 22  # elements that plain torch works on at a time
Dequantise = Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(the values, the borders between them: what lies above a border belongs to the next value)."""
    values = torch.tensor(CODE, dtype=torch.float32)
    return values.to(device), ((values[1:] + values[:-1]) / 2).to(device)


def quantise(values: torch.Tensor) -> torch.Tensor:
    """Rows of a weight as uint8 [rows, width]."""
    rows, columns = values.shape
    packed = torch.zeros(rows, width(columns), dtype=torch.uint8, device=values.device)
    step = max(1, _CHUNK // max(columns, 1))
    for low in range(0, rows, step):
        _quantise_rows(values[low : low + step].float(), packed[low : low + step])
    return packed


def _quantise_rows(values: torch.Tensor, packed: torch.Tensor) -> None:
    rows, columns = values.shape
    blocks, at = num_blocks(columns), code_bytes(columns)
    padded = values.new_zeros(rows, blocks, BLOCK)
    padded.view(rows, -1)[:, :columns] = values
    scales = padded.abs().amax(-1)
    padded /= torch.where(scales > 0, scales, 1.0)[..., None]
    _, borders = _tables(values.device)
    codes = torch.bucketize(padded, borders, out_int32=True).view(rows, -1).to(torch.uint8)
    pairs = (codes[:, 0::2] << 4) | codes[:, 1::2]
    packed[:, :at] = pairs[:, :at]
    packed[:, at:] = scales.contiguous().view(torch.uint8)


def dequantise(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a weight: value times scale in float32, rounded to `dtype`."""
    fused = fused_dequantise(packed.device) if packed.device.type == "cuda" else None
    return (fused or plain_dequantise)(packed, columns, dtype)


def plain_dequantise(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`dequantise` in plain torch."""
    out = torch.empty(len(packed), columns, dtype=dtype, device=packed.device)
    values, _ = _tables(packed.device)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=-1)  # of each byte
    at, blocks = code_bytes(columns), num_blocks(columns)
    step = max(1, _CHUNK // max(columns, 1))
    for low in range(0, len(packed), step):
        rows = packed[low : low + step]
        found = pairs.index_select(0, rows[:, :at].reshape(-1).int()).view(len(rows), -1)
        scales = rows[:, at:].contiguous().view(torch.float32).view(len(rows), blocks, 1)
        whole = found.new_zeros(len(rows), blocks * BLOCK)
        used = min(found.shape[1], whole.shape[1])
        whole[:, :used] = found[:, :used]
        whole = (whole.view(len(rows), blocks, BLOCK) * scales).view(len(rows), -1)
        out[low : low + step] = whole[:, :columns]
    return out


@cache
def fused_dequantise(device: torch.device) -> Dequantise | None:
    """One kernel for it on this GPU; None unless it was seen to compute what plain torch computes."""
    try:
        from shardproof.model.nf4_kernels import dequantise_on_gpu

        if problem := difference(dequantise_on_gpu, device):
            raise ValueError(problem)
    except Exception as error:
        logger.warning("the kernel for weights in 4 bits is not used, which makes steps slower: %s", error)
        return None
    return dequantise_on_gpu


def difference(
    candidate: Dequantise,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
) -> str | None:
    """For which weights a candidate computes other values than plain torch; None: for none."""
    for rows, columns in ((3, 4096), (5, 64), (2, 72), (7, 33), (1, 1)):
        draw = torch.Generator().manual_seed(columns)
        packed = quantise(torch.randn(rows, columns, generator=draw).to(device))
        for dtype in dtypes:
            if not torch.equal(candidate(packed, columns, dtype), plain_dequantise(packed, columns, dtype)):
                return f"it gives other values for [{rows}, {columns}] in {dtype}"
    return None


# Two operations of our own, opaque to torch.compile: with one that only dequantises, it would keep the forward pass's
# weight for the backward pass.
@torch.library.custom_op(
    "shardproof::nf4_linear", mutates_args=(), schema="(Tensor states, Tensor packed, int columns) -> Tensor"
)
def _linear(states: torch.Tensor, packed: torch.Tensor, columns: int) -> torch.Tensor:
    return nn.functional.linear(states, dequantise(packed.view(torch.uint8), columns, states.dtype))


@_linear.register_fake
def _linear_shape(states: torch.Tensor, packed: torch.Tensor, columns: int) -> torch.Tensor:
    return states.new_empty(*states.shape[:-1], packed.shape[0])


@torch.library.custom_op(
    "shardproof::nf4_linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor packed, int columns) -> Tensor",
)
def _linear_backward(grad: torch.Tensor, packed: torch.Tensor, columns: int) -> torch.Tensor:
    return grad @ dequantise(packed.view(torch.uint8), columns, grad.dtype)


@_linear_backward.register_fake
def _linear_backward_shape(grad: torch.Tensor, packed: torch.Tensor, columns: int) -> torch.Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, int], output: torch.Tensor) -> None:
    _, packed, ctx.columns = inputs
    ctx.save_for_backward(packed)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (packed,) = ctx.saved_tensors
    return _linear_backward(grad.contiguous(), packed, ctx.columns), None, None


_linear.register_autograd(_backward, setup_context=_keep)


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is held in 4 bits and gets no gradient."""

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of the weight that is held."""
        return self.out_features, self.in_features

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = _linear(states, self.weight, self.in_features)
        return out if self.bias is None else out + self.bias


def hold_in_nf4(model: PreTrainedModel, units: Collection[str], compute_dtype: torch.dtype) -> list[str]:
    """Let the frozen linear layers inside the blocks (`units`) hold their weights in 4 bits; returns the weights' names.

    The other frozen parameters are held in the dtype that they are computed in, whatever trained ones are held in: FSDP
    would cast them to it in each pass. All weights are on the meta device still.
    """
    name = type(model).__name__
    if num_experts(model.config) is not None:
        message = f"base={NF4!r}: the experts of {name} are not linear layers, and cannot be held in 4 bits."
        raise fail("L113", "lora", message, fix="leave model.lora.base out for models with experts")
    found = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{unit}.") for unit in units)
        if inside and type(module) is nn.Linear and not module.weight.requires_grad:
            module.__class__ = Nf4Linear
            shape = (module.out_features, width(module.in_features) // compute_dtype.itemsize)
            held = torch.empty(shape, dtype=compute_dtype, device="meta")
            module.weight = nn.Parameter(held, requires_grad=False)
            found.append(f"{path}.weight")
    if not found:
        message = f"base={NF4!r}: no block of {name} has a linear layer (torch.nn.Linear) to hold in 4 bits."
        raise fail("L113", "lora", message, fix="leave model.lora.base out for this family")
    replace_parameters(model.modules(), lambda param: _in_compute_dtype(param, compute_dtype))
    return found


def _in_compute_dtype(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if param.requires_grad or not param.is_floating_point() or param.dtype == dtype:
        return param
    return torch.empty(param.shape, dtype=dtype, device="meta")
