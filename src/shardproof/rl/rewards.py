"""Rewards: what a completion is worth, from functions of ours or of the user's, none of which can hang a run.

A user's function runs in worker processes. Each worker answers call by call, so that the call that hangs or kills its
worker is known: it alone is recorded as failed, and the rest of its chunk goes to other workers. A worker is a fresh
interpreter, not a fork, because ranks hold threads and a CUDA context; and it is started by `subprocess`, because
`multiprocessing` would run the user's training script again in it, and refuses to start anything below a daemon.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import math
import numbers
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from shardproof.errors import ShardproofError, choose, error_for, fail, nearest
from shardproof.findings import Finding

Sample = tuple[str, str, dict[str, Any]]  # prompt, completion, row
Reward = Callable[[str, str, dict[str, Any]], float]
Call = tuple[int, str, Sample]  # the sample's place in the batch, the reward's name, the sample
Outcome = tuple[float, str | None]  # the value, and the error that made it zero
Outcomes = dict[tuple[int, str], Outcome]  # by the sample's place and the reward's name

START_S, MAX_CHUNK = 120.0, 32  # what a worker may take to import the user's modules; calls sent at a time
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?"  # a sign, but not the minus of 7-3
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from shardproof.rl.rewards import serve; serve()"


def exact_match(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion is the answer, apart from space around them."""
    return float(completion.strip() == str(_cell(row, "answer")).strip())


