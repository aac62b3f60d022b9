"""The part of a tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from shardproof.weights.boxes import Box, enclosing_range, flatten, size_of


class Part(NamedTuple):
    """One box of a tensor, and the 1-D memory that holds it in row-major order."""

    box: Box
    memory: torch.Tensor


@dataclass(frozen=True)
class LocalShard:
    """Boxes of a tensor, and the 1-D memory that holds them end to end.

    FSDP shards into one box that is a range of the flattened tensor: FSDP2 whole rows, FSDP1 any range.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    flat: torch.Tensor

    @classmethod
    def of_range(
        cls, name: str, shape: Sequence[int], start: int, stop: int, flat: torch.Tensor
    ) -> LocalShard:
        """Elements [start, stop) of the flattened tensor."""
        return cls(name, tuple(shape), (((start, stop),),), flat)

    @classmethod
    def of_boxes(
        cls, name: str, shape: Sequence[int], boxes: Sequence[Box], flat: torch.Tensor
    ) -> LocalShard:
        """Boxes with a range per dim. Those that are contiguous in the tensor are kept as ranges of it, flattened."""
        return cls(name, tuple(shape), tuple(flatten(box, shape) for box in boxes), flat)

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> LocalShard:
        return cls.of_range(name, tensor.shape, 0, tensor.numel(), tensor.view(-1))

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    @property
    def start(self) -> int:
        """The first element that it holds, in the whole tensor's flat order."""
        return min((enclosing_range(box, self.shape)[0] for box in self.boxes), default=0)

    @property
    def flat_range(self) -> tuple[int, int] | None:
        """The one range of the flattened tensor that it is, if it is one."""
        if not self.boxes:
            return 0, 0
        return self.boxes[0][0] if len(self.boxes) == 1 and len(self.boxes[0]) == 1 else None

    def parts(self) -> Iterator[Part]:
        """Each box with its memory."""
        at = 0
        for box in self.boxes:
            size = size_of(box)
            yield Part(box, self.flat[at : at + size])
            at += size

    def empty(self) -> LocalShard:
        """The same tensor, of which nothing is held."""
        return replace(self, boxes=(), flat=self.flat[:0])
