"""Whole tensors from every rank's parts: one collective a bucket, in memory that is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardproof.dist.collectives import all_gather_flat, gather_uneven
from shardproof.export.payload import Layout

_ALIGNMENT = 16


class Gatherer:
    """Gathers bucket after bucket. What travels lies in two buffers that stay from one bucket to the next: gloo's
    threads let go of a buffer some time after a collective has ended, and new ones would pile up meanwhile.

    Memory: three times a bucket's bytes (sent, received, in order), and padding up to another half; a single tensor of more than `limit`
    bytes is there at most twice.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(
        self, values: dict[str, torch.Tensor], layout: Layout, sizes: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Whole tensors, flat, from every rank's `values`, which are used up. Collective: the shard axis."""
        if layout.group is None or not values:
            return values
        name, part = next(iter(values.items()))
        if len(values) == 1 and sizes[name] * part.element_size() > self._limit:
            self._buffers.clear()
            values.clear()
            return {name: _gather_one(part.contiguous(), layout.ranges[name], layout)}
        names = list(values)
        parts = [values.pop(name).contiguous() for name in names]
        dtypes = [part.dtype for part in parts]
        device = parts[0].device
        packs = _plan_packs(names, layout, dtypes)
        packed = self._buffer("sent", max(size for _, size in packs), device)
        for part, offset in zip(parts, packs[layout.rank][0], strict=True):
            raw = part.view(-1).view(torch.uint8)
            packed[offset : offset + raw.numel()] = raw
        del parts, part, raw
        received, starts = self._exchange(packed, [size for _, size in packs], layout)
        whole = {}
        for index, name in enumerate(names):
            full = torch.empty(sizes[name], dtype=dtypes[index], device=device)
            for rank, (start, stop) in enumerate(layout.ranges[name]):
                at = starts[rank] + packs[rank][0][index]
                raw = received[at : at + (stop - start) * dtypes[index].itemsize]
                full[start:stop] = raw.view(dtypes[index])
            whole[name] = full
        return whole

    def _exchange(
        self, packed: torch.Tensor, sizes: list[int], layout: Layout
    ) -> tuple[torch.Tensor, list[int]]:
        """(every rank's pack, where each begins)."""
        assert layout.group is not None
        if _is_uneven(sizes):
            received = self._buffer("received", sum(sizes), packed.device)
            gather_uneven(packed, sizes, received, layout.group)
            return received, [sum(sizes[:rank]) for rank in range(len(sizes))]
        longest = max(sizes)
        received = self._buffer("received", longest * len(sizes), packed.device)
        all_gather_flat(packed[:longest], received, layout.group)
        return received, [rank * longest for rank in range(len(sizes))]

    def _buffer(self, name: str, size: int, device: torch.device) -> torch.Tensor:
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            self._buffers.pop(name, None)
            del held
            held = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return held[:size]


def _gather_one(part: torch.Tensor, ranges: Sequence[tuple[int, int]], layout: Layout) -> torch.Tensor:
    """One large tensor: the ranks' parts follow each other, so what arrives is in order."""
    assert layout.group is not None
    lengths = [stop - start for start, stop in ranges]
    total, longest = sum(lengths), max(lengths)
    full_ranks = total // longest
    in_chunks = lengths[:full_ranks] == [longest] * full_ranks and sum(lengths[full_ranks + 1 :]) == 0
    if in_chunks and not _is_uneven(lengths):
        if part.numel() < longest:
            padded = part.new_zeros(longest)
            padded[: part.numel()] = part
            part = padded
        received = part.new_empty(longest * len(lengths))
        all_gather_flat(part, received, layout.group)
        return received[:total]
    received = part.new_empty(total)
    gather_uneven(part, lengths, received, layout.group)
    return received


def _is_uneven(sizes: list[int]) -> bool:
    """FSDP1 may put most of a bucket on one rank; padding every rank to its size would multiply the bucket."""
    return max(sizes) * len(sizes) > 1.5 * sum(sizes)


def _plan_packs(
    names: Sequence[str], layout: Layout, dtypes: Sequence[torch.dtype]
) -> list[tuple[list[int], int]]:
    """For each rank: where it packs each tensor, in bytes, and the length of its pack."""
    packs = []
    for rank in range(len(next(iter(layout.ranges.values())))):
        at, offsets = 0, []
        for name, dtype in zip(names, dtypes, strict=True):
            start, stop = layout.ranges[name][rank]
            offsets.append(at)
            at += -(-(stop - start) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        packs.append((offsets, at))
    return packs
