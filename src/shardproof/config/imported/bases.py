"""Configs that a config is made of: those that Hydra's `defaults` and a command's --config-name name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.config.imported.shell import Started
from shardproof.errors import ConfigError

# verl's and SkyRL's own, whose values are known.
_OWN = re.compile(
    r"_self_|(_generated_)?((fully_async|one_step_off|transfer_queue)_)?ppo(_\w+)?_trainer|(ppo|megatron)_base_config"
)
_MAX_FILES, _MAX_FOLDERS = 16, 8


def is_own(name: str) -> bool:
    """Whether a config is one of the libraries' own, or of a group of them, as in group@section."""
    return "@" in name or _OWN.fullmatch(Path(name).stem) is not None


def with_bases(
    found: Mapping[str, Any],
    folder: Path,
    read: Callable[[Path], Any],
    notes: list[str],
    seen: set[Path] | None = None,
) -> dict[str, Any]:
    """A config over those that its `defaults` name and that lie beside it; `notes` gets those that do not."""
    seen = set() if seen is None else seen
    listed = found.get("defaults")
    names = [each for each in listed if isinstance(each, str)] if isinstance(listed, Sequence) else []
    whole: dict[str, Any] = {}
    for name in names if "_self_" in names else [*names, "_self_"]:
        if name == "_self_":
            whole = merged(whole, found)
        elif not is_own(name):
            path = folder / f"{name.removesuffix('.yaml')}.yaml"
            is_beside = ".." not in path.parts and not Path(name).is_absolute() and path.is_file()
            base = read(path) if is_beside and path not in seen and len(seen) < _MAX_FILES else None
            seen.add(path)
            if isinstance(base, dict):
                whole = merged(whole, with_bases(base, path.parent, read, notes, seen))
            else:
                notes.append(f"defaults names {name}, which does not lie beside it: its settings are missing")
    return whole


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections laid over others."""
    whole = dict(under)
    for key, value in over.items():
        below = whole.get(key)
        is_section = isinstance(below, Mapping) and isinstance(value, Mapping)
        whole[key] = merged(dict(below or {}), value) if is_section else value
    return whole


def named_config(
    started: Started, script: Path, read: Callable[[Path], Any], notes: list[str]
) -> dict[str, Any]:
    """The config that a script's command names, where it lies near the script."""
    for folder, name in started.configs:
        if is_own(name):
            continue
        path = _near(script, folder, f"{name.removesuffix('.yaml')}.yaml")
        base = None if path is None else _read_or_none(read, path)
        if path is not None and isinstance(base, dict):
            return with_bases(base, path.parent, read, notes)
        notes.append(f"the command names the config {name}, which was not found: its settings are missing")
    return {}


def _read_or_none(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
    except (ConfigError, ValueError):
        return None


def _near(script: Path, folder: str, name: str) -> Path | None:
    """The file in a folder that is named as from the script's own, or from one above it."""
    if ".." in Path(name).parts or Path(name).is_absolute():
        return None
    parts = [part for part in Path(folder).parts if part not in ("/", ".", "..") and "$" not in part]
    ends = [Path(*parts[start:]) for start in range(len(parts))] or [Path("config")]
    for above in [*script.resolve().parents][:_MAX_FOLDERS]:
        for end in ends:
            if (above / end / name).is_file():
                return above / end / name
    return None
