"""What a run folder holds, read as it stands: the run may still write to it, and a kill may have torn a line."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.bounds import within
from shardproof.errors import did_you_mean, fail
from shardproof.folder_lock import claim_is_dead

METRICS_NAME, SAMPLES_NAME, EVENTS_NAME = "metrics.jsonl", "samples.jsonl", "events.jsonl"
EARLIER_NAME = "events.superseded.jsonl"
CONFIG_NAME, FACTS_NAME = "config.json", "run.json"
# What an evaluation comes down to: the first of these that it measured, and what it is called.
HEADLINES = {"eval/reward": "reward", "eval/pass@1": "pass@1", "eval/reward/accuracy": "accuracy"}
OF_SET = re.compile(r"eval/([^/]+)/(reward|pass@1)")  # a headline of a named set
EVALUATED = "eval/step"  # the step after which an evaluation began, where training went on meanwhile

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    name: str
    steps: list[int]  # of the metrics, in order
    times: list[float | None]  # seconds since the start of the run, at each of the steps
    metrics: list[dict[str, float | None]]  # at each of the steps; None is a value that is not finite
    samples: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    earlier: list[Record] = field(default_factory=list)  # events of steps that the run took again
    config: Record = field(default_factory=dict)  # the resolved recipe
    facts: Record = field(default_factory=dict)  # run.json: the machine, the versions, how the run ended
    notes: list[str] = field(default_factory=list)  # what could not be read
    age_s: float | None = None  # since the newest line was written
    was_killed: bool = False  # the process that wrote here is gone, and did not say how it ended


class LineFile:
    """A JSONL file that may still grow. Each `read` parses only the lines that are new."""

    def __init__(self, path: Path, clean: Callable[[Record], Record | None] = lambda record: record):
        self.path, self._clean = path, clean
        self._forget(None)

    def _forget(self, identity: tuple[int, int] | None) -> None:
        self._identity, self._offset = identity, 0
        self._records: list[Record] = []
        self._num_torn = 0

    def read(self, notes: list[str]) -> list[Record]:
        """The objects in the file so far, none if it is missing; lines that cannot be read are counted in the notes."""
        if not self.path.is_file():
            self._forget(None)
            return []
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            # A resumed run replaces the file by one without the lines that it writes again.
            if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset:
                self._forget((found.st_dev, found.st_ino))
            file.seek(self._offset)
            raw = file.read()
        # Split at line feeds alone: a completion may hold U+2028.
        *lines, last = raw.split(b"\n")
        self._offset += len(raw) - len(last)
        self._num_torn += self._take(lines, self._records)
        unfinished: list[Record] = []
        # A killed run tears the last line of a file; that must not hide the others.
        if num_torn := self._num_torn + self._take([last], unfinished):
            notes.append(f"{self.path.name}: {num_torn} unreadable line{'s' * (num_torn > 1)} left out.")
        return self._records + unfinished

    def _take(self, lines: Iterable[bytes], records: list[Record]) -> int:
        num_torn = 0
        for line in lines:
            if not line.strip():
                continue
            record = parse_object(line.decode("utf-8", "replace"))
            if record is None:
                num_torn += 1
            elif (cleaned := self._clean(record)) is not None:
                records.append(cleaned)
        return num_torn


class RunReader:
    """Reads one run folder, as often as asked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics = LineFile(folder / METRICS_NAME, _clean_metrics)
        self._samples = LineFile(folder / SAMPLES_NAME)
        self._events = LineFile(folder / EVENTS_NAME)
        self._earlier = LineFile(folder / EARLIER_NAME)

    def state(self) -> str:
        """A text that changes whenever one of the files does, or the process that writes them is gone."""
        names = (METRICS_NAME, SAMPLES_NAME, EVENTS_NAME, CONFIG_NAME, FACTS_NAME)
        return " ".join([*(_stamp(self.folder / name) for name in names), str(claim_is_dead(self.folder))])

    def age_s(self, now: float) -> float | None:
        """The seconds since the newest line was written; None if there is none."""
        written = [_modified(self.folder / name) for name in (METRICS_NAME, EVENTS_NAME, FACTS_NAME)]
        newest = max((each for each in written if each is not None), default=None)
        return None if newest is None else max(0.0, now - newest)

    def read(self, now: float | None = None) -> Run:
        """The folder's content. `now` is the time that ages are measured against; None leaves the age out."""
        notes: list[str] = []
        steps = _merge_steps(self._metrics.read(notes))
        return Run(
            self.folder.resolve().name,
            [step["step"] for step in steps],
            [step["time"] for step in steps],
            [step["metrics"] for step in steps],
            self._samples.read(notes),
            self._events.read(notes),
            self._earlier.read([]),  # torn lines are moved there
            _read_object(self.folder / CONFIG_NAME, notes),
            _read_object(self.folder / FACTS_NAME, notes),
            notes,
            None if now is None else self.age_s(now),
            claim_is_dead(self.folder),
        )


