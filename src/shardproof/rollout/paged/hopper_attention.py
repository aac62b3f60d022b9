"""Attention of packed prompts for Hopper GPUs: matrix units that multiply while other warps take exponentials.

A program takes 128 queries of one head. One warp copies blocks of the cache into shared memory; two groups of four warps
have 64 queries each. A group asks for the next scores and for the sum over the last values at once, and works on the
softmax of those scores while the sum is under way. Written in Gluon, Triton's language for what its compiler otherwise
decides. Only fully causal attention: windows, sinks and soft caps go through `reading_kernels.attend`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shardproof.rollout.paged.launching import launch
from shardproof.rollout.paged.reading_chunks import Chunk

_LOG2_E = 1.4426950408889634
_STAGES = 2  # of keys, and of values, in shared memory
_REGISTERS = (240, 24)  # per thread of the second group and of the copying warp
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_WIDTHS = (64, 128)


def fits(keys: torch.Tensor) -> bool:
    """Whether the kernel runs on this device and takes heads of this width."""
    if keys.device.type != "cuda" or torch.cuda.get_device_capability(keys.device) != (9, 0):
        return False
    return keys.dtype in _DTYPES and keys.shape[-1] in _WIDTHS


@gluon.jit
def _copy_blocks(
    keys, values, table_ptr, key_head, steps, key_room, value_room, barriers,
    KEY_HEADS: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Two blocks of keys, then the values of the same tokens, as soon as there is room."""
    for step in range(steps):
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        first = (gl.load(table_ptr + 2 * step) * KEY_HEADS + key_head) * PAGE
        second = (gl.load(table_ptr + 2 * step + 1) * KEY_HEADS + key_head) * PAGE
        mbarrier.wait(barriers.index(STAGES + stage), phase)
        full = barriers.index(stage)
        mbarrier.expect(full, BYTES)
        tma.async_copy_global_to_shared(keys, [first, 0], full, key_room.index(stage).slice(0, PAGE))
        tma.async_copy_global_to_shared(keys, [second, 0], full, key_room.index(stage).slice(PAGE, PAGE))
        mbarrier.wait(barriers.index(3 * STAGES + stage), phase)
        full = barriers.index(2 * STAGES + stage)
        mbarrier.expect(full, BYTES)
        tma.async_copy_global_to_shared(values, [first, 0], full, value_room.index(stage).slice(0, PAGE))
        tma.async_copy_global_to_shared(values, [second, 0], full, value_room.index(stage).slice(PAGE, PAGE))


