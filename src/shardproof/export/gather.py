"""Whole tensors from every rank's parts: one collective a bucket, in memory that is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from shardproof.dist.collectives import all_gather_flat, gather_uneven
from shardproof.dist.region import open_region
from shardproof.export.payload import Layout

_ALIGNMENT = 16
# For each rank: where it packs each tensor, in bytes, and how much it packs.
Packs = list[tuple[list[int], int]]


class Gatherer:
    """Gathers bucket after bucket. What travels lies in buffers that stay from one bucket to the next.

    Ranks of one host that keep their tensors in its memory write their parts into memory that all of them share, and
    nothing is sent. Else a bucket is one all-gather; gloo's threads let go of a buffer some time after a collective has
    ended, and new ones would pile up meanwhile.

    Memory: three times a bucket's bytes (sent, received, in order), and padding up to another half; shared memory has
    them twice. A single tensor of more than `limit` bytes is there at most twice.
    """

    def __init__(self, limit: int, may_share: bool = True) -> None:
        self._limit = limit
        self._buffers: dict[str, torch.Tensor] = {}
        self._region: torch.Tensor | None = None
        self._may_share = may_share

    def __call__(
        self, values: dict[str, torch.Tensor], layout: Layout, sizes: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Whole tensors, flat, from every rank's `values`, which are used up. Collective: the shard axis.

        Between two calls every rank must have met every other: what was gathered is written over.
        """
        if layout.group is None or not values:
            return values
        names = list(values)
        parts = [values.pop(name).contiguous() for name in names]
        dtypes = [part.dtype for part in parts]
        packs = _plan_packs(names, layout, dtypes)
        if parts[0].device.type == "cpu" and self._share(sum(size for _, size in packs), layout):
            received, starts = self._through_region(parts, packs, layout)
        elif len(names) == 1 and sizes[names[0]] * dtypes[0].itemsize > self._limit:
            self._buffers.clear()
            return {names[0]: _gather_one(parts.pop(), layout.ranges[names[0]], layout)}
        else:
            received, starts = self._through_collective(parts, packs, layout)
        whole = _in_order(names, dtypes, received, starts, packs, layout, sizes)
        if self._region is not None and self._region.numel() > max(self._limit, 1):
            self._region = None  # one tensor needed more than a bucket; the next ones do not
        return whole

    def _share(self, size: int, layout: Layout) -> bool:
        """Whether there is shared memory of this size. Collective when there is none yet, or too little."""
        assert layout.group is not None
        if self._may_share and (self._region is None or self._region.numel() < size):
            self._region = None
            self._region = open_region(max(size, self._limit), layout.group)
            self._may_share = self._region is not None
        return self._may_share

    def _through_region(
        self, parts: list[torch.Tensor], packs: Packs, layout: Layout
    ) -> tuple[torch.Tensor, list[int]]:
        """(every rank's pack in shared memory, where each begins). Uses up `parts`."""
        assert self._region is not None
        starts = [sum(size for _, size in packs[:rank]) for rank in range(len(packs))]
        _pack(parts, self._region[starts[layout.rank] :], packs[layout.rank][0])
        dist.all_reduce(torch.zeros(1), group=layout.group)  # every rank has written
        return self._region, starts

    def _through_collective(
        self, parts: list[torch.Tensor], packs: Packs, layout: Layout
    ) -> tuple[torch.Tensor, list[int]]:
        """(every rank's pack as it was received, where each begins). Uses up `parts`."""
        packed = self._buffer("sent", max(size for _, size in packs), parts[0].device)
        _pack(parts, packed, packs[layout.rank][0])
        return self._exchange(packed, [size for _, size in packs], layout)

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


def _pack(parts: list[torch.Tensor], target: torch.Tensor, offsets: Sequence[int]) -> None:
    """Lay the parts side by side, and let go of them."""
    for part, offset in zip(parts, offsets, strict=True):
        raw = part.view(-1).view(torch.uint8)
        target[offset : offset + raw.numel()] = raw
    parts.clear()


def _in_order(
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    received: torch.Tensor,
    starts: Sequence[int],
    packs: Packs,
    layout: Layout,
    sizes: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """Whole tensors out of every rank's pack."""
    whole = {}
    for index, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        full = torch.empty(sizes[name], dtype=dtype, device=received.device)
        for rank, (start, stop) in enumerate(layout.ranges[name]):
            at = starts[rank] + packs[rank][0][index]
            full[start:stop] = received[at : at + (stop - start) * dtype.itemsize].view(dtype)
        whole[name] = full
    return whole


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


def _plan_packs(names: Sequence[str], layout: Layout, dtypes: Sequence[torch.dtype]) -> Packs:
    packs: Packs = []
    for rank in range(len(next(iter(layout.ranges.values())))):
        at = 0
        offsets: list[int] = []
        for name, dtype in zip(names, dtypes, strict=True):
            start, stop = layout.ranges[name][rank]
            offsets.append(at)
            at += -(-(stop - start) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        packs.append((offsets, at))
    return packs
