"""How the contenders of benchmarks/gpu.py take their times, and hand them over."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

Row = dict[str, float]


class Save(Protocol):
    """Takes a row of a part; of a part that has several cases, also which."""

    def __call__(self, part: str, name: str, row: Row, case: str = "") -> None: ...


class SavedRows:
    """A `Save` that writes a file after each row: a process that is cut short leaves what it has."""

    def __init__(self, file: Path):
        self._file, self._rows = file, dict[str, dict[str, Any]]()

    def __call__(self, part: str, name: str, row: Row, case: str = "") -> None:
        rows = self._rows.setdefault(part, {})
        if case:
            rows.setdefault(name, {})[case] = row
        else:
            rows[name] = row
        print(f"{part}: {name}{case and f', {case}'}: {_short(row)}", flush=True)
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._rows))
        os.replace(unfinished, self._file)


def _short(row: Row) -> str:
    return ", ".join(f"{key} {value:.5g}" for key, value in row.items())


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
