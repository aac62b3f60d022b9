"""Where a thread is, in one line: the collective it waits in and the lines that led to it."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

MAX_LINES = 5
PACKAGE = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)
STANDARD = str(Path(os.__file__).parent)  # Python's own library
_OWN_FILES = ("stacks.py", "deadline.py", "messages.py", "contextlib.py", "threading.py", "c10d_logger.py")

Place = tuple[str, int, str]  # file, line, function


def place_of_thread(ident: int) -> str:
    """Where a thread is; where autograd's is in a collective and it is not, where autograd's is."""
    frames = sys._current_frames()
    others = [frame for other, frame in frames.items() if other not in (ident, threading.get_ident())]
    stacks = [list(_walk(frames[ident]))] if ident in frames else []
    stacks += [list(_walk(frame)) for frame in others]
    return describe(
        next((stack for stack in stacks if _collective(stack)), stacks[0] if ident in frames else [])
    )


def place_of_error(error: BaseException) -> str:
    """Where an error was raised, and the lines that led there."""
    entries = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.endswith(_OWN_FILES)
    ]
    places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in reversed(entries)]
    return describe(places + (list(_walk(entries[0][0].f_back)) if entries else []))


def _walk(frame: FrameType | None) -> Iterator[Place]:
    """The frames of a thread, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _collective(places: list[Place]) -> str | None:
    """The public torch.distributed function that the stack is in."""
    for file, _, function in places:
        if file.endswith("distributed_c10d.py") and not function.startswith("_"):
            return function
    return None


def describe(places: list[Place]) -> str:
    """`all_gather: gather_rows (dist/collectives.py:61) < agree (train/guard.py:70) < main (train.py:12)`."""
    visible = [p for p in places if not p[0].startswith((TORCH, "<")) and not p[0].endswith(_OWN_FILES)]
    lines = [f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, name in visible]
    # The innermost lines tell which collective it is; the first line outside of any package, which call of the user.
    outside = [
        number
        for number, (file, _, _) in enumerate(visible)
        if not file.startswith((PACKAGE, STANDARD)) and "site-packages" not in file
    ]
    shown = lines[:MAX_LINES]
    if outside and outside[0] >= MAX_LINES:
        shown = [*lines[: MAX_LINES - 1], lines[outside[0]]]
    return f"{_collective(places) or 'no collective'}: {' < '.join(shown) or 'unknown lines'}"
