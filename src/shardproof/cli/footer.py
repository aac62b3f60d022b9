"""What `shardproof train` says at its end: how the run ended, where the time went, what to look at and do next.

All of it is read from the run's folder, so that it can be said however the ranks ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.folder_lock import claim_is_dead
from shardproof.report.page import PAGE_NAME, write_report
from shardproof.report.read import EVENTS_NAME, FACTS_NAME, HEADLINES, METRICS_NAME
from shardproof.text import duration, printable

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

_PARTS = ("rollout", "update", "sync", "evaluation")  # metrics of steps, as time/...

_STEP = "step-"  # and the number: a checkpoint's folder
_MIN_SHARE = 0.005  # of the time; what took less is not shown


@dataclass
class Part:
    """One start of a run, as its launcher sees it."""

    recipe: Recipe
    first_step: int = 0  # the number of steps that were taken before
    started: float = field(default_factory=time.time)

    @classmethod
    def begin(cls, recipe: Recipe, from_step: int | None = None) -> Part:
        """The part of a run that starts now, from this step's checkpoint or the newest."""
        if from_step is None:
            saved = _checkpoints(Path(recipe.output.folder))
            from_step = int(saved[-1].name.removeprefix(_STEP)) if saved else 0
        return cls(recipe, from_step)

    def footer(self, interrupted: bool = False) -> list[str]:
        """The lines to end with, after a signal or not; few if the run never came to own its folder."""
        folder, facts = Path(self.recipe.output.folder), self._facts()
        if facts is None:
            return (
                [f"Stopped before the run began. Next: {_next_step('stopped', False)}"] if interrupted else []
            )
        status, step = facts.get("status"), facts.get("step", 0)
        if status == "running":  # rank 0 had no time to write how it ended
            status = "stopped" if interrupted else "failed"
            step = max((line["step"] for line in _read(self.recipe, METRICS_NAME)), default=step)
            _write_page(folder)
        lines = [_outcome(folder, status, step, self.recipe)]
        total = time.time() - self.started
        spent = self._times(total)
        if spent:
            shares = (
                f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in spent.items()
            )
            lines.append(f"Time:    {duration(total)}: {', '.join(shares)}")
        if (folder / PAGE_NAME).exists():
            lines.append(f"Report:  {folder / PAGE_NAME}")
        if status == "finished" and (folder / "model").is_dir():
            lines.append(f"Model:   {folder / 'model'}")
            if (folder / "adapter").is_dir():
                lines.append(f"Adapter: {folder / 'adapter'}")
        return [
            printable(line) for line in [*lines, f"Next:    {_next_step(status, bool(_checkpoints(folder)))}"]
        ]

    def _facts(self) -> dict[str, Any] | None:
        """What the run says of itself, if this start wrote it."""
        path = Path(self.recipe.output.folder) / FACTS_NAME
        try:
            facts = json.loads(path.read_bytes())
            is_ours = path.stat().st_mtime >= self.started - 1  # file systems round times
        except (OSError, ValueError):
            return None
        return facts if is_ours and isinstance(facts, dict) else None

    def _times(self, total: float) -> dict[str, float]:
        """Seconds by what they were spent on, in this part of the run, the longest first. Small shares are left out."""
        rows = [line for line in _read(self.recipe, METRICS_NAME) if line["step"] > self.first_step]
        if not rows:
            return {}
        metrics = [row.get("metrics") or {} for row in rows]
        spent = {name: sum(_number(row.get(f"time/{name}")) for row in metrics) for name in _PARTS}
        proofs = [line for line in _read(self.recipe, EVENTS_NAME) if line.get("kind") == "proof"]
        for name, proof in (("checkpoints", "checkpoint"), ("model", "export")):
            mine = (line for line in proofs if line.get("proof") == proof and line["step"] > self.first_step)
            spent[name] = sum(_number(line.get("seconds")) for line in mine)
        spent["start and other"] = max(total - sum(spent.values()), 0.0)
        longest_first = sorted(spent.items(), key=lambda item: -item[1])
        return {name: seconds for name, seconds in longest_first if seconds >= _MIN_SHARE * total}


def _write_page(folder: Path) -> None:
    """Write the page that a killed rank 0 could not write; it says that the run was killed."""
    if claim_is_dead(folder):
        with contextlib.suppress(Exception):  # a full disk: the footer is worth more
            write_report(folder)


def _outcome(folder: Path, status: Any, step: int, recipe: Recipe) -> str:
    if status == "finished":
        return f"Finished {step} steps.{_learned(recipe)}"
    how = "Stopped" if status == "stopped" else "Failed"
    when = f"after step {step}" if step else "before the first step was complete"
    saved = _checkpoints(folder)
    return f"{how} {when}. Last checkpoint: {saved[-1] if saved else 'none'}"


def _checkpoints(folder: Path) -> list[Path]:
    """The folders of a run's checkpoints, the newest last."""
    return sorted((folder / "checkpoints").glob(f"{_STEP}[0-9]*"))


def _learned(recipe: Recipe) -> str:
    """The first and the last evaluation of the run, in words."""
    found = [line.get("metrics") or {} for line in _read(recipe, METRICS_NAME)]
    for name, called in HEADLINES.items():
        rows = [row for row in found if isinstance(row.get(name), float)]
        if len(rows) < 2:
            continue
        first, last = (
            f"{row[name]:.3f}" + (f" ± {row[f'{name}_se']:.3f}" if f"{name}_se" in row else "")
            for row in (rows[0], rows[-1])
        )
        return f" Held-out {called}: {first} at first, {last} at the end."
    return ""


def _next_step(status: Any, is_saved: bool) -> str:
    if status == "finished":
        return "open the report; to train longer, raise train.steps and rerun the same command"
    rerun = f"rerun the same command{' to resume' if is_saved else ''}"
    if status == "stopped":
        return rerun
    return f"fix what the message above names (`shardproof explain CODE` says more), then {rerun}"


def _read(recipe: Recipe, name: str) -> Iterable[dict[str, Any]]:
    from shardproof.rl.loggers import read_lines

    try:
        return read_lines(Path(recipe.output.folder) / name)
    except (OSError, ValueError):
        return []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
