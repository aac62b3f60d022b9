"""How built-in rewards check their options: ValueError that names the option."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.errors import did_you_mean


def one_of(key: str, value: object, known: Sequence[str]) -> None:
    """ValueError unless the value is one of those that are known."""
    if value not in known:
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ValueError(f"{key}={value!r} is not one of {', '.join(known)}.{hint}".removesuffix("."))


def number(key: str, value: object, least: float, most: float, whole: bool = False) -> None:
    """ValueError unless the value is a number within its bounds."""
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "a whole number" if whole else "a number"
        raise ValueError(f"{key}={value!r} is not {what} from {least:g} to {most:g}")


def text(key: str, value: object, needed: bool = True) -> None:
    """ValueError unless the value is text, or is not there and need not be."""
    if not isinstance(value, str) and (needed or value is not None):
        raise ValueError(f"{key}={value!r} is not text")
