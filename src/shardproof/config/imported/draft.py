"""A recipe in the making: settings with where each comes from, what is still to be filled in, and what is left over."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections from dotted keys."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *names, last = key.split(".")
        section = sections
        for name in names:
            section = section.setdefault(name, {})
        section[last] = value
    return sections


@dataclass
class Foreign:
    """The settings of another library by dotted key, and which of them were looked at."""

    values: dict[str, Any]
    seen: set[str] = field(default_factory=set)
    last: str = ""  # that the config sets and that was looked at last

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the library's own default; null stands for the default. A section is a table."""
        self.seen.add(key)
        if self.has(key):
            self.last = key
        value = self.values.get(key)
        if value is None:
            value = nested(self.section(key)) or None
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the config sets the key."""
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the config sets the key to nothing, where that is not the library's default."""
        self.seen.add(key)
        return key in self.values and self.values[key] is None

    def either(self, *keys: str) -> str:
        """The first of a setting's names that the config sets; its name of today if it sets none."""
        return next(filter(self.has, keys), keys[0])

    def section(self, prefix: str) -> dict[str, Any]:
        """The settings below a key, which count as looked at."""
        found = {key: value for key, value in self.values.items() if key.startswith(f"{prefix}.")}
        self.seen |= found.keys()
        return {key.removeprefix(f"{prefix}."): value for key, value in found.items()}

    @property
    def left(self) -> dict[str, Any]:
        """What nobody has looked at."""
        return {
            key: value for key, value in self.values.items() if key not in self.seen and value is not None
        }


def _switched_off(values: Mapping[str, Any]) -> list[str]:
    """The beginnings of keys in sections whose own switch is off."""
    ends = (".enable", ".enabled")
    return [
        f"{key.rpartition('.')[0]}." for key, value in values.items() if key.endswith(ends) and value is False
    ]


@dataclass
class Draft:
    """What a recipe is made of."""

    values: dict[str, Any] = field(default_factory=dict)  # by dotted key
    origins: dict[str, str] = field(default_factory=dict)  # the foreign setting behind a value
    to_fill: dict[str, str] = field(
        default_factory=dict
    )  # keys whose value is a placeholder, and what belongs there
    gaps: dict[str, str] = field(
        default_factory=dict
    )  # foreign settings without a counterpart, and what that means
    unneeded: dict[str, str] = field(
        default_factory=dict
    )  # foreign settings that have no meaning here, and why
    idle: list[str] = field(default_factory=list)  # foreign settings without which the recipe is the same

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a key of the recipe; `origin` names the foreign keys that say so."""
        self.values[key], self.origins[key] = value, origin

    def ask(self, key: str, placeholder: Any, what: str) -> None:
        """Have the user fill a key in."""
        self.values[key], self.to_fill[key] = placeholder, what

    def lack(self, foreign: Foreign, key: str, why: str, *, unless: Iterable[Any] = ()) -> None:
        """Note a foreign setting that has no counterpart, unless it is absent or has one of these values."""
        value = foreign.take(key)
        if value is not None and value not in unless:
            self.gaps[f"{key}={value!r}"] = why

    def skip(self, foreign: Foreign, pattern: str, why: str) -> None:
        """Note the settings of a pattern that nobody has looked at yet as not needed."""
        for key in fnmatch.filter(foreign.left, pattern):
            self.unneeded[key] = why
            foreign.take(key)

    def says_the_same(self, other: Draft) -> bool:
        """Whether both make the same recipe, and tell the same about it."""
        return (self.values, self.to_fill, self.gaps) == (other.values, other.to_fill, other.gaps)

    def sort_left(self, foreign: Foreign, unneeded: Mapping[str, str]) -> None:
        """Note the foreign settings that nobody looked at: those that match a pattern are not needed, the others lack."""
        off = tuple(_switched_off(foreign.values))
        for key, value in foreign.left.items():
            why = next((why for pattern, why in unneeded.items() if fnmatch.fnmatch(key, pattern)), None)
            if key.startswith(off):
                why = "switched off"
            elif value in ({}, []):
                why = "says nothing"
            if why is None:
                self.gaps[f"{key}={value!r}"] = "nothing in a recipe corresponds to it"
            else:
                self.unneeded[key] = why


@dataclass(frozen=True)
class Same:
    """A foreign setting that means the same as a key of the recipe."""

    theirs: str
    ours: str
    default: Any = None  # of the other library; None: the recipe's key stays open where the config is silent
    convert: Callable[[Any], Any] | None = None


def copy(draft: Draft, foreign: Foreign, table: Iterable[Same]) -> None:
    """Take over the settings that mean the same."""
    for row in table:
        value = foreign.take(row.theirs, row.default)
        if value is not None:
            draft.put(row.ours, value if row.convert is None else row.convert(value), row.theirs)
