"""OpenEnv environments: a client resets and steps the environment on its server, and observations become messages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.environments.adapting import EVALUATION_SEED, require_split, wrong_options
from shardproof.environments.protocol import Environment, Message, Opening, Reply, Schema, ToolCall, Turn
from shardproof.user_code import import_named

_wrong = functools.partial(wrong_options, "openenv")
_CONNECT_S = 10.0
_OWN_FIELDS = ("done", "reward", "metadata")  # of every observation; the rest is the environment's
_REFUSED = "(code: VALIDATION_ERROR)"  # what the action is made of is not what the environment takes


class OpenEnv(Environment):
    """One episode on an OpenEnv server. Rewards are those of its steps.

    `url` is the server's. The model's turn is put into the field `action_key` of the action, with `action` as its other
    fields; with `action_key = ""` the turn itself must be the action, as a JSON object. What the model reads is the
    observation's field `observation_key`, or `observation` with the observation's fields put in place of `{field}`, or
    else the whole observation as JSON. With `tools = true` the environment's MCP tools are the model's, and each call is
    a step. `prompt` comes before the first observation, `system_prompt` before all. `reset_columns` names columns of the
    row that `reset` is given, besides a seed. `client` and `action_class`, each as `module:name`, take the environment's
    own client in place of OpenEnv's generic one.
    """

    replayable = False  # a server may give another episode for the same seed

    def __init__(
        self,
        url: str,
        action_key: str = "message",
        action: Mapping[str, Any] | None = None,
        observation_key: str | None = None,
        observation: str | None = None,
        tools: bool = False,
        prompt: str = "",
        system_prompt: str | None = None,
        reset_columns: Sequence[str] = (),
        size: int = 1000,
        evaluation_size: int = 200,
        client: str | None = None,
        action_class: str | None = None,
    ):
        self._url, self._action_key, self._action = url, action_key, dict(action or {})
        self._observation_key, self._template = observation_key, observation
        self._prompt, self._system, self._columns = prompt, system_prompt, tuple(reset_columns)
        self._sizes = {"train": size, "evaluation": evaluation_size}
        _client_class(client)
        self._client_name = client
        self._action_class = None if action_class is None else import_named("action class", action_class)
        self._client: Any = None
        self._steps_by_call = tools
        self.tools = _tools_of(url) if tools else []
        self.roles = ("tool", "user") if tools else ("user",)  # type: ignore[misc]

    @classmethod
    def rows(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        """Episodes by their seeds. Those of the two splits differ."""
        require_split("openenv", split)
        made = cls(**options)
        first = EVALUATION_SEED if split == "evaluation" else 0
        return [{"seed": first + place} for place in range(made._sizes[split])]

    async def start(self, row: dict[str, Any], seed: int) -> Opening:  # type: ignore[override]
        """Connect, and reset the environment with the row's seed, or else the conversation's."""
        if missing := [column for column in self._columns if column not in row]:
            raise ValueError(f"the row has no {missing[0]!r}, which reset_columns names")
        self._client = _client_class(self._client_name)(
            base_url=self._url,
            connect_timeout_s=min(_CONNECT_S, self.timeout_s),
            message_timeout_s=self.timeout_s,
        )
        given = {column: row[column] for column in self._columns}
        await self._ask("connect", self._client.connect())
        result = await self._ask("reset", self._client.reset(**{"seed": row.get("seed", seed), **given}))
        shown = self._show(result.observation)
        text = "\n\n".join(part for part in (self._prompt, shown) if part)
        if self._system is None and not self.tools:
            return Opening(messages=text)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return Opening(messages=[*system, {"role": "user", "content": text}], tools=self.tools)

    async def step(self, turn: Turn) -> Reply:  # type: ignore[override]
        """Take the turn as an action, or each of its calls as one."""
        if self._steps_by_call and turn.calls:
            return await self._call_tools(turn.calls)
        if self._steps_by_call and turn.malformed:
            return Reply(messages=[{"role": "user", "content": f"This is no call: {turn.malformed[0]}"}])
        if self._steps_by_call:
            return Reply(done=True)  # the model has said its last word
        text = turn.content.strip()
        action: Any = {**self._action, self._action_key: text}
        if not self._action_key:
            try:
                action = json.loads(text)
            except ValueError as error:
                return _refusal(f"That is not JSON: {error}.")
            if not isinstance(action, dict):
                return _refusal("That is not a JSON object.")
            action = {**self._action, **action}
        try:
            result = await self._ask("step", self._client.step(self._made(action)))
        except _Refused as refused:
            return _refusal(str(refused))
        messages = [] if result.done else [{"role": "user", "content": self._show(result.observation)}]
        return Reply(messages=messages, reward=_reward(result), done=bool(result.done))

    async def close(self) -> None:  # type: ignore[override]
        """Leave the server."""
        if self._client is not None:
            with contextlib.suppress(Exception):
                await self._client.close()

    async def _call_tools(self, calls: Sequence[ToolCall]) -> Reply:
        messages: list[Message] = []
        rewards: list[float] = []
        done = False
        for call in calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
            try:
                result = await self._ask("step", self._client.step(action))
                said = _said(_plain(result.observation))
                rewards += [] if result.reward is None else [float(result.reward)]
                done = bool(result.done)
            except _Refused as refused:
                said = str(refused)
            message = {"role": "tool", "name": call.name, "content": said}
            messages.append(message | ({"tool_call_id": call.id} if call.id else {}))
            if done:
                break
        return Reply(messages=[] if done else messages, reward=sum(rewards) if rewards else None, done=done)

    def _made(self, action: dict[str, Any]) -> Any:
        if self._action_class is None:
            return action
        try:
            return self._action_class(**action)
        except (TypeError, ValueError) as error:  # the model's mistake, where the turn itself is the action
            raise _Refused(f"That action is not accepted: {error}") from error

    def _show(self, observation: Any) -> str:
        """What the model reads of an observation."""
        fields = {key: value for key, value in _plain(observation).items() if key not in _OWN_FIELDS}
        if self._template is not None:
            return self._template.format_map(fields)
        if self._observation_key is None:
            return _text(fields) if fields else ""
        if self._observation_key not in fields:
            raise ValueError(
                f"the observation has no {self._observation_key!r}; it has {', '.join(fields) or 'no fields'}"
            )
        return _text(fields[self._observation_key])

    async def _ask(self, what: str, answer: Any) -> Any:
        """The server's answer. Whatever ends the connection is an error that names the server."""
        try:
            return await answer
        except RuntimeError as error:
            if what == "step" and _REFUSED in str(error):
                raise _Refused(
                    "That action is not accepted: the environment expects other fields."
                ) from error
            raise RuntimeError(f"OpenEnv at {self._url}, {what}: {error}") from error
        except Exception as error:
            message = str(error) or "no answer"
            raise ConnectionError(
                f"OpenEnv at {self._url}, {what}: {type(error).__name__}: {message}"
            ) from error


