"""Triton kernels with which each row's new token attends to its part of a paged cache.

A program serves one row and one head of keys: it puts the new key and value into the row's block, and reads of the cache
only what is filled and inside of the window. Where rows and heads are too few to keep the device reading, a context is cut
into pieces for several programs, and the one that arrives last combines what they found. How long the pieces are follows
from the row's position, on the device: a captured graph serves contexts of all lengths.
"""

from __future__ import annotations

from functools import cache as remember
from math import inf
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shardproof.rollout.early_launch import EARLY_LAUNCH, begin
from shardproof.rollout.paged.attention_parts import (
    attend_piece,
    finish,
    load_tokens,
    new_states,
    piece_of,
    put,
)


class Blocks(NamedTuple):
    """How programs share the work of a number of contexts, and how each of them does its part."""

    most_items: float  # contexts times heads of keys, up to which this is the fastest
    programs: int  # there should be that many, if contexts are long enough
    chunk: int  # cached tokens that are worth a program
    block_t: int  # cached tokens at a time
    warps: int
    stages: int  # one more than blocks of cached tokens that are on their way
    ahead: bool  # whether the first tokens are asked for before the kernel ahead has ended


# Measured on an H200, of whose 132 multiprocessors each holds two, four or nine of these programs at a time: all of them
# should be there at once. Few programs must be quick, each of them; many should be small.
TUNING = (
    Blocks(264, 264, 128, 64, 8, 3, True),
    Blocks(528, 264, 128, 64, 4, 2, True),
    Blocks(inf, 264, 512, 16, 1, 4, True),
)
_MOST_SPLITS = 64  # programs per context
_COMBINED = 16  # pieces at a time


