"""Triton kernels for training a plain transformer block: what lies between its matmuls, forward and backward.

All of it is limited by bytes, so each kernel reads and writes every value once, with float32 inside and one rounding. A
backward kernel computes the forward's output again on its way, so that it need not be kept. Gradients of norms' weights
are added up over the tokens of each program first; the few sums that are left are added up in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 8  # per multiprocessor, where each works through many tokens


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    at, column = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    here = column < N
    x = tl.load(x_ptr + at + column, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(out_ptr + at + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=here)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of x [tokens, n]."""
    tokens, n = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    _norm_kernel[(tokens,)](x, weight, out, eps, N=n, BLOCK=block, num_warps=min(max(block // 512, 1), 16))
    return out


@triton.jit(do_not_specialize=["tokens"])
def _norm_backward_kernel(
    x_ptr,  # [tokens, N]
    weight_ptr,  # [N]
    grad_ptr,  # [tokens, N], of the norm's output
    residual_ptr,  # [tokens, N], another gradient of x
    out_ptr,  # [tokens, N], the gradient of x
    normed_ptr,  # [tokens, N], the norm's output
    sums_ptr,  # [programs, N], float32
    tokens, eps,
    N: tl.constexpr, RECOMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    here = column < N
    weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    zero = tl.program_id(0).to(tl.int64) * 0  # makes offsets wide
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = (zero + token) * N + column
        x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
        x *= scale
        sums += grad * x
        grad *= weight
        if RECOMPUTE:
            tl.store(normed_ptr + at, (x * weight).to(normed_ptr.dtype.element_ty), mask=here)
        grad = residual + scale * (grad - x * (tl.sum(grad * x, 0) / N))
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(sums_ptr + tl.program_id(0) * N + column, sums, mask=here)


def norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad: torch.Tensor,
    residual: torch.Tensor,
    recompute: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of x, to which `residual` is added; gradient of the weight; the norm's output again, if asked for)."""
    tokens, n = x.shape
    out = torch.empty_like(x)
    normed = torch.empty_like(x) if recompute else out
    programs = min(tokens, _programs(x.device))
    sums = torch.empty(programs, n, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(n)
    _norm_backward_kernel[(programs,)](
        x, weight, grad, residual, out, normed, sums, tokens, eps, N=n, RECOMPUTE=recompute, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out, sums.sum(0).to(weight.dtype), normed


@triton.jit
def _load_heads(ptr, heads, low, WIDTH: tl.constexpr, NUM: tl.constexpr):
    """Both halves of a token's heads [NUM, WIDTH], in float32."""
    at = ptr + heads * WIDTH + low
    there = heads < NUM
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return first, tl.load(at + WIDTH // 2, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(ptr, heads, low, first, second, WIDTH: tl.constexpr, NUM: tl.constexpr):
    at = ptr + heads * WIDTH + low
    tl.store(at, first.to(ptr.dtype.element_ty), mask=heads < NUM)
    tl.store(at + WIDTH // 2, second.to(ptr.dtype.element_ty), mask=heads < NUM)


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, weight_ptr, token, heads, low, cos_low, cos_high, sin_low, sin_high, eps,
    WIDTH: tl.constexpr, NUM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    at = token * NUM * WIDTH
    first, second = _load_heads(x_ptr + at, heads, low, WIDTH, NUM)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + eps)[:, None]
        first *= scale * tl.load(weight_ptr + low).to(tl.float32)
        second *= scale * tl.load(weight_ptr + WIDTH // 2 + low).to(tl.float32)
    _store_heads(
        out_ptr + at, heads, low, first * cos_low - second * sin_low, second * cos_high + first * sin_high,
        WIDTH, NUM,
    )  # fmt: skip


@triton.jit
def _rotate_heads_backward(
    x_ptr, grad_ptr, out_ptr, weight_ptr, sums_low, sums_high, token, heads, low,
    cos_low, cos_high, sin_low, sin_high, eps,
    WIDTH: tl.constexpr, NUM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a token's heads; returns the sums for the weight's gradient, with this token's added."""
    at = token * NUM * WIDTH
    rotated_low, rotated_high = _load_heads(grad_ptr + at, heads, low, WIDTH, NUM)
    grad_low = rotated_low * cos_low + rotated_high * sin_high
    grad_high = rotated_high * cos_high - rotated_low * sin_low
    if NORM:
        first, second = _load_heads(x_ptr + at, heads, low, WIDTH, NUM)
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + eps)[:, None]
        first *= scale
        second *= scale
        sums_low += grad_low * first
        sums_high += grad_high * second
        grad_low *= tl.load(weight_ptr + low).to(tl.float32)
        grad_high *= tl.load(weight_ptr + WIDTH // 2 + low).to(tl.float32)
        inner = ((tl.sum(grad_low * first, 1) + tl.sum(grad_high * second, 1)) / WIDTH)[:, None]
        grad_low = scale * (grad_low - first * inner)
        grad_high = scale * (grad_high - second * inner)
    _store_heads(out_ptr + at, heads, low, grad_low, grad_high, WIDTH, NUM)
    return sums_low, sums_high


@triton.jit
def _load_angles(cos_ptr, sin_ptr, token, low, WIDTH: tl.constexpr):
    at, half = token * WIDTH + low, WIDTH // 2
    cos_low, cos_high = tl.load(cos_ptr + at).to(tl.float32), tl.load(cos_ptr + half + at).to(tl.float32)
    return (
        cos_low,
        cos_high,
        tl.load(sin_ptr + at).to(tl.float32),
        tl.load(sin_ptr + half + at).to(tl.float32),
    )


@triton.jit
def _rotate_kernel(
    query_ptr, key_ptr,  # [tokens, heads * WIDTH]
    cos_ptr, sin_ptr,  # [tokens, WIDTH]
    q_norm_ptr, k_norm_ptr,  # [WIDTH]
    query_out_ptr, key_out_ptr,
    eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token, low = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH // 2)[None, :]
    heads, key_heads = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[:, None]
    cos_low, cos_high, sin_low, sin_high = _load_angles(cos_ptr, sin_ptr, token, low, WIDTH)
    _rotate_heads(
        query_ptr, query_out_ptr, q_norm_ptr, token, heads, low, cos_low, cos_high, sin_low, sin_high, eps,
        WIDTH, HEADS, NORM,
    )  # fmt: skip
    _rotate_heads(
        key_ptr, key_out_ptr, k_norm_ptr, token, key_heads, low, cos_low, cos_high, sin_low, sin_high, eps,
        WIDTH, KEY_HEADS, NORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _rotate_backward_kernel(
    query_ptr, key_ptr,  # [tokens, heads * WIDTH], before the norm
    cos_ptr, sin_ptr,  # [tokens, WIDTH]
    q_norm_ptr, k_norm_ptr,  # [WIDTH]
    query_grad_ptr, key_grad_ptr,  # of what was rotated
    query_out_ptr, key_out_ptr,  # gradients of queries and keys
    sums_ptr,  # [programs, 2, WIDTH], float32
    tokens, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    column = tl.arange(0, HALF)
    low = column[None, :]
    heads, key_heads = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[:, None]
    # Per head: to add heads up for every token, warps would have to wait for each other.
    q_low, q_high = tl.zeros([BLOCK_Q, HALF], tl.float32), tl.zeros([BLOCK_Q, HALF], tl.float32)
    k_low, k_high = tl.zeros([BLOCK_K, HALF], tl.float32), tl.zeros([BLOCK_K, HALF], tl.float32)
    zero = tl.program_id(0).to(tl.int64) * 0  # makes offsets wide
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = zero + number
        cos_low, cos_high, sin_low, sin_high = _load_angles(cos_ptr, sin_ptr, token, low, WIDTH)
        q_low, q_high = _rotate_heads_backward(
            query_ptr, query_grad_ptr, query_out_ptr, q_norm_ptr, q_low, q_high, token, heads, low,
            cos_low, cos_high, sin_low, sin_high, eps, WIDTH, HEADS, NORM,
        )  # fmt: skip
        k_low, k_high = _rotate_heads_backward(
            key_ptr, key_grad_ptr, key_out_ptr, k_norm_ptr, k_low, k_high, token, key_heads, low,
            cos_low, cos_high, sin_low, sin_high, eps, WIDTH, KEY_HEADS, NORM,
        )  # fmt: skip
    if NORM:
        sums_at = sums_ptr + tl.program_id(0) * 2 * WIDTH + column
        tl.store(sums_at, tl.sum(q_low, 0))
        tl.store(sums_at + HALF, tl.sum(q_high, 0))
        tl.store(sums_at + WIDTH, tl.sum(k_low, 0))
        tl.store(sums_at + WIDTH + HALF, tl.sum(k_high, 0))


Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each [tokens, width]
Weights = tuple[torch.Tensor, torch.Tensor]  # of the norms of queries and of keys


def rotate(
    query: torch.Tensor, key: torch.Tensor, angles: Angles, weights: Weights | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [tokens, heads * width], normed per head if weights are given, and rotated by position."""
    out = torch.empty_like(query), torch.empty_like(key)
    shape = _head_shape(query, key, angles, weights)
    _rotate_kernel[(len(query),)](query, key, *angles, *(weights or angles), *out, eps, **shape)
    return out


def rotate_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    angles: Angles,
    weights: Weights | None,
    eps: float,
    grads: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of queries, keys and both weights. Without weights, queries and keys are looked at for their shape only."""
    out = torch.empty_like(query), torch.empty_like(key)
    programs = min(len(query), _programs(query.device))
    sums = torch.empty(programs, 2, angles[0].shape[-1], dtype=torch.float32, device=query.device)
    _rotate_backward_kernel[(programs,)](
        query, key, *angles, *(weights or angles), *grads, *out, sums, len(query), eps,
        **_head_shape(query, key, angles, weights),
    )  # fmt: skip
    if weights is None:
        return *out, None, None
    of_query, of_key = sums.sum(0)
    return *out, of_query.to(weights[0].dtype), of_key.to(weights[1].dtype)


def _head_shape(
    query: torch.Tensor, key: torch.Tensor, angles: Angles, weights: Weights | None
) -> dict[str, int]:
    width = angles[0].shape[-1]
    heads, key_heads = query.shape[1] // width, key.shape[1] // width
    block_q, block_k = triton.next_power_of_2(heads), triton.next_power_of_2(key_heads)
    shape = {"HEADS": heads, "KEY_HEADS": key_heads, "WIDTH": width, "NORM": weights is not None}
    return {
        **shape,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "num_warps": min(max(block_q * width // 512, 1), 8),
    }


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, out_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=at < total)


@triton.jit
def _gate_backward_kernel(
    gate_ptr, up_ptr, grad_ptr, gate_out_ptr, up_out_ptr, gated_ptr, total, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < total
    gate = tl.load(gate_ptr + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    dtype: tl.constexpr = gate_out_ptr.dtype.element_ty
    tl.store(gated_ptr + at, (active * up).to(dtype), mask=here)
    tl.store(up_out_ptr + at, (grad * active).to(dtype), mask=here)
    tl.store(gate_out_ptr + at, (grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype), mask=here)


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    out = torch.empty_like(gate)
    _gate_kernel[(triton.cdiv(gate.numel(), 4096),)](gate, up, out, gate.numel(), BLOCK=4096, num_warps=8)
    return out


def gate_backward(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of gate, gradient of up, silu(gate) * up again)."""
    outs = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), 2048),)
    _gate_backward_kernel[grid](gate, up, grad, *outs, gate.numel(), BLOCK=2048, num_warps=8)
    return outs


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
