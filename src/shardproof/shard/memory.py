"""Memory: the peak of a block of code, and how much is free."""

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
    """Resident memory of this process that no file backs; 0 where the system does not report it."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def free_memory(device: torch.device, sharers: int = 1) -> tuple[int, int]:
    """(bytes that this process can still allocate, bytes that it could have in total) where `sharers` processes share.

    On CUDA, what the allocator holds and does not use is free, and its own limit is respected. The host does not wait
    for the device.
    """
    if device.type != "cuda":
        available, total = host_memory()
        return available // sharers, total // sharers
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - held
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free // sharers + unused, limit - held), min(total // sharers, limit)


def device_id(device: torch.device) -> str:
    """What names a CUDA device wherever it is seen from: also containers and hosts of one name tell theirs apart."""
    return str(torch.cuda.get_device_properties(device).uuid)


def host_memory() -> tuple[int, int]:
    """(available, all) bytes of the host's memory; zeros where the system does not report them."""
    try:
        with open("/proc/meminfo") as info:
            sizes = dict(line.split(":", 1) for line in info)
        available, total = (int(sizes[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        return available, total
    except (OSError, KeyError):
        return 0, 0
