"""How the contenders of benchmarks/gpu.py take their times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Row = dict[str, float]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], repeats: int, device: str, warm: bool = False) -> float:
    """Mean seconds of one call, after one that does not count unless everything is `warm`."""
    if not warm:
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def update_row(seconds: float, tokens: int, device: str) -> Row:
    """What a step of so many tokens is reported as."""
    return {"tokens_per_s": tokens / seconds, "step_s": seconds, "peak_bytes": peak_bytes(device)}


def decode_row(
    generate: Callable[[int], None], steps: int, num_bytes: int, device: str, warm: bool = False
) -> Row:
    """Seconds of a step, without what the prompts take, and of everything."""
    whole = seconds_of(lambda: generate(steps), 1, device, warm)
    prefill = seconds_of(lambda: generate(1), 1, device)
    step = (whole - prefill) / (steps - 1)
    return {"step_s": step, "whole_s": whole, "steps": steps, "weight_bytes": num_bytes}
