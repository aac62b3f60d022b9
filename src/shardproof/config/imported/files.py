"""Configs of other libraries as they lie in files: YAML, JSON, or a shell script that starts a run with key=value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.config.imported.bases import named_config, with_bases
from shardproof.config.imported.shell import Started, other_ways, read_shell
from shardproof.config.imported.yaml_text import load_argument, load_yaml
from shardproof.errors import fail
from shardproof.foreign import read_foreign

_MAX_BYTES = 2**22
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_SETTING = re.compile(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_MAX_ROUNDS = 10  # of references in references
_MAX_FOLDERS, _MAX_SAID = 8, 8
_MAX_SETTINGS, _MAX_NODES, _MAX_LENGTH = 10_000, 200_000, 100_000


def read_config(path: Path, overrides: Sequence[str] = (), notes: list[str] | None = None) -> dict[str, Any]:
    """The settings of a config by dotted key, with `overrides` such as `trainer.seed=1` applied; raises a ConfigError.
    `notes` gets what a script leaves open."""
    notes = [] if notes is None else notes
    raw = read_foreign(
        path, "config", code="C001", max_bytes=_MAX_BYTES, fix="pass a YAML, JSON or shell file"
    )
    try:
        text = raw.decode("utf-8-sig")
        if path.suffix == ".sh":
            flat = _read_script(path, text, notes)
        else:
            found = json.loads(text) if path.suffix == ".json" else load_yaml(text)
            if not isinstance(found, dict):
                what = "nothing" if found is None else f"a {type(found).__name__}"
                raise ValueError(f"it holds {what}, expected settings")
            _check_size(found)
            flat = flatten(with_bases(found, path.parent, _read_base, notes))
    except (ValueError, RecursionError) as error:
        raise fail("C001", "config", f"{path} cannot be read: {error}.", fix="correct the file") from error
    for override in overrides:
        setting = _SETTING.fullmatch(override)
        if setting is None:
            fix = "write settings of the other library as its command line has them, such as trainer.seed=1"
            raise fail("C001", "config", f"{override!r} is not of the form key=value.", fix=fix)
        _apply(flat, setting)
    if len(flat) > _MAX_SETTINGS:
        message = f"{path} has {len(flat)} settings; the limit is {_MAX_SETTINGS}."
        raise fail("C001", "config", message, fix="pass the config of a run")
    return _resolved(flat)


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; lists, and sections without keys, are values."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_base(path: Path) -> Any:
    """A config that another one is made of."""
    raw = read_foreign(path, "config", code="C001", max_bytes=_MAX_BYTES)
    found = load_yaml(raw.decode("utf-8-sig"))
    _check_size(found)
    return found


def _read_script(path: Path, text: str, notes: list[str]) -> dict[str, Any]:
    """The key=value arguments of a shell script; `notes` gets what only running it would tell."""

    def find(name: str) -> str | None:
        """The text of a script that this one starts, whose name counts from a folder above."""
        wanted = Path(name)
        if wanted.is_absolute() or ".." in wanted.parts:
            return None
        for folder in [*path.resolve().parents][:_MAX_FOLDERS]:
            if (folder / wanted).is_file():
                other = read_foreign(folder / wanted, "config", code="C001", max_bytes=_MAX_BYTES)
                return other.decode("utf-8-sig", errors="replace")
        return None

    started = read_shell(text, find=find)
    flat = _settings(started)
    if not flat:
        missing = f"; it runs {', '.join(started.missing[:3])}, not found" if started.missing else ""
        options = (
            "; write options of TRL's, such as --learning_rate, into a YAML file"
            if started.has_options
            else ""
        )
        raise ValueError(f"it starts nothing with key=value arguments{missing}{options}")
    for ways in other_ways(started):
        other = _settings(read_shell(text, ways, find))
        changed = [key for key in flat | other if flat.get(key) != other.get(key)]
        if changed:
            ((what, way),) = ways.items()
            choice = started.choices[what]
            said = ", ".join(f"{key}={other.get(key)!r}" for key in changed[:_MAX_SAID])
            more = f" and {len(changed) - _MAX_SAID} more" if len(changed) > _MAX_SAID else ""
            taken = f"taken as {choice.taken!r}; as {choice.others[way - 1]!r} it would be"
            notes.append(f"{what}: {taken} {said}{more}")
    notes += started.notes
    below = flatten(named_config(started, path, _read_base, notes))
    return {key: value for key, value in below.items() if not _is_replaced(key, flat)} | flat


def _is_replaced(key: str, flat: Mapping[str, Any]) -> bool:
    """Whether a setting takes the place of the section that a key is in."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in flat for end in range(1, len(parts)))


def _settings(started: Started) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for command in started.commands:
        for word in command:
            if (setting := _SETTING.fullmatch(word)) is not None:
                _apply(flat, setting)
    return flat


def _apply(flat: dict[str, Any], setting: re.Match[str]) -> None:
    """Set a key as a command line does, in place of all that it had, or take it out: ~key=value."""
    sign, key, text = setting.groups()
    value = load_argument(text)
    for known in [known for known in flat if known == key or known.startswith(f"{key}.")]:
        del flat[known]
    if "~" not in sign:
        flat |= flatten({key: value})


def _check_size(found: Any) -> None:
    """Raise a ValueError where a file holds more than a config has, or itself: aliases can say so in few bytes."""
    left, count = [found], 0
    while left:
        node = left.pop()
        count += 1
        if count > _MAX_NODES:
            raise ValueError(f"it holds more than {_MAX_NODES} values, or itself")
        if isinstance(node, Mapping):
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)


def _resolved(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with `${other.key}` replaced by what it stands for; one that stands for nothing stays what it is."""

    def look_up(reference: str, at: str) -> tuple[bool, Any]:
        kind, _, rest = reference.partition(":")
        selects = kind == "oc.select"
        name, _, default = (rest if kind in ("oc.env", "oc.select") else reference).partition(",")
        if kind == "oc.env":
            value = os.environ.get(name.strip())
        else:
            value = flat.get(_absolute(name.strip(), at))
        if value is None and default:
            return True, load_yaml(default)
        return value is not None or selects, value

    def put_in(value: Any, at: str) -> Any:
        if isinstance(value, list):
            return [put_in(each, at) for each in value]
        unknown: set[str] = set()
        for _ in range(_MAX_ROUNDS):
            if not isinstance(value, str) or len(value) > _MAX_LENGTH:
                return value
            found = next((each for each in _REFERENCE.finditer(value) if each[0] not in unknown), None)
            if found is None:
                return value
            is_known, meant = look_up(found[1], at)
            if not is_known:
                unknown.add(found[0])
            elif found[0] == value:
                value = meant
            else:
                value = value.replace(found[0], "" if meant is None else str(meant))
        return value

    found = {key: put_in(value, key) for key, value in flat.items()}
    return {
        key: None if value == "???" else value for key, value in found.items()
    }  # which stands for missing


def _absolute(name: str, at: str) -> str:
    """A key that begins with dots counts from the section of the key that has the reference."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    section = at.split(".")[:-dots]
    return ".".join([*section, name[dots:]])
