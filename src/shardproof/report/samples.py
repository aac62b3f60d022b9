"""Samples by step and group, as many as fit into a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.report.ledger import cut
from shardproof.report.read import Record, finite, step_of

MAX_STEPS = 200  # that the slider offers
MAX_CHARACTERS = 1_500_000  # of all samples together
MAX_TEXT = 4000  # of one prompt or completion


def samples_of(samples: Sequence[Record]) -> dict[str, Any]:
    """The samples of the first and last step and of steps spread evenly between them."""
    by_step: dict[int, list[Record]] = {}
    for sample in samples:
        step = step_of(sample)
        by_step.setdefault(-1 if step is None else step, []).append(sample)
    steps = sorted(by_step)
    num = min(MAX_STEPS, len(steps))
    sizes = {step: sum(map(_size, rows)) for step, rows in by_step.items()}
    shown = _spread(steps, num)
    while num > 2 and sum(sizes[step] for step in shown) > MAX_CHARACTERS:
        num = max(2, num * 3 // 4)
        shown = _spread(steps, num)
    return {
        "num": len(samples),
        "num_steps": len(steps),
        "steps": [{"step": step, "groups": _groups(by_step[step])} for step in shown],
    }


def _spread(steps: Sequence[int], num: int) -> list[int]:
    """`num` of the steps at even distances, with the first and the last."""
    if num >= len(steps):
        return list(steps)
    return [steps[place * (len(steps) - 1) // (num - 1)] for place in range(num)]


def _size(sample: Record) -> int:
    return sum(min(MAX_TEXT, len(str(sample.get(key, "")))) for key in ("prompt", "completion")) + 100


def _groups(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """The completions of one prompt together. Rows of earlier versions name no group: equal prompts are one."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        key = cut(row["group"], 100) if "group" in row else "prompt " + cut(row.get("prompt", ""))
        group = groups.setdefault(
            key,
            {"prompt": cut(row.get("prompt", ""), MAX_TEXT), "answer": None, "rewards": [], "samples": []},
        )
        if row.get("answer") is not None:
            group["answer"] = cut(row["answer"], 1000)
        if isinstance(row.get("group_rewards"), list):
            group["rewards"] = [finite(value) for value in row["group_rewards"][:256]]
        group["samples"].append(_sample(row))
    return list(groups.values())


def _sample(row: Record) -> dict[str, Any]:
    parts = row.get("rewards")
    named = parts.items() if isinstance(parts, dict) else ()
    return {
        "completion": cut(row.get("completion", ""), MAX_TEXT),
        "reward": finite(row.get("reward")),
        "parts": [[cut(name, 100), finite(value)] for name, value in list(named)[:20]],
        "advantage": finite(row.get("advantage")),
    }
