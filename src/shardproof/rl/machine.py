"""What this machine has: memory that is free, its processor, and the disk behind a path."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path


def available_memory() -> int | None:
    """Bytes of memory and swap that processes can still get on this machine and in this container."""
    limits = list(_memory_limits())
    return min(limits) if limits else None


def _memory_limits() -> Iterator[int]:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemAvailable" in found:
        yield found["MemAvailable"] + found.get("SwapFree", 0)
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no cgroup of version 2, or no limit
        return
    yield limit - used


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    real = Path(os.path.realpath(folder))
    return next(path for path in (real, *real.parents) if path.is_dir())


def cpu_model() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
