"""Where a run's numbers go. A logger is anything with `log(step, metrics)` and `close()`."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Protocol

METRICS_NAME, SAMPLES_NAME, EVENTS_NAME = "metrics.jsonl", "samples.jsonl", "events.jsonl"


class Logger(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one line a step. Lines of steps that a resumed run takes again are dropped.

    `time` is the seconds that the run has taken so far, over all of its parts.
    """

    def __init__(self, folder: Path, first_step: int):
        self._path = folder / METRICS_NAME
        # Step 0 is an evaluation, which a run that begins again makes again.
        _drop_from(self._path, first_step or -1)
        for name in (SAMPLES_NAME, EVENTS_NAME):
            _drop_from(folder / name, first_step)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._start = time.time() - (float(json.loads(lines[-1])["time"]) if lines else 0.0)

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
    """A live line on a terminal, a plain line a step elsewhere: step, the main metrics, time left."""

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
        print(f"step {step}/{self._num_steps}  {shown}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Add one JSON object as a line."""
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def _drop_from(path: Path, first_step: int) -> None:
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if _step_of(line) <= first_step]
        path.write_text("".join(f"{line}\n" for line in lines))


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return sys.maxsize  # a line that a kill cut short
