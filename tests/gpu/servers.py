"""What the vLLM servers of these tests have in common."""

from __future__ import annotations

from typing import Any

# A cache of a fixed size: vLLM then need not find out how much memory is left, which fails if that changes meanwhile, so
# several servers can start on one GPU at a time. Nothing is compiled.
SMALL: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "enforce_eager": True,
    "args": ["--kv-cache-memory-bytes", str(2 * 2**30)],
}