def numeric(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the last number of the completion is the answer's, to 1e-6."""
    answer = _cell(row, "answer")
    expected = float(answer) if isinstance(answer, numbers.Real) else _last_number(str(answer))
    if expected is None:
        raise ValueError(f"the answer {str(answer)[:40]!r} holds no number")
    found = _last_number(completion)
    return float(found is not None and abs(found - expected) <= 1e-6)


def regex(pattern: str | None = None) -> Reward:
    """A reward of 1 when `pattern`, or else the row's own "pattern", is found in the completion."""
    compiled = None if pattern is None else re.compile(pattern)

    def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        search = compiled.search if compiled else re.compile(_cell(row, "pattern")).search
        return float(search(completion) is not None)

    return reward


BUILT_IN: dict[str, Reward] = {"exact_match": exact_match, "numeric": numeric, "regex": regex()}
# A pattern is the user's, and can take exponential time: regex runs in the workers like the user's own functions.
_CANNOT_HANG = ("exact_match", "numeric")


def _cell(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise ValueError(f"the row has no {column!r}")
    return row[column]


def _last_number(text: str) -> float | None:
    # Every number ends in a digit, and only the end of a long completion is worth a search.
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    found = _NUMBER.findall(text, max(0, end - 400), end)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


@dataclass(frozen=True)
class RewardSpec:
    """A reward by name, and its weight in the total."""

    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Scored:
    """A sample's weighted total, each reward's own value, and what went wrong."""

    total: float
    parts: dict[str, float]
    errors: tuple[str, ...]


def find_reward(name: str) -> Reward:
    """The function that `name` stands for: built in, `regex(pattern)`, or the user's `module:function`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith("regex(") and name.endswith(")"):
        try:
            return regex(name[len("regex(") : -1])
        except re.error as error:
            raise _unknown(f"the pattern of reward {name!r} is wrong: {error}.") from error
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        message = f"reward {name!r} is not one of {', '.join(BUILT_IN)}, regex(pattern), or module:function."
        raise _unknown(message, near=nearest(name, BUILT_IN))
    module = _import(name, module_name)
    try:
        function: Any = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = nearest(path, [key for key in vars(module) if not key.startswith("_")])
        raise _unknown(f"reward {name!r}: {module_name!r} has no {path!r}.", near=near) from error
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise _unknown(f"reward {name!r} cannot be called as (prompt, completion, row): {error}.") from error
    except ValueError:
        pass  # written in C, without a signature to look at
    return function


def _import(name: str, module_name: str) -> Any:
    # An installed command's path begins at its own folder; users keep their rewards where they start the run.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        message = f"reward {name!r} cannot be imported: {_describe(error)}"
        raise _unknown(message, "repair that module, or put its folder on PYTHONPATH") from error


def _unknown(message: str, fix: str | None = None, near: Sequence[str] = ()) -> ShardproofError:
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return fail("C001", "reward", message + hint, fix=fix or "name a built-in reward or a module:function")


def _describe(error: BaseException) -> str:
    """The error in one line, with the user's line that it came from."""
    ours = (__file__, importlib.__file__, "<frozen importlib")
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(ours)]
    where = f" ({os.path.basename(lines[-1].filename)}:{lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def _attempt(function: Reward, sample: Sample) -> Outcome:
    """What the function makes of the sample; whatever it raises or returns instead of a number is a zero."""
    try:
        value = function(*sample)
        if not isinstance(value, numbers.Real):
            return 0.0, f"returned {type(value).__name__}, expected a number"
        number = float(value)
    except (Exception, SystemExit) as error:  # a reward's sys.exit() is that sample's failure, no more
        return 0.0, _describe(error)
    if not math.isfinite(number):
        return 0.0, f"returned {number}, expected a finite number"
    return number, None


def serve() -> None:
    """A worker's life: import the rewards, then answer chunks of calls, one reply a call, until told to leave."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # a process that a reward starts must not keep the connection open
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError), open(os.devnull, "w") as nowhere:
        names, timeout_s = connection.recv()
        try:
            functions = {name: find_reward(name) for name in names}
        except ShardproofError as error:
            connection.send(error.findings[0])
            return
        connection.send(None)
        while (chunk := connection.recv()) is not None:
            # Ends a worker whose rank is gone while C code that never releases the interpreter lock, such as a regular
            # expression, keeps the thread that watches the rank from running.
            faulthandler.dump_traceback_later(timeout_s * len(chunk) + 60.0, exit=True, file=nowhere)
            for name, sample in chunk:
                connection.send(_attempt(functions[name], sample))
            faulthandler.cancel_dump_traceback_later()


def _leave_with(parent: int) -> None:
    """Kill this worker and what its rewards started once the rank is gone, even in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


class _Worker:
    """One worker process, and the calls it has not answered yet."""

    def __init__(self, names: Sequence[str], timeout_s: float):
        self.timeout_s = timeout_s
        self.ready = False
        self.pending: deque[Call] = deque()
        self.deadline = time.monotonic() + START_S
        self.connection, remote = Pipe()
        # A worker that stops in the middle of a message must not stop its rank.
        limit = struct.pack("ll", math.ceil(timeout_s), 0)
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        arguments = [sys.executable, "-c", _BOOT, str(os.getpid()), str(remote.fileno()), path]
        # A session of its own: Ctrl-C does not reach it, and killing its group also ends what its rewards started.
        self.process = subprocess.Popen(
            arguments, pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        remote.close()
        self.send((list(names), timeout_s))

    def submit(self, calls: Sequence[Call]) -> None:
        self.pending.extend(calls)
        self.deadline = time.monotonic() + self.timeout_s
        self.send([(name, sample) for _, name, sample in calls])

    def send(self, message: object) -> None:
        # A worker that is gone or stuck is noticed where its answers are read.
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> tuple[Call, Outcome] | None:
        """One answered call; None for the message that the worker is ready."""
        message = self.connection.recv()
        if isinstance(message, Finding):
            raise error_for([message])
        if not self.ready:
            self.ready, self.deadline = True, math.inf
            return None
        call = self.pending.popleft()
        self.deadline = time.monotonic() + self.timeout_s if self.pending else math.inf
        return call, message

    def stop(self, patience_s: float = 0.0) -> str:
        """End the process and all it started; returns how it ended."""
        if not self.connection.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.connection.close()
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class RewardRunner(contextlib.AbstractContextManager["RewardRunner"]):
    """Scores samples; a reward that raises, hangs, dies or returns no finite number costs its sample a recorded zero.

    With on_error="stop" the first such failure raises R504 instead. The weighted sum of a sample's rewards is its total.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        timeout_s: float = 10.0,
        num_workers: int = 2,
        on_error: str = "zero",
    ):
        self.specs = tuple(specs)
        self.timeout_s = timeout_s
        self.on_error = choose("reward", "reward.on_error", on_error, ("zero", "stop"))
        _require_settings(self.specs, timeout_s, num_workers)
        self._inside = [spec.name for spec in self.specs if spec.name in _CANNOT_HANG]
        self._outside = [spec.name for spec in self.specs if spec.name not in _CANNOT_HANG]
        self._num_workers = num_workers if self._outside else 0
        self._workers: list[_Worker] = []
        try:
            # Now, so that a name that cannot be imported stops the run before its first step.
            self._fill()
            while not all(worker.ready for worker in self._workers):
                self._pump(deque(), {})
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker, idle ones after a moment for their exit handlers; scoring again would start new ones."""
        idle = [worker for worker in self._workers if worker.ready and not worker.pending]
        for worker in idle:
            worker.send(None)
        until = time.monotonic() + 1.0
        for worker in self._workers:
            worker.stop(max(0.0, until - time.monotonic()) if worker in idle else 0.0)
        self._workers = []

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Each sample's rewards, in the order of `samples`."""
        outcomes: Outcomes = {}
        queue: deque[Call] = deque()
        for index, sample in enumerate(samples):
            queue.extend((index, name, sample) for name in self._outside)
            for name in self._inside:
                self._record((index, name, sample), _attempt(BUILT_IN[name], sample), outcomes)
        self._drop([worker for worker in self._workers if worker.process.poll() is not None])
        try:
            self._fill()
            while queue or any(worker.pending for worker in self._workers):
                self._dispatch(queue)
                self._pump(queue, outcomes)
        except BaseException:
            # A worker in the middle of a chunk would answer the next batch with this one's rewards.
            self._drop([worker for worker in self._workers if worker.pending])
            raise
        return [self._sum(index, outcomes) for index in range(len(samples))]

    def _sum(self, index: int, outcomes: Outcomes) -> Scored:
        found = {spec.name: outcomes[index, spec.name] for spec in self.specs}
        total = sum(spec.weight * found[spec.name][0] for spec in self.specs)
        parts = {name: value for name, (value, _) in found.items()}
        return Scored(total, parts, tuple(f"{name}: {error}" for name, (_, error) in found.items() if error))

    def _fill(self) -> None:
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._outside, self.timeout_s))

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.stop()

    def _dispatch(self, queue: deque[Call]) -> None:
        """Give every idle worker a chunk; chunks shrink towards the end, so that workers finish together."""
        for worker in self._workers:
            if queue and worker.ready and not worker.pending:
                size = max(1, min(MAX_CHUNK, len(queue) // (2 * len(self._workers))))
                worker.submit([queue.popleft() for _ in range(size)])

    def _pump(self, queue: deque[Call], outcomes: Outcomes) -> None:
        """Wait for answers or the nearest deadline, record what came, and replace workers that hang or died."""
        active = [worker for worker in self._workers if worker.pending or not worker.ready]
        patience = min(worker.deadline for worker in active) - time.monotonic()
        wait([worker.connection for worker in active], timeout=max(0.0, patience))
        for worker in active:
            try:
                while worker.connection.poll():
                    if (answered := worker.receive()) is not None:
                        self._record(*answered, outcomes)
            except (EOFError, OSError):
                self._bury(worker, f"its worker process died ({worker.stop(1.0)})", queue, outcomes)
            else:
                if time.monotonic() >= worker.deadline:
                    limit_s = self.timeout_s if worker.ready else START_S
                    self._bury(worker, f"no answer in {limit_s:g} s", queue, outcomes)

    def _bury(self, worker: _Worker, failure: str, queue: deque[Call], outcomes: Outcomes) -> None:
        """Blame the call that the worker was in, put the rest of its chunk back, and start another worker."""
        self._drop([worker])
        if not worker.ready:
            message = f"a worker for {', '.join(self._outside)} did not start: {failure}."
            raise fail("R504", "reward", message, fix="import the reward's module in a plain Python")
        self._fill()
        if worker.pending:
            call, *rest = worker.pending
            queue.extendleft(reversed(rest))
            self._record(call, (0.0, failure), outcomes)

    def _record(self, call: Call, outcome: Outcome, outcomes: Outcomes) -> None:
        index, name, (prompt, completion, _) = call
        if outcome[1] is not None and self.on_error == "stop":
            sample = f"sample {index} (prompt {prompt[-60:]!r}, completion {completion[:60]!r})"
            raise fail("R504", "reward", f"reward {name!r} failed on {sample}: {outcome[1]}.")
        outcomes[index, name] = outcome


def _require_settings(specs: Sequence[RewardSpec], timeout_s: float, num_workers: int) -> None:
    names = [spec.name for spec in specs]
    wrong = {
        "reward.functions is empty": not names,
        f"reward.functions names one twice: {', '.join(names)}": len(set(names)) < len(names),
        "a reward's weight is not finite": not all(math.isfinite(spec.weight) for spec in specs),
        f"reward.timeout_s={timeout_s} is not between 0 and a million": not 0 < timeout_s <= 1e6,
        f"reward.num_workers={num_workers} is not positive": num_workers < 1,
    }
    for message, found in wrong.items():
        if found:
            raise _unknown(f"{message}.", "correct this setting of the recipe")
