"""How models write thoughts: between marks at the beginning of a turn, or behind a mark that the prompt ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.environments.protocol import Message, Schema
from shardproof.rl.chat.stand_ins import BEGIN, STAND_IN, call_message
from shardproof.rl.chat.template import Template, Unrenderable

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_KEYS = ("reasoning_content", "reasoning", "thinking")  # of messages, in which templates look for the thought
_PROBE = "kq0thought"


@dataclass(frozen=True)
class ThoughtStyle:
    """The marks of a thought, and where a message has it."""

    opened: str = ""  # what the prompt of a turn ends with, if it begins the thought itself
    closed: bool = False  # the prompt of a turn ends the thought: the model is asked not to think
    known: bool = False  # the template knows thoughts
    key: str | None = None  # of messages; None: the thought is a part of the content
    in_channels: bool = False  # a turn has channels, and thoughts have one of their own

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(mark for pair in _PAIRS for mark in pair)

    def split(self, text: str) -> tuple[str, str]:
        """(thought, rest) of a turn. A thought that is not closed is all there is."""
        whole = self.opened + text
        begin = len(whole) - len(whole.lstrip())
        for opener, closer in _PAIRS:
            if whole.startswith(opener, begin):
                thought, _, rest = whole[begin + len(opener) :].partition(closer)
                return thought.strip(), rest.lstrip("\n")
        return "", text

    def add(self, message: Message, thought: str) -> Message:
        """The message with a thought."""
        if not thought:
            return message
        if self.key is not None:
            return {**message, self.key: thought}
        return {**message, "content": f"<think>\n{thought}\n</think>\n\n{message['content']}"}


def find_thoughts(
    template: Template, tools: Sequence[Schema] | None = None, arguments_as_text: bool | None = None
) -> ThoughtStyle:
    """How a template writes thoughts, found by rendering a turn with one; also one that calls a tool, if it writes calls."""
    try:
        prompt = template.render([BEGIN], tools).rstrip(" \n")
    except Unrenderable:
        return ThoughtStyle()
    opened = ""
    for opener, _ in _PAIRS:
        if prompt.endswith(opener):
            opened = template.render([BEGIN], tools)[prompt.rindex(opener) :]
    closed = any(prompt.endswith(closer) for _, closer in _PAIRS)
    known = bool(opened) or any(closer in template.source for _, closer in _PAIRS)
    channels = "<|channel|>analysis" in template.source
    turns: list[Message] = [{"role": "assistant", "content": "kq0answer"}]
    if arguments_as_text is not None:
        turns.append(call_message([STAND_IN], arguments_as_text))
    for key in _KEYS:
        for turn in turns:
            try:
                if _PROBE in template.render([BEGIN, {**turn, key: _PROBE}], tools, prompt=False):
                    return ThoughtStyle(opened, closed, True, key, channels)
            except Unrenderable:
                continue
    return ThoughtStyle(opened, closed, known, None, channels)
