"""An engine for tests that draws tokens from hashes, and answers when the test says so. It is of both kinds.

What it draws depends on the tokens it reads, the request's seed and the version of the weights, and on nothing else, so
that two drivers of conversations can be compared.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Segment, Trajectory

LONG_S = 60.0  # longer than anything here takes, unless it waits for what never comes


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.002)


@dataclass(eq=False)
class Asked:
    """A request that waits, or was answered; what was drawn of it so far, token by token."""

    request: Request
    sampling: Sampling
    future: Future[Trajectory] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def so_far(self) -> Segment | None:
        if not self.tokens:
            return None
        parts = parts_of(self.versions)
        logprobs = (-1.0,) * len(self.tokens)
        return Segment(tuple(self.tokens), "policy", logprobs, min(self.versions), True, parts=parts)


def parts_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(number of tokens, version) of each run of one version; nothing where there is only one."""
    parts: list[tuple[int, int]] = []
    for version in versions:
        if parts and parts[-1][1] == version:
            parts[-1] = parts[-1][0] + 1, version
        else:
            parts.append((1, version))
    return tuple(parts) if len(parts) > 1 else ()


class FakeEngine:
    """Draws tokens between `low` and `high`, and a stop token about one time in `length`.

    Held, it answers nothing until `answer`; otherwise at once, on the thread that asks. `version` may be changed at any
    time: what is drawn later has the new one.
    """

    canary_gap = 0.0

    def __init__(self, low: int = 5, high: int = 15, length: int = 6, held: bool = False, version: int = 0):
        self.low, self.high, self.length, self.held, self.version = low, high, length, held, version
        self.asked: list[Asked] = []  # all that wait for an answer, in the order they came
        self.num_started = 0
        self._lock = threading.Lock()
        self._batch: list[tuple[int, Trajectory]] = []

    # As a background engine.

    def start(self, request: Request, sampling: Sampling) -> Asked:
        asked = Asked(request, sampling)
        if request.begun is not None:
            asked.tokens = list(request.begun.tokens)
            asked.versions = [version or 0 for version in request.begun.token_versions]
        with self._lock:
            self.num_started += 1
            self.asked.append(asked)
        if not self.held:
            self.answer(asked)
        return asked

    @property
    def waiting(self) -> list[Asked]:
        """What was asked and is neither answered nor given up, in the order of groups and samples."""
        with self._lock:
            self.asked = [each for each in self.asked if not each.future.done()]
            return sorted(self.asked, key=lambda a: (a.request.trajectory.group, a.request.trajectory.sample))

    def draw(self, asked: Asked, num: int | None = None) -> bool:
        """Draw `num` more tokens of an answer, None for all; returns whether it is complete."""
        trajectory, sampling = asked.request.trajectory, asked.request.settings(asked.sampling)
        while num is None or num > 0:
            if len(asked.tokens) >= sampling.max_new_tokens or (
                asked.tokens and asked.tokens[-1] in sampling.stop_ids
            ):
                return True
            asked.tokens.append(self._token(trajectory, asked, sampling))
            asked.versions.append(self.version)
            num = None if num is None else num - 1
        return False

    def answer(self, *which: Asked) -> None:
        """Complete these requests, or all that wait."""
        for asked in which or self.waiting:
            self.draw(asked)
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_result(self._answered(asked))

    def fail(self, asked: Asked, error: BaseException) -> None:
        if asked.future.set_running_or_notify_cancel():
            asked.future.set_exception(error)

    def check_drawn(self) -> None: ...

    def activity(self) -> dict[str, float]:
        return {}

    # As a collective engine.

    @property
    def busy(self) -> bool:
        return bool(self._batch)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        for ticket, request in enumerate(requests):
            asked = Asked(request, sampling)
            self.draw(asked)
            self._batch.append((ticket, self._answered(asked)))
        return list(range(len(requests)))

    def poll(self) -> list[tuple[int, Trajectory]]:
        found, self._batch = self._batch, []
        return found

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def _answered(self, asked: Asked) -> Trajectory:
        finished = asked.tokens[-1] in asked.sampling.stop_ids
        logprobs = [-1.0] * len(asked.tokens)
        versions = asked.versions
        found = asked.request.answered(asked.tokens, logprobs, finished, min(versions), parts_of(versions))
        return replace(found, facts={**found.facts, "replica": "fake"})

    def _token(self, trajectory: Trajectory, asked: Asked, sampling: Sampling) -> int:
        read = (trajectory.tokens, asked.tokens, asked.request.seed, self.version)
        number = int.from_bytes(hashlib.sha256(repr(read).encode()).digest()[:8], "big")
        if sampling.stop_ids and number % self.length == 0:
            return sampling.stop_ids[0]
        return self.low + number // self.length % (self.high - self.low)
