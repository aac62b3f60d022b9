"""A Triton kernel that finds the lowest logit that top_k and top_p keep, without sorting a vocabulary.

A row's threshold is found two bits at a time, in the order of numbers: how many logits, or which share of the probability,
are at or above three candidates. One program reads its row some thirty times, mostly from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-(2**31))


@triton.jit
def _key(values):
    """Whole numbers in the order of float32 numbers; the same again turns their bits back."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(scores_ptr, start, size, BLOCK: tl.constexpr):
    entry = start + tl.arange(0, BLOCK)
    return tl.load(scores_ptr + entry, mask=entry < size, other=float("-inf"))


@triton.jit
def _by_rank(scores_ptr, top_k, size, BLOCK: tl.constexpr):
    """The key of the logit that is the `top_k`-th."""
    found = tl.full([], _LEAST, tl.int64)
    for number in range(16):
        step = tl.full([], 1, tl.int64) << (30 - 2 * number)
        one, two = (found + step).to(tl.int32), (found + 2 * step).to(tl.int32)
        three = (found + 3 * step).to(tl.int32)
        first, second = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, size, BLOCK):
            key = _key(_load(scores_ptr, start, size, BLOCK))
            first += (key >= one).to(tl.int32)
            second += (key >= two).to(tl.int32)
            third += (key >= three).to(tl.int32)
        passed = (tl.sum(first, 0) >= top_k).to(tl.int64) + (tl.sum(second, 0) >= top_k).to(tl.int64)
        found += step * (passed + (tl.sum(third, 0) >= top_k).to(tl.int64))
    return found


@triton.jit
def _by_mass(scores_ptr, aim, peak, scale, size, BLOCK: tl.constexpr):
    """The key of the highest logit from which on weights add up to `aim`."""
    found = tl.full([], _LEAST, tl.int64)
    for number in range(16):
        step = tl.full([], 1, tl.int64) << (30 - 2 * number)
        one, two = (found + step).to(tl.int32), (found + 2 * step).to(tl.int32)
        three = (found + 3 * step).to(tl.int32)
        first, second = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        third = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            scores = _load(scores_ptr, start, size, BLOCK)
            key, weights = _key(scores), tl.exp2((scores - peak) * scale)
            first += tl.where(key >= one, weights, 0.0)
            second += tl.where(key >= two, weights, 0.0)
            third += tl.where(key >= three, weights, 0.0)
        passed = (tl.sum(first, 0) >= aim).to(tl.int64) + (tl.sum(second, 0) >= aim).to(tl.int64)
        found += step * (passed + (tl.sum(third, 0) >= aim).to(tl.int64))
    return found


@triton.jit
def _mass(scores_ptr, by_rank, scale, size, BLOCK: tl.constexpr):
    """(the highest logit, what weights from this key on add up to): of equal ones at the border of top_k all are kept."""
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        peaks = tl.maximum(peaks, _load(scores_ptr, start, size, BLOCK))
    peak = tl.max(peaks, 0)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        scores = _load(scores_ptr, start, size, BLOCK)
        mass += tl.where(_key(scores) >= by_rank, tl.exp2((scores - peak) * scale), 0.0)
    return peak, tl.sum(mass, 0)


@triton.jit
def _threshold_kernel(
    scores_ptr,  # [rows, size] float32
    top_k_ptr, top_p_ptr,  # [rows] int64, float32
    lowest_ptr,  # [rows] float32
    size, inverse_temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    scores_ptr += row.to(tl.int64) * size
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    found = tl.full([], _LEAST, tl.int64)
    if top_k < size:
        found = _by_rank(scores_ptr, top_k, size, BLOCK)
    if top_p < 1.0:
        scale = inverse_temperature * _LOG2_E
        peak, total = _mass(scores_ptr, found.to(tl.int32), scale, size, BLOCK)
        found = tl.maximum(found, _by_mass(scores_ptr, top_p * total, peak, scale, size, BLOCK))
    lowest = found.to(tl.int32)
    lowest = (lowest ^ ((lowest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(lowest_ptr + row, tl.where(found == _LEAST, float("-inf"), lowest))


def threshold(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The lowest score of each row that top_k and top_p keep, [rows, 1]; minus infinity where both keep all."""
    rows, size = scores.shape
    lowest = torch.empty(rows, 1, dtype=torch.float32, device=scores.device)
    _threshold_kernel[(rows,)](
        scores.contiguous(), top_k, top_p, lowest, size, 1 / temperature, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return lowest
