"""Which format a model writes its tool calls in: the one whose parser reads back a call that the chat template writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardproof.environments.protocol import Message, Schema
from shardproof.errors import choose, fail
from shardproof.rl.chat.json_calls import (
    Parser,
    named_parser,
    read_hermes,
    read_list,
    read_llama,
    read_mistral,
)
from shardproof.rl.chat.reading import Found, Unreadable, call_of
from shardproof.rl.chat.stand_ins import BEGIN, STAND_IN, STAND_IN_TOOL, call_message
from shardproof.rl.chat.tagged_calls import read_glm, read_harmony, read_invoke, read_python, read_xml
from shardproof.rl.chat.template import Template, Unrenderable, num_same

_TEXT = "kq0text before it. "
OWN = "response_template"  # the tokenizer's own description of how to read its model
_DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_DSML = "\uff5cDSML\uff5c"
_LISTS = (
    ("<tool_calls>", "</tool_calls>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
)
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

# In the order in which they are tried. The marks are special tokens in some tokenizers, and stay in a turn's text.
FORMATS: dict[str, tuple[Parser, tuple[str, ...]]] = {
    "hermes": (read_hermes, ("<tool_call>", "</tool_call>")),
    "xml": (read_xml, ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>")),
    "glm": (
        read_glm,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "mistral": (read_mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "deepseek": (
        named_parser(
            "<\uff5ctool\u2581call\u2581begin\uff5c>",
            "<\uff5ctool\u2581call\u2581end\uff5c>",
            "<\uff5ctool\u2581sep\uff5c>",
            _DEEPSEEK,
        ),
        (
            *_DEEPSEEK,
            "<\uff5ctool\u2581call\u2581begin\uff5c>",
            "<\uff5ctool\u2581call\u2581end\uff5c>",
            "<\uff5ctool\u2581sep\uff5c>",
        ),
    ),
    "kimi": (
        named_parser("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", _KIMI),
        (*_KIMI, "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "list": (partial(read_list, _LISTS), tuple(mark for pair in _LISTS for mark in pair)),
    "invoke": (read_invoke, ("<minimax:tool_call>", "</minimax:tool_call>", _DSML)),
    "harmony": (
        read_harmony,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    ),
    "llama": (read_llama, ("<|python_tag|>",)),
    "pythonic": (
        read_python,
        ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
}


@dataclass(frozen=True)
class CallStyle:
    """How a model writes tool calls, and how its template takes them."""

    name: str
    parse: Parser
    markers: tuple[str, ...] = ()
    reads_whole: bool = False  # the parser wants the turn with all its special tokens, the last one included
    arguments_as_text: bool | None = False  # how the template takes arguments; None: it writes no calls
    named: bool = False  # by the recipe
    takes_text: bool = True  # a call may follow text in a turn
    written: str = ""  # a call as the template writes it


def require_known(tool_format: str | None) -> str | None:
    """The name of a format if there is such a one, else C001 with the nearest."""
    if tool_format is None:
        return None
    return choose("rollout", "environment.tool_format", tool_format, [*FORMATS, OWN])


def find_style(template: Template, tool_format: str | None) -> CallStyle:
    """The format that is named, or that reads what the template writes. Raises C001 if there is none."""
    written = _written_call(template)
    as_text = None if written is None else written.as_text
    own = getattr(template.tokenizer, OWN, None)
    if tool_format == OWN and not own:
        message = f"environment.tool_format={OWN!r}, but the tokenizer has no {OWN}."
        raise fail("C001", "rollout", message, fix=f"name one of {', '.join(FORMATS)}")
    text = "" if written is None else written.text
    styles = [CallStyle(name, *FORMATS[name], arguments_as_text=as_text, written=text) for name in FORMATS]
    if own:
        parse = partial(_read_own, template, _prompt(template))
        styles.insert(0, CallStyle(OWN, parse, reads_whole=True, arguments_as_text=as_text, written=text))
    if tool_format is not None:
        style = next(style for style in styles if style.name == tool_format)
        return replace(style, named=True, takes_text=_reads(style, written, _TEXT))
    for style in styles:
        if _reads(style, written):
            return replace(style, takes_text=_reads(style, written, _TEXT))
    what = "writes no tool calls" if written is None else "writes tool calls in a format that is not known"
    message = f"the chat template {what}, so the policy's calls cannot be read."
    fix = f"set environment.tool_format to how the model writes them: {', '.join(FORMATS)}; or use another model"
    raise fail("C001", "rollout", message, fix=fix)


@dataclass(frozen=True)
class _Written:
    """The stand-in call as the template writes it: the whole turn, and without the special token that ends it."""

    whole: str
    text: str
    as_text: bool  # the template takes arguments as JSON text


def _reads(style: CallStyle, written: _Written | None, before: str = "") -> bool:
    """Whether a format reads back the call that the template wrote, and the text before it."""
    if written is None:
        return False
    found = style.parse(before + (written.whole if style.reads_whole else written.text), [STAND_IN_TOOL])
    calls = [(call.name, call.arguments) for call in found.calls]
    return calls == [(STAND_IN.name, STAND_IN.arguments)] and before.strip() in found.content


def _prompt(template: Template) -> str:
    try:
        return template.render([BEGIN])
    except Unrenderable:
        return ""


def _written_call(template: Template) -> _Written | None:
    marks = {mark for _, markers in FORMATS.values() for mark in markers}
    for as_text in (False, True):
        turn = call_message([STAND_IN], as_text)
        for tools in ([STAND_IN_TOOL], None):
            try:
                text = template.render([BEGIN, turn], tools, prompt=False)
                begin = template.render([BEGIN], tools)
            except Unrenderable:
                continue
            place = str(STAND_IN.arguments["place"])
            # In single quotes: the template wrote an object as Python does, and wants text.
            if place not in text or f"'{place}'" in text:
                continue
            # Some templates write the beginning of a turn differently once it is there.
            same = num_same(text, begin)
            if same < len(begin):
                same = max(text.rfind(mark, 0, same) for mark in (">", "]", "\n")) + 1
            return _Written(text[same:], template.without_end(text[same:], marks), as_text)
    return None


def _read_own(template: Template, prompt: str, text: str, tools: Sequence[Schema]) -> Found:
    """A turn as the tokenizer's own response template reads it."""
    try:
        message: Message = template.tokenizer.parse_response(text, prefix=prompt, tools=list(tools))
    except Exception as error:  # made of the tokenizer's files, and for anything that a policy may write
        return Found(text, (), (f"the turn cannot be read: {' '.join(str(error).split())[:200]}",))
    calls, malformed = [], []
    for call in _as_list(message.get("tool_calls")):
        try:
            calls.append(call_of(call))
        except Unreadable as error:
            malformed.append(str(error))
    thoughts = [message.get(key) for key in ("reasoning_content", "thinking", "reasoning")]
    thought = next((each for each in thoughts if isinstance(each, str)), "")
    content = message.get("content")
    return Found(content if isinstance(content, str) else "", tuple(calls), tuple(malformed), thought)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
