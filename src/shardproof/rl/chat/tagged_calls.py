"""Formats in which the arguments of a tool call have marks of their own, and are bare text between them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from shardproof.environments.protocol import Schema, ToolCall
from shardproof.rl.chat.reading import (
    CallReader,
    Found,
    Unreadable,
    excerpt,
    make_call,
    not_closed,
    read_between,
    read_whole_json,
    require_unicode,
    typed,
    without,
)

_MAX_PYTHON = (
    20_000  # characters: Python's own parser takes what is nested too deeply for an error of its own
)


def read_xml(text: str, tools: Sequence[Schema]) -> Found:
    """<function=name><parameter=key>value</parameter></function>, usually inside of <tool_call>...</tool_call>.

    The arguments may be a JSON object instead.
    """
    marks = ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>")
    reader = read_between(text, "<function=", "</function>", lambda body: _xml_call(body, tools), marks)
    if "<tool_call>" in text and "<function=" not in text:
        reader.wrong(f"the call has no <function=name>: {excerpt(without(text, marks))}")
    return reader.found()


def _xml_call(body: str, tools: Sequence[Schema]) -> ToolCall:
    name, found, rest = body.partition(">")
    if not found:
        raise Unreadable(f"the name of the call has no end: {excerpt(body)}")
    name = name.strip().strip('"')
    if rest.lstrip().startswith("{"):
        return make_call(name, read_whole_json(rest))
    arguments: dict[str, Any] = {}
    for part in rest.split("<parameter=")[1:]:
        key, found, said = part.partition(">")
        if not found:
            raise Unreadable(f"the name of an argument has no end: {excerpt(part)}")
        value, found, _ = said.partition("</parameter>")
        key = key.strip().strip('"')
        if not found:
            raise Unreadable(f"the argument {excerpt(key)} is not closed: </parameter> is missing")
        _add(arguments, name, key, value.removeprefix("\n").removesuffix("\n"), tools)
    return make_call(name, arguments)


def _add(arguments: dict[str, Any], name: str, key: str, value: str, tools: Sequence[Schema]) -> None:
    if key in arguments:
        raise Unreadable(f"the call has the argument {excerpt(key)} twice")
    require_unicode(key, value)
    arguments[key] = typed(name, key, value, tools)


def read_invoke(text: str, tools: Sequence[Schema]) -> Found:
    """<invoke name="name"><parameter name="key">value</parameter></invoke>, with any prefix before the names of the tags."""
    reader, place = CallReader(), 0
    while not reader.is_full and (named := text.find('invoke name="', place)) >= 0:
        opened = text.rfind("<", place, named)
        prefix = text[opened + 1 : named] if opened >= 0 else ""
        reader.text(_first_line_off(text[place : max(opened, place)]))
        end = f"</{prefix}invoke>"
        closed = text.find(end, named)
        if closed < 0:
            reader.wrong(not_closed(end[:80]))
            return reader.found()
        body = text[named + len('invoke name="') : closed]
        reader.read(_invoked, body, prefix, tools)
        place = closed + len(end)
    reader.text(text[place:] if place == 0 else "")
    return reader.found()


def _first_line_off(text: str) -> str:
    """Text before a call, without the mark that begins a list of calls."""
    head, _, last = text.rstrip().rpartition("\n")
    return head if last.startswith("<") and last.endswith(">") else text


def _invoked(body: str, prefix: str, tools: Sequence[Schema]) -> ToolCall:
    name, found, rest = body.partition('"')
    arguments: dict[str, Any] = {}
    for part in rest.split(f'<{prefix}parameter name="')[1:]:
        head, found, said = part.partition(">")
        key, _, attributes = head.partition('"')
        value, closed, _ = said.partition(f"</{prefix}parameter>")
        if not (found and closed):
            raise Unreadable(f"the argument {excerpt(key)} is not closed: </{prefix}parameter> is missing")
        _add(arguments, name, key, value, tools)
        if 'string="false"' in attributes and isinstance(arguments[key], str):
            arguments[key] = read_whole_json(value)
    return make_call(name, arguments)


def read_glm(text: str, tools: Sequence[Schema]) -> Found:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""
    return read_between(text, "<tool_call>", "</tool_call>", lambda body: _glm_call(body, tools)).found()


def _glm_call(body: str, tools: Sequence[Schema]) -> ToolCall:
    name, *parts = body.split("<arg_key>")
    arguments: dict[str, Any] = {}
    for part in parts:
        key, found, said = part.partition("</arg_key>")
        _, opened, said = said.partition("<arg_value>")
        value, closed, _ = said.partition("</arg_value>")
        if not (found and opened and closed):
            raise Unreadable(
                f"the argument {excerpt(key)} is not <arg_key>name</arg_key><arg_value>value</arg_value>"
            )
        _add(arguments, name.strip(), key.strip(), value, tools)
    if not name.strip() or "{" in name:
        raise Unreadable(f"the call has no name: expected one behind <tool_call>, found {excerpt(name)}")
    return make_call(name.strip(), arguments)


def read_python(text: str, tools: Sequence[Schema]) -> Found:
    """[name(key=value, ...), ...] as the whole turn, with literals of Python for values."""
    marks = ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
    said = without(text, marks).strip()
    # A list is an answer too; a list of calls begins with a name and a parenthesis.
    name = said[1:].partition("(")[0].strip()
    if not said.startswith("[") or "(" not in said or not name.replace(".", "_").isidentifier():
        return Found(text)
    reader = CallReader()
    reader.read(_python_calls, said)
    return reader.found()


def _python_calls(said: str) -> Sequence[ToolCall]:
    if len(said) > _MAX_PYTHON:
        raise Unreadable(f"the calls have more than {_MAX_PYTHON} characters")
    require_unicode(said)
    try:
        tree = ast.parse(said, mode="eval").body
        if not isinstance(tree, ast.List):
            raise Unreadable(f"the calls are no list: {excerpt(said)}")
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError) as error:
        raise Unreadable(f"not valid Python calls: {str(error)[:100]}") from None


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(key.arg is None for key in node.keywords):
        raise Unreadable("a call is written as name(key=value), with every argument named")
    return make_call(
        ast.unparse(node.func), {str(key.arg): ast.literal_eval(key.value) for key in node.keywords}
    )


def read_harmony(text: str, tools: Sequence[Schema]) -> Found:
    """<|channel|>commentary to=functions.name<|message|>{...}<|call|>, with thoughts in the channel "analysis"."""
    reader, thoughts = CallReader(), []
    for part in text.split("<|start|>"):
        head, found, said = part.partition("<|message|>")
        if not found:
            if "to=functions." in head:
                reader.wrong(not_closed("<|message|>"))
            else:
                reader.text(head.removeprefix("assistant").replace("<|channel|>", ""))
            continue
        for end in ("<|end|>", "<|call|>", "<|return|>"):
            said = said.partition(end)[0]
        _, called, name = head.partition("to=functions.")
        if called and not reader.is_full:
            name = name.replace("<", " ").split()[0] if name.split() else ""
            reader.read(lambda name, said: make_call(name, read_whole_json(said or "{}")), name, said)
        elif "analysis" in head:
            thoughts.append(said)
        else:
            reader.text(said)
    return reader.found("\n".join(thoughts).strip())
