"""A Triton kernel for a step of AdamW with running means in bfloat16: every number is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardproof.train.moments import Factors

_BLOCK = 1024


@triton.jit
def _read_mean(pointer, mask):
    """Numbers in bfloat16, given as int16, as float32."""
    bits = tl.load(pointer, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_mean(pointer, values, bits, mask):
    """Numbers rounded to bfloat16 by 16 random bits."""
    rounded = (values.to(tl.uint32, bitcast=True) + bits) >> 16
    tl.store(pointer, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["start", "key"])
def _step_kernel(
    param_ptr, grad_ptr,  # [size]
    mean_ptr, square_ptr,  # [size], bfloat16 as int16
    size, start, key,
    decay, rate, first, second, root, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    param = tl.load(param_ptr + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean, square = _read_mean(mean_ptr + at, mask), _read_mean(square_ptr + at, mask)
    mean += (grad - mean) * first
    square = square * (1.0 - second) + grad * grad * second
    param = param * decay - mean * rate / (tl.sqrt(square) * root + eps)
    tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)
    index = start.to(tl.int64) + at
    bits = (index ^ (index >> 32) * 0x9E3779B1).to(tl.uint32) ^ key.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    _write_mean(mean_ptr + at, mean, bits & 0xFFFF, mask)
    _write_mean(square_ptr + at, square, bits >> 16, mask)


def step_on_gpu(
    param: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    start: int,
    factors: Factors,
) -> None:
    """`moments.plain_step` in one kernel."""
    size = param.numel()
    _step_kernel[(triton.cdiv(size, _BLOCK),)](
        param,
        grad,
        mean.view(torch.int16),
        square.view(torch.int16),
        size,
        start,
        factors.key,
        factors.decay,
        factors.rate,
        1 - factors.betas[0],
        1 - factors.betas[1],
        factors.root,
        factors.eps,
        BLOCK=_BLOCK,
    )
