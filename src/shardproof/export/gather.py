"""Whole tensors from every rank's parts: one collective per bucket, in buffers that are reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from shardproof.dist.collectives import all_gather_flat, gather_uneven, wait_for_group
from shardproof.dist.region import open_region
from shardproof.export.payload import Layout
from shardproof.weights.boxes import Box, cut, shape_of, size_of

_ALIGNMENT = 16
# For each rank: where it packs each tensor, in bytes, and how much it packs.
Packs = list[tuple[list[int], int]]


class Gatherer:
    """Gathers bucket after bucket. The buffers for sending and receiving are reused from one bucket to the next.

    Ranks of one host that keep their tensors in its memory write their parts into memory that all of them share, and
    nothing is sent. Else a bucket is one all-gather. gloo's threads release a buffer some time after a collective has
    ended, so that new ones for each bucket would pile up.

    Memory: three times a bucket's bytes (sent, received, in order), and padding up to another half; shared memory has
    them twice. A single tensor of more than `limit` bytes is there at most twice.
    """

    def __init__(self, limit: int, may_share: bool = True) -> None:
        self._limit = limit
        self._buffers: dict[str, torch.Tensor] = {}
        self._region: torch.Tensor | None = None
        self._may_share = may_share

    def __call__(
        self, values: dict[str, torch.Tensor], layout: Layout, shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, torch.Tensor]:
        """Whole tensors of these shapes from every rank's `values`, which are used up. Collective: the shard axis.

        Between two calls all ranks must have synchronised: the next call overwrites what was gathered.
        """
        if layout.group is None or not values:
            return {
                name: _from_one(value, layout.boxes[name], shapes[name]) for name, value in values.items()
            }
        names = list(values)
        parts = [values.pop(name).contiguous() for name in names]
        dtypes = [part.dtype for part in parts]
        packs = _plan_packs(names, layout, dtypes)
        if parts[0].device.type == "cpu" and self._share(sum(size for _, size in packs), layout):
            received, starts = self._through_region(parts, packs, layout)
        elif self._is_large(names, dtypes, shapes) and _in_flat_order(layout.boxes[names[0]]):
            self._buffers.clear()
            flat = _gather_one(parts.pop(), layout.boxes[names[0]], layout)
            return {names[0]: flat.view(tuple(shapes[names[0]]))}
        else:
            received, starts = self._through_collective(parts, packs, layout)
        whole = _in_order(names, dtypes, received, starts, packs, layout, shapes)
        if self._region is not None and self._region.numel() > max(self._limit, 1):
            self._region = None  # one tensor needed more than a bucket; the next ones do not
        return whole

    def _is_large(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Mapping[str, Sequence[int]]
    ) -> bool:
        return len(names) == 1 and prod(shapes[names[0]]) * dtypes[0].itemsize > self._limit

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
        assert layout.group is not None
        wait_for_group(layout.group)  # every rank has written
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
    """The parts side by side in one buffer; `parts` is emptied."""
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
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, torch.Tensor]:
    """Whole tensors out of every rank's pack."""
    whole = {}
    for index, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        full = torch.empty(tuple(shapes[name]), dtype=dtype, device=received.device)
        for rank, boxes in enumerate(layout.boxes[name]):
            at = starts[rank] + packs[rank][0][index]
            part = received[at : at + _num_elements(boxes) * dtype.itemsize]
            _fill(full, boxes, part.view(dtype))
        whole[name] = full
    return whole


def _from_one(part: torch.Tensor, boxes: Sequence[Sequence[Box]], shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor from the part of the only rank: itself, if its boxes are in order."""
    if _in_flat_order(boxes):
        return part.view(tuple(shape))
    full = part.new_empty(tuple(shape))
    _fill(full, boxes[0], part)
    return full


def _fill(whole: torch.Tensor, boxes: Sequence[Box], memory: torch.Tensor) -> None:
    """Put boxes that lie end to end in memory in their places."""
    at = 0
    for box in boxes:
        size = size_of(box)
        cut(whole, box).copy_(memory[at : at + size].view(shape_of(box)))
        at += size


def _num_elements(boxes: Sequence[Box]) -> int:
    return sum(map(size_of, boxes))


def _in_flat_order(boxes: Sequence[Sequence[Box]]) -> bool:
    """Whether the ranks' parts, end to end, are the flattened tensor."""
    at = 0
    for box in (box for part in boxes for box in part if size_of(box)):
        if len(box) > 1 or box[0][0] != at:
            return False
        at = box[0][1]
    return True


def _gather_one(part: torch.Tensor, boxes: Sequence[Sequence[Box]], layout: Layout) -> torch.Tensor:
    """One large tensor, flat: the ranks' parts follow each other, so what arrives is in order."""
    assert layout.group is not None
    lengths = [_num_elements(held) for held in boxes]
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
    for rank in range(len(next(iter(layout.boxes.values())))):
        at = 0
        offsets: list[int] = []
        for name, dtype in zip(names, dtypes, strict=True):
            offsets.append(at)
            nbytes = _num_elements(layout.boxes[name][rank]) * dtype.itemsize
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        packs.append((offsets, at))
    return packs
