"""A program that calls a model, as a conversation: it runs until its next call, and each call is a turn of the policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from shardproof.environments.model_endpoint import ModelCall, ModelEndpoint, plain_messages
from shardproof.environments.protocol import Message, Opening, Reply, Turn

_endpoints: dict[asyncio.AbstractEventLoop, asyncio.Task[ModelEndpoint]] = {}


async def shared_endpoint() -> ModelEndpoint:
    """The endpoint of this process. It is started by whoever needs it first."""
    loop = asyncio.get_running_loop()
    if loop not in _endpoints:
        _endpoints[loop] = loop.create_task(_started())
    return await asyncio.shield(_endpoints[loop])


async def _started() -> ModelEndpoint:
    endpoint = ModelEndpoint()
    await endpoint.start()
    return endpoint


class ModelCaller:
    """One conversation. `begin` and `answer` return when the program calls the model again, or None when it has ended."""

    def __init__(self, endpoint: ModelEndpoint):
        self._endpoint, self._names = endpoint, set[str]()
        self._calls: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._call: ModelCall | None = None  # that waits for the policy
        self._seen: list[Message] = []  # what the policy has read and written
        self.work: asyncio.Task[Any]

    def listen(self, name: str) -> None:
        """Take calls that come under this name."""
        self._names.add(name)
        self._endpoint.listen(name, self._calls)

    async def begin(self, work: Coroutine[Any, Any, Any]) -> Opening | None:
        """Run the program until it calls the model."""
        self.work = asyncio.get_running_loop().create_task(work)
        call = await self._next()
        if call is None:
            return None
        self._seen = list(call.messages)
        return Opening(messages=call.messages, tools=call.tools)

    async def answer(self, turn: Turn) -> Reply | None:
        """Let the program go on with the policy's turn."""
        assert self._call is not None
        said = self._call.resolve(turn)
        call = await self._next()
        while call is not None and (turn.last or not turn.finished):
            call.refuse()
            call = await self._next()
        if call is None:
            return None
        before = [*self._seen, *plain_messages([said])]
        self._seen = list(call.messages)
        new = call.messages[len(before) :]
        goes_on = bool(new) and all(message["role"] != "assistant" for message in new)
        if goes_on and _same(before, call.messages[: len(before)]):
            return Reply(messages=new)
        return Reply(messages=call.messages, fresh=True)  # another conversation, or this one rewritten

    async def close(self) -> None:
        """End the program, whatever it is doing."""
        for name in self._names:
            self._endpoint.forget(name)
        if hasattr(self, "work"):
            self.work.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self.work
        # Nobody will answer what still waits.
        waiting = [self._calls.get_nowait() for _ in range(self._calls.qsize())]
        for call in (*waiting, *((self._call,) if self._call is not None else ())):
            call.refuse()

    async def _next(self) -> ModelCall | None:
        waiting = asyncio.get_running_loop().create_task(self._calls.get())
        try:
            await asyncio.wait({waiting, self.work}, return_when=asyncio.FIRST_COMPLETED)
            self._call = waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
        return self._call


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    return [_essence(message) for message in one] == [_essence(message) for message in other]


def _essence(message: Message) -> tuple[str, str, list[Any]]:
    """What tells messages apart: programs drop thoughts and number calls as they like."""
    return (
        message["role"],
        message["content"].strip(),
        [call["function"] for call in message.get("tool_calls", ())],
    )
