"""What every section of a recipe has in common. A string under a key says what the key means: docs/settings.md shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, model_validator

from shardproof.errors import did_you_mean
from shardproof.user_code import is_user_name

DtypeName = Literal["float32", "bfloat16", "float16"]
StrategyName = Literal["fsdp2", "fsdp1"]


def keys_of(kind: type) -> dict[str, Any]:
    """The keys of a section, a model or a dataclass, with their types; none for what is no section."""
    if is_dataclass(kind):
        return {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    known = kind.model_fields if issubclass(kind, BaseModel) else {}
    return {name: field.annotation for name, field in known.items()}


def read_none(kind: type, data: Any) -> Any:
    """`data` with None for the string "none" where a key may be disabled; TOML itself has no null."""
    if not isinstance(data, dict):
        return data
    optional = {name for name, annotation in keys_of(kind).items() if type(None) in get_args(annotation)}
    return {key: None if key in optional and value == "none" else value for key, value in data.items()}


def known_or_users(name: str, known: Iterable[str]) -> str:
    """`name`, if it is one of `known` or a user's module:name."""
    if name not in known and not is_user_name(name):
        hint = did_you_mean(name, known)
        raise ValueError(f"{name!r} is not one of {', '.join(known)}, or module:name.{hint}")
    return name


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        return read_none(cls, data)
