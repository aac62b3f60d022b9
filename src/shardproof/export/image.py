"""A payload as one piece of memory: where each tensor lies in it, and digests of what lies there."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardproof.digest import digest, digest_tiles
from shardproof.weights.writer import TensorMeta

_ALIGNMENT = 64
# Linux's flag; Python 3.13 is the first that names it.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Place(NamedTuple):
    """Where a tensor lies: its first byte, and how many elements it has."""

    dtype: torch.dtype
    offset: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ImageLayout:
    """The place of each tensor of a payload, in the payload's order. Every tensor begins at a multiple of 64 bytes."""

    def __init__(self, metas: Sequence[TensorMeta]):
        self.metas = tuple(metas)
        self.places: dict[str, Place] = {}
        size = 0
        for meta in self.metas:
            place = Place(meta.dtype, size, torch.Size(meta.shape).numel())
            self.places[meta.name] = place
            size += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.size = max(size, _ALIGNMENT)

    @property
    def table(self) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
        """(name, dtype, shape, offset) of each tensor."""
        return tuple(
            (meta.name, str(meta.dtype).removeprefix("torch."), meta.shape, self.places[meta.name].offset)
            for meta in self.metas
        )


class Image:
    """Memory that holds a payload."""

    def __init__(self, layout: ImageLayout, memory: torch.Tensor):
        self.layout = layout
        self.memory = memory
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the memory, seen as elements of each dtype

    @classmethod
    def private(cls, layout: ImageLayout) -> Image:
        """An image of this process. Only the pages that are written take memory."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return cls(layout, torch.frombuffer(mmap.mmap(-1, layout.size, flags), dtype=torch.uint8))

    def flat(self, name: str) -> torch.Tensor:
        """A tensor's elements."""
        dtype, offset, count = self.layout.places[name]
        at = offset // dtype.itemsize
        return self._of(dtype)[at : at + count]

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._typed:
            self._typed[dtype] = self.memory.view(dtype)
        return self._typed[dtype]

    def digests(self, names: Sequence[str]) -> list[int]:
        """Digests of tensors that follow each other in the memory; all at once if they are of one size."""
        places = [self.layout.places[name] for name in names]
        if len({(place.dtype, place.numel) for place in places}) == 1:
            dtype, offset, count = places[0]
            if places[0].nbytes % _ALIGNMENT == 0:
                at = offset // dtype.itemsize
                tiles = self._of(dtype)[at : at + count * len(names)]
                return digest_tiles(tiles.view(len(names), count))
        return [digest(self.flat(name)) for name in names]

    def drop(self) -> None:
        """Let go of the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._typed.clear()