@gluon.jit
def _softmax(scores, peak, norm, scale, position, time, is_masked):
    """(weights, what earlier sums shrink by, highest score, sum of weights) after more scores."""
    if is_masked:
        scores = gl.where(time[None, :] <= position[:, None], scores, -float("inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - higher[:, None])
    shrink = gl.exp2(peak - higher)
    return weights, shrink, higher, norm * shrink + gl.sum(weights, 1)


@gluon.jit
def _attend_half(
    query_ptr, out_ptr, query_room, key_room, value_room, barriers, token, first, num, head, steps, full_steps,
    scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of 64 queries; `full_steps` are those in which every query sees every key."""
    ROWS: gl.constexpr = 64
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, flat)) + HALF * ROWS
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, flat))
    at = (token + row).to(gl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + column[None, :]
    query = query_room.index(HALF)
    query.store(gl.load(query_ptr + at, mask=(row < num)[:, None], other=0.0))
    fence_async_shared()
    position = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score))
    time = gl.arange(0, N, layout=gl.SliceLayout(0, score))
    peak = gl.full([ROWS], -1.0e30, gl.float32, layout=gl.SliceLayout(1, score))
    norm = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, score))
    zero = gl.full([ROWS, N], 0.0, gl.float32, layout=score)
    total = gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=result)
    mbarrier.wait(barriers.index(0), 0)
    scores = warpgroup_mma(query, key_room.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    mbarrier.arrive(barriers.index(STAGES), count=1)
    weights, shrink, peak, norm = _softmax(scores, peak, norm, scale, position, time, full_steps == 0)
    for step in range(1, steps):
        stage, before = step % STAGES, (step - 1) % STAGES
        factors = gl.convert_layout(weights.to(query_room.dtype), operand)
        mbarrier.wait(barriers.index(stage), (step // STAGES) & 1)
        scores = warpgroup_mma(
            query, key_room.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(barriers.index(2 * STAGES + before), ((step - 1) // STAGES) & 1)
        sums = warpgroup_mma(factors, value_room.index(before), total, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(barriers.index(STAGES + stage), count=1)
        weights, shrink, peak, norm = _softmax(
            scores, peak, norm, scale, position, step * N + time, step >= full_steps
        )
        total = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(barriers.index(3 * STAGES + before), count=1)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, result))[:, None]
    last = (steps - 1) % STAGES
    factors = gl.convert_layout(weights.to(query_room.dtype), operand)
    mbarrier.wait(barriers.index(2 * STAGES + last), ((steps - 1) // STAGES) & 1)
    sums = warpgroup_mma(factors, value_room.index(last), total, is_async=True)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    total = total / gl.convert_layout(norm, gl.SliceLayout(1, result))[:, None]
    attended = gl.convert_layout(total.to(out_ptr.dtype.element_ty), flat)
    gl.store(out_ptr + at, attended, mask=(row < num)[:, None])


@gluon.jit(do_not_specialize=["table_length"])
def _attend_kernel(
    query_ptr,  # [tokens, heads * width]
    keys, values,  # [blocks * key heads * PAGE, width]
    tables_ptr, tiles_ptr,  # as in reading_kernels
    out_ptr,  # [tokens, heads * width]
    table_length, scale,
    HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = 2 * PAGE
    head, tile = gl.program_id(0), tiles_ptr + gl.program_id(1) * 4
    sequence, token, first, num = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
    steps, full_steps = (first + num + N - 1) // N, (first + 1) // N
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, WIDTH], keys.dtype)
    key_room = gl.allocate_shared_memory(keys.dtype, [STAGES, N, WIDTH], layout)
    value_room = gl.allocate_shared_memory(keys.dtype, [STAGES, N, WIDTH], layout)
    query_room = gl.allocate_shared_memory(keys.dtype, [2, 64, WIDTH], layout)
    # Keys are there, keys were used by both groups; values are there, values were used by both groups.
    barriers = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
        mbarrier.init(barriers.index(STAGES + stage), count=2)
        mbarrier.init(barriers.index(2 * STAGES + stage), count=1)
        mbarrier.init(barriers.index(3 * STAGES + stage), count=2)
    fence_async_shared()
    table_ptr, key_head = tables_ptr + sequence * table_length, head // (HEADS // KEY_HEADS)
    BYTES: gl.constexpr = N * WIDTH * keys.dtype.primitive_bitwidth // 8
    gl.warp_specialize(
        [
            (_attend_half, (query_ptr, out_ptr, query_room, key_room, value_room, barriers, token, first, num, head,
                            steps, full_steps, scale, 0, HEADS, WIDTH, N, STAGES)),
            (_attend_half, (query_ptr, out_ptr, query_room, key_room, value_room, barriers, token, first, num, head,
                            steps, full_steps, scale, 1, HEADS, WIDTH, N, STAGES)),
            (_copy_blocks, (keys, values, table_ptr, key_head, steps, key_room, value_room, barriers,
                            KEY_HEADS, PAGE, STAGES, BYTES)),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def attend(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    chunk: Chunk,
    scaling: float,
) -> torch.Tensor:
    """As `reading_kernels.attend`. Values behind a sequence's last token must be finite, up to the end of its block."""
    keys = cache[0]
    num_blocks, key_heads, page, width = keys.shape
    heads = query.shape[1] // width
    out = torch.empty_like(query)
    layout = gl.NVMMASharedLayout.get_default_for([page, width], _DTYPES[keys.dtype])
    rows = num_blocks * key_heads * page
    held = [TensorDescriptor(each, [rows, width], [width, 1], [page, width], layout) for each in cache]
    constants = {
        **{"HEADS": heads, "KEY_HEADS": key_heads, "WIDTH": width, "PAGE": page},
        **{"STAGES": _STAGES, "REGISTERS": _REGISTERS},
    }
    launch(
        _attend_kernel, (heads, len(chunk.tiles)),
        (query, *held, chunk.tables, chunk.tiles, out, chunk.tables.shape[1], scaling * _LOG2_E),
        constants, num_warps=4,
    )  # fmt: skip
    return out
