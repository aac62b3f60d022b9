"""Triton kernels for a layer's experts where few rows visit many experts: every visited expert is read once.

Nothing is sorted or moved. A program takes a block of one expert's weight, looks up which rows visit that expert, and
ends at once if none does. A row's k visits go to k slots, and each slot is written by one expert alone, so that what is
left to do is to add the slots up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from shardproof.model import hf_private
from shardproof.model.experts import grouped_experts
from shardproof.rollout.early_launch import EARLY_LAUNCH, begin
from shardproof.rollout.kernels import float8_copies, rows_at_a_time

FEW_ROWS = "shardproof_few_rows"
# With more rows, experts compute too many that do not visit them: 317 against 461 us with 64 rows for a layer of 128
# experts, 441 against 454 with 96.
_MAX_ROWS = 64
# With more rows, converting float8 weights takes longer than reading twice as much: 184 against 198 us with 16 rows.
_MAX_ROWS_FP8 = 16
# Tuned on an H200 with 32 rows: the block sizes of a weight, and how many blocks are loaded ahead.
_GATE_UP = {"BLOCK_N": 64, "BLOCK_K": 64, "num_stages": 5}
_DOWN = {"BLOCK_N": 64, "BLOCK_K": 128, "num_stages": 3}


@triton.jit
def _visits(chosen_ptr, row, rows, expert, top, TOP: tl.constexpr):
    """(which of the rows visit the expert, the slot of each visit)."""
    slot = tl.arange(0, TOP)[None, :]
    at = chosen_ptr + row[:, None] * top + slot
    chosen = tl.load(at, mask=(row < rows)[:, None] & (slot < top), other=-1)
    mine = (chosen == expert).to(tl.int32)
    return tl.sum(mine, 1) > 0, tl.sum(mine * slot, 1)


@triton.jit
def _add_product(total, weight, x, scale_at, FP8: tl.constexpr):
    """`total` + weight @ x. A block of a float8 weight is multiplied in float16, and its sums with its scale."""
    if FP8:
        total += tl.dot(weight.to(tl.float16), x.to(tl.float16)) * tl.load(scale_at)
    else:
        total = tl.dot(weight, x, total)
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [rows, k]
    weight_ptr,  # [experts, 2 * n, k]: gate, up
    scales_ptr,  # [experts, 2 * n / 128, k / 128], with FP8
    chosen_ptr, scores_ptr,  # [rows, top]
    out_ptr,  # [rows, top, n]
    rows, n, k, top,
    TOP: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, at_n = tl.program_id(1), tl.program_id(0) * BLOCK_N
    column, row, inner = at_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    begin(EARLY)
    here, slot = _visits(chosen_ptr, row, rows, expert, top, TOP)
    if tl.sum(here.to(tl.int32), 0) > 0:
        gate_scale_at = scales_ptr + (expert * 2 * n + at_n) // 128 * (k // 128)
        up_scale_at = gate_scale_at + n // 128 * (k // 128)
        x_at = x_ptr + row[:, None] * k + inner[None, :]
        gate_at = weight_ptr + (expert.to(tl.int64) * 2 * n + column)[:, None] * k + inner[None, :]
        gate, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in range(0, k, BLOCK_K):
            x = tl.trans(tl.load(x_at + at, mask=here[:, None], other=0.0))
            gate = _add_product(gate, tl.load(gate_at + at), x, gate_scale_at + at // 128, FP8)
            up = _add_product(up, tl.load(gate_at + n * k + at), x, up_scale_at + at // 128, FP8)
        score = tl.load(scores_ptr + row * top + slot, mask=here, other=0.0).to(tl.float32)
        gated = gate * tl.sigmoid(gate) * up * score[None, :]
        if FP8:  # the next matmul is in float16
            gated = tl.minimum(tl.maximum(gated, -65280.0), 65280.0)
        out_at = out_ptr + (row * top + slot)[None, :] * n + column[:, None]
        tl.store(out_at, gated.to(out_ptr.dtype.element_ty), mask=here[None, :])


@triton.jit
def _down_kernel(
    x_ptr,  # [rows, top, k]
    weight_ptr,  # [experts, n, k]
    scales_ptr,  # [experts, n / 128, k / 128], with FP8
    chosen_ptr,  # [rows, top]
    out_ptr,  # [top, rows, n], float32
    rows, n, k, top,
    TOP: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, at_n = tl.program_id(1), tl.program_id(0) * BLOCK_N
    column, row, inner = at_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    begin(EARLY)
    here, slot = _visits(chosen_ptr, row, rows, expert, top, TOP)
    if tl.sum(here.to(tl.int32), 0) > 0:
        scale_at = scales_ptr + (expert * n + at_n) // 128 * (k // 128)
        x_at = x_ptr + (row * top + slot)[:, None] * k + inner[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * n + column)[:, None] * k + inner[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in range(0, k, BLOCK_K):
            x = tl.load(x_at + at, mask=here[:, None], other=0.0)
            total = _add_product(total, tl.load(weight_at + at), tl.trans(x), scale_at + at // 128, FP8)
        out_at = out_ptr + (slot * rows + row)[None, :] * n + column[:, None]
        tl.store(out_at, total, mask=here[None, :])


def few_rows_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What a layer's experts make of [tokens, hidden]; for inference."""
    if len(hidden_states) > _MAX_ROWS:
        return grouped_experts(module, hidden_states, top_k_index, top_k_weights)
    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    rows, hidden = hidden_states.shape
    top, inner = top_k_index.shape[1], down.shape[2]
    copies = float8_copies([gate_up, down], rows) if rows <= _MAX_ROWS_FP8 else None
    weights: list[torch.Tensor] = [gate_up, down]
    scales = weights
    if copies is not None:
        weights, scales = [copy.values for copy in copies], [copy.scales for copy in copies]
    shared = {
        "TOP": triton.next_power_of_2(top), "FP8": copies is not None, "EARLY": EARLY_LAUNCH, "launch_pdl": EARLY_LAUNCH, "num_warps": 4,
        "BLOCK_M": rows_at_a_time(rows),
    }  # fmt: skip
    chosen, scores = top_k_index.contiguous(), top_k_weights.contiguous()
    gated = torch.empty(rows, top, inner, dtype=hidden_states.dtype, device=hidden_states.device)
    _gate_up_kernel[(inner // _GATE_UP["BLOCK_N"], len(down))](
        hidden_states.contiguous(), weights[0], scales[0], chosen, scores, gated, rows, inner, hidden, top,
        **_GATE_UP, **shared,
    )  # fmt: skip
    sums = torch.empty(top, rows, hidden, dtype=torch.float32, device=hidden_states.device)
    _down_kernel[(hidden // _DOWN["BLOCK_N"], len(down))](
        gated, weights[1], scales[1], chosen, sums, rows, hidden, inner, top, **_DOWN, **shared
    )
    return sums.sum(0).to(hidden_states.dtype)


hf_private.register_experts(FEW_ROWS, few_rows_experts)
