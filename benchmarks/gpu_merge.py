"""How benchmarks/gpu.py puts rows that another run measured beside its own."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_workload import (
    DECODE,
    DECODE_MOE,
    DENSE,
    EXACT,
    FIRST,
    LONG,
    MEMORY,
    MOE,
    PROMPTS,
    RL,
    RL_TAILS,
    ROWS,
    TAILS,
)

_UPDATE = ("sequences", "lengths")
_STEP = ("prompt", "steps", "prompts", "group")
# What two runs must have in common for a part's rows to stand in one table.
WORKLOAD: dict[str, tuple[str, ...]] = {
    ROWS: ("prompt", "row_steps"),
    TAILS: ("prompt", "tail_mean", "tail_longest"),
    PROMPTS: (),
    DECODE: ("rows", "prompt", "steps"),
    DECODE_MOE: ("rows", "prompt", "steps"),
    DENSE: _UPDATE,
    MOE: _UPDATE,
    LONG: (),
    RL: _STEP,
    RL_TAILS: ("prompt", "group", "tail_prompts", "tail_mean", "tail_longest"),
    EXACT: _STEP,
    FIRST: _STEP,
    MEMORY: (),
}


class CannotMerge(Exception):
    """Two runs measured different things."""


def take_over(other: dict[str, Any], results: dict[str, Any], file: str) -> None:
    """Put the rows of another run that are not among the results there, and under "merged" where they come from."""
    taken: dict[str, list[str]] = {}
    for part, needed in WORKLOAD.items():
        rows = other.get(part, {})
        missing = {name: row for name, row in rows.items() if name not in results.get(part, {})}
        if not missing:
            continue
        _check(part, needed, other["settings"], results["settings"], file)
        results.setdefault(part, {}).update(missing)
        taken[part] = list(missing)
    kept = ("environment", "settings", "machine", "seconds")
    source = {key: other[key] for key in kept if key in other}
    results["merged"].append({"file": file, "rows": taken, **source})


def _check(
    part: str, needed: tuple[str, ...], theirs: dict[str, Any], ours: dict[str, Any], file: str
) -> None:
    for key in ("tiny", "device", *needed):
        if theirs[key] != ours[key]:
            message = f"{file} measured {part!r} with {key} = {theirs[key]}, this run with {ours[key]}."
            raise CannotMerge(f"{message} Fix: give both the same --{key.replace('_', '-')}.")
