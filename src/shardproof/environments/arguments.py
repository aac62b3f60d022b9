"""A call's arguments against its tool's JSON schema: what does not fit, in words that help to repair it.

The part of JSON schema that descriptions of tools use: types, required and unknown names, enums, nested values, bounds.
Nothing is converted: "2" is no integer. A keyword that is not known here restricts nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardproof.errors import did_you_mean

_DEPTH, _MOST_STEPS = 32, 100_000  # how deep, and how many values are looked at: the rest is taken as it is
_SHOWN = 100  # characters of a wrong value that are quoted
_EXAMPLES: dict[str, Any] = {
    "integer": 1,
    "number": 1.5,
    "string": "text",
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def problems(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """What keeps the arguments from fitting the schema of a tool's parameters; empty if they fit."""
    try:
        return list(_Check(parameters).object(parameters, arguments, "", 0))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return []  # the schema is none: others wrote it


def as_declared(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with integers made floats where the schema says that a number is meant."""
    properties = parameters.get("properties", {})
    numbers = {name for name, each in properties.items() if each.get("type") == "number"}
    return {
        name: float(value) if name in numbers and type(value) is int and abs(value) < 2**53 else value
        for name, value in arguments.items()
    }


def example(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that look right: one value for each that is required."""
    try:
        properties = parameters.get("properties", {})
        return {name: _example(properties.get(name, {})) for name in parameters.get("required", ())}
    except (AttributeError, TypeError):
        return {}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = _kinds(schema)
    return _EXAMPLES.get(kinds[0] if kinds else "string", "text")


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    return [kind] if isinstance(kind, str) else list(kind or ())


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _quoted(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Check:
    """One comparison of arguments with a schema, which may refer to parts of itself and so be endless."""

    def __init__(self, root: Mapping[str, Any]):
        self._root, self._left = root, _MOST_STEPS

    def value(self, schema: Any, value: Any, where: str, depth: int) -> Iterator[str]:
        """What is wrong with one value, `where` being its name as a call writes it."""
        schema = _resolved(schema, self._root)
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._left < 0:
            return
        if value is None and schema.get("nullable"):
            return
        kinds, kind = _kinds(schema), _kind_of(value)
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            yield f"{where} must be of type {' or '.join(kinds)}, and is {_quoted(value)} ({kind})"
            return
        if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
            yield f"{where} must be one of {', '.join(map(_quoted, schema['enum']))}, and is {_quoted(value)}"
        if "const" in schema and not _same(value, schema["const"]):
            yield f"{where} must be {_quoted(schema['const'])}, and is {_quoted(value)}"
        yield from self._combined(schema, value, where, depth)
        yield from _bounds(schema, value, where)
        if isinstance(value, Mapping):
            yield from self.object(schema, value, f"{where}.", depth + 1)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for place, each in enumerate(value):
                first = schema.get("prefixItems", ())
                inner = first[place] if place < len(first) else schema.get("items")
                yield from self.value(inner, each, f"{where}[{place}]", depth + 1)

    def object(
        self, schema: Mapping[str, Any], values: Mapping[str, Any], prefix: str, depth: int
    ) -> Iterator[str]:
        """What is wrong with named values: arguments, or an object inside of them."""
        properties = schema.get("properties") or {}
        for name in schema.get("required", ()):
            if name not in values:
                yield f"{prefix}{name} is missing"
        others = schema.get("additionalProperties")
        for name, value in values.items():
            if name in properties:
                yield from self.value(properties[name], value, f"{prefix}{name}", depth)
            elif isinstance(others, Mapping):
                yield from self.value(others, value, f"{prefix}{str(name)[:_SHOWN]}", depth)
            elif others is False or (others is None and (properties or depth == 0)):
                hint = did_you_mean(str(name), properties)
                yield f"{prefix}{str(name)[:_SHOWN]} is not known{'.' * bool(hint)}{hint}"

    def _combined(self, schema: Mapping[str, Any], value: Any, where: str, depth: int) -> Iterator[str]:
        for each in schema.get("allOf", ()):
            yield from self.value(each, value, where, depth + 1)
        for key in ("anyOf", "oneOf"):
            found = [list(self.value(each, value, where, depth + 1)) for each in schema.get(key, ())]
            if found and all(found):
                first = [each[0] for each in found]
                yield (
                    first[0] if len(first) == 1 else f"{where} fits none of its forms: {'; or '.join(first)}"
                )


def _bounds(schema: Mapping[str, Any], value: Any, where: str) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        bounds = (
            ("minimum", "at least", lambda bound: value >= bound),
            ("maximum", "at most", lambda bound: value <= bound),
            ("exclusiveMinimum", "above", lambda bound: value > bound),
            ("exclusiveMaximum", "below", lambda bound: value < bound),
        )
        for key, words, holds in bounds:
            if isinstance(schema.get(key), int | float) and not holds(schema[key]):
                yield f"{where} must be {words} {schema[key]}, and is {_quoted(value)}"
    elif isinstance(value, str | list):
        many, unit = ("Length", "characters") if isinstance(value, str) else ("Items", "entries")
        if len(value) < schema.get(f"min{many}", 0):
            yield f"{where} must have at least {schema[f'min{many}']} {unit}, and has {len(value)}"
        if len(value) > schema.get(f"max{many}", len(value)):
            yield f"{where} must have at most {schema[f'max{many}']} {unit}, and has {len(value)}"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a `$ref` inside of the same document stands for."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not re.match(r"#/\$?\w+/", reference):
            return schema
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part, {}) if isinstance(schema, Mapping) else {}
    return {}
