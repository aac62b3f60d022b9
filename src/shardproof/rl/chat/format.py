"""How a tokenizer's chat template and its family's tool format make tokens of messages, and turns of sampled tokens."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from shardproof.environments.protocol import Message, Schema, Turn
from shardproof.errors import ConfigError, fail
from shardproof.rl.chat.call_formats import FORMATS, CallStyle, find_style, require_known
from shardproof.rl.chat.probe import Rewrite, find_respelling, find_rewrites
from shardproof.rl.chat.stand_ins import (
    BEGIN,
    NO_ID,
    STAND_IN_TOOL,
    TURN,
    Scaffold,
    build_scaffold,
    call_message,
)
from shardproof.rl.chat.template import Endless, Span, Template, Unrenderable, clean
from shardproof.rl.chat.thoughts import ThoughtStyle, find_thoughts
from shardproof.rollout.trajectory import Segment

_KEPT_SCAFFOLDS = 256  # replies with ids of their own make one each
_KEPT_FORMATS = 64  # rows with variables of their own make one for each value


class ChatFormat:
    """A chat model's format: its template, how it writes thoughts and tool calls, and what it writes between turns."""

    def __init__(
        self, tokenizer: Any, tool_format: str | None = None, variables: Mapping[str, Any] | None = None
    ):
        self.template = Template(tokenizer, variables)
        self._tool_format = require_known(tool_format)
        self._others: dict[str, ChatFormat] = {}  # with other variables
        self._style: CallStyle | None = None
        self._thoughts: ThoughtStyle | None = None
        self._scaffolds: dict[str, Scaffold] = {}

    @classmethod
    def of(
        cls, tokenizer: Any, tool_format: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> ChatFormat:
        """The format of a tokenizer with a chat template; `tool_format` names how the model writes tool calls.

        `variables` are for the template, such as `enable_thinking`.
        """
        return cls(tokenizer, tool_format, variables)

    def with_variables(self, variables: Mapping[str, Any] | None) -> ChatFormat:
        """The format with a row's own variables for the template; the same one where the row has none."""
        if variables is None:
            return self
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._others:
            if len(self._others) >= _KEPT_FORMATS:
                self._others.pop(next(iter(self._others)))
            self._others[key] = ChatFormat(self.template.tokenizer, self._tool_format, variables)
        return self._others[key]

    @property
    def calls(self) -> CallStyle:
        """How the model writes tool calls. Raises C001 if no known format reads what the template writes."""
        if self._style is None:
            self._style = find_style(self.template, self._tool_format)
        return self._style

    @property
    def thoughts(self) -> ThoughtStyle:
        """How the model writes thoughts."""
        if self._thoughts is None:
            style = self._style
            tools = None if style is None else [STAND_IN_TOOL]
            self._thoughts = find_thoughts(
                self.template, tools, None if style is None else style.arguments_as_text
            )
        return self._thoughts

    def probe(self, roles: Sequence[str], has_tools: bool) -> list[Rewrite]:
        """How the template rewrites what the policy has read and said, once replies of these roles follow; [] if it does not.

        Without roles only tools are looked at. Raises C001 if the template refuses or leaves out messages of these roles,
        tools or tool calls.
        """
        try:
            # A template that does not even take a question is not asked further.
            self.template.render([BEGIN], [STAND_IN_TOOL] if has_tools else None)
            calls = self.calls if has_tools else None
            return find_rewrites(self.template, self.message, roles, calls, self.thoughts)
        except (Endless, Unrenderable) as error:
            raise fail(
                "C001", "rollout", f"{error}.", fix="use a model with another chat template"
            ) from error

    def respelling(self, has_tools: bool) -> list[str]:
        """What changes in the policy's turns when they are rendered anew, in words: of interest where turns are split."""
        tools = [STAND_IN_TOOL] if has_tools else None
        calls = self.calls if has_tools else None
        return find_respelling(
            self.template,
            lambda tokens: self.message(self.turn(tokens, finished=False, tools=tools)),
            calls,
            self.thoughts,
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None = None) -> list[Segment]:
        """A whole conversation up to the policy's turn, as one segment."""
        text = self.template.render([clean(message) for message in messages], tools)
        return [Segment(tuple(self.template.encode(text)), "prompt")]

    def reply(
        self,
        messages: Sequence[Message],
        ended_with: int | None,
        tools: Sequence[Schema] | None = None,
        is_stop: bool = True,
    ) -> list[Segment]:
        """The tokens between what the policy sampled and its next turn: the messages and what the template adds.

        `ended_with` is the token that ended what the policy sampled. The template's end of a turn is not written again if
        it is that token, or if that is another stop token, `is_stop`, and neither text nor a mark of calls. None: the turn
        was cut, and its end is written. Raises `Unrenderable` if the template refuses the messages.
        """
        if not messages:
            raise Unrenderable("the reply has no messages")
        messages, tools = _with_ids([clean(message) for message in messages]), tools or ()
        scaffold = self._scaffold(messages, tools)
        tail = scaffold.tail(self.template.render([*scaffold.before, *messages], tools))
        tokens, spans = self._encode_tail(tail)
        contents = scaffold.contents(tail, messages)
        if spans is None or contents is None:
            contents, spans = [(0, 1)], [(0, 1)] * len(tokens)
        replaces = is_stop and ended_with in self.template.own_tokens and not self._marks_calls(ended_with)
        begin = scaffold.num_sampled(ended_with, tokens, self.template.special_tokens, replaces)
        return list(_segments(tokens, spans, contents, begin))

    def turn(
        self,
        tokens: Sequence[int],
        finished: bool,
        number: int = 1,
        last: bool = False,
        tools: Sequence[Schema] | None = None,
    ) -> Turn:
        """What the sampled tokens say. Never raises, whatever they are.

        `text` is without special tokens, as rewards read completions. Tool calls are looked for if there are tools, and
        special tokens that mark them stay in `text` then, the one that ended the turn too.
        """
        style = self.calls if tools else None
        ends = finished and not (tokens and self._marks_calls(tokens[-1]))
        said = tokens[:-1] if ends else tokens
        marks = style.markers if style is not None else ()
        text = self._text(said, marks)
        readable = self._text(said, (*marks, *self.thoughts.markers), text)
        thought, rest = self.thoughts.split(readable)
        turn = Turn(text, rest, thought, number=number, finished=finished, last=last)
        if style is not None:
            whole = self.template.decode(tokens, special=True) if style.reads_whole else rest
            found = style.parse(whole, tools or ())
        elif self.thoughts.in_channels:
            parse, marks = FORMATS["harmony"]
            found = replace(parse(self._text(said, marks), ()), calls=(), malformed=())
        else:
            return turn if rest != readable else replace(turn, content=text)
        return replace(
            turn,
            content=found.content,
            thought=found.thought or thought,
            calls=found.calls,
            malformed=found.malformed,
        )

    def message(self, turn: Turn) -> Message:
        """The turn as the assistant's message, to render a conversation anew."""
        written = bool(turn.calls) and not turn.malformed and self.calls.arguments_as_text is not None
        if written:
            message = call_message(turn.calls, bool(self.calls.arguments_as_text), turn.content, turn.number)
            return self.thoughts.add(message, turn.thought)
        if turn.thought and self.thoughts.key is not None:
            rest = turn.content if not (turn.calls or turn.malformed) else self.thoughts.split(turn.text)[1]
            return self.thoughts.add({"role": "assistant", "content": rest}, turn.thought)
        return {"role": "assistant", "content": self.thoughts.opened + turn.text}

    def _text(self, tokens: Sequence[int], markers: Sequence[str], without: str | None = None) -> str:
        """The text of tokens, with these special tokens and no others; `without`: what it is without any of them."""
        special = self.template.special_tokens
        if not any(special.get(token) in markers for token in tokens):
            return self.template.decode(tokens, special=False) if without is None else without
        kept = [token for token in tokens if token not in special or special[token] in markers]
        return self.template.decode(kept, special=True)

    def _marks_calls(self, token: int) -> bool:
        """Whether a token is one of those between which the model writes its calls: it ends a call before it ends a turn."""
        style = self._style
        if style is None or style.name == "harmony":  # whose marks are around all that is said
            return False
        return self.template.decode([token], special=True).strip() in style.markers

    def _scaffold(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Scaffold:
        fields = [{key: value for key, value in m.items() if key != "content"} for m in messages]
        key = json.dumps([fields, tools], default=str)
        if key not in self._scaffolds:
            if len(self._scaffolds) >= _KEPT_SCAFFOLDS:
                self._scaffolds.pop(next(iter(self._scaffolds)))
            style = self._style_if_any() if messages[0].get("role") == "tool" else None
            if style is None:
                self._scaffolds[key] = build_scaffold(self.template, messages, tools)
            else:
                self._scaffolds[key] = build_scaffold(
                    self.template, messages, tools, style.arguments_as_text, style.markers
                )
        return self._scaffolds[key]

    def _style_if_any(self) -> CallStyle | None:
        """How calls are written; None: in no known way, and an environment without tools may not care."""
        try:
            return self.calls
        except ConfigError:
            return None

    def _encode_tail(self, tail: str) -> tuple[list[int], list[Span] | None]:
        """The tail's tokens as they are behind other text: a tokenizer may begin a text of its own differently."""
        if not self.template.begins_special(tail):
            tokens, spans = self.template.encode_with_spans(TURN + tail)
            begins = [n for n, (begin, end) in enumerate(spans or ()) if begin >= len(TURN) and end > begin]
            if spans is not None and begins and (begins[0] == 0 or spans[begins[0] - 1][1] <= len(TURN)):
                first = begins[0]
                return tokens[first:], [(a - len(TURN), b - len(TURN)) for a, b in spans[first:]]
        return self.template.encode_with_spans(tail)


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages; answers of tools that name no call get the id that a call without one has in its place."""
    places = count()
    return [
        {"tool_call_id": NO_ID.format(1, next(places)), **message}
        if message.get("role") == "tool"
        else message
        for message in messages
    ]


def _segments(
    tokens: Sequence[int], spans: Sequence[Span], contents: Sequence[Span], place: int
) -> Iterator[Segment]:
    """The tokens from a place on, by author: the environment's as soon as one character of its content is in a token."""
    for begin, end in contents:
        first = max(bisect_right(spans, begin, key=lambda span: span[1]), place)
        last = max(bisect_left(spans, end, key=lambda span: span[0]), first)
        if first > place:
            yield Segment(tuple(tokens[place:first]), "template")
        if last > first:
            yield Segment(tuple(tokens[first:last]), "environment")
        place = last
    if place < len(tokens):
        yield Segment(tuple(tokens[place:]), "template")


class PlainFormat:
    """What `ChatFormat` does with messages and turns, without a template: messages are their contents, one after the other."""

    def __init__(self, tokenizer: Any):
        self.template = Template(tokenizer)

    def with_variables(self, variables: Mapping[str, Any] | None) -> PlainFormat:
        """The same: there is no template."""
        return self

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None = None) -> list[Segment]:
        """The contents as tokens, with those that the tokenizer begins a text with. Raises `Unrenderable` for tools."""
        if tools:
            raise Unrenderable("plain text cannot show its tools to the model: set data.chat=true")
        text = "".join(_content(message) for message in messages)
        return [Segment(tuple(self.template.encode(text, special=True)), "prompt")]

    def reply(
        self,
        messages: Sequence[Message],
        ended_with: int | None,
        tools: Sequence[Schema] | None = None,
        is_stop: bool = True,
    ) -> list[Segment]:
        """The contents as the environment's tokens; none for empty ones."""
        tokens = self.template.encode("".join(_content(message) for message in messages))
        return [Segment(tuple(tokens), "environment")] if tokens else []

    def turn(
        self,
        tokens: Sequence[int],
        finished: bool,
        number: int = 1,
        last: bool = False,
        tools: Sequence[Schema] | None = None,
    ) -> Turn:
        """What the sampled tokens say: text, without special tokens."""
        text = self.template.decode(tokens[:-1] if finished else tokens, special=False)
        return Turn(text, text, number=number, finished=finished, last=last)

    def message(self, turn: Turn) -> Message:
        """The turn as the assistant's message."""
        return {"role": "assistant", "content": turn.text}


def _content(message: Message) -> str:
    content = clean(message).get("content")
    if not isinstance(content, str):
        raise Unrenderable(
            f"a message's content is {type(content).__name__}; without a chat template it must be text"
        )
    return content
