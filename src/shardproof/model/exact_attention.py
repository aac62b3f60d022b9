"""Attention of exact mode: over packed sequences, over a cache padded on the left, and over a paged cache.

A query reads its sequence's keys in blocks of 64 from position 0 on, in the same tile whether it is alone, as in
decoding, or among others, as in training. Where keys lie is a table, and does not matter.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface

from shardproof.errors import fail
from shardproof.model import exact_cpu
from shardproof.model.attention import attend_packed, packed_attention
from shardproof.model.packing import Packing, to_device

PACKED, COLUMNS = "shardproof_exact_packed", "shardproof_exact_columns"
BLOCK = 64  # tokens of a cache's block, and keys that attention on CUDA reads at a time


def packed(
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What `attend_packed` computes, exactly; its gradient is that of `attend_packed`."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return _Packed.apply(query, key, value, sinks, packing, scale, window, softcap)


AttentionInterface.register(PACKED, partial(packed_attention, attend=packed))


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        packing: Packing,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.settings = (packing, scaling, window, softcap)
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        extras: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        if query.is_cuda:
            from shardproof.model import exact_kernels  # Triton is not everywhere

            tables, tiles, sequences = _on_device(packing, query.shape[1] // key.shape[1])
            out, _ = exact_kernels.attention(q, k, v, tables, tiles, sequences, scaling, **extras)
        else:
            places, spans, tokens = _on_host(packing)
            out = exact_cpu.attention(q, k, v, places, spans, tokens, scaling, **extras)
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ordinary: Any = attend_packed
        inputs: Any = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ordinary(*inputs[:3], *ctx.settings, inputs[3])
        wanted = [each for each in inputs if each is not None]
        grads = iter(torch.autograd.grad(out, wanted, grad))
        return *(next(grads) if each is not None else None for each in inputs), *[None] * 4


_plans: WeakKeyDictionary[Packing, Any] = WeakKeyDictionary()  # found once for all layers


def _on_host(packing: Packing) -> tuple[torch.Tensor, list[tuple[int, int]], list[tuple[int, int, int]]]:
    """(where each position's key is, tiles, sequences) as `exact_cpu.attention` takes them."""
    if packing not in _plans:
        width = exact_cpu.padded(packing.max_length)
        starts, lengths = packing.borders[:-1], list(packing.lengths)
        places = torch.tensor(starts)[:, None] + torch.arange(width)
        sequences = [(start, length, 0) for start, length in zip(starts, lengths, strict=True)]
        places = places.clamp(max=packing.borders[-1] - 1)
        _plans[packing] = places, exact_cpu.tiles_of(lengths), sequences
    return _plans[packing]


def _on_device(packing: Packing, group: int) -> tuple[torch.Tensor, Any, Any]:
    """(where each block of keys begins, tiles, sequences) as `exact_kernels.attention` takes them."""
    if packing not in _plans:
        device = packing.cu_seqlens.device
        starts, lengths = packing.borders[:-1], list(packing.lengths)
        blocks = torch.arange(-(-packing.max_length // BLOCK), dtype=torch.int32) * BLOCK
        tables = to_device(torch.tensor(starts, dtype=torch.int32)[:, None] + blocks, device)
        sequences = [(start, length, 0) for start, length in zip(starts, lengths, strict=True)]
        _plans[packing] = tables, _tiles(lengths, group, device), _columns(sequences, device)
    return _plans[packing]


class Columns:
    """Where the tokens of rows lie in a cache that is padded on the left, and may have gaps; found once for all layers."""

    def __init__(self, mask: torch.Tensor, num_new: int):
        self._rows, self._width = mask.shape
        there = mask.bool()
        counts = there.sum(1).tolist()
        new = there[:, self._width - num_new :].sum(1).tolist()
        # Stable: padding first, then tokens in their order.
        order = torch.argsort(mask.to(torch.int8), dim=1, stable=True)
        self._columns = torch.zeros(self._rows, exact_cpu.padded(max(counts)), dtype=torch.int64)
        for row, count in enumerate(counts):
            self._columns[row, :count] = order[row, self._width - count :]
        # Queries are the last columns, tokens of each row behind its padding.
        self.sequences = [
            (row * num_new + num_new - num, num, count - num)
            for row, (num, count) in enumerate(zip(new, counts, strict=True))
        ]
        self.tiles = exact_cpu.tiles_of(new)

    def places(self, num_held: int) -> torch.Tensor:
        """Where each position's key is among those of all rows, of which a layer holds the last `num_held` columns."""
        # Columns that a sliding window has left behind are masked: any key may stand for them.
        columns = (self._columns - (self._width - num_held)).clamp(min=0)
        return columns + torch.arange(self._rows)[:, None] * num_held


def columns_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    columns: Columns | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of new tokens to a padded cache, [rows, heads, new, width] to [rows, new, heads, width]; on a CPU."""
    if columns is None:
        message = f"{type(module).__name__} does not pass keyword arguments on to its attention."
        raise fail("T303", "attention", message, fix="set rollout.exact=false")
    rows, heads, num_new, width = query.shape
    keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (key, value))
    out = exact_cpu.attention(
        query.transpose(1, 2).reshape(rows * num_new, heads, width),
        keys,
        values,
        columns.places(key.shape[2]),
        columns.tiles,
        columns.sequences,
        scaling if scaling is not None else width**-0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.view(rows, num_new, heads, -1), None


AttentionInterface.register(COLUMNS, columns_attention)


def paged(
    query: torch.Tensor,  # [tokens, heads, width], sequences end to end
    cache: tuple[torch.Tensor, torch.Tensor],  # keys and values, [blocks, key heads, 64, width] each
    tables: torch.Tensor,  # [sequences, blocks] int32
    sequences: list[tuple[int, int, int]],  # (first query's row, queries, first query's position)
    scaling: float,
    **extras: Any,
) -> torch.Tensor:
    """Attention of new tokens to their blocks, in which their own keys and values are already; [tokens, heads, width]."""
    if not query.is_cuda:
        # What nobody wrote to has no weight, but must be a number.
        keys, values = (each.transpose(1, 2).flatten(0, 1).nan_to_num() for each in cache)
        places = (tables.long()[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
        spans = exact_cpu.tiles_of([count for _, count, _ in sequences])
        return exact_cpu.attention(query, keys, values, places, spans, sequences, scaling, **extras)
    from shardproof.model import exact_kernels  # Triton is not everywhere

    group, device = query.shape[1] // cache[0].shape[1], query.device
    counts = [count for _, count, _ in sequences]
    keys, values = cache
    tiles, rows = _tiles(counts, group, device), _columns(sequences, device)
    return exact_kernels.attention(query, keys, values, tables, tiles, rows, scaling, **extras)[0]


def _tiles(counts: list[int], group: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[tiles] each: a sequence, and the first of its rows, of which each query has `group`."""
    tiles = [(number, at) for number, count in enumerate(counts) for at in range(0, count * group, BLOCK)]
    of, first = to_device(torch.tensor(tiles, dtype=torch.int32).t().contiguous(), device)
    return of, first


def _columns(
    sequences: list[tuple[int, int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    start, count, position = to_device(torch.tensor(sequences, dtype=torch.int32).t().contiguous(), device)
    return start, count, position


def attend_step(
    query: torch.Tensor,  # [rows, heads, width]
    key: torch.Tensor,  # [rows, key heads, width]
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    positions: torch.Tensor,  # [rows, 1]
    scaling: float,
    **extras: Any,
) -> torch.Tensor:
    """Attention of one new token per row, after its key and value are stored; [rows, heads * width]."""
    rows = len(query)
    if not query.is_cuda:
        block = tables.gather(1, positions // BLOCK).squeeze(1).long()
        for states, new in zip(cache, (key, value), strict=True):
            states[block, :, positions[:, 0] % BLOCK] = new
        sequences = [(row, 1, position) for row, position in enumerate(positions[:, 0].tolist())]
        return paged(query, cache, tables, sequences, scaling, **extras).flatten(1)
    from shardproof.model import exact_kernels  # as above

    at = positions.reshape(rows)
    exact_kernels.store(key, value, cache, tables, at)
    number, zeros, ones = _numbers(rows, query.device)
    keys, values = cache
    rows_of = (number, ones, at)
    out, _ = exact_kernels.attention(query, keys, values, tables, (number, zeros), rows_of, scaling, **extras)
    return out.flatten(1)


@cache
def _numbers(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    number = torch.arange(rows, dtype=torch.int32, device=device)
    return number, torch.zeros_like(number), torch.ones_like(number)
