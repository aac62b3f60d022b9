"""Host memory for many shards at once, in huge pages where the system has them.

A rank of a model with many small parameters takes tens of thousands of page faults while it fills them, one a 4 KiB
page, which costs as much as reading the checkpoint. Torch's own switch for huge pages is an environment variable that
is read once and covers single allocations of 2 MiB and more.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import numpy as np
import torch

_HUGE_BYTES = 2**21
_ALIGNMENT = 64


class Arena:
    """Host memory handed out piece by piece. Each tensor has a storage of its own; all of them keep it alive."""

    def __init__(self, nbytes: int):
        """Room for `nbytes` of tensors, reserved and not touched."""
        self._memory = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._next = -address % _HUGE_BYTES
        with suppress(OSError):  # a kernel without huge pages: the memory is as good, only slower to fill
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that a tensor takes up in an arena."""
        return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next piece. Its elements are zero until they are written."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._next)
        self._next += self.room(shape, dtype)
        return tensor.view(shape)
