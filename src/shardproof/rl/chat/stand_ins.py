"""What the template writes between two turns of the policy, found with a conversation that stands in for the real one.

The policy's turn in it is a placeholder: nothing that the policy said is ever rendered or encoded again, and the cost
of a reply does not grow with the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from shardproof.environments.protocol import Message, Schema, ToolCall
from shardproof.rl.chat.template import Span, Template, Unrenderable

BEGIN: Message = {"role": "user", "content": "kq0begin"}
TURN = "kq0turn"  # in place of what the policy said
ARGUMENT = "kq0argument"  # in place of what it called a tool with, at last
_EARLIER = "kq0earlier"  # and before
# Of calls to which the model gave no id: the turn's number and the call's place in it, as answers of tools name them.
# Nine letters and digits: templates of the Mistral family refuse others.
NO_ID = "t{:04d}c{:03d}"
_CONTENT = "kq0content{:05d}"  # in place of what the environment said
_SAID: Message = {"role": "assistant", "content": TURN}

STAND_IN = ToolCall("kq0name", {"place": "kq0place", "days": 3})
STAND_IN_TOOL: Schema = {
    "type": "function",
    "function": {
        "name": "kq0name",
        "description": "Stands in for a tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A place."},
                "days": {"type": "integer", "description": "A number."},
            },
            "required": ["place", "days"],
        },
    },
}


def call_message(calls: Sequence[ToolCall], as_text: bool, content: str = "", number: int = 1) -> Message:
    """The assistant's message with tool calls, as chat templates take it; arguments as an object, or as JSON text."""
    written = []
    for n, call in enumerate(calls):
        arguments = dict(call.arguments)
        function = {
            "name": call.name,
            "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
        }
        written.append({"type": "function", "id": call.id or NO_ID.format(number, n), "function": function})
    return {"role": "assistant", "content": content, "tool_calls": written}


@dataclass(frozen=True)
class Scaffold:
    """What the template writes around replies of one pattern of roles."""

    before: tuple[Message, ...]  # the stand-in conversation that replies are rendered behind
    mark: str  # the last text of the policy's stand-in turn that is known
    closer: str  # what its turn has behind the mark: the end of a tool call
    end: tuple[int, ...]  # the tokens with which the template ends the turn
    pieces: tuple[str, ...]  # the template's own text: before, between and behind the messages' contents

    def tail(self, text: str) -> str:
        """The part of a rendered stand-in conversation that follows the policy's own text."""
        _, found, rest = text.partition(self.mark)
        if not found or not rest.startswith(self.closer):
            raise Unrenderable("the chat template leaves out or changes the turn before the reply")
        return rest[len(self.closer) :]

    def contents(self, tail: str, messages: Sequence[Message]) -> list[Span] | None:
        """Where the messages' contents are in the tail; None if the template changes them beyond recognition."""
        if not tail.startswith(self.pieces[0]):
            return None
        place, spans = len(self.pieces[0]), []
        for n, message in enumerate(messages):
            behind = self.pieces[n + 1]
            for text in _written_forms(message.get("content")):
                if tail.startswith(text, place) and tail.startswith(behind, place + len(text)):
                    break
            else:
                if n + 1 < len(messages) or not tail.endswith(behind) or place + len(behind) > len(tail):
                    return None
                text = tail[place : len(tail) - len(behind)]
            spans.append((place, place + len(text)))
            place += len(text) + len(behind)
        return spans

    def num_sampled(
        self, ended_with: int | None, tail: Sequence[int], special: Collection[int], replaces: bool
    ) -> int:
        """How many of the tail's first tokens the policy wrote itself, or another stop token in place of them.

        A turn ends with one stop token, the sampled one. If the template would write another (<|eot_id|> where the
        policy sampled <|eom_id|> or the end of sequence), it is left out, where the sampled one `replaces` it. Some models
        have none: they stop with the token that begins the next message.
        """
        if ended_with is None:
            return 0
        for written in (self.end, tail[: len(self.end) + 1]):  # the last of these begins the next message
            if ended_with in written:
                before = written[: written.index(ended_with)]
                # Text behind a special token is no end by itself: the policy has not said the special token.
                if ended_with in special or not any(token in special for token in before):
                    return len(before) + 1
        return next((n + 1 for n, token in enumerate(self.end) if token in special), 0) if replaces else 0


def _written_forms(content: object) -> Iterator[str]:
    """The ways in which templates write a content: as it is, trimmed, or as a JSON string."""
    if not isinstance(content, str):
        return
    texts = (content, content.strip(), content.lstrip(), content.rstrip())
    yield from texts
    for text in texts[:2]:
        for ascii_only in (False, True):
            yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def build_scaffold(
    template: Template,
    messages: Sequence[Message],
    tools: Sequence[Schema],
    arguments_as_text: bool | None = None,
    marks: Collection[str] = (),
) -> Scaffold:
    """The scaffold of replies like these messages, whose contents are not looked at.

    `arguments_as_text` says how the template takes the arguments of tool calls, None: it writes no calls; `marks` are
    what it marks calls with.
    """
    marked = [{**message, "content": _CONTENT.format(n)} for n, message in enumerate(messages)]
    if arguments_as_text is not None and messages[0].get("role") == "tool":
        answered = list(takewhile(lambda message: message.get("role") == "tool", messages))
        # As many calls as are answered, or one: some templates take no more in a turn.
        for some in (answered, answered[-1:]):
            try:
                turn = _calling_turn(some, arguments_as_text)
                closer = _closer(template, turn, tools, marks)
                return _scaffold(template, (BEGIN, turn), ARGUMENT, closer, marked, tools)
            except Unrenderable:
                continue
    return _scaffold(template, (BEGIN, _SAID), TURN, "", marked, tools)


def _calling_turn(answered: Sequence[Message], as_text: bool) -> Message:
    """A stand-in turn that calls the tools which these messages answer; the last call has the mark."""
    values = [_EARLIER] * (len(answered) - 1) + [ARGUMENT]
    calls = [
        ToolCall(str(message.get("name") or "tool"), {"value": value}, str(message.get("tool_call_id") or ""))
        for message, value in zip(answered, values)
    ]
    return call_message(calls, as_text)


def _closer(template: Template, turn: Message, tools: Sequence[Schema], marks: Collection[str]) -> str:
    """What the policy itself writes behind the mark in a turn that ends with a tool call."""
    _, found, rest = template.render((BEGIN, turn), tools, prompt=False).partition(ARGUMENT)
    if not found:
        raise Unrenderable("the chat template leaves out tool calls")
    end = template.render((BEGIN, _SAID), tools, prompt=False).partition(TURN)[2]
    if end and rest.endswith(end):
        return rest[: len(rest) - len(end)]
    return template.without_end(rest, marks)  # a turn with calls has an end of its own


def _scaffold(
    template: Template,
    before: tuple[Message, ...],
    mark: str,
    closer: str,
    marked: list[Message],
    tools: Sequence[Schema],
) -> Scaffold:
    scaffold = Scaffold(before, mark, closer, (), ())
    try:
        end = template.encode(scaffold.tail(template.render(before, tools, prompt=False)))
    except Unrenderable:  # a template may want that a conversation ends with a question
        end = []
    tail = scaffold.tail(template.render([*before, *marked], tools))
    pieces = []
    for n, message in enumerate(marked):
        piece, found, tail = tail.partition(_CONTENT.format(n))
        if not found:
            raise Unrenderable(f'the chat template leaves out "{message.get("role")}" messages')
        pieces.append(piece)
    return replace(scaffold, end=tuple(end), pieces=(*pieces, tail))
