"""Where a run's numbers go. A logger is anything with `log(step, metrics)` and `close()`."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardproof.files import append_line, write_atomic
from shardproof.report.read import EVENTS_NAME, HEADLINES, METRICS_NAME, OF_SET, SAMPLES_NAME, parse_object
from shardproof.terminal import Bar
from shardproof.text import duration

logger = logging.getLogger(__name__)

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


class Progress:
    """Log records for the terminal: one per step with the main metrics, one per evaluation."""

    _SHOWN = (
        ("reward/mean", "reward {:.3f}"),
        ("reward/solved", "solved {:.3f}"),
        ("reward/accuracy", "accuracy {:.3f}"),
        ("teacher/kl", "KL to the teacher {:.4f}"),
        ("kl/mean", "KL {:.4f}"),
        ("loss/policy", "loss {:.4f}"),
        ("grad_norm", "grad norm {:.3f}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
    )

    def __init__(self, num_steps: int, first_step: int):
        self._num_steps, self._first, self._last = num_steps, first_step, first_step
        self._start = time.monotonic()
        self._report("", "training: steps %d to %d", first_step + 1, num_steps)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step > self._first:
            self._last = step
            shown = "  ".join(text.format(metrics[name]) for name, text in self._texts(metrics))
            seconds = (time.monotonic() - self._start) / (step - self._first) * (self._num_steps - step)
            self._report(shown, "step %d/%d  %s  left %.0f s", step, self._num_steps, shown, seconds)
        evaluation = describe_evaluation(metrics)
        if evaluation:
            after = int(metrics.get("eval/step", step))  # one beside training began after an earlier step
            when = f"after step {after}" if after else "before the first step"
            logger.info("evaluation %s: %s", when, evaluation)

    def _texts(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """What is shown of these metrics: the share of solved ones only where no reward counts."""
        hidden = "reward/solved" if "reward/mean" in metrics else None
        return [(name, text) for name, text in self._SHOWN if name in metrics and name != hidden]

    def close(self) -> None:
        seconds = time.monotonic() - self._start
        if self._last > self._first:
            message = "trained steps %d to %d in %s"
            self._report("", message, self._first + 1, self._last, duration(seconds), ended=True)

    def _report(self, shown: str, message: str, *values: object, ended: bool = False) -> None:
        bar = Bar("step", self._last, self._num_steps, shown, ended)
        logger.info(message, *values, extra={"bar": bar})


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """The held-out results among a step's metrics, in words; empty if there was no evaluation."""
    parts = []
    found = next((name for name in HEADLINES if name in metrics), None)
    if found is not None:
        parts.append(_said(metrics, f"held-out {HEADLINES[found]}", found))
    if "eval/loss" in metrics:
        parts.append(f"held-out loss {metrics['eval/loss']:.4f}")
    for name in metrics:  # of sets with names
        of_set = OF_SET.fullmatch(name)
        if of_set is not None and (of_set[2] == "reward" or f"eval/{of_set[1]}/reward" not in metrics):
            parts.append(_said(metrics, f"{of_set[1]} {of_set[2]}", name))
    return ", ".join(parts)


def _said(metrics: Mapping[str, float], what: str, name: str) -> str:
    if math.isnan(metrics[name]):
        return f"{what} unknown"
    error = metrics.get(f"{name}_se")
    return f"{what} {metrics[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects with a step in a run's JSONL file, none if it is missing. Torn and foreign lines are left out."""
    return [line for raw in _raw_lines(path) if (line := _parse(raw)) is not None]


def evaluated_steps(folder: Path) -> set[int]:
    """The steps after which evaluations beside training began of which a run's metrics tell."""
    told = [line.get("metrics") for line in read_lines(folder / METRICS_NAME)]
    return {metrics["eval/step"] for metrics in told if isinstance(metrics, dict) and "eval/step" in metrics}


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
    line = parse_object(raw)
    return line if line is not None and isinstance(line.get("step"), int) else None
