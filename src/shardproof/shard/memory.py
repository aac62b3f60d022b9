"""Peak memory of a block of code."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

_INTERVAL_S = 0.01


class PeakMemory:
    """Samples this process's anonymous host memory, or asks the allocator of a CUDA device; `rise` is the result."""

    def __init__(self, device: torch.device):
        self.rise = 0
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.empty(0, device=self._device)  # the allocator has no statistics before its first use
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        else:
            self._start = anonymous_bytes()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.rise = torch.cuda.max_memory_allocated(self._device) - self._start
            return
        self._stop.set()
        self._thread.join()
        self.rise = max(self.rise, anonymous_bytes() - self._start)

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.rise = max(self.rise, anonymous_bytes() - self._start)


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
