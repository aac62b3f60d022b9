"""Finds out how a chat template rewrites what the policy has read and said, before anything is sampled.

A conversation grows turn by turn. What the policy read at each turn must be the beginning of what it reads at the next,
and what it said must be there whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product

from shardproof.environments.protocol import Message, Schema, ToolCall, Turn
from shardproof.errors import fail
from shardproof.rl.chat.call_formats import STAND_IN_TOOL, CallStyle
from shardproof.rl.chat.template import Template, Unrenderable

_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_QUESTION: Message = {"role": "user", "content": "How is the weather?"}
_THOUGHT, _ANSWER = "let me think about {}", "answer number {}"
_SHOWN = 40  # characters of what is dropped or changed
_FIX = "use another chat template or model, or an environment with other roles"


@dataclass(frozen=True)
class Rewrite:
    """One way in which the template changes what came before."""

    after: str  # the role of the message that makes it do so
    where: str  # what it changes: "the policy's earlier turns" or "the prompt"
    change: str  # how, in words

    def __str__(self) -> str:
        return (
            f'the chat template rewrites {self.where} once a "{self.after}" message follows: it {self.change}'
        )


@dataclass(frozen=True)
class _Said:
    """A turn of the policy in a probe, and the texts that must stay in it."""

    message: Message
    parts: tuple[str, ...]


Exchange = tuple[_Said, str, list[Message]]  # a turn, the role that decides, and the reply


def find_rewrites(
    template: Template,
    message_of: Callable[[Turn], Message],
    roles: Sequence[str],
    calls: CallStyle | None,
) -> list[Rewrite]:
    """How the template rewrites earlier text, once for each role and kind of change; [] if it is prefix-stable.

    `calls` says how the policy calls tools; None: it has none. Raises C001 if the template refuses or leaves out what
    the environment needs.
    """
    tools = [STAND_IN_TOOL] if calls is not None else None
    if tools and STAND_IN_TOOL["function"]["name"] not in _require(template, [_QUESTION], tools, "tools"):
        message = "the chat template does not tell the model about tools."
        raise fail("C001", "rollout", message, fix="use a model whose chat template knows tools")
    found: dict[tuple[str, str, str], Rewrite] = {}
    rendered = dict.fromkeys(roles, False)
    errors: dict[str, str] = {}
    for opening, exchanges in _conversations(message_of, roles, calls):
        try:
            rewrites = list(_rewrites(template, opening, exchanges, tools))
        except Unrenderable as error:
            for _, role, _ in exchanges:
                errors.setdefault(role, str(error))
            continue
        for _, role, _ in exchanges:
            rendered[role] = True
        for rewrite in rewrites:
            found.setdefault((rewrite.after, rewrite.where, rewrite.change), rewrite)
    for role in roles:
        if not rendered[role] and role in errors:
            message = f'the environment replies with "{role}" messages: {errors[role]}.'
            raise fail("C001", "rollout", message, fix=_FIX)
    return list(found.values())


def _require(template: Template, messages: list[Message], tools: list[Schema] | None, what: str) -> str:
    try:
        return template.render(messages, tools)
    except Unrenderable as error:
        raise fail("C001", "rollout", f"with {what}: {error}.", fix=_FIX) from error


def _conversations(
    message_of: Callable[[Turn], Message], roles: Sequence[str], calls: CallStyle | None
) -> Iterator[tuple[list[Message], list[Exchange]]]:
    """Openings, and two exchanges behind each, in every combination of kinds of turns and roles."""
    first = list(_exchanges(message_of, roles, calls, 1))
    second = list(_exchanges(message_of, roles, calls, 2))
    for opening in ([_QUESTION], [_SYSTEM, _QUESTION]):
        for one, two in product(first, second):
            yield opening, [one, two]


def _exchanges(
    message_of: Callable[[Turn], Message], roles: Sequence[str], calls: CallStyle | None, number: int
) -> Iterator[Exchange]:
    thought, answer = _THOUGHT.format(number), _ANSWER.format(number)
    for role in roles:
        for thinks in (False, True):
            turn = Turn(answer, answer)
            parts = [answer]
            if role == "tool":
                if calls is None:
                    continue
                place = f"place number {number}"
                call = ToolCall(STAND_IN_TOOL["function"]["name"], {"place": place, "days": 3})
                turn, parts = Turn("", "", calls=(call,)), [place]
            if thinks:
                text = f"<think>\n{thought}\n</think>\n\n{turn.text}"
                turn = Turn(text, turn.content, thought, turn.calls)
                parts = [thought, *parts]
            said = _Said(message_of(turn), tuple(parts))
            yield said, role, [_reply(role, number)]
            if role == "tool" and not thinks and "user" in roles:
                yield said, "user", [_reply("tool", number), _reply("user", number)]


def _reply(role: str, number: int) -> Message:
    content = f"{role} message number {number}"
    if role != "tool":
        return {"role": role, "content": content}
    name = STAND_IN_TOOL["function"]["name"]
    return {"role": role, "name": name, "tool_call_id": "call00000", "content": content}


def _rewrites(
    template: Template, opening: list[Message], exchanges: list[Exchange], tools: list[Schema] | None
) -> Iterator[Rewrite]:
    messages = list(opening)
    before = template.render(messages, tools)
    begin = len(before)
    for said, role, reply in exchanges:
        messages.append(said.message)
        finished = template.render(messages, tools, prompt=False)
        messages += reply
        after = template.render(messages, tools)
        for message in reply:
            if message["content"] not in after:
                raise Unrenderable(f'the chat template leaves out "{message["role"]}" messages')
        if not after.startswith(before):
            where = "the prompt" if not after.startswith(before[:begin]) else "the policy's earlier turns"
            yield Rewrite(role, where, _change(before, after))
        elif missing := [part for part in said.parts if part not in after]:
            whole = finished if missing[0] in finished else before + missing[0]
            yield Rewrite(role, "the policy's earlier turns", _change(whole, after))
        before = after


def _change(before: str, after: str) -> str:
    """The first thing that is different in a longer conversation, in words."""
    for tag, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "delete":
            return f"drops {_excerpt(before[a:b])}"
        if tag == "insert":
            return f"adds {_excerpt(after[c:d])}"
        if tag == "replace":
            return f"changes {_excerpt(before[a:b])} to {_excerpt(after[c:d])}"
    return "changes it"


def _excerpt(text: str) -> str:
    line = " ".join(text.split()) or text.replace("\n", "\\n")
    return f'"{line[:_SHOWN]}..."' if len(line) > _SHOWN else f'"{line}"'
