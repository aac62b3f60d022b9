"""Labels of weights on vLLM servers: `{run}/{version}`, and `{run}/{version}/pending` while a sync is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def label_of(run: str, version: int) -> str:
    """The label of a version that was committed."""
    return f"{run}/{version}"


def version_of(run: str, label: object) -> int:
    """The version that a label of this run stands for; -1 for what is pending, another run's, or no label."""
    prefix, _, number = str(label).rpartition("/")
    return int(number) if prefix == run and number.isascii() and number.isdigit() else -1


def label_of_workers(rows: Sequence[dict[str, Any]]) -> tuple[str, int | None]:
    """What all workers of a server say: the label ("" if they differ or have none), and how often it was set.

    For versions of vLLM that have no place for a label; None where the workers do not count.
    """
    labels = {(row["label"], row.get("marks")) for row in rows}
    label, marks = labels.pop() if len(labels) == 1 else (None, None)
    return label or "", marks
