"""Environments in which the policy calls tools: the one that a recipe configures, and the base of your own."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardproof.environments.arguments import example, problems
from shardproof.environments.protocol import Environment, Message, Reply, Schema, ToolCall, Turn
from shardproof.environments.toolbox import Tool, ToolError, ToolTimeout, bounded, describe, well_formed
from shardproof.environments.typed_functions import function_tools, method_tools
from shardproof.errors import did_you_mean, fail

_SHARE = 0.9  # of the environment's time limit that calls may take: the rest is for answering that they took too long


@dataclass
class _Tally:
    """What came of the calls of one turn."""

    calls: int = 0
    malformed_calls: int = 0
    unknown_tools: int = 0
    tool_errors: int = 0
    reward: float | None = None
    done: bool = False

    def facts(self) -> dict[str, float]:
        names = ("calls", "malformed_calls", "unknown_tools", "tool_errors")
        return {name: float(getattr(self, name)) for name in names}


class ToolEnvironment(Environment):
    """An environment with tools: methods marked with `sp.tool`, and the typed functions listed in `functions`.

    Each conversation has an object of its own, so that tools can keep state in `self`. A turn's calls are run one after
    the other, and each is answered by a message of role `tool`: with the result, or with what was wrong. A turn without
    calls ends the conversation. Define `finish` to reward it; a tool that returns a `Reply` can reward or end it, too.
    """

    roles: ClassVar[Sequence[str]] = ("tool",)
    functions: ClassVar[Sequence[str | Callable[..., Any]]] = ()
    max_calls: int = 16  # that are run in one turn
    max_result_chars: int = 10_000  # of one result; what is longer loses its middle
    tool_timeout_s: float | None = (
        None  # for one call; by default a turn's calls share the environment's time
    )

    def toolbox(self) -> Mapping[str, Tool]:
        """The tools by name."""
        return _class_tools(type(self))  # type: ignore[arg-type]  # mypy takes a class for an object without hash

    @property
    def tools(self) -> Sequence[Schema]:  # type: ignore[override]  # a value there, computed here
        """The schemas of the tools, as chat templates take them."""
        return tuple(each.schema for each in self.toolbox().values())

    def finish(self, turn: Turn) -> Reply | Sequence[Message] | str | float | None:
        """What follows the last turn: one without calls, or the last that the limits allow. Define it to give a reward.

        A number is the reward, and the conversation is over. None: it is over, without a reward. Messages go on with it,
        and so does a string, as a message of the last of `roles`. May be async.
        """
        return None

    async def step(self, turn: Turn) -> Reply:  # type: ignore[override]  # async, as the worker allows
        """Run the turn's calls and answer each; end the conversation if there are none."""
        tally = _Tally()
        messages = await self._answers(turn, tally)
        over = tally.done or turn.last or not turn.finished
        if messages and not over:
            return Reply(messages, tally.reward, facts=tally.facts())
        end = None if tally.done else self.finish(turn)
        end = await end if asyncio.iscoroutine(end) else end
        return _ended(messages, tally, end, self.roles[-1])

    async def _answers(self, turn: Turn, tally: _Tally) -> list[Message]:
        until = time.monotonic() + _SHARE * self.timeout_s
        messages = []
        for place, call in enumerate(turn.calls):
            tally.calls += 1
            if place >= self.max_calls:
                content = f"Error: not run, because a turn may have at most {self.max_calls} calls."
                tally.tool_errors += 1
            elif tally.done:
                content = "Not run: the conversation is over."
            else:
                content = await self._answer(call, until, tally)
            messages.append(
                {
                    "role": "tool",
                    "name": _short(call.name),
                    "tool_call_id": _short(call.id) or f"t{turn.number:04d}c{place:03d}",
                    "content": well_formed(bounded(content, self.max_result_chars)),
                }
            )
        for place, why in enumerate(turn.malformed[: self.max_calls], start=len(turn.calls)):
            identity = f"t{turn.number:04d}c{place:03d}"
            content = well_formed(bounded(f"Error: {why.rstrip('.')}.{self._how()}", self.max_result_chars))
            messages.append({"role": "tool", "name": "error", "tool_call_id": identity, "content": content})
        tally.malformed_calls += len(turn.malformed)
        return messages

    async def _answer(self, call: ToolCall, until: float, tally: _Tally) -> str:
        """What the policy is told about one call; what came of it is counted."""
        tools = self.toolbox()
        if (tool := tools.get(call.name)) is None:
            tally.unknown_tools += 1
            known = ", ".join(tools) or "none"
            return f"Error: there is no tool {_short(call.name)!r}. Tools: {known}.{did_you_mean(call.name, tools)}"
        if wrong := problems(tool.parameters, call.arguments):
            tally.malformed_calls += 1
            takes = json.dumps(tool.parameters.get("properties", {}), ensure_ascii=False)
            return f"Error: {'; '.join(wrong[:10])}. {tool.name} takes {bounded(takes, 2000)}."
        seconds = max(0.001, until - time.monotonic())
        seconds = min(seconds, self.tool_timeout_s or seconds)
        try:
            result = await tool.call(self, dict(call.arguments), seconds)
        except ToolTimeout:
            tally.tool_errors += 1
            return f"Error: no answer in {self.tool_timeout_s or self.timeout_s:g} s."
        except ToolError as error:
            tally.tool_errors += 1
            return f"Error: {error}"
        except Exception as error:
            tally.tool_errors += 1
            return f"Error: {describe(error)}"
        if isinstance(result, str):
            return result
        tally.done |= result.done
        if result.reward is not None:
            tally.reward = (tally.reward or 0.0) + float(result.reward)
        return _content(result)

    def _how(self) -> str:
        for each in self.toolbox().values():
            arguments = json.dumps(example(each.parameters), ensure_ascii=False)
            return f" A call names a tool and gives its arguments, for example {each.name} with {arguments}."
        return " There are no tools."


