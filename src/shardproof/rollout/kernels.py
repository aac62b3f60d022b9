"""Triton kernels around and for the matmuls of a decoding step, where every weight is read once.

A matmul of few rows is a read of its weight. To keep all multiprocessors reading, its columns are shared out as well as
its rows, and each share's partial sums are added up by the kernel that comes next anyway: the residual with its norm, or
attention. Gate and up, which are large enough, are read by one kernel that needs no shares. Each kernel may begin before
the one ahead of it has ended, with what it does not need of it: its weights.

From some row count on the matrix units are the limit, and cuBLAS uses them better: it then multiplies with weights that
lie side by side in memory (`join_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from shardproof.model.adjacent import joined_linear
from shardproof.rollout import fp8_kernels
from shardproof.rollout.early_launch import EARLY_LAUNCH, begin
from shardproof.rollout.fp8 import Float8, copy_of

# Tuned on an H200 with 32 rows: the block sizes of a weight, and how many blocks there should be.
_BLOCK_N, _BLOCK_K, _TARGET_BLOCKS = 64, 128, 256
_GATE_UP = {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
_GATE_BLOCK = 128  # divides all sizes that the step takes
# With more rows than this cuBLAS is faster: 44 against 60 us for the matmuls of a layer of Qwen3-1.7B with 96 rows, 83
# against 171 with 512; with 64 rows both take 44.
_FEW_ROWS = 64


@triton.jit
def _project_kernel(
    x_ptr,  # [rows, k]
    first_ptr, second_ptr, third_ptr,  # [n, k] each
    first_bias_ptr, second_bias_ptr, third_bias_ptr,  # [n] each
    out_ptr,  # [shares, rows, n of all], float32
    rows, n, k, first_n, second_n,
    BIAS: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    # Blocks of rows come first: those that share a weight's block run side by side, and memory is read for one of them.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n, share = tl.program_id(1) * BLOCK_N, tl.program_id(2)
    weight_ptr, bias_ptr, local_n = first_ptr, first_bias_ptr, at_n
    if at_n >= first_n + second_n:
        weight_ptr, bias_ptr, local_n = third_ptr, third_bias_ptr, at_n - first_n - second_n
    elif at_n >= first_n:
        weight_ptr, bias_ptr, local_n = second_ptr, second_bias_ptr, at_n - first_n
    length = k // SHARES
    column, inner = local_n + tl.arange(0, BLOCK_N), share * length + tl.arange(0, BLOCK_K)
    here = (row < rows)[:, None]
    x_at = x_ptr + row[:, None] * k + inner[None, :]
    weight_at = weight_ptr + column[:, None] * k + inner[None, :]
    # Weights need nothing of the kernel before: the first of them are on their way while it ends.
    weight = tl.load(weight_at)
    if TWO:
        next_weight = tl.load(weight_at + BLOCK_K)
    begin(EARLY)
    x = tl.load(x_at, mask=here, other=0.0)
    if TWO:
        next_x = tl.load(x_at + BLOCK_K, mask=here, other=0.0)
    total = tl.dot(weight, tl.trans(x))
    if TWO:
        total = tl.dot(next_weight, tl.trans(next_x), total)
    for at in range(2 * BLOCK_K if TWO else BLOCK_K, length, BLOCK_K):
        x = tl.load(x_at + at, mask=here, other=0.0)
        total = tl.dot(tl.load(weight_at + at), tl.trans(x), total)
    if BIAS:
        bias = tl.load(bias_ptr + column).to(tl.float32)
        total += tl.where(share == 0, bias, 0.0)[:, None]
    out_at = out_ptr + (share * rows + row)[None, :] * n + (at_n + tl.arange(0, BLOCK_N))[:, None]
    tl.store(out_at, total, mask=(row < rows)[None, :])


@triton.jit
def _add_norm_kernel(
    states_ptr,  # [rows, n], added to
    sums_ptr,  # [shares, rows, n]
    weight_ptr,  # [n]
    out_ptr,  # [rows, n]
    rows, n, eps,
    SHARES: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    here = column < n
    weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
    begin(EARLY)
    states = tl.load(states_ptr + row * n + column, mask=here, other=0.0).to(tl.float32)
    if SHARES > 0:
        for share in tl.static_range(SHARES):
            states += tl.load(sums_ptr + (share * rows + row) * n + column, mask=here, other=0.0)
        states = states.to(states_ptr.dtype.element_ty)
        tl.store(states_ptr + row * n + column, states, mask=here)
        states = states.to(tl.float32)
    scale = tl.rsqrt(tl.sum(states * states, 0) / n + eps)
    tl.store(out_ptr + row * n + column, (states * scale * weight).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _gate_kernel(
    both_ptr,  # [rows, 2 * n]: gate, up
    out_ptr,  # [rows, n]
    n,
    EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    gate_at = both_ptr + tl.program_id(0) * 2 * n + column
    gate, up = tl.load(gate_at).to(tl.float32), tl.load(gate_at + n).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + tl.program_id(0) * n + column, gated.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [rows, k]
    gate_ptr, up_ptr,  # [n, k]
    out_ptr,  # [rows, n]
    rows, n, k,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column, inner = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    here = (row < rows)[:, None]
    x_at = x_ptr + row[:, None] * k + inner[None, :]
    gate_at = gate_ptr + column[:, None] * k + inner[None, :]
    up_at = up_ptr + column[:, None] * k + inner[None, :]
    first_gate, first_up = tl.load(gate_at), tl.load(up_at)
    begin(EARLY)
    x = tl.trans(tl.load(x_at, mask=here, other=0.0))
    gate, up = tl.dot(first_gate, x), tl.dot(first_up, x)
    for at in range(BLOCK_K, k, BLOCK_K):
        x = tl.trans(tl.load(x_at + at, mask=here, other=0.0))
        gate = tl.dot(tl.load(gate_at + at), x, gate)
        up = tl.dot(tl.load(up_at + at), x, up)
    gated = gate * tl.sigmoid(gate) * up
    out_at = out_ptr + row[None, :] * n + column[:, None]
    tl.store(out_at, gated.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :])


def project(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """x [rows, k] times up to three weights [n, k], one after the other: partial sums [shares, rows, n of all].

    They are float32, or with many rows one share in x's own type.
    """
    rows, k = x.shape
    joined = joined_linear(weights, biases) if rows > _FEW_ROWS else None
    if joined is not None:
        return linear(x, *joined)[None]
    copies = float8_copies(weights, rows)
    if copies is not None:
        return fp8_kernels.project(x, copies, biases)
    n = sum(map(len, weights))
    first, second, third = (*weights, weights[0], weights[0])[:3]
    given = biases if biases is not None else weights
    block_m = rows_at_a_time(rows)
    row_blocks = triton.cdiv(rows, block_m)
    shares = _num_shares(row_blocks * n // _BLOCK_N, k)
    out = torch.empty(shares, rows, n, dtype=torch.float32, device=x.device)
    _project_kernel[(row_blocks, n // _BLOCK_N, shares)](
        x, first, second, third, *(*given, given[0], given[0])[:3], out,
        rows, n, k, len(first), len(second) if len(weights) > 1 else 0,
        BIAS=biases is not None, SHARES=shares, EARLY=EARLY_LAUNCH,
        BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, TWO=k // shares >= 2 * _BLOCK_K,
        num_warps=4, num_stages=2, launch_pdl=EARLY_LAUNCH,
    )  # fmt: skip
    return out


def float8_copies(weights: Sequence[torch.Tensor], rows: int) -> list[Float8] | None:
    """What to read in place of these weights; None with too many rows, or if there are no copies in float8."""
    copies = [copy_of(weight) for weight in weights] if rows <= fp8_kernels.MAX_ROWS else []
    found = [copy for copy in copies if copy is not None]
    return found if len(found) == len(weights) else None


def rows_at_a_time(rows: int) -> int:
    """Rows of x per block of a matmul; matrix units take at least 16."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _num_shares(blocks: int, k: int) -> int:
    """How many shares a weight's columns are split into, so that every multiprocessor has something to read."""
    shares = 1
    while blocks * shares < _TARGET_BLOCKS and k // _BLOCK_K % (2 * shares) == 0:
        shares *= 2
    return shares


