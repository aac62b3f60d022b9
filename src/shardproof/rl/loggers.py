"""Where a run's numbers go. A logger is anything with `log(step, metrics)` and `close()`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from shardproof.files import append_line, write_atomic

METRICS_NAME, SAMPLES_NAME, EVENTS_NAME = "metrics.jsonl", "samples.jsonl", "events.jsonl"
LINES = (METRICS_NAME, SAMPLES_NAME, EVENTS_NAME)


class Logger(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one line per step. Lines of steps that a resumed run takes again are moved aside.

    `time` is the seconds that the run has taken so far, over all of its parts.
    """

    def __init__(self, folder: Path, first_step: int):
        self._path = folder / METRICS_NAME
        # Step 0 is an evaluation, which a run that begins again makes again.
        supersede(self._path, first_step or -1)
        for name in (SAMPLES_NAME, EVENTS_NAME):
            supersede(folder / name, first_step)
        times = [line.get("time") for line in read_lines(self._path)]
        taken = [each for each in times if isinstance(each, (int, float))]
        self._start = time.time() - (taken[-1] if taken else 0.0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        append_line(
            self._path, {"step": step, "time": round(time.time() - self._start, 3), "metrics": finite}
        )

    def close(self) -> None:
        pass


class TensorBoard:
    """TensorBoard events under `tensorboard/`."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Progress:
    """A live line on a terminal, a plain line per step elsewhere: step, the main metrics, time left."""

    _SHOWN = (
        ("reward/mean", "reward {:.3f}"),
        ("eval/reward", "held-out {:.3f}"),
        ("kl/mean", "KL {:.4f}"),
        ("loss/policy", "loss {:.4f}"),
        ("grad_norm", "grad norm {:.3f}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
    )

    def __init__(self, num_steps: int, first_step: int):
        self._num_steps = num_steps
        self._start, self._first = time.time(), first_step
        self._live: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            )
            self._live = Bar(*columns, console=Console(stderr=True))
            self._task = self._live.add_task("starting", total=num_steps, completed=first_step)
            self._live.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(text.format(metrics[name]) for name, text in self._SHOWN if name in metrics)
        if self._live is not None:
            self._live.update(self._task, completed=step, description=shown)
            return
        left = ""  # nothing is known about it before the first step
        if step > self._first:
            seconds = (time.time() - self._start) / (step - self._first) * (self._num_steps - step)
            left = f"  left {seconds:.0f} s"
        # A terminal that is gone must not end a run.
        with contextlib.suppress(OSError):
            print(f"step {step}/{self._num_steps}  {shown}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects with a step in a run's JSONL file, none if it is missing. Torn and foreign lines are left out."""
    return [line for raw in _raw_lines(path) if (line := _parse(raw)) is not None]


def supersede(path: Path, first_step: int) -> None:
    """Move lines of steps after `first_step`, and torn ones, to the end of `*.superseded.jsonl` beside the file.

    A kill in between leaves a line in both files, never in none.
    """
    kept: list[bytes] = []
    moved: list[bytes] = []
    for raw in _raw_lines(path):
        line = _parse(raw)
        (kept if line is not None and line["step"] <= first_step else moved).append(raw)
    if moved:
        with path.with_suffix(f".superseded{path.suffix}").open("ab") as file:
            file.write(b"".join(raw + b"\n" for raw in moved))
            file.flush()
            os.fsync(file.fileno())
        write_atomic(path, b"".join(raw + b"\n" for raw in kept))


def _raw_lines(path: Path) -> list[bytes]:
    # Bytes, split at line feeds alone: text may hold U+2028, and a damaged file what is not UTF-8.
    return [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.is_file() else []


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
