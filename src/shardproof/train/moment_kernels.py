"""A Triton kernel for a step of AdamW with running means in bfloat16: every number is read and written once.

One launch steps all parameters: with one each, the host took three times as long as the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from shardproof.model.packing import to_device
from shardproof.train.moments import Part

_BLOCK, _ROUNDS = 1024, 16  # elements at a time, and how often, of one program
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _places_of(pointer, at, ALIGNED: tl.constexpr):
    """Pointers to elements; runs of eight lie at multiples of 16 bytes if they are aligned."""
    found = pointer + at
    if ALIGNED:
        found = tl.max_contiguous(tl.multiple_of(found, 16), 8)
    return found


@triton.jit
def _read_mean(pointer, mask):
    """Numbers in bfloat16, given as int16, as float32."""
    bits = tl.load(pointer, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_mean(pointer, values, bits, mask):
    """Numbers rounded to bfloat16 by 16 random bits."""
    rounded = (values.to(tl.uint32, bitcast=True) + bits) >> 16
    tl.store(pointer, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["parts", "programs"])
def _step_kernel(
    table_ptr,  # [7, parts], int64: addresses of parameter, gradient and both means, first element, size, key
    numbers_ptr,  # [3, parts], float32: decay, rate, root
    places_ptr,  # [2, programs], int32: which part, and which of its programs
    parts, programs, first, second, eps,
    PARAM: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    part = tl.load(places_ptr + tl.program_id(0))
    number = tl.load(places_ptr + programs + tl.program_id(0)).to(tl.int64)
    table_ptr += part
    param_ptr = tl.load(table_ptr).to(tl.pointer_type(PARAM))
    grad_ptr = tl.load(table_ptr + parts).to(tl.pointer_type(GRAD))
    mean_ptr = tl.load(table_ptr + 2 * parts).to(tl.pointer_type(tl.int16))
    square_ptr = tl.load(table_ptr + 3 * parts).to(tl.pointer_type(tl.int16))
    start, size = tl.load(table_ptr + 4 * parts), tl.load(table_ptr + 5 * parts)
    key = tl.load(table_ptr + 6 * parts).to(tl.uint32)
    decay = tl.load(numbers_ptr + part)
    rate, root = tl.load(numbers_ptr + parts + part), tl.load(numbers_ptr + 2 * parts + part)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    for index in range(ROUNDS):
        at = (number * ROUNDS + index) * BLOCK + tl.arange(0, BLOCK)
        mask = at < size
        param_at, grad_at = _places_of(param_ptr, at, ALIGNED), _places_of(grad_ptr, at, ALIGNED)
        mean_at, square_at = _places_of(mean_ptr, at, ALIGNED), _places_of(square_ptr, at, ALIGNED)
        param = tl.load(param_at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_at, mask=mask, other=0.0).to(tl.float32)
        mean, square = _read_mean(mean_at, mask), _read_mean(square_at, mask)
        mean += (grad - mean) * first
        square = square * (1.0 - second) + grad * grad * second
        param = param * decay - mean * rate / (tl.sqrt(square) * root + eps)
        tl.store(param_at, param.to(PARAM), mask=mask)
        place = start + at
        bits = (place ^ (place >> 32) * 0x9E3779B1).to(tl.uint32) ^ key
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = bits ^ (bits >> 16)
        _write_mean(mean_at, mean, bits & 0xFFFF, mask)
        _write_mean(square_at, square, bits >> 16, mask)


def step_on_gpu(parts: Sequence[Part]) -> None:
    """`moments.plain_step` of parts that have the same dtypes, betas and eps."""
    for aligned in (True, False):
        some = [part for part in parts if _is_aligned(part) == aligned]
        if some:
            _launch(some, aligned)


def _is_aligned(part: Part) -> bool:
    return part.param.numel() % 16 == 0 and all(each.data_ptr() % 16 == 0 for each in part.tensors)


def _launch(parts: Sequence[Part], aligned: bool) -> None:
    one, device = parts[0], parts[0].param.device
    sizes = tuple(part.param.numel() for part in parts)
    rows = [
        [*(each.data_ptr() for each in part.tensors), part.start, size, part.factors.key]
        for part, size in zip(parts, sizes, strict=True)
    ]
    factors = [(part.factors.decay, part.factors.rate, part.factors.root) for part in parts]
    places = _places(sizes, device)
    _step_kernel[(places.shape[1],)](
        to_device(torch.tensor(rows).t().contiguous(), device),
        to_device(torch.tensor(factors, dtype=torch.float32).t().contiguous(), device),
        places,
        len(parts),
        places.shape[1],
        1 - one.factors.betas[0],
        1 - one.factors.betas[1],
        one.factors.eps,
        PARAM=_KINDS[one.param.dtype],
        GRAD=_KINDS[one.grad.dtype],
        ALIGNED=aligned,
        BLOCK=_BLOCK,
        ROUNDS=_ROUNDS,
    )


@lru_cache(maxsize=8)
def _places(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Of each program: its part, and its number among the programs of that part."""
    counts = [-(-size // (_BLOCK * _ROUNDS)) for size in sizes]
    part = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    number = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return torch.from_numpy(np.stack([part, number])).to(device)
