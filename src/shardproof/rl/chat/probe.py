"""Finds out how a chat template rewrites what the policy has read and said, before anything is sampled.

A conversation grows turn by turn. What the policy read at each turn must be the beginning of what it reads at the next,
and what it said must be there whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardproof.environments.protocol import Message, Schema, ToolCall, Turn
from shardproof.errors import fail
from shardproof.rl.chat.call_formats import CallStyle
from shardproof.rl.chat.stand_ins import NO_ID, STAND_IN_TOOL
from shardproof.rl.chat.template import Template, Unrenderable, num_same
from shardproof.rl.chat.thoughts import ThoughtStyle

_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_QUESTION: Message = {"role": "user", "content": "How is the weather?"}
_TOOL = str(STAND_IN_TOOL["function"]["name"])
_TURNS = "the policy's earlier turns"
_SHOWN = 40  # characters of what is dropped or added
_ALIKE = 14  # characters: changes that begin so are one kind
_SAME = 12  # characters that are the same again: a change ends there


@dataclass(frozen=True)
class Rewrite:
    """One way in which the template changes what came before."""

    after: str  # the role of the message that makes it do so
    where: str  # "the policy's earlier turns" or "earlier messages"
    change: str  # what it does, in words

    def __str__(self) -> str:
        return (
            f'the chat template rewrites {self.where} once a "{self.after}" message follows: it {self.change}'
        )


@dataclass(frozen=True)
class _Exchange:
    """A turn of the policy in a probe, the texts that must stay in it, and the reply."""

    said: Message
    parts: tuple[str, ...]
    reply: list[Message]
    is_simple: bool  # the turn answers or calls one tool, and not both: enough for what follows another turn

    @property
    def role(self) -> str:
        return str(self.reply[-1]["role"])


def find_rewrites(
    template: Template,
    message_of: Callable[[Turn], Message],
    roles: Sequence[str],
    calls: CallStyle | None,
    thoughts: ThoughtStyle,
) -> list[Rewrite]:
    """How the template rewrites earlier text, once for each role and kind of change; [] if it is prefix-stable.

    `calls` says how the policy calls tools; None: it has none. Raises C001 if the template refuses or leaves out what
    the environment needs.
    """
    tools = None if calls is None else [STAND_IN_TOOL]
    if calls is not None and not calls.named and _TOOL not in template.render([_QUESTION], tools):
        message = "the chat template does not tell the model about tools."
        fix = "use a model whose chat template knows tools, or describe them in your prompts and set environment.tool_format"
        raise fail("C001", "rollout", message, fix=fix)
    marks = () if calls is None else calls.markers
    found: dict[tuple[str, ...], Rewrite] = {}
    errors: dict[str, str] = {}
    rendered: set[str] = set()
    firsts = list(_exchanges(message_of, roles, calls, thoughts, 1))
    seconds = [each for each in _exchanges(message_of, roles, calls, thoughts, 2) if each.is_simple]
    for opening, first, second in product(([_QUESTION], [_SYSTEM, _QUESTION]), firsts, seconds):
        try:
            rewrites = list(_rewrites(template, opening, (first, second), tools, marks))
        except Unrenderable as error:
            for exchange in (first, second):
                errors.setdefault(exchange.role, str(error))
            continue
        rendered |= {first.role, second.role}
        for rewrite in rewrites:
            found.setdefault((rewrite.after, rewrite.where, rewrite.change[:_ALIKE]), rewrite)
    for role in roles:
        if role not in rendered:
            reason = errors.get(role, "no conversation with them could be tried")
            message = f'the environment replies with "{role}" messages, and {reason}.'
            fix = "use another chat template or model, or an environment with other roles"
            raise fail("C001", "rollout", message, fix=fix)
    return list(found.values())


def find_respelling(
    template: Template,
    message_of: Callable[[Sequence[int]], Message],
    calls: CallStyle | None,
    thoughts: ThoughtStyle,
) -> list[str]:
    """What the template spells differently from the policy when it renders the policy's turn, in words."""
    tools = None if calls is None else [STAND_IN_TOOL]
    samples = [("changes spaces around what the policy says", " two  words \n")]
    if thoughts.known:
        opener = "" if thoughts.opened else "<think>"
        samples.append(
            ("changes spaces around thoughts, or drops them", f"{opener}one thought</think>one answer")
        )
    if calls is not None and calls.written:
        close = calls.written.replace('": ', '":').replace(", ", ",")
        samples.append(("changes spaces in tool calls", close))
    found = []
    read = template.render([_QUESTION], tools)
    for words, sampled in samples:
        try:
            message = message_of(template.encode(sampled))
            if not template.render([_QUESTION, message], tools, prompt=False).startswith(read + sampled):
                found.append(words)
        except Unrenderable as error:
            found.append(f"refuses the turn: {error}")
    return found


