"""A worker's life: it makes environments and runs the calls of many conversations until its rank says it is enough.

Async methods of all conversations run at the same time on one event loop. Plain methods run one after another, while the
loop is not running, so that they may run loops of their own. Every call is answered, also one that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import socket
import time
import types
from collections import deque
from collections.abc import Awaitable, Generator
from dataclasses import dataclass
from typing import Any

from shardproof.environments.answers import NotAnAnswer, as_json, opening_of, reply_of
from shardproof.environments.factory import Factory
from shardproof.environments.frames import Frames, framed
from shardproof.environments.guard import Guard, TooLong
from shardproof.environments.protocol import Environment, Opening, Reply
from shardproof.environments.spec import LEAVE_S
from shardproof.errors import ShardproofError
from shardproof.processes import take_files
from shardproof.user_code import describe_error, end_fork_of

_READ_BYTES, _NO_LIMIT = 2**20, 2**62
_CLEANUP_S = 5.0  # for a call that was cancelled at its deadline
MAX_ERROR_CHARS = 500


@dataclass
class _Call:
    number: int
    kind: str  # make, rows, open, step or close
    conversation: int
    given: bytes
    limit_s: float
    begun: float = 0.0
    others_s: float = 0.0  # what the main thread had spent in users' code before it began
    own_s: float = 0.0  # what the main thread spent in its code
    task: asyncio.Task[None] | None = None
    answered: bool = False


def serve() -> None:
    """Answer a rank's calls until it hangs up."""
    descriptor, note = take_files()
    connection = socket.socket(fileno=descriptor)
    # A fork of the user's must neither speak for the worker nor keep the connection open when the worker is gone.
    os.register_at_fork(after_in_child=connection.close)
    with contextlib.suppress(OSError):  # the rank is gone
        _Worker(connection, Guard(note)).live()


