"""A worker process as its rank sees it: calls go there, answers come back, and neither can block the rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardproof.environments.frames import Frames, NoFrame, framed
from shardproof.environments.guard import NOTE_BYTES, read_note
from shardproof.environments.protocol import Answer
from shardproof.environments.spec import START_S, EnvironmentSpec
from shardproof.processes import WorkerProcess

MARGIN_S = 2.0  # beyond a call's deadline, for the worker to end it by itself
_READ_BYTES = 2**20
_MAX_ROWS_BYTES = 2**33


class Garbage(Exception):
    """A worker sent what is no answer: its environment wrote to the connection itself."""


@dataclass(eq=False)
class Conversation:
    """One conversation: what the environment was asked, what it answered, and where it lives."""

    key: int
    number: int  # in the workers: keys may come again
    requests: list[tuple[str, bytes]]  # open, then steps
    answers: list[Answer] = field(default_factory=list)
    position: int = 0  # how many of its requests its worker has answered
    link: Link | None = None
    seconds: float = 0.0  # of the environment's own time, without that of a replay
    suspect: bool = False  # its call was one of several in progress when a worker died: the next runs alone
    lost: str = ""  # how the last worker ended that it lived in
    over: bool = False


@dataclass(eq=False)
class Call:
    """Something that a worker is asked."""

    number: int
    kind: str  # make, rows, open, step or close
    conversation: Conversation | None
    given: bytes
    limit_s: float

    @property
    def alone(self) -> bool:
        """Whether nothing else may be in progress beside it."""
        return self.conversation is not None and self.conversation.suspect

    @property
    def is_long(self) -> bool:
        """Whether it may take as long as a start, and its answer be as large as a data set."""
        return self.kind in ("make", "rows")


class Link:
    """One worker process, the calls that wait to be sent to it, and those that it has not answered."""

    def __init__(self, spec: EnvironmentSpec):
        self.ready = False
        self.waiting: deque[Call] = deque()
        self.calls: dict[int, Call] = {}
        self.conversations: set[Conversation] = set()
        self._spec = spec
        self._alone: Call | None = None  # in progress, with nothing beside it
        self._long: set[Call] = set()  # in progress
        self._heard = time.monotonic()
        self._frames, self._unsent = Frames(), bytearray()
        self._note = os.memfd_create("note")
        os.ftruncate(self._note, NOTE_BYTES)
        self.socket, remote = socket.socketpair()
        self.socket.setblocking(False)
        with remote:
            files = [remote.fileno(), self._note]
            self._started = WorkerProcess("shardproof.environments.worker", files, spec.python)
        self.process = self._started.popen

    @property
    def wants_to_write(self) -> bool:
        """Bytes wait until the worker reads."""
        return bool(self._unsent)

    @property
    def deadline(self) -> float:
        """When the worker has been silent for too long."""
        if not self.calls:
            return math.inf
        return self._heard + max(self._spec.timeout_s + MARGIN_S, START_S if self._long else 0.0)

    @property
    def suspects(self) -> list[Call]:
        """Who may have cost the worker: the call whose code it was in, or else all that it had begun and not answered."""
        running, begun = read_note(self._note)
        if running in self.calls:
            return [self.calls[running]]
        return [call for call in self.calls.values() if call.number <= begun]

    def submit(self, call: Call) -> None:
        """Have the worker asked as soon as it may be."""
        self.waiting.append(call)
        self.feed()

    def feed(self) -> None:
        """Send what waits. A call that must be alone is sent when nothing is in progress, and nothing until its answer."""
        while self.waiting and self._alone is None:
            if self.waiting[0].alone and self.calls:
                return
            call = self.waiting.popleft()
            if not self.calls:
                self._heard = time.monotonic()
            self.calls[call.number] = call
            if call.alone:
                self._alone = call
            if call.is_long:
                self._long.add(call)
            number = call.conversation.number if call.conversation else 0
            self._unsent += framed(pickle.dumps((call.number, call.kind, number, call.given, call.limit_s)))
            self.write()

    def write(self) -> None:
        """Send what the worker takes."""
        # A worker that is gone is noticed where its answers are read.
        with contextlib.suppress(BlockingIOError, OSError):
            while self._unsent:
                del self._unsent[: self.socket.send(memoryview(self._unsent)[:_READ_BYTES])]

    def read(self) -> Iterator[tuple[Call, dict[str, Any]]]:
        """What came: calls and their answers. EOFError when the worker is gone, Garbage for what is no answer."""
        while True:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            try:
                for message in self._frames.feed(data, self._largest):
                    yield self._answer(json.loads(message))
            except (NoFrame, ValueError, RecursionError) as error:
                raise Garbage from error

    @property
    def _largest(self) -> int:
        """The bytes that one answer may have: a character has up to six in JSON, and messages have more than text."""
        return _MAX_ROWS_BYTES if self._long else 2**24 + 16 * self._spec.max_reply_chars

    def _answer(self, message: object) -> tuple[Call, dict[str, Any]]:
        if not isinstance(message, dict) or not isinstance(message.get("seconds"), float):
            raise Garbage
        number = message.get("call")
        call = self.calls.pop(number, None) if isinstance(number, int) else None
        if call is None:
            raise Garbage
        self._long.discard(call)
        if call is self._alone:
            self._alone = None
        self._heard = time.monotonic()
        return call, message

    def end(self, patience_s: float = 0.0) -> str:
        """End the process and all it started; returns how it ended."""
        how = self._started.end(patience_s)
        self.socket.close()
        os.close(self._note)
        return how

    def hang_up(self) -> None:
        """Tell the worker that it is enough."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
