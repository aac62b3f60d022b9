"""Recipes from TOML files and `key=value` overrides, with errors that name the nearest key."""

from __future__ import annotations

import difflib
import glob
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from shardproof.config.foreign_names import names_here
from shardproof.config.schema import Recipe, keys_of
from shardproof.errors import fail
from shardproof.foreign import read_foreign

_MAX_BYTES = 2**20
_NO_RECIPE = "pass a recipe, a TOML file; `shardproof recipes` copies the built-in ones to ./recipes"
# What pydantic would say in words of Python.
_TABLE = "expected a table, such as { key = value }"
_MESSAGES = {
    "list_type": "expected a list, such as [1, 2] or ['a', 'b']",
    "tuple_type": "expected a list, such as [1, 2]",
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
    "dataclass_type": _TABLE,
}
_FOREIGN = (".yaml", ".yml", ".json", ".sh")  # what configs of other libraries are written in
_LISTED, _LABEL_CHARACTERS = 20, 100  # problems that a message lists; how much of a strange key it shows


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file with overrides such as `train.steps=10` applied; raises a ConfigError."""
    file = Path(path)
    raw = read_foreign(file, "recipe", code="C001", max_bytes=_MAX_BYTES, fix=_NO_RECIPE)
    try:
        data = tomllib.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # TOML's, UTF-8's and integers' errors are all ValueErrors
        fix = (
            "recipes are TOML files: see docs/settings.md, or begin with one that `shardproof recipes` copies"
        )
        if file.suffix.lower() == ".toml":
            fix = "correct the line that the message names"
        elif file.suffix.lower() in _FOREIGN:
            fix = f"recipes are TOML files; `shardproof import-config {file}` makes one of a config of TRL, verl or SkyRL"
        raise fail("C001", "recipe", f"{file} is not valid TOML: {error}.", fix=fix) from error
    for section, key in _PATHS:
        _resolve(data.get(section), key, file.parent)
    for tables in (_list_in(data, "evaluation", "sets"), _list_in(data, "data", "train")):
        for number, each in enumerate(tables):
            _resolve(each, "source", file.parent)
            if isinstance(each, str):
                tables[number] = _resolved(each, file.parent)
    for each in _list_in(data, "reward", "models"):
        _resolve(each, "path", file.parent)
    for override in overrides:
        _apply(data, override)
    _write_dates(data)
    return parse_recipe(data, str(file))


# A recipe's own paths are relative to it, so that it works from any folder.
_PATHS = (
    ("model", "path"),
    ("data", "train"),
    ("data", "evaluation"),
    ("data", "pass_rates"),
    ("reference", "path"),
    ("critic", "path"),
    ("teacher", "path"),
    ("environment", "python"),
)


def _resolve(section: Any, key: str, base: Path) -> None:
    if isinstance(section, dict) and isinstance(section.get(key), str):
        section[key] = _resolved(section[key], base)


def _resolved(given: str, base: Path) -> str:
    if not given:
        return given  # the folder itself is not meant
    path = os.path.join(base, given)
    # Unlike Path.exists, this is False also for what can be no path.
    if os.path.exists(path) or (set(given) & set("*?[") and _has_files(path)):
        return path.removeprefix("./") if path.startswith("./../") else path
    return given


def _has_files(pattern: str) -> bool:
    try:
        return any(True for _ in glob.iglob(pattern, recursive=True))
    except ValueError:  # it can be no path
        return False


def _write_dates(data: dict[str, Any]) -> None:
    """Put dates and times as text: recipes travel as JSON, and all who read one must see the same."""
    held: list[Any] = [data]
    while held:
        each = held.pop()
        for key, value in list(each.items() if isinstance(each, dict) else enumerate(each)):
            if isinstance(value, dict | list):
                held.append(value)
            elif isinstance(value, date | time):
                each[key] = value.isoformat()


def _list_in(data: dict[str, Any], section: str, key: str) -> list[Any]:
    held = data.get(section)
    found = held.get(key) if isinstance(held, dict) else None
    if isinstance(found, dict):  # a single table is a list of one
        return [found]
    return found if isinstance(found, list) else []


def parse_recipe(data: dict[str, Any], label: str) -> Recipe:
    """The checked recipe, or a ConfigError with every problem and, for unknown keys, the nearest valid one."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_input=False, include_context=False, include_url=False)
        found = _of_one_branch(found)
        problems = [_explain(item) for item in found[:_LISTED]]
        if len(found) > _LISTED:
            problems.append(f"and {len(found) - _LISTED} more")
        raise fail("C001", "recipe", f"{label}: " + "; ".join(problems), fix="correct these keys") from error


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise fail(
            "C001", "recipe", f"{override!r} is not of the form key=value.", fix="write section.key=value"
        )
    *sections, leaf = key.split(".")
    target = data
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise fail("C001", "recipe", f"{key!r}: {section!r} is a value, not a section.")
    target[leaf] = _value(text)


def _value(text: str) -> Any:
    """TOML's reading of a value; what TOML cannot read is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _of_one_branch(problems: Sequence[Any]) -> list[Any]:
    """The problems, of a key that takes text or a list those of the form that was meant, without the forms' names."""
    places = [problem["loc"] for problem in problems]
    inside = {loc[:n] for loc in places for n, part in enumerate(loc[:-1]) if _is_list(part)}
    found = []
    for problem in problems:
        loc = problem["loc"]
        at = next((n for n, part in enumerate(loc) if part == "str" or _is_list(part)), None)
        if at is None:
            found.append(problem)
        elif (loc[at] == "str") is not (loc[:at] in inside):
            found.append({**problem, "loc": (*loc[:at], *loc[at + 1 :])})
    return found


def _is_list(part: Any) -> bool:
    return str(part).startswith("list[")


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if len(where) > _LABEL_CHARACTERS:
        where = f"{where[:_LABEL_CHARACTERS]}..."
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = " or ".join(map(repr, _nearest(where)))
        return f"unknown key {where!r}" + (f", did you mean {near}?" if near else "")
    if problem["type"] == "missing":
        return f"{where!r} is missing"
    is_listed = any(isinstance(part, int) for part in problem["loc"])
    if problem["type"] in ("model_type", "dataclass_type") and where and not is_listed:
        return f"{where}: this is a section; write its keys under [{where}]"
    message = _MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _nearest(unknown: str) -> list[str]:
    """The key that was meant: in the same section one that begins alike, or has the word's initials (`lr`); those that
    another library calls so; the only one of that name in another section; one that is spelt alike in the same section."""
    plain = ".".join(part for part in unknown.split(".") if not part.isdigit())
    keys, (section, _, leaf) = list(all_keys(Recipe)), plain.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    initials = "".join(word[:1] for word in leaf.split("_"))
    longer = [own for own in siblings if len(leaf) > 3 and own.startswith(leaf)]
    named = longer or [own for own in siblings if own == initials and len(own) > 1]
    if named:
        return [siblings[named[0]]]
    moved = [key for key in keys if key.rpartition(".")[2] == leaf]
    known = names_here(plain) or (moved if len(moved) == 1 else [])
    return known or [siblings[own] for own in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)]


def all_keys(section: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section and of those in it."""
    for name, annotation in keys_of(section).items():
        yield f"{prefix}{name}"
        for part in [annotation, *get_args(annotation)]:
            if isinstance(part, type):
                yield from all_keys(part, f"{prefix}{name}.")


def to_json(recipe: Recipe) -> str:
    return json.dumps(recipe.model_dump(mode="json"), indent=2)


def from_json(text: str) -> Recipe:
    return Recipe.model_validate(json.loads(text))
