"""Rewards as a user would write them, good and bad."""

from __future__ import annotations

import os
from typing import Any


def dies_on_long_answers(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Takes its own process with it, as a crash in a native library does."""
    if len(completion) >= 2:
        os._exit(9)
    return float(completion == row["answer"])


def nan(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return float("nan")
