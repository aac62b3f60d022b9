"""Triton kernels for reading prompts: everything between the matmuls of a layer, for thousands of packed tokens.

The matmuls are cuBLAS's. What lies between them is limited by bytes, so each kernel reads and writes every value once:
the residual with its norm, the rotation of queries and keys with the store into the cache's blocks, and the gate.
Attention reads keys and values from the blocks where they are: what was read before needs no copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shardproof.rollout.paged.launching import launch
from shardproof.rollout.paged.reading_chunks import Chunk, queries_per_program

_LOG2_E = 1.4426950408889634
# Tuned on an H200. With few registers, two programs share a multiprocessor: one multiplies while the other does not.
_ATTEND = {
    False: {"num_warps": 8, "num_stages": 2, "maxnreg": 128},
    True: {"num_warps": 4, "num_stages": 2},  # wide heads
}


class Norms(NamedTuple):
    """Weights of the norms of queries and keys, and their epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@triton.jit
def _add_norm_kernel(
    states_ptr,  # [tokens, n], added to
    new_ptr,  # [tokens, n]
    weight_ptr,  # [n]
    out_ptr,  # [tokens, n]
    n, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, column = tl.program_id(0).to(tl.int64) * n, tl.arange(0, BLOCK)
    here = column < n
    states = tl.load(states_ptr + at + column, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
    if ADD:
        states += tl.load(new_ptr + at + column, mask=here, other=0.0).to(tl.float32)
        rounded = states.to(states_ptr.dtype.element_ty)
        tl.store(states_ptr + at + column, rounded, mask=here)
        states = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(states * states, 0) / n + eps)
    tl.store(out_ptr + at + column, (states * scale * weight).to(out_ptr.dtype.element_ty), mask=here)


def add_norm(
    states: torch.Tensor, new: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The RMS norm of states [tokens, n], to which `new` is added first, in place."""
    tokens, n = states.shape
    out = torch.empty_like(states)
    block = triton.next_power_of_2(n)
    launch(
        _add_norm_kernel, (tokens, 1),
        (states, new if new is not None else states, weight, out, n, eps),
        {"ADD": new is not None, "BLOCK": block}, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < total
    gate = tl.load(gate_ptr + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=here, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(gate_ptr + at, gated.to(gate_ptr.dtype.element_ty), mask=here)


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in place of `gate`, rounded once."""
    total = gate.numel()
    block = 4096
    launch(_gate_kernel, (triton.cdiv(total, block), 1), (gate, up, total), {"BLOCK": block}, num_warps=8)
    return gate


@triton.jit
def _gate_visits_kernel(
    inner_ptr,  # [visits, 2 * n], gate before up
    scores_ptr,  # [visits]
    out_ptr,  # [visits, n]
    n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    visit, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < n
    score = tl.load(scores_ptr + visit).to(tl.float32)
    gate = tl.load(inner_ptr + visit * 2 * n + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(inner_ptr + visit * 2 * n + n + column, mask=here, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up * score
    tl.store(out_ptr + visit * n + column, gated.to(out_ptr.dtype.element_ty), mask=here)


def gate_visits(inner: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * score of each visit to an expert, rounded once."""
    visits, n = inner.shape[0], inner.shape[1] // 2
    out = torch.empty(visits, n, dtype=inner.dtype, device=inner.device)
    block = min(triton.next_power_of_2(n), 2048)
    _gate_visits_kernel[(visits, triton.cdiv(n, block))](inner, scores, out, n, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _add_visits_kernel(
    rows_ptr,  # [visits, n]
    places_ptr,  # [tokens, VISITS]
    out_ptr,  # [tokens, n]
    n,
    VISITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < n
    total = tl.zeros([BLOCK], tl.float32)
    for visit in tl.static_range(VISITS):
        place = tl.load(places_ptr + token * VISITS + visit).to(tl.int64)
        total += tl.load(rows_ptr + place * n + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * n + column, total.to(out_ptr.dtype.element_ty), mask=here)


def add_visits(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The sum of each token's visits, which are at `places` [tokens, visits per token] of `rows`, in float32."""
    (tokens, visits), n = places.shape, rows.shape[1]
    out = torch.empty(tokens, n, dtype=rows.dtype, device=rows.device)
    block = min(triton.next_power_of_2(n), 2048)
    _add_visits_kernel[(tokens, triton.cdiv(n, block))](
        rows, places, out, n, VISITS=visits, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _normed_and_rotated(
    ptr, weight_ptr, cos_low, cos_high, sin_low, sin_high, there, eps,
    WIDTH: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Both halves of a token's heads [heads, width], after their norm and their rotation by position, in float32."""
    HALF: tl.constexpr = WIDTH // 2
    low = tl.arange(0, HALF)
    at = ptr + tl.arange(0, BLOCK_H)[:, None] * WIDTH + low[None, :]
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + eps)[:, None]
        first *= scale * tl.load(weight_ptr + low).to(tl.float32)[None, :]
        second *= scale * tl.load(weight_ptr + HALF + low).to(tl.float32)[None, :]
    rotated = first * cos_low[None, :] - second * sin_low[None, :]
    return rotated, second * cos_high[None, :] + first * sin_high[None, :]


@triton.jit
def _rotate_store_kernel(
    query_ptr,  # [tokens, heads * width], rotated in place
    key_ptr, value_ptr,  # [tokens, key heads * width]
    cos_ptr, sin_ptr,  # [positions, width]
    q_norm_ptr, k_norm_ptr,  # [width]
    keys_ptr, values_ptr,  # [blocks, key heads, PAGE, width]
    positions_ptr, places_ptr,  # [tokens]: of each token, in its sequence and in the cache
    tails_ptr,  # [tokens]: places behind it whose values become 0
    eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = WIDTH // 2
    low, whole = tl.arange(0, HALF), tl.arange(0, WIDTH)
    heads, key_heads = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[:, None]
    table = tl.load(positions_ptr + token) * WIDTH
    place = tl.load(places_ptr + token).to(tl.int64)
    cos_low = tl.load(cos_ptr + table + low).to(tl.float32)
    cos_high = tl.load(cos_ptr + table + HALF + low).to(tl.float32)
    sin_low = tl.load(sin_ptr + table + low).to(tl.float32)
    sin_high = tl.load(sin_ptr + table + HALF + low).to(tl.float32)
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    query_at = query_ptr + token * HEADS * WIDTH
    first, second = _normed_and_rotated(
        query_at, q_norm_ptr, cos_low, cos_high, sin_low, sin_high, heads < HEADS, eps, WIDTH, NORM, BLOCK_Q
    )
    query_at += heads * WIDTH + low[None, :]
    tl.store(query_at, first.to(query_ptr.dtype.element_ty), mask=heads < HEADS)
    tl.store(query_at + HALF, second.to(query_ptr.dtype.element_ty), mask=heads < HEADS)
    new_at = token * KEY_HEADS * WIDTH
    first, second = _normed_and_rotated(
        key_ptr + new_at, k_norm_ptr, cos_low, cos_high, sin_low, sin_high, key_heads < KEY_HEADS, eps,
        WIDTH, NORM, BLOCK_K,
    )  # fmt: skip
    store = ((place // PAGE) * KEY_HEADS + key_heads) * PAGE * WIDTH + (place % PAGE) * WIDTH
    tl.store(keys_ptr + store + low[None, :], first.to(dtype), mask=key_heads < KEY_HEADS)
    tl.store(keys_ptr + store + HALF + low[None, :], second.to(dtype), mask=key_heads < KEY_HEADS)
    value_at = value_ptr + new_at + key_heads * WIDTH + whole[None, :]
    value = tl.load(value_at, mask=key_heads < KEY_HEADS, other=0.0)
    tl.store(values_ptr + store + whole[None, :], value.to(dtype), mask=key_heads < KEY_HEADS)
    for behind in range(1, tl.load(tails_ptr + token) + 1):
        nothing = tl.zeros([BLOCK_K, WIDTH], dtype)
        tl.store(values_ptr + store + behind * WIDTH + whole[None, :], nothing, mask=key_heads < KEY_HEADS)


def rotate_store(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotary: tuple[torch.Tensor, torch.Tensor],
    norms: Norms | None,
    cache: tuple[torch.Tensor, torch.Tensor],
    chunk: Chunk,
) -> torch.Tensor:
    """The queries of packed tokens, normed and rotated in place; keys and values go to their places in the blocks.

    Values behind a prompt's last token, up to the end of its block, become 0: nothing finite was there for sure.

    `states`: queries, keys and values, [tokens, heads * width]. `rotary`: cosines and sines by position.
    """
    query, key, value = states
    keys, values = cache
    _, key_heads, page, width = keys.shape
    heads = query.shape[1] // width
    q_norm, k_norm, eps = norms if norms is not None else (keys, keys, 0.0)
    block_q, block_k = triton.next_power_of_2(heads), triton.next_power_of_2(key_heads)
    constants = {
        **{"HEADS": heads, "KEY_HEADS": key_heads, "WIDTH": width, "PAGE": page, "NORM": norms is not None},
        **{"BLOCK_Q": block_q, "BLOCK_K": block_k},
    }
    launch(
        _rotate_store_kernel, (len(query), 1),
        (query, key, value, *rotary, q_norm, k_norm, keys, values, chunk.positions, chunk.places, chunk.tails, eps),
        constants, num_warps=min(max(block_q * width // 512, 1), 8),
    )  # fmt: skip
    return query


@triton.jit
def _attend_block(
    query, keys_ptr, values_ptr, block, at, position, end, scale, softcap, window, peak, norm, total,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The running softmax after a block of cached tokens, the first of them at `at`. Scores are in units of log 2."""
    inner = tl.arange(0, PAGE)
    offsets = block * (PAGE * WIDTH) + inner[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    scores = tl.dot(query, tl.trans(tl.load(keys_ptr + offsets))) * scale
    if CAPPED:  # tanh, by way of an exponential
        bounded = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        scores = bounded * (softcap * 1.4426950408889634)
    if MASKED:
        time = at + inner[None, :]
        seen = time <= position[:, None]
        if WINDOW:
            seen = seen & (time > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    norm = norm * shrink + tl.sum(weights, 1)
    if MASKED:  # a weight of 0 does not hide a NaN: what was never written must not be loaded
        value = tl.load(values_ptr + offsets, mask=(at + inner < end)[:, None], other=0.0)
    else:
        value = tl.load(values_ptr + offsets)
    return higher, norm, tl.dot(weights.to(value.dtype), value, total * shrink[:, None])


@triton.jit(do_not_specialize=["table_length", "window"])
def _attend_kernel(
    query_ptr,  # [tokens, heads * width]
    keys_ptr, values_ptr,  # [blocks, key heads, PAGE, width]
    tables_ptr, tiles_ptr,  # see Chunk
    sinks_ptr,  # [heads]
    out_ptr,  # [tokens, heads * width]
    table_length, scale, softcap, window,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Heads come first: those that share a key head run side by side, and memory is read for one of them.
    head, tile_at = tl.program_id(0), tiles_ptr + tl.program_id(1) * 4
    key_head = head // (HEADS // KEY_HEADS)
    sequence, token = tl.load(tile_at), tl.load(tile_at + 1)
    first, num = tl.load(tile_at + 2), tl.load(tile_at + 3)
    table_ptr = tables_ptr + sequence * table_length
    row, whole = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    position, end = first + row, first + num
    row_at = (token + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + whole[None, :]
    query = tl.load(query_ptr + row_at, mask=(row < num)[:, None], other=0.0)
    # A number, not minus infinity: with a window, the first blocks may have nothing that a query sees.
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # take probability and have no value
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        peak = tl.zeros([BLOCK_M], tl.float32) + sink
        norm += 1.0
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // PAGE * PAGE
    else:
        begin = (first + 1) // PAGE * PAGE  # before it, every query of this program sees every key
        for at in range(0, begin, PAGE):
            block = tl.load(table_ptr + at // PAGE).to(tl.int64) * KEY_HEADS + key_head
            peak, norm, total = _attend_block(
                query, keys_ptr, values_ptr, block, at, position, end, scale, softcap, window, peak, norm, total,
                WIDTH, PAGE, False, False, CAPPED,
            )  # fmt: skip
    for at in range(begin, end, PAGE):
        block = tl.load(table_ptr + at // PAGE).to(tl.int64) * KEY_HEADS + key_head
        peak, norm, total = _attend_block(
            query, keys_ptr, values_ptr, block, at, position, end, scale, softcap, window, peak, norm, total,
            WIDTH, PAGE, True, WINDOW, CAPPED,
        )  # fmt: skip
    attended = (total / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row_at, attended, mask=(row < num)[:, None])


def attend(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    chunk: Chunk,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries [tokens, heads * width] to the blocks of their sequences."""
    keys, values = cache
    _, key_heads, page, width = keys.shape
    heads = query.shape[1] // width
    out = torch.empty_like(query)
    capped = softcap is not None
    # The cap comes before the change to units of log 2.
    scale = scaling if capped else scaling * _LOG2_E
    constants = {
        **{"HEADS": heads, "KEY_HEADS": key_heads, "WIDTH": width, "PAGE": page},
        **{"WINDOW": window is not None, "CAPPED": capped, "SINKS": sinks is not None},
        "BLOCK_M": queries_per_program(width),
    }
    launch(
        _attend_kernel, (heads, len(chunk.tiles)),
        (
            query, keys, values, chunk.tables, chunk.tiles, sinks if sinks is not None else keys, out,
            chunk.tables.shape[1], scale, softcap if capped else 1.0, window if window is not None else 0,
        ),
        constants, **_ATTEND[width > 128],
    )  # fmt: skip
    return out
