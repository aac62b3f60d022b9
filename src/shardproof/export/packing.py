"""A rank's slices of a payload, end to end: where each lies in the payload's memory, and that they make up all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardproof.export.image import ImageLayout

# A block is what is compared, encoded, sent and checked at once.
BLOCK_BYTES = 4 * 2**20


class Packing:
    """Ranges of a payload's memory in the order in which a rank sends them. `spans` has [start, stop) in bytes."""

    def __init__(self, spans: np.ndarray):
        self.spans = spans
        self._ends = np.cumsum(spans[:, 1] - spans[:, 0])
        self.size = int(self._ends[-1]) if len(spans) else 0

    @classmethod
    def of(cls, ranges: Mapping[str, np.ndarray], layout: ImageLayout) -> Packing:
        """The packing of ranges of elements, in the payload's order."""
        spans = [
            ranges[meta.name] * meta.dtype.itemsize + layout.places[meta.name].offset
            for meta in layout.metas
            if meta.name in ranges
        ]
        return cls(np.concatenate(spans) if spans else np.zeros((0, 2), dtype=np.int64))

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where bytes [start, stop) of the packed slices lie in the payload's memory, in order."""
        if start >= stop:
            return []
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        found = self.spans[first : last + 1].copy()
        found[0, 0] = found[0, 1] - (self._ends[first] - start)
        found[-1, 1] -= self._ends[last] - stop
        return [(int(a), int(b)) for a, b in found]

    def take(self, memory: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the packed slices: a view if they are one piece of the memory."""
        pieces = [memory[a:b] for a, b in self.pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([memory[:0], *pieces])

    def put(self, memory: np.ndarray, start: int, values: np.ndarray) -> None:
        """Write bytes of the packed slices to their places."""
        at = 0
        for a, b in self.pieces(start, start + len(values)):
            memory[a:b] = values[at : at + b - a]
            at += b - a


def first_gap(packings: Mapping[int, Packing], layout: ImageLayout) -> tuple[str, str] | None:
    """(tensor, what is wrong) where the ranks' slices together are not every byte exactly once."""
    spans = np.concatenate([packing.spans for packing in packings.values()] or [np.zeros((0, 2), np.int64)])
    owners = np.concatenate([[rank] * len(packing.spans) for rank, packing in packings.items()] or [[]])
    order = np.argsort(spans[:, 0], kind="stable")
    spans, owners = spans[order], owners[order]
    at = 0
    for meta in layout.metas:
        place = layout.places[meta.name]
        position, end = place.offset, place.offset + place.nbytes
        while at < len(spans) and spans[at, 0] < end:
            low, high = spans[at]
            if low != position or high > end:
                return meta.name, _describe(spans, owners, at, position - place.offset, place.offset)
            position, at = int(high), at + 1
        if position != end:
            return meta.name, f"bytes {position - place.offset} to {place.nbytes} were sent by no rank"
    return None if at == len(spans) else ("", "slices lie behind the last tensor")


def _describe(spans: np.ndarray, owners: np.ndarray, at: int, position: int, offset: int) -> str:
    low, high = (int(edge) - offset for edge in spans[at])
    if low > position:
        return f"bytes {position} to {low} were sent by no rank"
    if low < position:
        return f"bytes from {low} on were sent twice, by ranks {int(owners[at - 1])} and {int(owners[at])}"
    return f"rank {int(owners[at])} sent bytes {low} to {high}, which lie outside of it"


def check_spans(spans: np.ndarray, layout: ImageLayout) -> str | None:
    """What is wrong with spans from another process, before anything is read or written through them."""
    ordered = np.all(spans[1:, 0] >= spans[:-1, 1]) and np.all(spans[:, 0] < spans[:, 1])
    inside = not len(spans) or (spans[0, 0] >= 0 and spans[-1, 1] <= layout.size)
    return None if ordered and inside else "its slices are not in order, or lie outside of the payload"


def block_starts(size: int) -> Sequence[int]:
    """Where each block of `size` packed bytes begins."""
    return range(0, size, BLOCK_BYTES)
