"""A rank's environments: thousands of conversations in a few worker processes, none of which can hang the run.

A thread of the rank feeds the workers and reads their answers, so that deadlines hold while the main thread is busy.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardproof.environments.dispatcher import Dispatcher
from shardproof.environments.link import Conversation
from shardproof.environments.protocol import Answer, Failure, Turn
from shardproof.environments.spec import EnvironmentFacts, EnvironmentSpec, require_python
from shardproof.user_code import describe_error

__all__ = ["EnvironmentFacts", "EnvironmentPool", "EnvironmentSpec"]

_START_S = 1.0  # after which a thread that has not started was interrupted before it could


class EnvironmentPool(contextlib.AbstractContextManager["EnvironmentPool"]):
    """Conversations with an environment. `open` and `step` return at once; `answers` brings what they lead to.

    The names of conversations are the caller's: `key` is free again once it is released. A Failure ends its
    conversation, whose environment is then closed; release it all the same.
    """

    facts: EnvironmentFacts

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        if spec.python is not None:
            require_python(spec.python)
        self._conversations: dict[int, Conversation] = {}
        self._outstanding: set[int] = set()  # keys whose answer has not been taken
        self._num_opened = 0
        self._answers: queue.SimpleQueue[tuple[Conversation, Answer] | BaseException] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dispatcher = Dispatcher(spec, lambda *answer: self._answers.put(answer), self._told.put)
        self._tasks: deque[Callable[[], None]] = deque()  # for the thread
        self._closing, self._ended = False, threading.Event()
        self._failure: BaseException | None = None  # of the thread
        self._wake_end, self._wake_start = socket.socketpair()
        self._wake_end.setblocking(False)
        self._wake_start.setblocking(False)
        self._thread: threading.Thread | None = None
        try:
            self._start()
            self.facts = self._next(self._told)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, key: int, row: Mapping[str, Any], seed: int) -> None:
        """Begin a conversation about a copy of a data row; its Opening or Failure comes from `answers`."""
        if key in self._conversations:
            raise ValueError(f"conversation {key} is open already")
        self._num_opened += 1
        self._conversations[key] = Conversation(key, self._num_opened, [])
        self._ask(key, "open", (dict(row), seed))

    def step(self, key: int, turn: Turn) -> None:
        """Give the environment the policy's turn; its Reply or Failure comes from `answers`."""
        self._ask(key, "step", turn)

    def release(self, key: int) -> None:
        """End a conversation: its environment is closed, which nothing waits for."""
        conversation = self._conversations.pop(key)
        self._outstanding.discard(key)
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
            # Not the thread's own join: interrupted once, it takes a running thread for an ended one.
            while not self._ended.wait(_START_S) and self._thread.ident is not None:
                pass
            self._thread = None
            self._wake_end.close()
            self._wake_start.close()

    def _ask(self, key: int, kind: str, given: object) -> None:
        conversation = self._conversations[key]
        if key in self._outstanding:
            raise ValueError(f"conversation {key} has not answered yet")
        self._outstanding.add(key)
        try:
            request = (kind, pickle.dumps(given))
        except Exception as error:
            what = "the row" if kind == "open" else "the turn"
            failure = Failure(f"{what} cannot be sent to a worker: {describe_error(error)}")
            self._answers.put((conversation, failure))
            return
        self._do(lambda: self._dispatcher.ask(conversation, request))

    def _next(self, source: queue.SimpleQueue[Any]) -> Any:
        """What the thread puts there next; raises what ended it."""
        while True:
            with contextlib.suppress(queue.Empty):
                found = source.get(timeout=0.0 if self._ended.is_set() else _START_S)
                if isinstance(found, BaseException):
                    raise found
                return found
            if self._ended.is_set() and source.empty():
                raise self._failure or RuntimeError("the environment's workers are closed")

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # it is full, and the thread will wake anyway; or the pool is closed
            self._wake_start.send(b"!")

    def _start(self) -> None:
        # Known before it runs: an interrupt may come at any time from then on, and it must be ended then too.
        self._thread = threading.Thread(target=self._work, name="shardproof environments", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            # An interrupt in the middle of a start can come out as an error of the start's lock; the thread runs then.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            self._thread = None
            raise

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
        finally:
            self._dispatcher.end()
            self._ended.set()
