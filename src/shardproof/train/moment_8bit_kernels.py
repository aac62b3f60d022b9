"""A Triton kernel for a step of AdamW with running means in 8 bits: every number is read and written once.

One launch steps all parameters. A program works on some blocks of one of them, a row of 256 elements each. The nearest number
of a table is computed, not searched: a decade is divided into equal parts, whose middles are the numbers. Searching took 21
ms for a billion parameters on an H200, of which the memory bus needs 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from shardproof.model.packing import to_device
from shardproof.train.moments_8bit import BLOCK, Given, Part8, tables

_ROWS = 8  # blocks of one program
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _places_of(pointer, at, ALIGNED: tl.constexpr):
    """Pointers to elements; runs of eight lie at multiples of 16 bytes if they are aligned."""
    found = pointer + at
    if ALIGNED:
        found = tl.max_contiguous(tl.multiple_of(found, [1, 16]), [1, 8])
    return found


@triton.jit
def _codes(sizes, limits_ptr, PARTS: tl.constexpr):
    """The number of each size, from 0 to 1, among its table's numbers above 0; -1 for 0.

    `limits` are the 8 borders at which a decade begins, and the last number, 1; the first decade has `PARTS` parts.
    """
    decade = tl.zeros_like(sizes).to(tl.int32)
    up = tl.zeros_like(sizes) + 1e6
    up = tl.where(sizes > tl.load(limits_ptr + 1), 1e5, up)
    up = tl.where(sizes > tl.load(limits_ptr + 2), 1e4, up)
    up = tl.where(sizes > tl.load(limits_ptr + 3), 1e3, up)
    up = tl.where(sizes > tl.load(limits_ptr + 4), 1e2, up)
    up = tl.where(sizes > tl.load(limits_ptr + 5), 1e1, up)
    up = tl.where(sizes > tl.load(limits_ptr + 6), 1.0, up)
    for index in tl.static_range(6):
        decade += (sizes > tl.load(limits_ptr + index + 1)).to(tl.int32)
    parts = (tl.zeros_like(decade) + PARTS) << decade
    inside = ((sizes * up - 0.1) * (parts.to(tl.float32) / 0.9)).to(tl.int32)
    inside = tl.minimum(tl.maximum(inside, 0), parts - 1)
    found = parts - PARTS + inside
    found = tl.where(sizes > tl.load(limits_ptr + 7), 127 * PARTS, found)
    return tl.where(sizes > tl.load(limits_ptr), found, -1)


@triton.jit
def _scales(values, given):
    """Of each row: what is given, or else its largest magnitude; and the sizes of values as shares of it."""
    found = tl.where(given >= 0.0, given, tl.max(tl.abs(values), axis=1))
    return found, tl.abs(values) * (1.0 / tl.where(found > 0.0, found, 1.0))[:, None]


@triton.jit(do_not_specialize=["parts", "programs"])
def _step_kernel(
    table_ptr,  # [9, parts], int64: addresses of parameter, gradient, means, scales and given scales, elements before, size
    numbers_ptr,  # [3, parts], float32: decay, rate, root
    places_ptr,  # [2, programs], int32: which part, and which of its programs
    codes_ptr, limits_ptr,  # [2, 256] and [2, 8], float32: of the first mean, and of the second
    parts, programs, first, second, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.load(places_ptr + tl.program_id(0))
    number = tl.load(places_ptr + programs + tl.program_id(0)).to(tl.int64)
    table_ptr += part
    param_ptr = tl.load(table_ptr).to(tl.pointer_type(PARAM))
    grad_ptr = tl.load(table_ptr + parts).to(tl.pointer_type(GRAD))
    mean_ptr = tl.load(table_ptr + 2 * parts).to(tl.pointer_type(tl.uint8))
    square_ptr = tl.load(table_ptr + 3 * parts).to(tl.pointer_type(tl.uint8))
    mean_scale_ptr = tl.load(table_ptr + 4 * parts).to(tl.pointer_type(tl.float32))
    square_scale_ptr = tl.load(table_ptr + 5 * parts).to(tl.pointer_type(tl.float32))
    given_at = tl.load(table_ptr + 6 * parts)  # 0: none
    before, size = tl.load(table_ptr + 7 * parts), tl.load(table_ptr + 8 * parts)
    numbers_ptr += part
    decay, rate, root = tl.load(numbers_ptr), tl.load(numbers_ptr + parts), tl.load(numbers_ptr + 2 * parts)
    row = number * ROWS + tl.arange(0, ROWS)
    blocks = (before + size + BLOCK - 1) // BLOCK
    inside = row < blocks
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        mask = at < size
    else:
        at -= before
        mask = (at >= 0) & (at < size)
    param_at, grad_at = _places_of(param_ptr, at, ALIGNED), _places_of(grad_ptr, at, ALIGNED)
    mean_at, square_at = _places_of(mean_ptr, at, ALIGNED), _places_of(square_ptr, at, ALIGNED)
    param = tl.load(param_at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(codes_ptr + tl.load(mean_at, mask=mask, other=0).to(tl.int32))
    square = tl.load(codes_ptr + 256 + tl.load(square_at, mask=mask, other=0).to(tl.int32))
    mean *= tl.load(mean_scale_ptr + row, mask=inside, other=0.0)[:, None]
    square *= tl.load(square_scale_ptr + row, mask=inside, other=0.0)[:, None]
    mean += (grad - mean) * first
    square = square * (1.0 - second) + grad * grad * second
    param = param * decay - mean * rate / (tl.sqrt(square) * root + eps)
    tl.store(param_at, param.to(PARAM), mask=mask)
    mean, square = tl.where(mask, mean, 0.0), tl.where(mask, square, 0.0)
    given, of_square = tl.full([ROWS], -1.0, tl.float32), tl.full([ROWS], -1.0, tl.float32)
    if given_at != 0:
        given_ptr = given_at.to(tl.pointer_type(tl.float32))
        given = tl.load(given_ptr + row, mask=inside, other=-1.0)
        of_square = tl.load(given_ptr + blocks + row, mask=inside, other=-1.0)
    scale, sizes = _scales(mean, given)
    tl.store(mean_scale_ptr + row, scale, mask=inside)
    codes = _codes(sizes, limits_ptr, 1)
    # There are 127 numbers below 0, then 0 itself, and 128 above it: the first has no -1.
    codes = tl.where(mean < 0.0, 126 - tl.minimum(codes, 126), 128 + codes)
    codes = tl.where(sizes > tl.load(limits_ptr), codes, 127)
    tl.store(mean_at, codes.to(tl.uint8), mask=mask)
    scale, sizes = _scales(square, of_square)
    tl.store(square_scale_ptr + row, scale, mask=inside)
    codes = tl.maximum(_codes(sizes, limits_ptr + 8, 2) + 1, tl.where(square > 0.0, 1, 0))
    tl.store(square_at, codes.to(tl.uint8), mask=mask)


def step_on_gpu(parts: Sequence[Part8], given: Sequence[Given]) -> None:
    """`moments_8bit.plain_step` of parts that have the same dtypes, betas and eps."""
    for aligned in (True, False):
        some = [pair for pair in zip(parts, given, strict=True) if _is_aligned(pair[0]) == aligned]
        if some:
            _launch([part for part, _ in some], [each for _, each in some], aligned)


def _is_aligned(part: Part8) -> bool:
    return (
        part.before == 0
        and part.param.numel() % 16 == 0
        and all(each.data_ptr() % 16 == 0 for each in part.tensors)
    )


def _launch(parts: Sequence[Part8], given: Sequence[Given], aligned: bool) -> None:
    one, device = parts[0], parts[0].param.device
    known = [_table(part, each) for part, each in zip(parts, given, strict=True)]
    rows = [
        [
            *(each.data_ptr() for each in part.tensors),
            0 if table is None else table.data_ptr(),
            part.before,
            part.param.numel(),
        ]
        for part, table in zip(parts, known, strict=True)
    ]
    factors = [(part.factors.decay, part.factors.rate, part.factors.root) for part in parts]
    places = _places(tuple(len(part.mean_scale) for part in parts), device)
    codes, limits = _tables(device)
    _step_kernel[(places.shape[1],)](
        to_device(torch.tensor(rows).t().contiguous(), device),
        to_device(torch.tensor(factors, dtype=torch.float32).t().contiguous(), device),
        places,
        codes,
        limits,
        len(parts),
        places.shape[1],
        1 - one.factors.betas[0],
        1 - one.factors.betas[1],
        one.factors.eps,
        PARAM=_KINDS[one.param.dtype],
        GRAD=_KINDS[one.grad.dtype],
        ALIGNED=aligned,
        ROWS=_ROWS,
        BLOCK=BLOCK,
    )


def _table(part: Part8, given: Given) -> torch.Tensor | None:
    """[2, blocks]: the scales that are given, -1 for the others; None if none is."""
    if not given:
        return None
    found = torch.full((2, len(part.mean_scale)), -1.0, device=part.param.device)
    for at, maxima in given.items():
        found[:, at] = torch.stack(maxima)
    return found


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(both tables; of each, the borders above 0 where a decade begins, and that of its last number)."""
    found = []
    for signed in (True, False):
        code, borders = tables(signed, device)
        above = borders[int((code <= 0).sum()) - 1 :]  # the first lies between 0 and the next number
        parts = 1 if signed else 2
        found.append((code, above[[0, *(parts * (2**index - 1) for index in range(1, 8))]]))
    return torch.stack([code for code, _ in found]), torch.stack([limits for _, limits in found]).contiguous()


@lru_cache(maxsize=8)
def _places(blocks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Of each program: its part, and its number among the programs of that part."""
    counts = [-(-count // _ROWS) for count in blocks]
    part = np.repeat(np.arange(len(blocks), dtype=np.int32), counts)
    number = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return torch.from_numpy(np.stack([part, number])).to(device)
