"""An OpenAI-compatible endpoint on this machine whose completions the policy writes.

For programs that call a model themselves: each of their calls waits here until the policy has taken that turn. What they
send and get is text; the policy's tokens never pass through here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.environments.protocol import Message, Schema, Turn

_MAX_HEAD, _MAX_BODY = 2**16, 2**28
SESSION_HEADER = "x-session-id"
# Agent programs end their run, and keep what they have, when a model says that its context is full.
_OVER = "the conversation is over: maximum context length exceeded"


@dataclass
class ModelCall:
    """One call of a program, which waits for its answer."""

    messages: list[Message]
    tools: list[Schema]
    stream: bool = False
    answer: asyncio.Future[tuple[int, dict[str, Any]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def resolve(self, turn: Turn) -> Message:
        """Answer with the policy's turn. Returns it as the message that the program is given."""
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{turn.number}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for place, call in enumerate(turn.calls)
            ]
        elif not turn.content.strip():
            message["content"] = (
                turn.text.strip() or " "
            )  # programs take an empty answer for a fault of the model
        reason = "length" if not turn.finished else "tool_calls" if turn.calls else "stop"
        self._answer(200, {"message": message, "finish_reason": reason})
        return message

    def refuse(self) -> None:
        """Say that there will be no further turn."""
        self._answer(
            400,
            {"error": {"message": _OVER, "code": "context_length_exceeded", "type": "invalid_request_error"}},
        )

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        if not self.answer.done():
            self.answer.set_result((status, content))


def is_over(text: str) -> bool:
    """Whether an error that came from this endpoint says that there will be no further turn."""
    return _OVER in text


class ModelEndpoint:
    """The server. Each conversation has a queue of calls, under names that tell whose a call is."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[ModelCall]] = {}
        self._numbers = itertools.count(1)
        self._server: asyncio.Server
        self.url = ""

    async def start(self) -> None:
        """Listen on loopback, on a port that is free."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_MAX_HEAD)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def url_of(self, name: str) -> str:
        """The base URL for a program whose calls are told apart by it."""
        return f"{self.url}/{name}/v1"

    def listen(self, name: str, calls: asyncio.Queue[ModelCall]) -> None:
        """Put the calls that come under this name, in the URL or the session header, into a queue."""
        self._queues[name] = calls

    def forget(self, name: str) -> None:
        """Refuse calls under this name from now on."""
        self._queues.pop(name, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader)) is not None:
                path, headers, body = request
                writer.write(await self._respond(path, headers, body))
                await writer.drain()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # who called is gone, or speaks something else
        finally:
            writer.close()

    async def _respond(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        if path.endswith("/models"):
            return _json(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})
        if not path.endswith("/chat/completions"):
            return _error(404, f"{path} is not served here, only chat completions are")
        name = headers.get(SESSION_HEADER, "")
        queue = self._queues.get(name) or self._queues.get(path.split("/")[1])
        if queue is None:
            return _error(404, f"no conversation is called {name or path.split('/')[1]!r}")
        try:
            asked = json.loads(body)
            call = ModelCall(
                plain_messages(asked["messages"]), list(asked.get("tools") or ()), bool(asked.get("stream"))
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _error(422, f"the request cannot be used: {error}")
        await queue.put(call)
        status, content = await call.answer
        if status != 200:
            return _json(status, content)
        head = {"id": f"chatcmpl-{next(self._numbers)}", "created": int(time.time()), "model": "policy"}
        return _completion(head, content, call.stream)


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
    """Path, headers and body of the next request; None when there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= _MAX_BODY or "transfer-encoding" in headers:
        raise ValueError("a request without a length that can be read")
    return first.split(" ")[1].partition("?")[0], headers, await reader.readexactly(length)


def _completion(head: dict[str, Any], content: dict[str, Any], stream: bool) -> bytes:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    if not stream:
        choice = {"index": 0, "logprobs": None, **content}
        return _json(200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    delta = dict(content["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    head = {**head, "object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": content["finish_reason"]}]},
        {**head, "choices": [], "usage": usage},
    ]
    said = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return _http(200, "text/event-stream", "".join(f"data: {each}\n\n" for each in said).encode())


def _error(status: int, message: str) -> bytes:
    return _json(status, {"error": {"message": message, "type": "invalid_request_error"}})


def _json(status: int, content: object) -> bytes:
    return _http(status, "application/json", json.dumps(content).encode())


def _http(status: int, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def plain_messages(messages: list[Any]) -> list[Message]:
    """Messages as chat templates take them: content is text, and the arguments of calls are objects."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        if other := [part.get("type") for part in content if part.get("type") != "text"]:
            raise ValueError(f"content of type {other[0]!r} is not supported, only text is")
        content = "\n".join(part["text"] for part in content)
    plain: Message = {"role": message["role"], "content": content or ""}
    plain |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": call.get("id", ""), "type": "function", "function": function}
