"""Where a recipe differs from the defaults: what a reader of a run wants to know first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardproof.config.schema import Algorithm, Recipe


def differences_from_defaults(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """{"section.key": {"value": ..., "default": ...}} of every setting that has another value than its default.

    A key that has no default, such as `model.path`, has the default None. The defaults of an algorithm's settings are
    those of its name and preset.
    """
    return {
        key: {"value": _plain(value), "default": _plain(default)}
        for key, value, default in _walk(recipe, "")
        if value != default
    }


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, default) of every key of a section and of the sections in it."""
    for name, default in _defaults(section):
        value = getattr(section, name)
        if isinstance(value, BaseModel) or is_dataclass(value):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, default


def _defaults(section: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(section, BaseModel):
        for name, field in type(section).model_fields.items():
            default = field.get_default(call_default_factory=True)
            if isinstance(section, Algorithm) and name not in ("name", "preset"):
                default = getattr(Algorithm(name=section.name, preset=section.preset), name)
            yield name, None if default is PydanticUndefined else default
        return
    for each in fields(section):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        yield each.name, None if default is MISSING else default


def _plain(value: Any) -> Any:
    """A value as JSON can hold it; of the entries of a list what differs from their own defaults."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
