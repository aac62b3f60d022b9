"""A Triton kernel for digests on a GPU: one pass over the bytes of many tensors, where torch takes nine over each.

Sums modulo 2^64 do not depend on their order, so its results are those of `digest`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS = 8  # that a program adds up: 64 KiB


@triton.jit(do_not_specialize=["tensors"])
def _digest_kernel(
    table_ptr,  # [2, tensors], int64: their addresses, and how many words each has
    columns_ptr,  # [COLUMNS], int64, the weights of a row's words
    out_ptr,  # [tensors], int64, zero
    tensors,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first, tensor = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    words = tl.load(table_ptr + tensors + tensor)
    if first * COLUMNS < words:
        words_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(tl.int64))
        column = tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), dtype=tl.uint64)
        for index in range(ROWS):
            row = first + index
            at = row * COLUMNS + column
            word = tl.load(words_ptr + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
            z = (row.to(tl.uint64) + ((1 << 40) + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB
            z = (z ^ (z >> 31)) | 1
            total += (word ^ (word >> 29)) * z
        weights = tl.load(columns_ptr + column).to(tl.uint64, bitcast=True)
        found = tl.sum(total * weights, 0)
        tl.atomic_add(out_ptr + tensor, found.to(tl.int64, bitcast=True))


def digest_words(tensors: Sequence[torch.Tensor], columns: torch.Tensor) -> torch.Tensor:
    """The digest of each contiguous tensor of one GPU, as a vector there. `columns` are the weights of a row's words.

    Each begins at a multiple of 8 bytes and has a multiple of 8 bytes. The host does not wait.
    """
    sizes = [each.numel() * each.itemsize // 8 for each in tensors]
    table = torch.tensor([[each.data_ptr() for each in tensors], sizes])
    if columns.is_cuda:
        table = table.pin_memory().to(columns.device, non_blocking=True)
    out = torch.zeros(len(tensors), dtype=torch.int64, device=columns.device)
    grid = (triton.cdiv(max(sizes), len(columns) * _ROWS), len(tensors))
    _digest_kernel[grid](table, columns, out, len(tensors), COLUMNS=len(columns), ROWS=_ROWS)
    return out