def require_run_folder(folder: Path) -> Path:
    """The folder if a run has written there, else a ConfigError with what to do."""
    if any((folder / name).is_file() for name in (METRICS_NAME, EVENTS_NAME, CONFIG_NAME, FACTS_NAME)):
        return folder
    if not folder.is_dir():
        if folder.exists():
            message = f"{folder} is a file, not a run folder."
            raise fail("C001", "report", message, fix=f"pass its folder, {folder.parent}")
        near = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, near)
        raise fail("C001", "report", f"{folder} does not exist.{hint}", fix="pass a run's output.folder")
    inside = sorted(path.name for path in folder.iterdir() if (path / METRICS_NAME).is_file())
    hint = f" It contains runs: {', '.join(inside[:5])}{', ...' * (len(inside) > 5)}." if inside else ""
    message = f"{folder} is not a run folder: it has no {METRICS_NAME} and no {CONFIG_NAME}.{hint}"
    fix = f"pass {folder / inside[0]}" if inside else "pass a run's output.folder"
    raise fail("C001", "report", message, fix=fix)


def finite(value: Any) -> float | None:
    """The value as a float, or None if it is no finite number."""
    if type(value) is float:  # most values of a long run
        return value if math.isfinite(value) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)  # and an int of any size
    return float(value) if is_number and within(abs(value), sys.float_info.max) else None


def step_of(record: Record) -> int | None:
    """The step that a record names, if it is one that a run can have."""
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**53 else None


def dig(value: Any, *keys: str) -> Any:
    """What stands under the keys of nested objects, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def parse_object(text: str | bytes) -> Record | None:
    """The JSON object that a text holds, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _clean_metrics(record: Record) -> Record | None:
    step, values = step_of(record), record.get("metrics")
    if step is None or not isinstance(values, dict):
        return None
    metrics = {str(name): finite(value) for name, value in values.items()}
    return {"step": step, "time": finite(record.get("time")), "metrics": metrics}


def _merge_steps(records: Iterable[Record]) -> list[Record]:
    """One record per step, in order. A resumed run writes some steps again, and the later line counts."""
    steps: dict[int, Record] = {}
    for record in (part for line in records for part in _by_step(line)):
        step = record["step"]
        if (earlier := steps.get(step)) is not None:
            time = earlier["time"] if record["time"] is None else record["time"]
            record = {"step": step, "time": time, "metrics": earlier["metrics"] | record["metrics"]}
        steps[step] = record
    return [steps[step] for step in sorted(steps)]


def _by_step(record: Record) -> list[Record]:
    """A record, with the numbers of an evaluation that ran beside training at the step after which it began."""
    metrics = record["metrics"]
    begun = metrics.get(EVALUATED)
    if begun is None or not 0 <= begun < record["step"]:
        return [record]
    evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    rest = {name: value for name, value in metrics.items() if name not in evaluated}
    del evaluated[EVALUATED]
    return [{"step": int(begun), "time": None, "metrics": evaluated}, {**record, "metrics": rest}]


def _read_object(path: Path, notes: list[str]) -> Record:
    found = parse_object(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}
    if found is None:
        notes.append(f"{path.name} cannot be read.")
    return found or {}


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