def _short(name: str) -> str:
    """A name that the policy made up, as it may be repeated."""
    return well_formed(name[:100])


def _content(reply: Reply) -> str:
    """The text of a reply that a tool returned in place of a result."""
    if isinstance(reply.messages, str):
        return well_formed(reply.messages)
    return well_formed("\n".join(str(each.get("content", "")) for each in reply.messages))


def _ended(messages: list[Message], tally: _Tally, end: Any, role: str) -> Reply:
    """The reply to a last turn: what `finish` returned, behind the answers to the turn's calls."""
    if isinstance(end, bool | int | float):
        end = Reply(reward=float(end), done=True)
    elif end is None:
        end = Reply(done=True)
    elif not isinstance(end, Reply):
        end = Reply(end)
    after = end.messages
    if isinstance(after, str):
        after = [{"role": role, "content": after}] if after else []
    rewards = [each for each in (tally.reward, end.reward) if each is not None]
    reward = sum(rewards) if rewards else None
    return Reply([*messages, *after], reward, end.done, end.fresh, {**tally.facts(), **end.facts})


class Tools(ToolEnvironment):
    """The environment `tools` of recipes: typed functions, MCP servers and a Python interpreter."""

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]] = (),
        mcp: Sequence[str] = (),
        python: Mapping[str, Any] | None = None,
        *,
        max_calls: int = 16,
        max_result_chars: int = 10_000,
        tool_timeout_s: float | None = None,
    ):
        self.max_calls, self.max_result_chars, self.tool_timeout_s = (
            max_calls,
            max_result_chars,
            tool_timeout_s,
        )
        limits = None if python is None else tuple(sorted(python.items()))
        self._tools = _given_tools(tuple(functions), tuple(mcp), limits)

    def toolbox(self) -> Mapping[str, Tool]:
        """The tools by name."""
        return self._tools


@functools.cache  # conversations of a worker share their tools: schemas are made once, servers started once
def _class_tools(owner: type[ToolEnvironment]) -> Mapping[str, Tool]:
    return _by_name([*method_tools(owner), *function_tools(owner.functions)])


@functools.cache
def _given_tools(
    functions: tuple[str | Callable[..., Any], ...],
    mcp: tuple[str, ...],
    limits: tuple[tuple[str, Any], ...] | None,
) -> Mapping[str, Tool]:
    # What is not asked for is not imported either: a run waits for its workers to start.
    tools = function_tools(functions)
    if limits is not None:
        from shardproof.environments.interpreter import PythonTool

        tools.append(PythonTool(dict(limits)))
    if mcp:
        from shardproof.environments.mcp_tools import mcp_tools

        tools += mcp_tools(mcp, taken={each.name for each in tools})
    return _by_name(tools)


def _by_name(tools: Sequence[Tool]) -> Mapping[str, Tool]:
    found: dict[str, Tool] = {}
    for each in tools:
        if each.name in found:
            raise fail("C001", "tools", f"two tools are named {each.name!r}.", fix="rename one of them")
        found[each.name] = each
    return found
