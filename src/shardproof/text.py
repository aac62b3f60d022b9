"""Text on its way to a terminal: what others wrote, and durations."""

from __future__ import annotations

import logging
import unicodedata

# Cc: control characters, which begin escape sequences. Cs: halves of surrogate pairs, which no terminal can be sent.
# Zl and Zp: line breaks that hide in a line.
_ESCAPED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
# They change the order in which the text around them is shown.
_BIDI_CONTROLS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_KEPT = set("\n\t")


def printable(text: object, limit: int | None = None) -> str:
    """The text with everything escaped that a terminal would obey instead of show; at most `limit` characters."""
    shown = str(text)
    if limit is not None and len(shown) > limit:
        shown = f"{shown[:limit]}..."
    if shown.isprintable() and shown.isascii():
        return shown
    return "".join(_escaped(character) for character in shown)


def duration(seconds: float) -> str:
    """A duration in the units that people use: 0.4 s, 57 s, 12 min 5 s, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class _PrintableRecord(logging.LogRecord):
    """A log record whose message a terminal shows and does not obey."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def sanitise_logging() -> None:
    """Make every log line of this process printable, including those of libraries that quote untrusted files."""
    if logging.getLogRecordFactory() is logging.LogRecord:  # a factory that somebody else set is theirs
        logging.setLogRecordFactory(_PrintableRecord)


def _escaped(character: str) -> str:
    if character in _KEPT:
        return character
    if unicodedata.category(character) in _ESCAPED_CATEGORIES or character in _BIDI_CONTROLS:
        return character.encode("unicode_escape").decode("ascii")
    return character