class _Refused(Exception):
    """The server did not accept an action, and still has the episode."""


def _refusal(message: str) -> Reply:
    """Tell the model what was wrong with its action."""
    return Reply(messages=[{"role": "user", "content": message}], facts={"refused": 1.0})


def _reward(result: Any) -> float | None:
    return None if result.reward is None else float(result.reward)


def _plain(observation: Any) -> dict[str, Any]:
    """An observation's fields, whether it is a dict or of the environment's own class."""
    if isinstance(observation, Mapping):
        return dict(observation)
    return dict(observation.model_dump() if hasattr(observation, "model_dump") else vars(observation))


def _said(seen: Mapping[str, Any]) -> str:
    """What a tool said: its error, or its result without MCP's wrapping."""
    if isinstance(error := seen.get("error"), Mapping):
        return f"error: {error.get('message')}"
    result = seen.get("result")
    if isinstance(result, Mapping) and "data" in result:
        result = result["data"]
    return _text(result)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _client_class(name: str | None) -> Any:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        fix = (
            "install it into an environment of its own (python -m venv envs; envs/bin/pip install 'openenv>=0.10') "
            "and set environment.python='envs/bin/python'"
        )
        raise _wrong(f"the package openenv cannot be imported: {error}.", fix) from error
    return GenericEnvClient if name is None else import_named("OpenEnv client", name)


@functools.lru_cache(maxsize=8)
def _tools_of(url: str) -> list[Schema]:
    """The schemas of a server's MCP tools."""

    async def ask() -> Any:
        client = _client_class(None)(base_url=url, connect_timeout_s=_CONNECT_S)
        await client.connect()
        try:
            return (await client.step({"type": "list_tools"})).observation
        finally:
            await client.close()

    try:
        listed = asyncio.run(ask())["tools"]
    except Exception as error:
        fix = (
            "start the server before the run; its environment must have MCP tools, or leave options.tools out"
        )
        raise _wrong(f"the server at {url} does not list its tools: {error}.", fix) from error
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in listed
    ]
