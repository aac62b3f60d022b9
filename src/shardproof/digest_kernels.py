"""A Triton kernel for digests on a GPU: one pass over the bytes, where torch takes nine.

Sums modulo 2^64 do not depend on their order, so its results are those of `digest`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 8  # that a program adds up: 64 KiB


@triton.jit
def _digest_kernel(
    words_ptr,  # [tiles, words], int64
    columns_ptr,  # [COLUMNS], int64, the weights of a row's words
    out_ptr,  # [tiles], int64, zero
    words,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first, tile = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.uint64)
    for index in range(ROWS):
        row = first + index
        at = row * COLUMNS + column
        word = tl.load(words_ptr + tile * words + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
        z = (row.to(tl.uint64) + ((1 << 40) + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = (z ^ (z >> 31)) | 1
        total += (word ^ (word >> 29)) * z
    weights = tl.load(columns_ptr + column).to(tl.uint64, bitcast=True)
    found = tl.sum(total * weights, 0)
    tl.atomic_add(out_ptr + tile, found.to(tl.int64, bitcast=True))


def digest_words(tiles: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The digest of each row of a contiguous int64 matrix on a GPU; `columns` are the weights of a row's words."""
    count, words = tiles.shape
    out = torch.zeros(count, dtype=torch.int64, device=tiles.device)
    grid = (triton.cdiv(words, len(columns) * _ROWS), count)
    _digest_kernel[grid](tiles, columns, out, words, COLUMNS=len(columns), ROWS=_ROWS)
    return out
