"""Status for the user: one logging handler that shows a live line on a terminal and dated lines elsewhere.

Code reports what it does through `logging`. Two conventions shape what a terminal shows:
a message that ends in "..." names something that takes time, and gets a spinner until the next message;
a record with `extra={"bar": Bar(...)}` moves a progress bar.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from shardproof.text import duration, printable

_PACKAGE = "shardproof"
LIBRARIES = ("torch", "transformers")  # that log through handlers of their own
_TIME = "%H:%M:%S"
_ONGOING = "..."
_SHOWN_AFTER_S = 0.5  # how long something must have taken for its duration to be shown
_CLEAR_LINE = "\r\x1b[2K"  # another process may have drawn its live line there
_REFRESHES_PER_S = 8
_LABEL = r"(?m)^(Finished|Stopped|Failed|[A-Z]\d{3}|[A-Z][a-z]+:)"  # what the eye looks for in shown lines
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Bar:
    """How far something is that has a known number of parts."""

    unit: str  # "step"
    done: int
    total: int
    text: str = ""  # what is known about the latest part
    ended: bool = False  # no further part comes


class Terminal(logging.Handler):
    """What shows log records to the user, and lines that even `--quiet` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self._adopted: dict[str, list[logging.Handler]] = {}

    def adopt(self, *names: str) -> None:
        """Show the records of libraries that log through handlers of their own, which would tear live lines.

        They make these when they are imported: call it afterwards.
        """
        for name in names:
            library = logging.getLogger(name)
            if library.handlers and library.handlers != [self]:
                self._adopted[name], library.handlers = library.handlers, [self]

    def give_back(self) -> None:
        """Undo `adopt`."""
        for name, handlers in self._adopted.items():
            logging.getLogger(name).handlers = handlers
        self._adopted.clear()

    def show(self, text: str) -> None:
        """Show lines whatever the level is."""
        raise NotImplementedError

    def pause(self) -> None:
        """End what is drawn live, so that another process may draw."""


class Lines(Terminal):
    """A line with the time per record: for files, pipes and ranks that do not own the live line."""

    def __init__(self, stream: TextIO, prefix: str = "", dated: bool = True):
        super().__init__()
        self._stream, self._prefix = stream, prefix
        self._dated = dated
        self._start = _CLEAR_LINE if stream.isatty() else ""

    def emit(self, record: logging.LogRecord) -> None:
        date = f"{time.strftime(_TIME, time.localtime(record.created))} " if self._dated else ""
        self._write(f"{date}{self._prefix}{_severity(record)}{_text(record)}")

    def show(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        # A terminal that is gone must not end a run.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{self._start}{text}\n")
            self._stream.flush()


class Live(Terminal):
    """A terminal: finished lines scroll up, under them a progress bar, a spinner, or both."""

    def __init__(self, stream: TextIO):
        super().__init__()
        from rich.console import Console
        from rich.spinner import Spinner

        self._stream = _Lenient(stream)
        self._console = Console(file=self._stream, highlight=False)  # type: ignore[arg-type]
        self._spinner = Spinner("dots")
        self._live: Any = None
        self._bar: Any = None
        self._ongoing: tuple[str, float] | None = None  # what takes time now, since when

    def emit(self, record: logging.LogRecord) -> None:
        text, bar = _text(record), getattr(record, "bar", None)
        self._finish_ongoing()
        if isinstance(bar, Bar):
            self._draw_bar(bar)
            if not bar.ended:
                return
            self.pause()
        if record.levelno >= logging.WARNING:
            self._print(f"{_severity(record)}{text}", "red" if record.levelno >= logging.ERROR else "yellow")
        elif text.endswith(_ONGOING):
            self._ongoing = (text.removesuffix(_ONGOING).rstrip(), time.monotonic())
            self._draw()
        else:
            self._print(text)

    def show(self, text: str) -> None:
        from rich.text import Text

        self.pause()
        shown = Text(text)
        shown.highlight_regex(_LABEL, "bold")
        self._console.print(shown, soft_wrap=True)  # commands and paths in it can be copied whole

    def pause(self) -> None:
        self._finish_ongoing()
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._bar = None
        self._stream.write(_SHOW_CURSOR)  # a rank that was killed may have hidden it
        self._stream.flush()

    def close(self) -> None:
        self.pause()
        super().close()

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style), soft_wrap=True)

    def _finish_ongoing(self) -> None:
        if self._ongoing is not None:
            (text, since), self._ongoing = self._ongoing, None
            seconds = time.monotonic() - since
            if seconds >= _SHOWN_AFTER_S:
                self._print(f"{text}  ({duration(seconds)})", "dim")
            elif self._bar is None:  # between two steps what was quick leaves no line
                self._print(text, "dim")

    def _draw_bar(self, bar: Bar) -> None:
        if self._bar is None:
            self._bar = _make_bar(self._console)
            self._bar.add_task(bar.text, total=bar.total, completed=bar.done, unit=bar.unit)
        description = {"description": bar.text} if bar.text else {}
        self._bar.update(self._bar.task_ids[0], completed=bar.done, **description)
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            from rich import live

            # What other code of this process prints is shown above the live lines, and does not tear them.
            self._live = live.Live(
                console=self._console, get_renderable=self._render, refresh_per_second=_REFRESHES_PER_S
            )
            self._live.start()
        self._live.transient = self._bar is None  # the last state of a bar stays
        self._live.refresh()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [] if self._bar is None else [self._bar.get_renderable()]
        ongoing = self._ongoing
        if ongoing is not None:
            line = f"{ongoing[0]}  {time.monotonic() - ongoing[1]:.0f} s"
            self._spinner.update(text=Text(line, no_wrap=True, overflow="ellipsis"))
            parts.append(self._spinner)
        return Group(*parts)


def _make_bar(console: Any) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    count = TextColumn("{task.fields[unit]} {task.completed:.0f}/{task.total:.0f}")
    left = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
    one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    text = TextColumn("{task.description}", table_column=one_line)
    return Progress(count, BarColumn(bar_width=20), left, text, console=console, expand=True)


class _Lenient:
    """A stream whose errors are passed over: a terminal that is gone must not end a run."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _severity(record: logging.LogRecord) -> str:
    if record.levelno < logging.WARNING:
        return ""
    source = "" if record.name.split(".")[0] == _PACKAGE else f"{record.name}: "
    return f"{record.levelname.lower()}: {source}"


def _text(record: logging.LogRecord) -> str:
    return printable(record.getMessage())


@contextlib.contextmanager
def attached(quiet: bool = False, rank: int = 0, handler: Terminal | None = None) -> Iterator[Terminal]:
    """Show this process's log records on stderr inside the block, or through `handler`.

    Ranks above 0 show warnings alone, with their number, since rank 0 tells what all of them do.
    """
    if sys.stderr is None:  # it was closed by whoever started this process; libraries write there too
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    is_first = rank == 0
    if handler is None and is_first and sys.stderr.isatty():
        handler = Live(sys.stderr)
    elif handler is None:
        prefix = "" if is_first else f"rank {rank}: "
        handler = Lines(sys.stderr, prefix, dated=not sys.stderr.isatty())
    package, root = logging.getLogger(_PACKAGE), logging.getLogger()
    before = package.level
    package.setLevel(logging.WARNING if quiet or not is_first else logging.INFO)
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        handler.give_back()
        package.setLevel(before)
        handler.close()
