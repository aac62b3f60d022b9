"""What stands between a block's matmuls, in Triton: norms, rotary embedding and gate of exact mode on CUDA.

Each row is computed by one program, from the same numbers in the same order, however many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDEST_IN_GROUPS = 256  # a norm of fewer columns takes several rows per program


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, n, x_stride, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    states = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(states * states, 1) / n + eps)
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0)
    out = weight[None, :] * (states * scale[:, None]).to(x.dtype)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * n + column[None, :], out, mask=mask)


@triton.jit
def _rounded(x, like):
    """Rounded as a tensor of the model's dtype would be, and back in float32."""
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def _rotate_kernel(
    x_ptr,  # [tokens, heads, width], by strides
    weight_ptr,  # [width]
    cos_ptr, sin_ptr,  # [tokens, width]
    out_ptr,  # [tokens, heads, width]
    heads, token_stride, head_stride, eps,
    NORM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    half: tl.constexpr = WIDTH // 2
    other = (column + half) % WIDTH
    mask = (head < heads)[:, None] & (column >= 0)[None, :]
    at = x_ptr + token * token_stride + head[:, None] * head_stride
    given = tl.load(at + column[None, :], mask=mask, other=0.0)
    x, pair = given.to(tl.float32), tl.load(at + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        weight = tl.load(weight_ptr + column).to(tl.float32)[None, :]
        other_weight = tl.load(weight_ptr + other).to(tl.float32)[None, :]
        x = _rounded(weight * _rounded(x * scale, given), given)
        pair = _rounded(other_weight * _rounded(pair * scale, given), given)
    cos = tl.load(cos_ptr + token * WIDTH + column).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * WIDTH + column).to(tl.float32)[None, :]
    turned = tl.where(column < half, -1.0, 1.0)[None, :] * pair
    out = _rounded(x * cos, given) + _rounded(turned * sin, given)
    out_at = out_ptr + (token * heads + head)[:, None] * WIDTH + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(
    gate_ptr, up_ptr,  # [rows, n], by strides
    scores_ptr,  # [rows]
    out_ptr,  # [rows, n]
    n, gate_stride, up_stride, SCORES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=column < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=column < n, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    if SCORES:
        out *= tl.load(scores_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * n + column, out.to(out_ptr.dtype.element_ty), mask=column < n)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of the last dimension, rounded before the weight is applied, as most families do."""
    n = x.shape[-1]
    flat = x.reshape(-1, n)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    per_program = 16 if n <= _WIDEST_IN_GROUPS else 1
    grid = (triton.cdiv(len(flat), per_program),)
    _norm_kernel[grid](
        flat, weight, out, len(flat), n, flat.stride(0), eps, ROWS=per_program,
        BLOCK_N=triton.next_power_of_2(n), num_warps=4 if n <= 4096 else 8,
    )  # fmt: skip
    return out.view(x.shape)


def rotate(
    x: torch.Tensor,  # [tokens, heads, width]
    weight: torch.Tensor | None,  # of the norm of each head; None for none
    cos: torch.Tensor,  # [tokens, width]
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Heads that are normed, if a family does that, and then rotated."""
    tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_kernel[(tokens,)](
        x, weight if weight is not None else cos, cos, sin, out, heads, x.stride(0), x.stride(1), eps,
        NORM=weight is not None, WIDTH=width, HEADS=triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    return out


def gate(
    gated: torch.Tensor,  # [rows, n]
    up: torch.Tensor,
    scores: torch.Tensor | None = None,  # [rows]
) -> torch.Tensor:
    """silu(gated) * up, times a score per row if there is one, rounded once."""
    rows, n = gated.shape
    out = torch.empty(rows, n, dtype=gated.dtype, device=gated.device)
    block = min(1024, triton.next_power_of_2(n))
    _gate_kernel[(rows, triton.cdiv(n, block))](
        gated, up, scores if scores is not None else gated, out, n, gated.stride(0), up.stride(0),
        SCORES=scores is not None, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return out