class _Worker:
    def __init__(self, connection: socket.socket, guard: Guard):
        self._connection, self._guard, self._process = connection, guard, os.getpid()
        self._frames = Frames()
        self._calls: deque[_Call] = deque()  # not begun yet
        self._environments: dict[int, Environment] = {}  # by conversation
        self._running: dict[int, _Call] = {}  # async calls, by conversation
        self._factory: Factory
        self._leaving = False
        self._loop = asyncio.new_event_loop()

    def live(self) -> None:
        """Run until the rank hangs up or says that it is enough."""
        self._loop.add_reader(self._connection, self._read)
        while not self._leaving:
            if self._calls:
                self._loop.stop()  # one round for async calls between two plain ones
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task that a user's code started
                self._loop.run_forever()
            if self._calls and not self._leaving:
                self._begin(self._calls.popleft())
        self._leave()

    def _leave(self) -> None:
        """Close the environments that are left; what still waits is given up without a word."""
        self._loop.remove_reader(self._connection)
        self._loop.set_exception_handler(lambda *_: None)
        for conversation in list(self._environments):
            self._begin(_Call(0, "close", conversation, b"", LEAVE_S / 2, answered=True))
        if tasks := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=LEAVE_S / 2))

    def _read(self) -> None:
        end_fork_of(self._process)
        try:
            data = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        for message in self._frames.feed(data, _NO_LIMIT):
            self._calls.append(_Call(*pickle.loads(message)))
        self._leaving = not data
        self._loop.stop()

    def _begin(self, call: _Call) -> None:
        call.begun, call.others_s = time.monotonic(), self._guard.spent_s
        try:
            value = self._run(call, getattr(self, f"_{call.kind}"), call)
            if inspect.isawaitable(value):
                call.task = self._loop.create_task(self._await(call, value))
                self._running[call.conversation] = call
                self._expect(call)
            else:
                self._finish(call, value)
        except BaseException as error:  # sys.exit() is that conversation's failure, no more
            self._fail(call, error)

    def _run(self, call: _Call, function: Any, *arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return self._guard.run(call.number, call.limit_s - self._age(call), function, *arguments)
        finally:
            call.own_s += time.monotonic() - started

    def _age(self, call: _Call) -> float:
        """The seconds that a call took so far, without those in which it had to wait for other conversations' code."""
        others_s = self._guard.spent_s - call.others_s - call.own_s
        return max(0.0, time.monotonic() - call.begun - max(0.0, others_s))

    async def _await(self, call: _Call, awaitable: Awaitable[Any]) -> None:
        try:
            self._finish(call, await self._pieces(call, awaitable))
        except GeneratorExit:  # the worker leaves
            raise
        except BaseException as error:
            self._fail(call, error)
        finally:
            if self._running.get(call.conversation) is call:
                del self._running[call.conversation]

    @types.coroutine
    def _pieces(self, call: _Call, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Await something with every piece of its code run under the guard."""
        iterator: Any = awaitable.__await__()
        resume, given = iterator.send, None
        while True:
            try:
                waited_for = self._run(call, resume, given)
            except StopIteration as over:
                return over.value
            try:
                resume, given = iterator.send, (yield waited_for)
            except GeneratorExit:
                iterator.close()
                raise
            except BaseException as error:
                resume, given = iterator.throw, error
            if self._age(call) > call.limit_s + _CLEANUP_S:
                raise TooLong  # it was cancelled and goes on: nothing runs it any more

    def _expect(self, call: _Call) -> None:
        """Fail an async call at its deadline, whether or not it heeds that it is cancelled."""
        if call.answered or call.task is None:
            return
        left_s = call.limit_s - self._age(call)
        if left_s > 0:
            self._loop.call_later(left_s, self._expect, call)
        else:
            self._fail(call, TooLong())
            call.task.cancel()

    def _finish(self, call: _Call, value: object) -> None:
        if not call.answered:
            self._answer(call, self._run(call, self._checked, call, value))

    def _checked(self, call: _Call, value: Any) -> str:
        """The answer as JSON, checked under the guard as well: it may be made of the user's own classes."""
        limit = self._factory.max_reply_chars
        if call.kind == "open":
            opening: Opening = opening_of(value, limit)
            return as_json({"messages": opening.messages, "tools": opening.tools})
        if call.kind == "step":
            reply: Reply = reply_of(value, self._factory.facts.roles, limit)
            return as_json(vars(reply))
        return as_json(value if call.kind in ("make", "rows") else None)

    def _fail(self, call: _Call, error: BaseException) -> None:
        if isinstance(error, ShardproofError) and call.kind in ("make", "rows"):
            found = error.findings[0]
            self._answer(call, as_json([found.code, found.message, found.fix]), "finding")
        elif isinstance(error, TooLong):
            self._answer(call, "null", "late")
        else:
            self._answer(call, as_json(self._described(call, error)), "error")

    def _described(self, call: _Call, error: BaseException) -> str:
        """The error in one line; how it is written is the user's code as well."""
        if isinstance(error, ShardproofError):
            text = error.findings[0].message
        elif isinstance(error, NotAnAnswer):
            text = str(error)
        else:
            try:
                text = self._run(call, describe_error, error)
            except BaseException:
                text = type(error).__name__
        return " ".join(text.split())[:MAX_ERROR_CHARS].encode(errors="backslashreplace").decode()

    def _answer(self, call: _Call, said: str, kind: str = "value") -> None:
        end_fork_of(self._process)
        if not call.answered:
            call.answered = True
            head = f'{{"call": {call.number}, "seconds": {self._age(call):.6f}, "{kind}": '
            self._connection.sendall(framed(f"{head}{said}}}".encode()))

    def _make(self, call: _Call) -> dict[str, Any]:
        self._factory = Factory(*pickle.loads(call.given))
        return vars(self._factory.facts)

    def _rows(self, call: _Call) -> list[dict[str, Any]]:
        return self._factory.rows(pickle.loads(call.given))

    def _open(self, call: _Call) -> Any:
        row, seed = pickle.loads(call.given)
        environment = self._environments[call.conversation] = self._factory.make()
        return environment.start(row, seed)

    def _step(self, call: _Call) -> Any:
        return self._environments[call.conversation].step(pickle.loads(call.given))

    def _close(self, call: _Call) -> Any:
        running = self._running.pop(call.conversation, None)
        if running is not None and running.task is not None:
            running.task.cancel()
        environment = self._environments.pop(call.conversation, None)
        return None if environment is None else environment.close()
