"""Reads what a policy wrote as a tool call. Nothing here raises for what it reads, and all of it takes linear time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from shardproof.environments.protocol import Schema, ToolCall

MAX_CALLS = 64  # in one turn: more are not read
_MAX_DEPTH = 64  # of lists and objects in arguments
_SHOWN = 60  # characters of a policy's text in a reason


@dataclass(frozen=True)
class Found:
    """What a turn says: its content without calls, the calls, and why others are none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    thought: str = ""  # where the format itself marks it


class Unreadable(Exception):
    """This is not a call, and why: words that can be shown to the model."""


class CallReader:
    """Collects the calls of one turn, the text around them, and what is wrong."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._malformed: list[str] = []
        self._num_read = 0

    @property
    def is_full(self) -> bool:
        """Whether the turn has more calls than are read."""
        return self._num_read > MAX_CALLS

    def text(self, text: str) -> None:
        """Add text that is no part of a call."""
        self._texts.append(text)

    def read(self, make: Callable[..., ToolCall | Sequence[ToolCall]], *given: Any) -> None:
        """Add the call or calls that a function makes of what it is given, or its reason why there is none."""
        self._num_read += 1
        try:
            found = make(*given)
            self._calls += [found] if isinstance(found, ToolCall) else found
        except Unreadable as error:
            self._malformed.append(str(error))

    def wrong(self, reason: str) -> None:
        """Add a reason why what looks like a call is none."""
        self._num_read += 1
        self._malformed.append(reason)

    def found(self, thought: str = "") -> Found:
        """All that was collected."""
        calls, malformed = self._calls, self._malformed
        if len(calls) + len(malformed) > MAX_CALLS:
            calls = calls[:MAX_CALLS]
            malformed = malformed[: MAX_CALLS - len(calls)]
            malformed.append(f"more than {MAX_CALLS} tool calls in one turn: the rest was not read")
        return Found("".join(self._texts).strip(), tuple(calls), tuple(malformed), thought)


def read_between(
    text: str, opener: str, closer: str, make: Callable[[str], ToolCall], dropped: Sequence[str] = ()
) -> CallReader:
    """All calls between two marks, each made of the text between them; `dropped` are marks in the text around them."""
    reader, place = CallReader(), 0
    while not reader.is_full and (opened := text.find(opener, place)) >= 0:
        reader.text(without(text[place:opened], dropped))
        closed = text.find(closer, opened)
        if closed < 0:
            reader.wrong(not_closed(closer))
            place = len(text)
            break
        reader.read(make, text[opened + len(opener) : closed])
        place = closed + len(closer)
    reader.text(without(text[place:], dropped))
    return reader


def not_closed(closer: str) -> str:
    """The reason why a call without its closing mark is none."""
    return f"the call is not closed: {closer} is missing"


def without(text: str, marks: Sequence[str]) -> str:
    """The text without these marks."""
    for mark in marks:
        text = text.replace(mark, "")
    return text


def excerpt(text: str) -> str:
    """The beginning of a text in quotes, on one line."""
    line = " ".join(text[: 4 * _SHOWN].split())
    return f"'{line[:_SHOWN]}...'" if len(line) > _SHOWN or len(text) > 4 * _SHOWN else f"'{line}'"


def _refuse_constant(name: str) -> NoReturn:
    raise Unreadable(f"the JSON has {name}, which is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Unreadable(f"the JSON has the number {text[:_SHOWN]}, which is too large")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Unreadable(f"the JSON has the key {excerpt(double)} twice")
    return found


# Not strict: models write line breaks into strings as they are, above all in code.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_doubles, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)


def skip_space(text: str, place: int) -> int:
    """The place of the next character that is no space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def read_json(text: str, place: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at a place, and where it ends. Raises `Unreadable` for what JSON or we do not take."""
    place = skip_space(text, place)
    try:
        value, end = _DECODER.raw_decode(text, place)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(f"the JSON is nested deeper than {_MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise Unreadable(
            f"not valid JSON: {error.msg} at character {error.pos - place + 1} of {excerpt(text[place:])}"
        ) from None
    except ValueError as error:  # an integer of thousands of digits
        raise Unreadable(f"not valid JSON: {str(error)[:100]}") from None
    _require_plain(value)
    return value, end


def read_whole_json(text: str) -> Any:
    """The JSON value that a text is, with nothing behind it."""
    value, end = read_json(text)
    if text[end:].strip():
        raise Unreadable(f"there is text behind the JSON: {excerpt(text[end:])}")
    return value


def _require_plain(value: Any) -> None:
    """Raise if a value is nested too deeply, or has text that is no valid Unicode. Without recursion, which might end first."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        for each in level:
            require_unicode(*(each if isinstance(each, dict) else (each,)))
        nested = [each for each in level if isinstance(each, (dict, list))]
        level = [part for each in nested for part in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise Unreadable(f"the JSON is nested deeper than {_MAX_DEPTH}")


def require_unicode(*texts: object) -> None:
    """Raise `Unreadable` if a text has halves of surrogate pairs, which no tool can be sent."""
    for text in texts:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise Unreadable("the call has text that is not valid Unicode") from None


def call_of(value: Any) -> ToolCall:
    """The call that a JSON object is: {"name": ..., "arguments": {...}}, with the names that families use."""
    if not isinstance(value, dict):
        raise Unreadable(f"a call is a JSON object with a name and arguments, found {_kind(value)}")
    inner = value.get("function")
    if isinstance(inner, dict):
        return call_of({"id": value.get("id"), **inner})
    name = value.get("name", value.get("tool_name", inner))
    given = [key for key in ("arguments", "parameters", "args") if key in value]
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):  # some models write the object as JSON text
        arguments = read_whole_json(arguments) if arguments.strip() else {}
    known = value.get("id") or value.get("tool_call_id")
    return make_call(name, arguments, str(known) if isinstance(known, (str, int)) else "")


def make_call(name: Any, arguments: Any, call_id: str = "") -> ToolCall:
    """A call of a name with arguments, if they are a name and an object."""
    if not isinstance(name, str) or not name.strip():
        found = "nothing" if name is None else _kind(name)
        raise Unreadable(f'the call has no name: expected text under "name", found {found}')
    require_unicode(name, call_id)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Unreadable(
            f"the arguments of {excerpt(name)} are {_kind(arguments)}, expected a JSON object with one value by name"
        )
    return ToolCall(name.strip(), arguments, call_id)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def typed(name: str, argument: str, text: str, tools: Sequence[Schema]) -> Any:
    """An argument that was written as bare text, as the type that the tool's schema says; text if it says nothing.

    Without a schema for it, what reads as JSON other than a string is taken as such.
    """
    types = _types(name, argument, tools)
    if types is not None and (not types or "string" in types):
        if "null" in types and text.strip() in ("null", "None"):
            return None
        return text
    stripped = text.strip()
    if stripped in ("True", "False", "None"):  # as Python writes them, and so do some templates
        stripped = {"True": "true", "False": "false", "None": "null"}[stripped]
    try:
        value = read_whole_json(stripped)
    except Unreadable:
        return text
    return text if types is None and isinstance(value, str) else value


def _types(name: str, argument: str, tools: Sequence[Schema]) -> set[str] | None:
    """The JSON types that a tool's argument may have; None if no tool is known that has it."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schema = properties.get(argument) if isinstance(properties, Mapping) else None
            return _types_of(schema) if isinstance(schema, Mapping) else None
    return None


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    stated = schema.get("type")
    found = {stated} if isinstance(stated, str) else set()
    found |= {each for each in stated if isinstance(each, str)} if isinstance(stated, list) else set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            found |= _types_of(each) if isinstance(each, Mapping) else set()
    return found | ({"null"} if schema.get("nullable") else set())
