"""Samples by step and group, as many as fit into a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.report.ledger import cut
from shardproof.report.read import Record, finite, step_of

MAX_STEPS = 200  # that the slider offers
MAX_CHARACTERS = 1_500_000  # of all samples together
MAX_TEXT = 4000  # of one prompt or completion
MAX_PART = 2000  # of one segment, call or answer of a conversation
MAX_SEGMENTS = 150  # of one conversation
MAX_CALLS = 16  # of one turn
MAX_PIECES = 32  # of one turn, by versions of the weights


def samples_of(samples: Sequence[Record], versions: Mapping[int, float] | None = None) -> dict[str, Any]:
    """The samples of the first and last step and of steps spread evenly between them.

    `versions` are those of the policy at the beginning of a step, where they are known.
    """
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
        "steps": [
            {"step": step, "version": (versions or {}).get(step), "groups": _groups(by_step[step])}
            for step in shown
        ],
    }


def _spread(steps: Sequence[int], num: int) -> list[int]:
    """`num` of the steps at even distances, with the first and the last."""
    if num >= len(steps):
        return list(steps)
    return [steps[place * (len(steps) - 1) // (num - 1)] for place in range(num)]


def _size(sample: Record) -> int:
    """About how many characters a sample takes in the page."""
    segments = _dicts(sample.get("segments"), MAX_SEGMENTS)
    if segments:
        return 100 + sum(100 + min(MAX_PART, len(str(segment.get("text", "")))) for segment in segments)
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
    sample: dict[str, Any] = {
        "completion": cut(row.get("completion", ""), MAX_TEXT),
        "reward": finite(row.get("reward")),
        "parts": [[cut(name, 100), finite(value)] for name, value in list(named)[:20]],
        "advantage": finite(row.get("advantage")),
        **_origin(row),
    }
    segments = _dicts(row.get("segments"))
    if segments:
        sample |= {
            "completion": "",  # the segments say it
            "ended": cut(row.get("ended", ""), 100),
            "error": cut(row.get("error", ""), MAX_PART),
            "segments": [_segment(segment) for segment in segments[:MAX_SEGMENTS]],
            "left_out": max(0, len(segments) - MAX_SEGMENTS),
        }
    return sample


def _origin(row: Record) -> dict[str, Any]:
    """Which weights and which replica drew a sample, and for which step, where that is known."""
    versions = row.get("versions")
    found = {
        "versions": [
            [finite(part[0]), finite(part[1])]
            for part in (versions[:MAX_PIECES] if isinstance(versions, list) else ())
            if isinstance(part, list) and len(part) == 2
        ],
        "replica": cut(row["replica"], 100) if row.get("replica") else None,
        "drawn_for": finite(row.get("drawn_for")),
        "pieces": _pieces(row),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def _pieces(row: Record) -> list[dict[str, Any]]:
    """The parts of a turn that different weights drew."""
    return [
        {
            "version": finite(piece.get("version")),
            "tokens": finite(piece.get("tokens")),
            "text": cut(piece.get("text", ""), MAX_PART),
        }
        for piece in _dicts(row.get("pieces"), MAX_PIECES)
    ]


def _segment(row: Record) -> dict[str, Any]:
    """A segment with what is known of it; what is missing is left out."""
    malformed = row.get("malformed")
    found = {
        "author": cut(row.get("author", ""), 40),
        "text": cut(row.get("text", ""), MAX_PART),
        "trained": row.get("trained") is True,
        **{
            key: finite(row.get(key))
            for key in ("tokens", "turn", "sequence", "version", "reward", "advantage")
        },
        "pieces": _pieces(row),
        "calls": [
            {
                "name": cut(call.get("name", ""), 200),
                "arguments": cut(call.get("arguments", ""), MAX_PART),
                "answer": cut(call["answer"], MAX_PART) if "answer" in call else None,
                "failed": call.get("failed") is True,
            }
            for call in _dicts(row.get("calls"), MAX_CALLS)
        ],
        "malformed": [cut(why, MAX_PART) for why in malformed[:MAX_CALLS]]
        if isinstance(malformed, list)
        else [],
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def _dicts(rows: Any, limit: int | None = None) -> list[Record]:
    return [row for row in rows[:limit] if isinstance(row, dict)] if isinstance(rows, list) else []
