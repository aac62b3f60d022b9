"""Attention, experts and log-probs whose rows do not depend on the rows beside them, in Triton: exact mode on CUDA.

Attention always has tiles of 64 queries (a query that is alone has padding beside it) and reads 64 keys at a time, from
position 0 on. Other kernels reduce a row in one program. So a row is added up in the same order wherever it is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardproof.model.exact_block_kernels import gate
from shardproof.model.exact_matmul import Visits, expert_linear, linear

__all__ = ["attention", "experts", "linear", "row_sums", "store", "token_logprobs"]

BLOCK = 64  # keys that attention reads at a time, from position 0 on


@triton.jit
def _visible(scores, at, position, softcap, window, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores, capped where a family does that, of the keys that each query may see."""
    if SOFTCAP:
        bounded = 1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0)
        scores = bounded * softcap * 1.4426950408889634
    seen = at[None, :] <= position[:, None]
    if WINDOW:
        seen &= at[None, :] > position[:, None] - window
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "heads", "window", "table_stride"])
def _attention_kernel(
    query_ptr,  # [tokens, heads, width]
    key_ptr, value_ptr,  # by strides: blocks of a cache, or the tokens of packed sequences
    out_ptr,  # [tokens, heads, value width]
    norms_ptr,  # [heads, tokens]: the logarithms of the softmax's sums
    tables_ptr,  # [sequences, blocks]: where each block of 64 keys begins, in units of `key_block`
    tile_sequence_ptr, tile_first_ptr,  # [tiles]: a sequence, and the first of its rows, of which each query has GROUP
    starts_ptr, counts_ptr, positions_ptr,  # [sequences]: first query, queries, and the first query's position
    sinks_ptr,  # [heads]
    tokens, heads, scale, softcap, window, table_stride,
    key_block, key_head, key_token, value_block, value_head, value_token,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    tile, key_head_number = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence_ptr + tile)
    count = tl.load(counts_ptr + sequence)
    first_position = tl.load(positions_ptr + sequence).to(tl.int32)
    row = tl.load(tile_first_ptr + tile) + tl.arange(0, BLOCK_M)
    here = row < count * GROUP
    position = first_position + row // GROUP
    token = (tl.load(starts_ptr + sequence) + row // GROUP).to(tl.int64)
    head = key_head_number * GROUP + row % GROUP
    inner, value_inner, at_key = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_T)
    query_at = query_ptr + (token * heads + head)[:, None] * WIDTH + inner[None, :]
    query = tl.load(query_at, mask=here[:, None] & (inner < WIDTH)[None, :], other=0.0)
    key_ptr += key_head_number.to(tl.int64) * key_head
    value_ptr += key_head_number.to(tl.int64) * value_head
    last = tl.minimum(first_position + count, tl.max(tl.where(here, position, 0), 0) + 1)
    first_block = 0
    if WINDOW:
        first_block = tl.maximum(tl.min(tl.where(here, position, 2147483647), 0) - window + 1, 0) // BLOCK_T
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for block in range(first_block, tl.cdiv(last, BLOCK_T)):
        start = tl.load(tables_ptr + sequence * table_stride + block).to(tl.int64)
        at = block * BLOCK_T + at_key
        key_at = key_ptr + start * key_block + at_key[None, :] * key_token + inner[:, None]
        key = tl.load(key_at, mask=(at < last)[None, :] & (inner < WIDTH)[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION)
        scores = _visible(scores * scale, at, position, softcap, window, WINDOW, SOFTCAP)
        new = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # before the window: nothing was seen yet
        weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        value_at = value_ptr + start * value_block + at_key[:, None] * value_token + value_inner[None, :]
        value = tl.load(value_at, mask=(at < last)[:, None] & (value_inner < VALUE_WIDTH)[None, :], other=0.0)
        out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
        largest = new
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=here, other=0.0).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - largest)
    total, largest = tl.where(here, total, 1.0), tl.where(here, largest, 0.0)
    out_at = out_ptr + (token * heads + head)[:, None] * VALUE_WIDTH + value_inner[None, :]
    out_mask = here[:, None] & (value_inner < VALUE_WIDTH)[None, :]
    tl.store(out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
    norm = (largest + tl.log2(total)) * 0.6931471805599453
    tl.store(norms_ptr + head.to(tl.int64) * tokens + token, norm, mask=here)


@triton.jit(do_not_specialize=["table_stride"])
def _store_kernel(
    key_ptr, value_ptr,  # [rows, key heads, width], by strides
    keys_ptr, values_ptr,  # [blocks, key heads, 64, width]
    tables_ptr, positions_ptr,
    key_row, key_head, value_row, value_head, table_stride, block_stride, head_stride,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, head, inner = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_D)
    position = tl.load(positions_ptr + row).to(tl.int32)
    block = tl.load(tables_ptr + row * table_stride + position // BLOCK_T).to(tl.int64)
    at = block * block_stride + head * head_stride + position % BLOCK_T * WIDTH + inner
    mask = inner < WIDTH
    tl.store(keys_ptr + at, tl.load(key_ptr + row * key_row + head * key_head + inner, mask=mask), mask=mask)
    value = tl.load(value_ptr + row * value_row + head * value_head + inner, mask=mask)
    tl.store(values_ptr + at, value, mask=mask)


@triton.jit
def _sum_visits_kernel(x_ptr, out_ptr, n, VISITS: tl.constexpr, BLOCK_N: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for visit in tl.static_range(VISITS):
        at = (row * VISITS + visit) * n + column
        total += tl.load(x_ptr + at, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + column, total.to(out_ptr.dtype.element_ty), mask=column < n)


@triton.jit
def _sum_kernel(x_ptr, out_ptr, n, x_stride, divisor, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for at in range(0, n, BLOCK_N):
        column = at + tl.arange(0, BLOCK_N)
        total += tl.load(x_ptr + row * x_stride + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, (tl.sum(total, 0) / divisor).to(out_ptr.dtype.element_ty))


@triton.jit
def _logprob_kernel(
    logits_ptr, tokens_ptr, out_ptr, norms_ptr, n, stride, temperature, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    highest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for at in range(0, n, BLOCK_N):
        logits = tl.load(logits_ptr + row * stride + at + column, mask=at + column < n, other=float("-inf"))
        highest = tl.maximum(highest, logits.to(tl.float32))
    largest = tl.max(highest, 0) / temperature
    total = tl.zeros((BLOCK_N,), tl.float32)
    for at in range(0, n, BLOCK_N):
        logits = tl.load(logits_ptr + row * stride + at + column, mask=at + column < n, other=float("-inf"))
        total += tl.exp(logits.to(tl.float32) / temperature - largest)
    norm = largest + tl.log(tl.sum(total, 0))
    token = tl.load(tokens_ptr + row)
    chosen = tl.load(logits_ptr + row * stride + token).to(tl.float32) / temperature
    tl.store(out_ptr + row, chosen - norm)
    tl.store(norms_ptr + row, norm)


def attention(
    query: torch.Tensor,  # [tokens, heads, width]
    key: torch.Tensor,  # [tokens, key heads, width], or a cache [blocks, key heads, 64, width]
    value: torch.Tensor,
    tables: torch.Tensor,  # [sequences, blocks] int32
    tiles: tuple[torch.Tensor, torch.Tensor],  # [tiles] int32: sequence, first row
    sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # [sequences] int32: start, count, position
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tile: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, value width], logarithms of the softmax's sums [heads, tokens]).

    Blocks of 64 keys are read from position 0 on (or from the first that a window sees), so that a row's result does not
    depend on the queries beside it, nor on where keys and values lie.
    """
    num_tokens, heads, width = query.shape
    key_heads, value_width = key.shape[1], value.shape[-1]
    query = query.contiguous()
    out = torch.empty(num_tokens, heads, value_width, dtype=query.dtype, device=query.device)
    norms = torch.empty(heads, num_tokens, dtype=torch.float32, device=query.device)
    log2e = 1.4426950408889634
    scale = scaling if softcap is not None else scaling * log2e
    tile = {"BLOCK_M": BLOCK, "num_warps": 4, "num_stages": 3} | (tile or {})
    _attention_kernel[(len(tiles[0]), key_heads)](
        query, key, value, out, norms, tables, *tiles, *sequences, sinks if sinks is not None else query,
        num_tokens, heads, scale, softcap or 0.0, window or 0, tables.stride(0),
        *_strides(key), *_strides(value),
        GROUP=heads // key_heads, WIDTH=width, VALUE_WIDTH=value_width,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, PRECISION="ieee",
        BLOCK_T=BLOCK, BLOCK_D=max(16, triton.next_power_of_2(width)),
        BLOCK_V=max(16, triton.next_power_of_2(value_width)), **tile,
    )  # fmt: skip
    return out, norms


def _strides(states: torch.Tensor) -> tuple[int, int, int]:
    """From block to block (which may begin at any token of packed sequences), head to head, token to token."""
    assert states.stride(-1) == 1, "keys and values have their elements side by side"
    return states.stride(0), states.stride(1), states.stride(0 if states.dim() == 3 else 2)


def store(
    key: torch.Tensor,  # [rows, key heads, width]
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    positions: torch.Tensor,  # [rows]
) -> None:
    """Write one new key and value per row into a cache's blocks."""
    keys, values = cache
    rows, heads, width = key.shape
    _store_kernel[(rows, heads)](
        key, value, keys, values, tables, positions, key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), tables.stride(0), keys.stride(0), keys.stride(1),
        WIDTH=width, BLOCK_T=BLOCK, BLOCK_D=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def experts(
    hidden: torch.Tensor,  # [tokens, hidden]
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    chosen: torch.Tensor,  # [tokens, k]
    scores: torch.Tensor,  # [tokens, k]
) -> torch.Tensor:
    """The output of a layer's experts for [tokens, hidden]; a token's experts are added up in the order of `chosen`."""
    hidden = hidden.contiguous()
    (tokens, per_token), width = chosen.shape, down.shape[2]
    visits = Visits(chosen, len(gate_up))
    inner = expert_linear(hidden, gate_up.contiguous(), visits, per_token)
    gated = gate(inner[:, :width], inner[:, width:], scores.reshape(-1))
    each = expert_linear(gated, down.contiguous(), visits, 1)
    out = torch.empty_like(hidden)
    n = hidden.shape[1]
    block = min(1024, triton.next_power_of_2(n))
    _sum_visits_kernel[(tokens, triton.cdiv(n, block))](each, out, n, VISITS=per_token, BLOCK_N=block)
    return out


def row_sums(x: torch.Tensor, divisor: float, dtype: torch.dtype) -> torch.Tensor:
    """The sums of the last dimension, added up in float32 and divided."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(len(flat), dtype=dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(flat.shape[1]))
    _sum_kernel[(len(flat),)](flat, out, flat.shape[1], flat.stride(0), divisor, BLOCK_N=block, num_warps=4)
    return out.view(x.shape[:-1])


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each row's token, log of the row's sum of exponentials) in float32, for [rows, vocabulary]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, n = logits.shape
    out, norms = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    block = min(16384, triton.next_power_of_2(n))
    _logprob_kernel[(rows,)](
        logits, tokens, out, norms, n, logits.stride(0), temperature, BLOCK_N=block, num_warps=16
    )
    return out, norms
