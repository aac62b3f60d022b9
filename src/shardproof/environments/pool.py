"""A rank's environments: thousands of conversations in a few worker processes, none of which can hang the run.

A thread of the rank feeds the workers and reads their answers, so that deadlines hold while the main thread is busy.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from shardproof.background import BackgroundThread
from shardproof.environments.dispatcher import Dispatcher
from shardproof.environments.link import Conversation
from shardproof.environments.protocol import Answer, Failure, Turn
from shardproof.environments.spec import EnvironmentFacts, EnvironmentSpec, require_python
from shardproof.user_code import describe_error

__all__ = ["EnvironmentFacts", "EnvironmentPool", "EnvironmentSpec"]

_LOOK_S = 1.0  # how often a caller that waits looks whether the thread still runs


class EnvironmentPool(contextlib.AbstractContextManager["EnvironmentPool"]):
    """Conversations with an environment. `begin` and `reply` return a future each, and may be called from any thread.

    For one caller that waits for all of them, `open` and `step` ask the same, and `answers` brings what they lead to.

    The names of conversations are the caller's: `key` is free again once it is released. A Failure ends its
    conversation, whose environment is then closed; release it all the same.
    """

    facts: EnvironmentFacts

    def __init__(self, spec: EnvironmentSpec):
        if spec.python is not None:
            spec = replace(spec, python=require_python(spec.python))
        self.spec = spec
        self._conversations: dict[int, Conversation] = {}
        self._futures: dict[
            Conversation, Future[Answer]
        ] = {}  # of what is asked; whoever pops one resolves it
        self._outstanding: set[int] = set()  # keys whose answer has not been taken from `answers`
        self._num_opened = itertools.count(1)
        self._answers: queue.SimpleQueue[tuple[Conversation, Answer] | BaseException] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dispatcher = Dispatcher(spec, self._deliver, self._told.put)
        self._tasks: deque[Callable[[], None]] = deque()  # for the thread
        self._closing = self._over = False  # over: the thread answers nothing any more
        self._failure: BaseException | None = None  # of the thread
        self._wake_end, self._wake_start = socket.socketpair()
        self._wake_end.setblocking(False)
        self._wake_start.setblocking(False)
        self._thread: BackgroundThread | None = BackgroundThread("shardproof environments", self._work)
        try:
            self._thread.start()
            self.facts = self._next(self._told)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def begin(self, key: int, row: Mapping[str, Any], seed: int) -> Future[Answer]:
        """Begin a conversation about a copy of a data row; its Opening or Failure comes later, from the pool's thread.

        The future raises what ends the pool. To cancel it changes nothing: release the conversation.
        """
        if key in self._conversations:
            raise ValueError(f"conversation {key} is open already")
        self._conversations[key] = Conversation(key, next(self._num_opened), [])
        return self._ask(key, "open", (dict(row), seed))

    def reply(self, key: int, turn: Turn) -> Future[Answer]:
        """Give the environment the policy's turn; its Reply or Failure comes later, from the pool's thread."""
        return self._ask(key, "step", turn)

    def open(self, key: int, row: Mapping[str, Any], seed: int) -> None:
        """Begin a conversation about a copy of a data row; its Opening or Failure comes from `answers`."""
        self._queue(key, self.begin(key, row, seed))

    def step(self, key: int, turn: Turn) -> None:
        """Give the environment the policy's turn; its Reply or Failure comes from `answers`."""
        self._queue(key, self.reply(key, turn))

    def release(self, key: int) -> None:
        """End a conversation: its environment is closed, which nothing waits for."""
        conversation = self._conversations.pop(key)
        self._outstanding.discard(key)
        future = self._futures.pop(conversation, None)
        if future is not None:
            future.cancel()
        self._do(lambda: None if conversation.over else self._dispatcher.release(conversation))

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """(key, answer) to every `open` and `step` so far, and to those that come meanwhile, in the order they come."""
        while self._outstanding:
            conversation, answer = self._next(self._answers)
            key = conversation.key
            if self._conversations.get(key) is conversation and key in self._outstanding:
                self._outstanding.remove(key)
                yield key, answer

    def seconds(self, key: int) -> float:
        """The environment's own time in a conversation so far."""
        return self._conversations[key].seconds

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The environment's own data rows; C005 if it has none for the split."""
        self._do(lambda: self._dispatcher.ask_rows(split))
        return self._next(self._told)

    def close(self) -> None:
        """Give up what is not answered and end every worker."""
        self._closing = True
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._thread = None
            self._wake_end.close()
            self._wake_start.close()

    def _ask(self, key: int, kind: str, given: object) -> Future[Answer]:
        conversation = self._conversations[key]
        if conversation in self._futures or key in self._outstanding:
            raise ValueError(f"conversation {key} has not answered yet")
        future: Future[Answer] = Future()
        self._futures[conversation] = future
        try:
            request = (kind, pickle.dumps(given))
        except Exception as error:
            what = "the row" if kind == "open" else "the turn"
            failure = Failure(f"{what} cannot be sent to a worker: {describe_error(error)}")
            self._deliver(conversation, failure)
            return future
        self._do(lambda: self._dispatcher.ask(conversation, request))
        if self._over:  # looked at once the future is known: the thread fails those that it knows as it ends
            self._fail(conversation)
        return future

    def _queue(self, key: int, future: Future[Answer]) -> None:
        """Have the answer come from `answers`."""
        self._outstanding.add(key)
        conversation = self._conversations[key]

        def put(done: Future[Answer]) -> None:
            if not done.cancelled():
                self._answers.put(done.exception() or (conversation, done.result()))

        future.add_done_callback(put)

    def _deliver(self, conversation: Conversation, answer: Answer) -> None:
        """Resolve what was asked of a conversation, unless it was released."""
        future = self._futures.pop(conversation, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def _fail(self, conversation: Conversation) -> None:
        future = self._futures.pop(conversation, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_exception(self._failure or _closed())

    def _next(self, source: queue.SimpleQueue[Any]) -> Any:
        """What the thread puts there next; raises what ended it."""
        while True:
            ended = self._over  # looked at before the queue, which the thread then fills no more
            with contextlib.suppress(queue.Empty):
                found = source.get(timeout=0.0 if ended else _LOOK_S)
                if isinstance(found, BaseException):
                    raise found
                return found
            if ended:
                raise self._failure or _closed()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # it is full, and the thread will wake anyway; or the pool is closed
            self._wake_start.send(b"!")

    def _work(self) -> None:
        """The thread: hand calls to the workers and their answers to the queues until the pool is closed."""
        try:
            self._dispatcher.fill()
            while not self._closing:
                with contextlib.suppress(BlockingIOError):
                    self._wake_end.recv(4096)
                while self._tasks:
                    self._tasks.popleft()()
                self._dispatcher.wait(self._wake_end)
        except BaseException as error:
            self._failure = error
            self._told.put(error)
        finally:
            self._dispatcher.end()
            self._over = True
            for conversation in list(self._futures):
                self._fail(conversation)


def _closed() -> RuntimeError:
    return RuntimeError("the environment's workers are closed")
