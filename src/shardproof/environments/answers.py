"""What environments return, checked and cut in their worker, and read again by the rank as the data that it is."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence

from shardproof.bounds import MAX_REWARD, within
from shardproof.environments.protocol import Message, Opening, Reply, Schema

MAX_MESSAGES, MAX_FACTS, MAX_FACT_NAME = 1000, 100, 100
MAX_OPENING_CHARS = (
    10**6
)  # unless replies may be longer: an opening is not cut, for half a question is another one


class NotAnAnswer(Exception):
    """An environment returned something else; the text says what."""


def opening_of(value: object, max_chars: int) -> Opening:
    """What `start` returned, as an Opening with plain data."""
    given = value if isinstance(value, Opening) else Opening(messages=value)  # type: ignore[arg-type]
    messages: list[Message] | str | None = None
    if isinstance(given.messages, str):
        messages = given.messages
    elif given.messages is not None:
        messages = _messages(given.messages, None)
    tools = None if given.tools is None else schemas(given.tools)
    limit = max(MAX_OPENING_CHARS, max_chars)
    for what, said in {"it begins": messages, "its tools are described": tools}.items():
        length = len(said) if isinstance(said, str) else len(as_json(said))
        if length > limit:
            raise NotAnAnswer(f"{what} with {length:,} characters, expected at most {limit:,}")
    return Opening(messages, tools)


def reply_of(value: object, roles: Sequence[str], max_chars: int) -> Reply:
    """What `step` returned, as a Reply with plain data, cut to `max_chars`."""
    if value is None:
        return Reply(done=True)
    given = value if isinstance(value, Reply) else Reply(messages=value)  # type: ignore[arg-type]
    for name in ("done", "fresh"):
        if not isinstance(getattr(given, name), bool):
            raise NotAnAnswer(f"{name} is {_shown(getattr(given, name))}, expected True or False")
    messages: object = given.messages
    if isinstance(messages, str):
        messages = [{"role": roles[0], "content": messages}]
    checked = _messages(messages, None if given.fresh else roles)
    reward = None if given.reward is None else _number("the reward", given.reward, MAX_REWARD)
    return Reply(_cut(checked, max_chars), reward, given.done, given.fresh, _facts(given.facts))


def schemas(tools: object) -> list[Schema]:
    """Descriptions of tools, as plain data."""
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise NotAnAnswer(f"tools is {_shown(tools)}, expected a list of schemas")
    return list(tools)


def as_json(value: object) -> str:
    """The value as JSON, or NotAnAnswer where it has none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.start]
        raise NotAnAnswer(f"text holds half of a surrogate pair, behind {near!r}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAnAnswer(f"it is no JSON: {error}") from None
    return text


def _messages(messages: object, roles: Sequence[str] | None) -> list[Message]:
    """The messages, each with a role of `roles` (None: any) and text."""
    if not isinstance(messages, (list, tuple)):
        raise NotAnAnswer(f"returned {_shown(messages)}, expected text, a list of messages or None")
    if len(messages) > MAX_MESSAGES:
        raise NotAnAnswer(f"returned {len(messages):,} messages, expected at most {MAX_MESSAGES:,}")
    return [_message(message, number, roles) for number, message in enumerate(messages, 1)]


def _message(message: object, number: int, roles: Sequence[str] | None) -> Message:
    if not isinstance(message, dict):
        raise NotAnAnswer(f"message {number} is {_shown(message)}, expected {{'role': ..., 'content': ...}}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role or (roles is not None and role not in roles):
        expected = "text" if roles is None else f"one of {', '.join(roles)} (the environment's `roles`)"
        raise NotAnAnswer(f"message {number} has the role {_shown(role)}, expected {expected}")
    calls = roles is None and role == "assistant" and bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (calls and content is None):
        raise NotAnAnswer(f"the content of message {number} is {_shown(content)}, expected text")
    return dict(message)


def _cut(messages: list[Message], max_chars: int) -> list[Message]:
    """The messages with at most `max_chars` characters in all; what is cut says so."""
    left, beside = max_chars, 0
    for message in messages:
        beside += len(as_json({key: value for key, value in message.items() if key != "content"}))
        if beside > MAX_OPENING_CHARS:
            raise NotAnAnswer(
                f"messages have more than {MAX_OPENING_CHARS:,} characters beside their content"
            )
        content = message.get("content") or ""
        if len(content) > left:
            note = f"[cut: {len(content):,} characters, of which {left:,} are shown]"
            message["content"] = f"{content[:left]}\n{note}" if left else note
        left = max(0, left - len(content))
    return messages


def _facts(facts: object) -> dict[str, float]:
    if not isinstance(facts, Mapping) or len(facts) > MAX_FACTS:
        raise NotAnAnswer(f"facts is {_shown(facts)}, expected at most {MAX_FACTS} numbers by name")
    for name in facts:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_FACT_NAME:
            raise NotAnAnswer(f"a fact is named {_shown(name)}, expected a short text")
    return {name: _number(f"the fact {name!r}", value, math.inf) for name, value in facts.items()}


def _number(what: str, value: object, limit: float) -> float:
    if not isinstance(value, numbers.Real):
        raise NotAnAnswer(f"{what} is {_shown(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NotAnAnswer(f"{what} is {number}, expected a finite number")
    if not within(abs(number), limit):
        raise NotAnAnswer(f"{what} is {number:g}, expected a number up to {limit:g}")
    return number


def _shown(value: object) -> str:
    """A value in a message: what is short as it is, the rest by its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        shown = repr(value)
        return shown if len(shown) <= 60 else f"{shown[:60]}..."
    return f"a value of type {type(value).__name__}"
