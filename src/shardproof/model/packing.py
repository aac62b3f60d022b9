"""Sequences laid end to end: one row of tokens, no padding, and the borders that attention must respect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class HeadExchange(Protocol):
    """What attention needs of a sequence-parallel group; the group itself is handed in."""

    size: int
    rank: int

    def split_heads(self, states: torch.Tensor) -> torch.Tensor: ...

    def split_tokens(self, states: torch.Tensor) -> torch.Tensor: ...


class Packing:
    """Borders of the packed sequences; travels through the model's forward as one keyword.

    Deliberately not a dataclass: FSDP1 copies dataclasses among its inputs, field by field.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, exchange: HeadExchange | None = None):
        self.lengths = tuple(lengths)
        self.max_length = max(lengths)
        self.exchange = exchange
        self.borders = [0]
        for length in lengths:
            self.borders.append(self.borders[-1] + length)
        self.cu_seqlens = to_device(torch.tensor(self.borders, dtype=torch.int32), device)

    def spans(self) -> list[tuple[int, int]]:
        """(first, past the last) token of each sequence."""
        return list(zip(self.borders[:-1], self.borders[1:], strict=True))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, without making the host wait for it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