# Numbers that change with the rows make no other kernel: a run compiles it once.
@triton.jit(
    do_not_specialize=["rows", "table_stride", "shares"],
    do_not_specialize_on_alignment=[
        "tables_ptr",
        "positions_ptr",
        "parts_ptr",
        "scalars_ptr",
        "counters_ptr",
    ],
)
def _attend_kernel(
    sums_ptr,  # [shares, rows, (heads + 2 * key heads) * width]
    cos_ptr, sin_ptr,  # [positions, width]
    q_norm_ptr, k_norm_ptr,  # [width]
    sinks_ptr,  # [heads]
    keys_ptr, values_ptr,  # [blocks, key heads, PAGE, width]
    tables_ptr, positions_ptr,  # [rows, .], [rows]
    out_ptr,  # [rows, heads * width]
    parts_ptr, scalars_ptr, counters_ptr,  # of pieces: [rows * key heads, splits, group * width], [., ., 2 * group], [.]
    rows, table_stride, shares, scale, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SHARES: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    # What stands in the cache, and where, does not depend on the kernels before.
    position = tl.load(positions_ptr + row).to(tl.int32)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    first, at, end, pieces = piece_of(position, split, tl.num_programs(2), WINDOW, CHUNK, BLOCK_T)
    if split >= pieces:
        return
    next_block, cached_key, cached_value, there = tl.load(table_ptr + at // PAGE), None, None, None
    if AHEAD:
        cached_key, cached_value, there = load_tokens(
            keys_ptr, values_ptr, next_block, head, at, first, end, KEY_HEADS, WIDTH, PAGE, WIDTH, BLOCK_T
        )
        next_block = tl.load(table_ptr + (at + BLOCK_T) // PAGE, mask=at + BLOCK_T < end, other=0)
    column = tl.arange(0, WIDTH)
    cos = tl.load(cos_ptr + position.to(tl.int64) * WIDTH + column).to(tl.float32)
    sin = tl.load(sin_ptr + position.to(tl.int64) * WIDTH + column).to(tl.float32)
    begin(EARLY)
    is_first = split == 0
    query, new_key, new_value = new_states(
        sums_ptr, rows, row, head, shares, is_first, q_norm_ptr, k_norm_ptr, cos, sin, eps,
        HEADS, KEY_HEADS, WIDTH, NORM, SHARES, BLOCK_G,
    )  # fmt: skip
    query, new_key, new_value = query.to(dtype), new_key.to(dtype), new_value.to(dtype)
    put(
        keys_ptr, values_ptr, table_ptr, head, position, new_key, new_value, is_first, KEY_HEADS, WIDTH, PAGE, WIDTH
    )  # fmt: skip
    peak, norm, total = attend_piece(
        query, new_key, new_value, sinks_ptr, cached_key, cached_value, there, next_block,
        keys_ptr, values_ptr, table_ptr, head, at, first, end, is_first, scale,
        KEY_HEADS, GROUP, WIDTH, PAGE, SOFTCAP, SINKS, AHEAD, BLOCK_G, WIDTH, BLOCK_T,
    )  # fmt: skip
    finish(
        peak, norm, total, out_ptr, parts_ptr, scalars_ptr, counters_ptr, row * KEY_HEADS + head,
        split, tl.num_programs(2), pieces, GROUP, WIDTH, BLOCK_G, WIDTH, BLOCK_S,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "tables_ptr",
        "positions_ptr",
        "parts_ptr",
        "scalars_ptr",
        "counters_ptr",
    ],
)
def _attend_rotated_kernel(
    query_ptr, key_ptr, value_ptr,  # [rows, heads, width], [rows, key heads, width] twice
    sinks_ptr,  # [heads]
    keys_ptr, values_ptr,  # [blocks, key heads, PAGE, width]
    tables_ptr, positions_ptr,  # [rows, .], [rows]
    out_ptr,  # [rows, heads * width]
    parts_ptr, scalars_ptr, counters_ptr,  # as above
    table_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    position = tl.load(positions_ptr + row).to(tl.int32)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    first, at, end, pieces = piece_of(position, split, tl.num_programs(2), WINDOW, CHUNK, BLOCK_T)
    if split >= pieces:
        return
    next_block, cached_key, cached_value, there = tl.load(table_ptr + at // PAGE), None, None, None
    if AHEAD:
        cached_key, cached_value, there = load_tokens(
            keys_ptr, values_ptr, next_block, head, at, first, end, KEY_HEADS, WIDTH, PAGE, BLOCK_W, BLOCK_T
        )
        next_block = tl.load(table_ptr + (at + BLOCK_T) // PAGE, mask=at + BLOCK_T < end, other=0)
    column, group = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_G)
    item = row * KEY_HEADS + head
    query_at = query_ptr + item * GROUP * WIDTH + group[:, None] * WIDTH + column[None, :]
    query = tl.load(query_at, mask=(group < GROUP)[:, None] & (column < WIDTH)[None, :], other=0.0)
    new_key = tl.load(key_ptr + item * WIDTH + column, mask=column < WIDTH, other=0.0)
    new_value = tl.load(value_ptr + item * WIDTH + column, mask=column < WIDTH, other=0.0)
    is_first = split == 0
    put(
        keys_ptr, values_ptr, table_ptr, head, position, new_key, new_value, is_first, KEY_HEADS, WIDTH, PAGE, BLOCK_W
    )  # fmt: skip
    peak, norm, total = attend_piece(
        query, new_key, new_value, sinks_ptr, cached_key, cached_value, there, next_block,
        keys_ptr, values_ptr, table_ptr, head, at, first, end, is_first, scale,
        KEY_HEADS, GROUP, WIDTH, PAGE, SOFTCAP, SINKS, AHEAD, BLOCK_G, BLOCK_W, BLOCK_T,
    )  # fmt: skip
    finish(
        peak, norm, total, out_ptr, parts_ptr, scalars_ptr, counters_ptr, item,
        split, tl.num_programs(2), pieces, GROUP, WIDTH, BLOCK_G, BLOCK_W, BLOCK_S,
    )  # fmt: skip


def attend(
    sums: torch.Tensor,
    rotary_tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [rows, heads * width] of each row's new token, whose key and value are put into the cache.

    `sums` [shares, rows, n]: partial sums of queries, keys and values. `rotary_tables`: cosines and sines by position.
    `norms`: weights of the norms of queries and keys, and their epsilon. `cache`: keys and values
    [blocks, key heads, 64, width]. `tables` [rows, .]: the blocks of each row, from position 0 on. `positions` [rows, 1]:
    those of the new tokens. With a `window`, a token sees that many tokens, itself included.
    """
    keys, values = cache
    _, key_heads, _, width = keys.shape
    shares, rows, size = sums.shape
    q_norm, k_norm, eps = norms if norms is not None else (keys, keys, 0.0)
    out = torch.empty(rows, size - 2 * key_heads * width, dtype=keys.dtype, device=keys.device)
    splits, memory, options = _plan(out, keys, tables, window, softcap, sinks)
    _attend_kernel[(key_heads, rows, splits)](
        sums, *rotary_tables, q_norm, k_norm, sinks if sinks is not None else out, keys, values, tables, positions, out,
        *memory, rows, tables.stride(0), shares, scaling, eps,
        NORM=norms is not None, SHARES=max(4, triton.next_power_of_2(shares)), EARLY=EARLY_LAUNCH,
        launch_pdl=EARLY_LAUNCH, **options,
    )  # fmt: skip
    return out


def attend_rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend`, for query [rows, heads, width], key and value [rows, key heads, width] that are normed and rotated."""
    keys, values = cache
    rows, heads, width = query.shape
    out = torch.empty(rows, heads * width, dtype=query.dtype, device=query.device)
    splits, memory, options = _plan(out, keys, tables, window, softcap, sinks)
    _attend_rotated_kernel[(keys.shape[1], rows, splits)](
        query.contiguous(), key.contiguous(), value.contiguous(), sinks if sinks is not None else out,
        keys, values, tables, positions, out, *memory, tables.stride(0), scaling,
        BLOCK_W=triton.next_power_of_2(width), **options,
    )  # fmt: skip
    return out


def _plan(
    out: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any]]:
    """(programs per context, memory through which they combine what they found, the kernels' options)."""
    _, key_heads, page, width = keys.shape
    rows, heads = len(out), out.shape[1] // width
    group, items = heads // key_heads, rows * key_heads
    capacity = tables.shape[1] * page
    blocks = next(each for each in TUNING if items <= each.most_items)
    splits = num_splits(blocks, items, min(capacity, window or capacity))
    pieces = items * splits * group if splits > 1 else 0
    memory = torch.empty(pieces * (width + 2), dtype=torch.float32, device=out.device)
    options = {
        "HEADS": heads, "KEY_HEADS": key_heads, "WIDTH": width, "PAGE": page,
        "WINDOW": window or 0, "SOFTCAP": softcap or 0.0, "SINKS": sinks is not None,
        "CHUNK": blocks.chunk, "AHEAD": blocks.ahead, "BLOCK_T": blocks.block_t, "BLOCK_S": _COMBINED,
        "BLOCK_G": triton.next_power_of_2(group), **_resources(blocks, group, width, out.device),
    }  # fmt: skip
    return splits, (*memory.split([pieces * width, pieces * 2]), _counters(items, out.device)), options


@remember
def _resources(blocks: Blocks, group: int, width: int, device: torch.device) -> dict[str, int]:
    """Warps and stages: more warps where the states of a head group fill more registers, no more stages than fit."""
    group, width = triton.next_power_of_2(group), triton.next_power_of_2(width)
    stages = blocks.stages
    if device.type == "cuda":  # not Triton's interpreter
        room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
        stages = max(2, min(stages, 1 + (room - 4096) // (blocks.block_t * width * 4)))
    return {"num_warps": max(blocks.warps, width // 128, min(group * width // 512, 8)), "num_stages": stages}


def num_splits(blocks: Blocks, items: int, longest: int) -> int:
    """How many programs share a context of up to `longest` tokens, where rows times heads of keys are `items`."""
    return max(1, min(blocks.programs // items, _MOST_SPLITS, longest // blocks.chunk))


@remember
def _counters(items: int, device: torch.device) -> torch.Tensor:
    """How many programs have arrived, per context and head of keys; 0 between launches."""
    return torch.zeros(items, dtype=torch.int32, device=device)
