"""How models write thoughts: between marks at the beginning of a turn, or behind a mark that the prompt ends with."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.environments.protocol import Message
from shardproof.rl.chat.template import Template, Unrenderable

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
_KEYS = ("reasoning_content", "reasoning", "thinking")  # of messages, in which templates look for the thought
_PROBE = "kq0thought"


@dataclass(frozen=True)
class ThoughtStyle:
    """The marks of a thought, and where a message has it."""

    opened: str = ""  # what the prompt of a turn ends with, if it begins the thought itself
    key: str | None = None  # of messages; None: the thought is a part of the content

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


def find_thoughts(template: Template) -> ThoughtStyle:
    """How a template writes thoughts, found by rendering a turn with one."""
    begin = [{"role": "user", "content": "kq0begin"}]
    try:
        prompt = template.render(begin)
    except Unrenderable:
        return ThoughtStyle()
    opened = ""
    for opener, _ in _PAIRS:
        if prompt.rstrip().endswith(opener):
            opened = prompt[prompt.rindex(opener) :]
    for key in _KEYS:
        turn = {"role": "assistant", "content": "kq0answer", key: _PROBE}
        try:
            if _PROBE in template.render([*begin, turn], prompt=False):
                return ThoughtStyle(opened, key)
        except Unrenderable:
            continue
    return ThoughtStyle(opened)
