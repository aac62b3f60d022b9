"""Text on its way to a terminal or a file: what others wrote, durations, and what must stay secret."""

from __future__ import annotations

import logging
import re
import unicodedata
from typing import Any

# Cc: control characters, which begin escape sequences. Cs: halves of surrogate pairs, which no terminal can be sent.
# Zl and Zp: line breaks that hide in a line.
_ESCAPED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
# They change the order in which the text around them is shown.
_BIDI_CONTROLS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_KEPT = set("\n\t")
_SECRET = re.compile(r"(^|[_.-])(api_?key|token|password|secret|rdzv_?id)$", re.IGNORECASE)
_INSIDE = re.compile(
    r"((?:api[_-]?key|token|password|secret)[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,}\"']+)", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # of an address
_HIDDEN = "..."


def printable(text: object, limit: int | None = None) -> str:
    """The text with everything escaped that a terminal would obey instead of show; at most `limit` characters."""
    shown = str(text)
    if limit is not None and len(shown) > limit:
        shown = f"{shown[:limit]}..."
    if shown.isprintable() and shown.isascii():
        return shown
    return "".join(_escaped(character) for character in shown)


def shortened(text: str, limit: int) -> str:
    """The text, or its first `limit` characters and how many more there are."""
    rest = len(text) - limit
    return text if rest <= 0 else f"{text[:limit]} … and {rest} more characters"


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


def without_secrets(value: Any, name: str = "") -> Any:
    """A setting, or a list of arguments, with passwords, tokens and logins in addresses replaced by dots."""
    if isinstance(value, dict):
        return {key: without_secrets(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        names = ["", *(each if isinstance(each, str) and each.startswith("-") else "" for each in value)]
        return [without_secrets(each, before) for each, before in zip(value, names)]
    if not isinstance(value, str) or not value:
        return value
    if _is_secret(name):
        return _HIDDEN
    key, equals, _ = value.partition("=")
    if equals and _is_secret(key):
        return f"{key}={_HIDDEN}"
    return _INSIDE.sub(rf"\1{_HIDDEN}", _LOGIN.sub(f"{_HIDDEN}@", value))


def _is_secret(name: str) -> bool:
    return _SECRET.search(name.replace("-", "_")) is not None


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
