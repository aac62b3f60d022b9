"""Conditions of a shell script, as far as its variables decide them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from shardproof.config.imported.shell_values import Values, is_unknown

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}


def condition(words: Sequence[str], values: Values) -> bool | None:
    """Whether `[ ... ]`, `[[ ... ]]`, `test` or `(( ... ))` is true; None if only running the script would tell."""
    before, values.unset_is_empty = values.unset_is_empty, True
    try:
        if words[0].startswith("(("):
            number = values.computed(words[0][2:-2])
            return None if number is None else bool(number)
        ends = {"[": "]", "[[": "]]"}.get(words[0])
        inner = list(words[1:-1]) if ends is not None and words[-1] == ends else list(words[1:])
        return _any(inner, values, by_pattern=words[0] == "[[")
    finally:
        values.unset_is_empty = before


def _any(words: list[str], values: Values, *, by_pattern: bool) -> bool | None:
    for sign, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        place = _place(words, sign)
        if place is not None:
            sides = [
                _any(words[:place], values, by_pattern=by_pattern),
                _any(words[place + 1 :], values, by_pattern=by_pattern),
            ]
            return decides if decides in sides else None if None in sides else not decides
    if words and words[0] == "!":
        inner = _any(words[1:], values, by_pattern=by_pattern)
        return None if inner is None else not inner
    if len(words) > 1 and words[0] in ("(", "\\(") and words[-1] in (")", "\\)"):
        return _any(words[1:-1], values, by_pattern=by_pattern)
    return _one(words, values, by_pattern=by_pattern)


def _place(words: Sequence[str], sign: str) -> int | None:
    """Where a sign stands that is in no parentheses."""
    depth = 0
    for place, word in enumerate(words):
        depth += (word in ("(", "\\(")) - (word in (")", "\\)"))
        if word == sign and not depth:
            return place
    return None


def _one(words: list[str], values: Values, *, by_pattern: bool) -> bool | None:
    texts = [values.text(word) for word in words]
    if any(map(is_unknown, texts)):
        return None
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[0] == "-n") == bool(texts[1])
    if len(texts) != 3:
        return None
    one, sign, other = texts
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(one, other) if by_pattern else one == other
    if sign == "!=":
        return not fnmatch.fnmatchcase(one, other) if by_pattern else one != other
    if sign in _NUMBERS:
        try:
            return _NUMBERS[sign](int(one or 0), int(other or 0))
        except ValueError:
            return None
    return None
