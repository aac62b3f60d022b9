"""What reward processes are asked, and how a rank talks to one of them."""

from __future__ import annotations

import contextlib
import math
import pickle
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, Protocol

from shardproof.errors import ShardproofError, error_for, fail
from shardproof.findings import Finding
from shardproof.processes import WorkerProcess, take_files
from shardproof.rl.rewards.calling import Function, Outcome, Sample
from shardproof.rl.rewards.functions import find_reward
from shardproof.rl.rewards.specs import RewardSpec, Surroundings

START_S = 120.0  # what a worker may take to import the user's modules


class Job:
    """Calls that are awaited and given up together. `record` takes each call's outcomes, `settle` the end: None, or an error.

    Both are called by the thread that uses the workers.
    """

    def __init__(
        self,
        record: Callable[[Call, Sequence[Outcome]], None],
        settle: Callable[[BaseException | None], None],
    ):
        self.record, self.settle = record, settle
        self.waiting: deque[Call] = deque()
        self.num_open = 0  # calls that have no outcome yet
        self.complete = False  # no more calls come
        self.over = False  # settled, or given up

    def extend(self, calls: Sequence[Call]) -> None:
        """Await these calls as well."""
        self.num_open += len(calls)
        self.waiting.extend(calls)

    def give_up(self) -> None:
        self.over = True
        self.waiting.clear()


class Call(NamedTuple):
    """A reward that is to be asked about samples: one, or as many as a batched function takes."""

    job: Job
    numbers: tuple[int, ...]  # the samples' places in the batch
    key: str  # the reward's
    samples: tuple[Sample, ...]
    alone: bool = (
        False  # one of several that were running as their process came to its end: to be asked by itself
    )

    def failed(self, how: str) -> list[Outcome]:
        return [Outcome(0.0, how)] * len(self.samples)


class Kind(NamedTuple):
    """What a worker says of a function once it has imported it."""

    is_async: bool
    longest_s: float
    concurrency: int


class Pool(Protocol):
    """Processes that answer calls. One thread at a time uses it."""

    jobs: dict[Job, None]  # with calls that wait

    @property
    def busy(self) -> bool:
        """Calls are not answered yet."""
        ...

    def restart_ended(self) -> None: ...
    def add(self, job: Job, calls: Sequence[Call]) -> None: ...
    def drop(self, job: Job) -> None: ...
    def dispatch(self) -> None: ...
    def collect(self, wake: Sequence[socket.socket] = ()) -> Iterator[tuple[Call, list[Outcome]]]: ...
    def cancel(self) -> None: ...


class NotAnAnswer(Exception):
    """A worker sent what is no answer: a reward wrote to the connection itself."""


class Link:
    """One worker process, from the rank's side."""

    def __init__(self, module: str, specs: Sequence[RewardSpec], around: Surroundings):
        self.kinds: dict[str, Kind] | None = None  # of its functions, once it has imported them
        self.deadline = time.monotonic() + START_S
        self.connection, remote = Pipe()
        # A worker that stops in the middle of a message must not stop its rank.
        limit = struct.pack("ll", math.ceil(around.timeout_s), 0)
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        with remote:
            self._started = WorkerProcess(module, [remote.fileno()])
        self.process = self._started.popen
        self.send((list(specs), around))

    @property
    def ready(self) -> bool:
        return self.kinds is not None

    def send(self, message: object) -> None:
        # A worker that is gone or stuck is noticed where its answers are read.
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def read(self) -> Any:
        """A message; None for the one that the worker is ready, which is kept. Raises the error that it could not start with."""
        raw = self.connection.recv_bytes()
        try:
            message = pickle.loads(raw)
        except Exception as error:
            raise NotAnAnswer from error
        if isinstance(message, Finding):
            raise error_for([message])
        if not self.ready:
            if not isinstance(message, dict):
                raise NotAnAnswer
            self.kinds, self.deadline = message, math.inf
            return None
        return message

    def stop(self, patience_s: float = 0.0) -> str:
        """End the process and all it started; returns how it ended."""
        how = self._started.end(patience_s)
        self.connection.close()
        return how


def first_words() -> tuple[Connection, dict[str, Function]] | None:
    """In a worker: the connection to its rank and its functions, which it has told about; None if they cannot be had."""
    (descriptor,) = take_files()
    connection = Connection(descriptor)
    specs, around = connection.recv()
    try:
        functions = {spec.key: find_reward(spec, around) for spec in specs}
    except ShardproofError as error:
        connection.send(error.findings[0])
        return None
    connection.send({key: Kind(f.is_async, f.longest_s, f.concurrency) for key, f in functions.items()})
    return connection, functions


def checked(message: object, call: Call) -> list[Outcome]:
    """The outcomes of a call; NotAnAnswer if the message is something else."""
    good = isinstance(message, list) and len(message) == len(call.samples) and all(map(_is_outcome, message))
    if not good:
        raise NotAnAnswer
    outcomes: list[Outcome] = message  # type: ignore[assignment]
    return outcomes


def _is_outcome(message: object) -> bool:
    if not isinstance(message, Outcome):
        return False
    value, error, _ = message
    return (value is None or isinstance(value, float)) and (error is None or isinstance(error, str))


def did_not_start(specs: Sequence[RewardSpec], failure: str) -> ShardproofError:
    """The error of a worker that ended before it was ready."""
    message = f"a worker for {', '.join(spec.name for spec in specs)} did not start: {failure}."
    fix = "check that the reward's module can be imported in a new Python process"
    return fail("R504", "reward", message, fix=fix)
