"""Sequences laid end to end: one row of tokens, no padding, and the borders that attention must respect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from shardproof.model import cudnn_attention


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
        # For cuDNN, whose plans are for a power of two of sequences, the last of them empty, and of tokens in each.
        self.uses_cudnn = cudnn_attention.can_use(device)
        if self.uses_cudnn:
            empty = _power_of_two(len(lengths)) - len(lengths)
            self.filled_borders = to_device(
                torch.tensor(self.borders + self.borders[-1:] * empty, dtype=torch.int32), device
            )
            self.rounded_length = _power_of_two(max(self.max_length, 128))
        self._device = device
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None

    def by_length(self) -> dict[int, int]:
        """{length: number of sequences that have it}, in the order in which `order` puts them."""
        return dict(Counter(sorted(self.lengths)))

    @property
    def ordered(self) -> bool:
        """Sequences of one length are side by side already."""
        return all(a <= b for a, b in pairwise(self.lengths))

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(token positions with sequences of one length side by side, the way back); found once for all layers."""
        if self._order is None:
            spans = sorted(self.spans(), key=lambda span: span[1] - span[0])
            order = torch.cat([torch.arange(a, b) for a, b in spans])
            self._order = (to_device(order, self._device), to_device(torch.argsort(order), self._device))
        return self._order

    def spans(self) -> list[tuple[int, int]]:
        """(first, past the last) token of each sequence."""
        return list(zip(self.borders[:-1], self.borders[1:], strict=True))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, without making the host wait for it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