def _exchanges(
    message_of: Callable[[Turn], Message],
    roles: Sequence[str],
    calls: CallStyle | None,
    thoughts: ThoughtStyle,
    number: int,
) -> Iterator[_Exchange]:
    """Turns of every kind that the model may write, with replies of every role that may follow."""
    thought, answer, place = (f"{what} number {number}" for what in ("thought", "answer", "place"))
    call = ToolCall(_TOOL, {"place": place, "days": 3})
    turns = [Turn(answer, answer)]
    if calls is not None:
        turns += [Turn(place, calls=(call,)), Turn(place, calls=(call, call))]
        turns += [Turn(f"{answer}\n{place}", answer, calls=(call,))] if calls.takes_text else []
    if thoughts.known and not thoughts.closed:
        thoughtful = [
            Turn(f"<think>\n{thought}\n</think>\n\n{turn.text}", turn.content, thought, turn.calls)
            for turn in turns
        ]
        # Where the prompt opens the thought, there is one in every turn.
        turns = thoughtful if thoughts.opened else turns + thoughtful
    for turn, role in product(turns, roles):
        parts = [thought] * bool(turn.thought) + [answer] * bool(turn.content) + [place] * bool(turn.calls)
        said = message_of(replace(turn, number=number))
        # Calls are answered by tools, if the environment has that role; what is no call is not.
        answers = [_reply("tool", number, n) for n in range(len(turn.calls)) if "tool" in roles]
        simple = bool(turn.content) + len(turn.calls) == 1
        if role != "tool":
            yield _Exchange(said, tuple(parts), [*answers, _reply(role, number)], simple)
        elif answers or calls is None:
            yield _Exchange(said, tuple(parts), answers or [_reply(role, number)], simple)


def _reply(role: str, number: int, place: int = 0) -> Message:
    content = f"{role} message number {number}" + " again" * place
    if role != "tool":
        return {"role": role, "content": content}
    return {"role": role, "name": _TOOL, "tool_call_id": NO_ID.format(number, place), "content": content}


def _rewrites(
    template: Template,
    opening: list[Message],
    exchanges: Sequence[_Exchange],
    tools: list[Schema] | None,
    marks: Sequence[str],
) -> Iterator[Rewrite]:
    messages = list(opening)
    read = template.render(messages, tools)
    turns: list[tuple[int, int]] = []  # where the policy's turns are in what it read, with what begins them
    for exchange in exchanges:
        begin = read.rfind(messages[-1]["content"]) + len(messages[-1]["content"])
        messages.append(exchange.said)
        finished = _finished(template, messages, tools)
        messages += exchange.reply
        after = template.render(messages, tools)
        for message in exchange.reply:
            if message["content"] not in after:
                raise Unrenderable(f'the chat template leaves out "{message["role"]}" messages')
        turns.append((begin, max(after.find(part) + len(part) for part in exchange.parts)))
        missing = [part for part in exchange.parts if part not in after]
        if not after.startswith(read):
            same, change = _change(read, after)
            inside = any(a <= same < max(b, len(read)) if a == begin else a <= same < b for a, b in turns)
            yield Rewrite(exchange.role, _TURNS if inside else "earlier messages", change)
        elif missing:
            yield Rewrite(exchange.role, _TURNS, _loss(missing[0], exchange, finished, after))
        elif closes := _changed_close(template, exchange.parts[-1], finished, after, marks):
            yield Rewrite(exchange.role, _TURNS, closes)
        read = after


def _finished(template: Template, messages: list[Message], tools: list[Schema] | None) -> str:
    """The conversation with the policy's turn as its last message; empty if the template wants a question there."""
    try:
        return template.render(messages, tools, prompt=False)
    except Unrenderable:
        return ""


def _changed_close(
    template: Template, part: str, finished: str, after: str, marks: Sequence[str]
) -> str | None:
    """How the template writes what closes a turn differently, such as the end of a call; None if it does not."""
    close = template.without_end(finished.rpartition(part)[2], marks)
    behind = after.rpartition(part)[2]
    if part not in finished or behind.startswith(close):
        return None
    same = num_same(close, behind)
    return f"writes {_excerpt(part + behind[: same + _SHOWN])} where the turn has {_excerpt(part + close)}"


def _loss(part: str, exchange: _Exchange, finished: str, after: str) -> str:
    """What the template does to a part of a turn that is no longer there."""
    if "answer" in part and "tool_calls" in exchange.said:
        return "drops text before a tool call"
    if part not in finished:
        return "drops thoughts" if "thought" in part else "drops a part of them"
    change = _change(finished, after)[1]
    return "drops thoughts" if change == 'drops "..."' and "thought" in part else change


def _change(before: str, after: str) -> tuple[int, str]:
    """Where a longer conversation begins to be different from a shorter one, and what is different, in words."""
    same = num_same(before, after)
    # Back to where the word or the mark begins.
    same = max(before.rfind(mark, 0, same) for mark in (">", "]", " ", "\n")) + 1
    for end in range(same + 1, len(before)):
        if after.startswith(before[end : end + _SAME], same):
            return same, f"drops {_excerpt(before[same:end])}"
    rest = before[same:]
    place = after.find(rest, same)
    if 0 <= place < len(after) - len(rest):  # at its end is only what begins the next turn
        return same, f"adds {_excerpt(after[same:place])}"
    return same, f"drops {_excerpt(rest)}"


def _excerpt(text: str) -> str:
    """The text on one line in quotes, with dots for the probe's own words."""
    text = re.sub(r"(thought|answer|place) number \d", "...", text)
    line = " ".join(text.split()) or text.replace("\n", "\\n")
    return f'"{line[:_SHOWN]}..."' if len(line) > _SHOWN else f'"{line}"'
