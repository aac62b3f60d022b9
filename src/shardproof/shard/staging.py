"""From file pages to a shard's memory: straight on the CPU, through pinned buffers to a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_STAGE_BYTES = 32 * 2**20
_NUM_STAGES = 3
_GATHER_BYTES = 4 * 2**20  # stays in a core's cache between the copy and the conversion


class Staging:
    """Buffers to read into. For a CUDA shard they are pinned, and each is copied while the next one is filled."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event | None] = []
        self._turn = 0
        self._gathered: torch.Tensor | None = None

    @staticmethod
    def parts(memory: torch.Tensor, source_dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """The consecutive ranges that memory is filled in; who reads for this rank reads them in the same order."""
        size = memory.numel()
        step = max(size, 1) if memory.device.type == "cpu" else _STAGE_BYTES // source_dtype.itemsize
        for low in range(0, size, step):
            yield low, min(low + step, size)

    def buffers(
        self, memory: torch.Tensor, source_dtype: torch.dtype, gather: bool = False
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(low, high, buffer) for consecutive ranges of the memory; the caller fills `buffer` before it asks for more.

        On the CPU the buffer is the memory itself, unless many small pieces are to be converted: with `gather` they
        are laid side by side in the checkpoint's dtype first.
        """
        if memory.device.type == "cpu" and (not gather or memory.dtype == source_dtype):
            for low, high in self.parts(memory, source_dtype):
                yield low, high, memory[low:high]
            return
        if memory.device.type == "cpu":
            step = _GATHER_BYTES // source_dtype.itemsize
            for low in range(0, memory.numel(), step):
                high = min(low + step, memory.numel())
                buffer = self._scratch(source_dtype)[: high - low]
                yield low, high, buffer
                memory[low:high].copy_(buffer)
            return
        for low, high in self.parts(memory, source_dtype):
            pinned = self._take()
            buffer = pinned[: (high - low) * source_dtype.itemsize].view(source_dtype)
            yield low, high, buffer
            self._send(buffer, memory[low:high])

    def _scratch(self, dtype: torch.dtype) -> torch.Tensor:
        if self._gathered is None:
            self._gathered = torch.empty(_GATHER_BYTES, dtype=torch.uint8)
        return self._gathered.view(dtype)

    def _take(self) -> torch.Tensor:
        if not self._pinned:
            self._pinned = [
                torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_STAGES)
            ]
            self._free = [None] * _NUM_STAGES
        self._turn = (self._turn + 1) % _NUM_STAGES
        event = self._free[self._turn]
        if event is not None:
            event.synchronize()
        return self._pinned[self._turn]

    def _send(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        """Copy in the checkpoint's dtype and convert on the device: fewer bytes cross the bus."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            target.copy_(buffer.to(target.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
        self._free[self._turn] = event

    def finish(self) -> None:
        """Wait for the copies under way."""
        if self._stream is not None:
            self._stream.synchronize()
