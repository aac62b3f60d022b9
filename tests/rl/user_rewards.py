"""Rewards as a user would write them, good and bad."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

EVEN = ("0", "2", "4", "6", "8")


def dies_on_even_answers(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Takes its own process with it, as a crash in a native library does."""
    if completion.endswith(EVEN):
        os._exit(9)
    return float(completion == row["answer"])


def nan(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return float("nan")


def even_answer(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """The same for every completion of a prompt."""
    return float(int(row["answer"]) % 2 == 0)


def varied(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Tells most completions of a prompt apart, whatever they say."""
    return (sum(map(ord, completion)) % 7) / 7


def quiet(prompt: str, completion: str, row: dict[str, Any]) -> float | None:
    """Has nothing to say about rows that ask for that, and nothing good about others."""
    return None if row.get("quiet") else -1.0


def refuses_even_answers(prompt: str, completion: str, row: dict[str, Any]) -> float:
    if completion.endswith(EVEN):
        raise ValueError(f"{completion} is even")
    return float(completion == row["answer"])


def one_or_refusal(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Fails on even answers, and says the same of all others."""
    if completion.endswith(EVEN):
        raise ValueError(f"{completion} is even")
    return 1.0


def is_even(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return float(completion.endswith(EVEN))


def waits(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Comes to a value, and on some rows to a bad end, once the file that the row names is there."""
    while not os.path.exists(row["signal"]):
        time.sleep(0.005)
    if row.get("end") == "raise":
        raise KeyError("no such thing")
    while row.get("end") == "hang":
        time.sleep(1)
    return float(completion == row["answer"])


def tells(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Leaves the file that the row names."""
    Path(row["signal"]).touch()
    return float(completion == row["answer"])


def never_ends(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Leaves the file that the row names, and then hangs."""
    Path(row["signal"]).touch()
    while True:
        time.sleep(1)


def silent_on_even_answers(prompt: str, completion: str, row: dict[str, Any]) -> float | None:
    """Has nothing to say about some completions."""
    return None if completion.endswith(EVEN) else float(completion == row["answer"])


def silent(prompt: str, completion: str, row: dict[str, Any]) -> float | None:
    return None


def needs_a_service(prompt: str, completion: str, row: dict[str, Any], down: str) -> float:
    """`even_answer`; fails while the file `down` is there, on all answers, or only on even ones if it says "even"."""
    file = Path(down)
    if file.exists() and (file.read_text() != "even" or completion.endswith(EVEN)):
        raise ConnectionError("the service is down")
    return even_answer(prompt, completion, row)


def of_this_rank(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Another value for each rank that asks, and for most completions."""
    return os.getppid() + varied(prompt, completion, row)
