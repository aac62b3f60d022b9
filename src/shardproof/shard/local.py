"""The part of a tensor that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LocalShard:
    """Elements [start, stop) of a tensor's flat order, and the 1-D memory that holds them.

    Both strategies shard into such ranges: FSDP2 gives whole rows, FSDP1 any range of its flat parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    flat: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()
