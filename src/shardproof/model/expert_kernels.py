"""Triton kernels for training experts: what lies between their grouped matmuls, each value read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # that a program of the gate works on at a time


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(
    inner_ptr, score_ptr, out_ptr, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * (2 * N) + column[None, :]
    gate = tl.load(inner_ptr + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(inner_ptr + at + N, mask=here, other=0.0).to(tl.float32)
    score = tl.load(score_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up * score[:, None]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * N + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=here,
    )


@triton.jit(do_not_specialize=["rows"])
def _gate_backward_kernel(
    grad_ptr,  # [rows, N], of the gate's output
    inner_ptr,  # [rows, 2 N]
    score_ptr,  # [rows]
    out_ptr,  # [rows, N], the gate's output
    grad_inner_ptr,  # [rows, 2 N]
    grad_score_ptr,  # [rows]
    rows,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    score = tl.load(score_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    wide = row.to(tl.int64)[:, None]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        here = (row < rows)[:, None] & (column < N)
        at, half = wide * (2 * N) + column, wide * N + column
        gate = tl.load(inner_ptr + at, mask=here, other=0.0).to(tl.float32)
        up = tl.load(inner_ptr + at + N, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + half, mask=here, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        active = gate * sigmoid
        gated = active * up
        weighted = grad * score
        grad_gate = weighted * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        kind = out_ptr.dtype.element_ty
        tl.store(out_ptr + half, (gated * score).to(kind), mask=here)
        tl.store(grad_inner_ptr + at, grad_gate.to(kind), mask=here)
        tl.store(grad_inner_ptr + at + N, (weighted * active).to(kind), mask=here)
        sums += grad * gated
    tl.store(grad_score_ptr + row, tl.sum(sums, 1).to(grad_score_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _sum_kernel(rows_ptr, place_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for visit in tl.static_range(K):
        row = tl.load(place_ptr + token * K + visit)
        total += tl.load(rows_ptr + row * N + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + column, total.to(out_ptr.dtype.element_ty), mask=here)


def _tile(n: int) -> tuple[int, int]:
    """(rows, columns) of a tile: columns that divide n where a sensible power of two does."""
    block = n & -n
    block = min(block, 1024) if block >= 64 else min(triton.next_power_of_2(n), 1024)
    return max(1, _ELEMENTS // block), block


def gate(inner: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * score of inner states [rows, 2 n], rounded once."""
    rows, n = len(inner), inner.shape[1] // 2
    out = inner.new_empty(rows, n)
    tall, block = _tile(n)
    grid = (triton.cdiv(rows, tall), triton.cdiv(n, block))
    _gate_kernel[grid](inner, score, out, rows, N=n, ROWS=tall, BLOCK=block, num_warps=4)
    return out


def gate_backward(
    grad: torch.Tensor, inner: torch.Tensor, score: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what `gate` gave, the gradient of its input, the gradient of the scores)."""
    rows, n = grad.shape
    out, grad_inner, grad_score = torch.empty_like(grad), torch.empty_like(inner), torch.empty_like(score)
    tall, block = _tile(n)
    tall = max(1, tall // 2)  # it holds twice as much
    _gate_backward_kernel[(triton.cdiv(rows, tall),)](
        grad, inner, score, out, grad_inner, grad_score, rows, N=n, ROWS=tall, BLOCK=block, num_warps=4
    )
    return out, grad_inner, grad_score


def sum_by_token(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows, found through `place` [tokens, k], in float32."""
    (tokens, k), n = place.shape, rows.shape[1]
    out = rows.new_empty(tokens, n)
    block = min(triton.next_power_of_2(n), 2048)
    _sum_kernel[(tokens, triton.cdiv(n, block))](rows, place, out, N=n, K=k, BLOCK=block, num_warps=4)
    return out
