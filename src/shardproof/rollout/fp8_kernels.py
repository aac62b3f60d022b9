"""Triton kernels that multiply few rows with weights in float8, of which they read half the bytes.

Every number of float8 is a number of float16, which the hardware converts two at a time, so the matrix units multiply in
float16. The scale of a weight's block, a power of two, is multiplied into the block's sums. As with 16-bit weights, columns
are shared out as well as rows, and the kernel that comes next adds the partial sums up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from shardproof.rollout.early_launch import EARLY_LAUNCH, begin
from shardproof.rollout.fp8 import BLOCK, Float8

# With more rows than this, 16-bit weights are faster: converting takes longer than reading twice as much.
MAX_ROWS = 32
# Tuned on an H200 with the shapes of Qwen3-1.7B: blocks of a weight, and how many of them there should be.
_BLOCK_N, _TARGET_BLOCKS, _MIN_LENGTH = 64, 384, 2 * BLOCK
_GATE_BLOCK = 128  # divides all sizes that the step takes
_LARGEST = 65280.0  # a number of bfloat16 that float16 has too: what the next matmul reads must not be infinite there


@triton.jit
def _add_product(total, weight, x, scale, ROWS_FIRST: tl.constexpr):
    """`total` + the product of x [rows, k] with a weight's block [n, k]; [rows, n], or [n, rows]."""
    if ROWS_FIRST:
        total += tl.dot(x.to(tl.float16), tl.trans(weight.to(tl.float16))) * scale
    else:
        total += tl.dot(weight.to(tl.float16), tl.trans(x.to(tl.float16))) * scale
    return total


@triton.jit
def _project_kernel(
    x_ptr,  # [rows, k]
    first_ptr, second_ptr, third_ptr,  # [n, k] each
    first_scale_ptr, second_scale_ptr, third_scale_ptr,  # [n / 128, k / 128] each
    first_bias_ptr, second_bias_ptr, third_bias_ptr,  # [n] each
    out_ptr,  # [shares, rows, n of all], float32
    rows, n, k, first_n, second_n,
    BIAS: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr, ROWS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n, share = tl.program_id(1) * BLOCK_N, tl.program_id(2)
    weight_ptr, scale_ptr, bias_ptr, local_n = first_ptr, first_scale_ptr, first_bias_ptr, at_n
    if at_n >= first_n + second_n:
        weight_ptr, scale_ptr, bias_ptr = third_ptr, third_scale_ptr, third_bias_ptr
        local_n = at_n - first_n - second_n
    elif at_n >= first_n:
        weight_ptr, scale_ptr, bias_ptr = second_ptr, second_scale_ptr, second_bias_ptr
        local_n = at_n - first_n
    length = k // (SHARES * BLOCK_K) * BLOCK_K  # so that the compiler knows what it is a multiple of
    column, inner = local_n + tl.arange(0, BLOCK_N), share * length + tl.arange(0, BLOCK_K)
    here = (row < rows)[:, None]
    x_at = x_ptr + row[:, None] * k + inner[None, :]
    weight_at = weight_ptr + column[:, None] * k + inner[None, :]
    scale_at = scale_ptr + local_n // BLOCK_K * (k // BLOCK_K) + share * length // BLOCK_K
    # Weights need nothing of the kernel before: the first of them are on their way while it ends.
    weight, scale = tl.load(weight_at), tl.load(scale_at)
    begin(EARLY)
    x = tl.load(x_at, mask=here, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_N] if ROWS_FIRST else [BLOCK_N, BLOCK_M], tl.float32)
    total = _add_product(total, weight, x, scale, ROWS_FIRST)
    for at in range(BLOCK_K, length, BLOCK_K):
        x = tl.load(x_at + at, mask=here, other=0.0)
        total = _add_product(total, tl.load(weight_at + at), x, tl.load(scale_at + at // BLOCK_K), ROWS_FIRST)
    if not ROWS_FIRST:
        total = tl.trans(total)
    if BIAS:
        bias = tl.load(bias_ptr + column).to(tl.float32)
        total += tl.where(share == 0, bias, 0.0)[None, :]
    out_at = out_ptr + (share * rows + row)[:, None] * n + (at_n + tl.arange(0, BLOCK_N))[None, :]
    tl.store(out_at, total, mask=here)


@triton.jit
def _gate_kernel(
    sums_ptr,  # [shares, rows, 2 * n]: gate, up
    out_ptr,  # [rows, n]
    rows, n, largest,
    SHARES: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    begin(EARLY)
    for share in tl.static_range(SHARES):
        gate_at = sums_ptr + (share * rows + row) * 2 * n + column
        gate += tl.load(gate_at)
        up += tl.load(gate_at + n)
    gated = tl.minimum(tl.maximum(gate * tl.sigmoid(gate) * up, -largest), largest)
    tl.store(out_ptr + row * n + column, gated.to(out_ptr.dtype.element_ty))


def project(
    x: torch.Tensor, weights: Sequence[Float8], biases: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """x [rows, k] times up to three weights [n, k], one after the other: partial sums [shares, rows, n of all]."""
    rows, k = x.shape
    sizes = [len(weight.values) for weight in weights]
    n = sum(sizes)
    values = [weight.values for weight in weights]
    scales = [weight.scales for weight in weights]
    given = biases if biases is not None else values
    rows_first = rows <= 16
    block_m = 16 if rows_first else 32
    row_blocks = triton.cdiv(rows, block_m)
    shares = _num_shares(row_blocks * n // _BLOCK_N, k)
    out = torch.empty(shares, rows, n, dtype=torch.float32, device=x.device)
    _project_kernel[(row_blocks, n // _BLOCK_N, shares)](
        x, *_three(values), *_three(scales), *_three(given), out,
        rows, n, k, sizes[0], sizes[1] if len(sizes) > 1 else 0,
        BIAS=biases is not None, SHARES=shares, EARLY=EARLY_LAUNCH, ROWS_FIRST=rows_first,
        BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_K=BLOCK,
        num_warps=4, num_stages=3, launch_pdl=EARLY_LAUNCH,
    )  # fmt: skip
    return out


def _three(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (*tensors, tensors[0], tensors[0])[:3]


def _num_shares(blocks: int, k: int) -> int:
    """How many shares a weight's columns are split into, so that every multiprocessor has enough to convert."""
    shares = 1
    while (
        blocks * shares < _TARGET_BLOCKS
        and k // BLOCK % (2 * shares) == 0
        and k // (2 * shares) >= _MIN_LENGTH
    ):
        shares *= 2
    return shares


def gate_up(x: torch.Tensor, gate: Float8, up: Float8) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x [rows, k], rounded once."""
    sums = project(x, [gate, up])
    shares, rows, size = sums.shape
    n = size // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block = _GATE_BLOCK * (8 if n % (8 * _GATE_BLOCK) == 0 else 1)
    _gate_kernel[(rows, n // block)](
        sums, out, rows, n, _LARGEST,
        SHARES=shares, EARLY=EARLY_LAUNCH, BLOCK=block, num_warps=4, launch_pdl=EARLY_LAUNCH,
    )  # fmt: skip
    return out
