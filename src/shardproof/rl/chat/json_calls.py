"""Formats in which a tool call is a JSON object, or has its arguments as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardproof.environments.protocol import Schema, ToolCall
from shardproof.rl.chat.reading import (
    CallReader,
    Found,
    Unreadable,
    call_of,
    excerpt,
    make_call,
    not_closed,
    read_between,
    read_json,
    read_whole_json,
    skip_space,
)

Parser = Callable[[str, Sequence[Schema]], Found]


def read_hermes(text: str, tools: Sequence[Schema]) -> Found:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    opener, closer = "<tool_call>", "</tool_call>"
    reader, place = CallReader(), 0
    while not reader.is_full and (begin := text.find(opener, place)) >= 0:
        reader.text(text[place:begin])
        begin += len(opener)
        try:
            # Read before the closing mark is looked for: an argument may hold the mark itself.
            value, end = read_json(text, begin)
            end = skip_space(text, end)
            if not text.startswith(closer, end):
                problem = text[end:].partition(closer)[0]
                raise Unreadable(
                    f"there is text behind the JSON: {excerpt(problem)}"
                    if closer in text[end:]
                    else not_closed(closer)
                )
            place = end + len(closer)
            reader.read(call_of, value)
        except Unreadable as error:
            end = text.find(closer, begin)
            place = end + len(closer) if end >= 0 else len(text)
            reader.wrong(str(error) if end >= 0 else not_closed(closer))
    reader.text(text[place:])
    return reader.found()


def read_llama(text: str, tools: Sequence[Schema]) -> Found:
    """{"name": ..., "parameters": {...}} as the whole turn, several with ; between them, maybe behind <|python_tag|>."""
    mark = "<|python_tag|>"
    before, marked, said = text.partition(mark)
    if not marked:
        before, said = "", text
        if not said.lstrip().startswith("{"):
            return Found(text)
    reader, place = CallReader(), 0
    reader.text(before)
    while not reader.is_full:
        try:
            value, end = read_json(said, place)
        except Unreadable as error:
            # An answer may be JSON too, or begin with a brace: only what has a name is taken for a call.
            if not marked and '"name"' not in said[place : place + 100]:
                return Found(text)
            reader.wrong(str(error))
            break
        if not marked and not (isinstance(value, dict) and ("name" in value or "function" in value)):
            return Found(text)
        reader.read(call_of, value)
        place = skip_space(said, end)
        if place == len(said):
            break
        if said[place] in ";,":
            place += 1
        elif said[place] != "{":
            reader.wrong(f"there is text behind the call: {excerpt(said[place:])}")
            break
    return reader.found()


def read_mistral(text: str, tools: Sequence[Schema]) -> Found:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}], or [TOOL_CALLS]name[ARGS]{...} for each call."""
    mark = "[TOOL_CALLS]"
    before, *parts = text.split(mark)
    reader = CallReader()
    reader.text(before)
    for part in parts:
        if reader.is_full:
            break
        reader.read(_mistral_calls, part)
    return reader.found()


def _mistral_calls(part: str) -> Sequence[ToolCall]:
    stripped = part.strip()
    if stripped.startswith("["):
        return _calls_of(read_whole_json(stripped))
    name, brace, _ = stripped.partition("{")
    name, _, _ = name.partition("[ARGS]")
    name, _, call_id = name.partition("[CALL_ID]")
    if not brace:
        raise Unreadable(
            f"the call {excerpt(stripped)} has no arguments: expected a JSON object behind its name"
        )
    return [make_call(name, read_whole_json(stripped[stripped.index("{") :]), call_id.strip())]


def read_list(pairs: Sequence[tuple[str, str]], text: str, tools: Sequence[Schema]) -> Found:
    """[{"name": ..., "arguments": {...}}, ...] between two marks, or objects one after the other; the last may be missing."""
    present = [(text.find(opener), opener, closer) for opener, closer in pairs if opener in text]
    if not present:
        return Found(text)
    begin, opener, closer = min(present)
    reader = CallReader()
    reader.text(text[:begin])
    place = begin + len(opener)
    while not reader.is_full:
        place = skip_space(text, place)
        if place == len(text) or text.startswith(closer, place):
            reader.text(text[place + len(closer) :])
            break
        try:
            value, place = read_json(text, place)
        except Unreadable as error:
            reader.wrong(str(error))
            break
        reader.read(_calls_of, value if isinstance(value, list) else [value])
    return reader.found()


def _calls_of(values: Sequence[object]) -> Sequence[ToolCall]:
    return [call_of(value) for value in values]


def named_parser(begin: str, end: str, between: str, section: tuple[str, str]) -> Parser:
    """A parser of calls with their name and JSON arguments as two parts: begin, name, between, arguments, end."""

    def parse(text: str, tools: Sequence[Schema]) -> Found:
        return read_between(text, begin, end, lambda body: _named_call(body, between), section).found()

    return parse


def _named_call(body: str, between: str) -> ToolCall:
    head, found, said = body.partition(between)
    if not found:
        raise Unreadable(f"the call {excerpt(body)} has no {between} between its name and its arguments")
    if (
        head.strip() == "function"
    ):  # a kind of tool, and then the name on a line of its own, and JSON in a code block
        head, _, said = said.partition("\n")
        said = said.strip().removeprefix("```json").removesuffix("```")
    call_id = head.strip()
    name = call_id.removeprefix("functions.")
    number = name.rpartition(":")
    if number[1] and number[2].isdigit():  # functions.name:0
        return make_call(number[0], read_whole_json(said), call_id)
    return make_call(name, read_whole_json(said))