def add_norm(
    states: torch.Tensor, sums: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The RMS norm of the states, to which partial sums are added first, in place."""
    rows, n = states.shape
    out = torch.empty_like(states)
    _add_norm_kernel[(rows,)](
        states, sums if sums is not None else states, weight, out, rows, n, eps,
        SHARES=len(sums) if sums is not None else 0, EARLY=EARLY_LAUNCH,
        BLOCK=triton.next_power_of_2(n), num_warps=16, launch_pdl=EARLY_LAUNCH,
    )  # fmt: skip
    return out


def gate_up(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x [rows, k]; with few rows rounded once."""
    rows, k = x.shape
    n = len(gate)
    copies = float8_copies([gate, up], rows)
    if copies is not None:
        return fp8_kernels.gate_up(x, *copies)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    joined = joined_linear([gate, up]) if rows > _FEW_ROWS else None
    if joined is not None:
        block = _GATE_BLOCK * (8 if n % (8 * _GATE_BLOCK) == 0 else 1)
        _gate_kernel[(rows, n // block)](
            linear(x, *joined), out, n, EARLY=EARLY_LAUNCH, BLOCK=block, num_warps=4, launch_pdl=EARLY_LAUNCH
        )
        return out
    block_m = rows_at_a_time(rows)
    _gate_up_kernel[(triton.cdiv(rows, block_m), n // _GATE_UP["BLOCK_N"])](
        x, gate, up, out, rows, n, k, EARLY=EARLY_LAUNCH, BLOCK_M=block_m, **_GATE_UP, launch_pdl=EARLY_LAUNCH
    )
    return out
