"""Which worker answers what, and what becomes of the conversations of a worker that hangs or dies.

All of this happens in one thread of the rank. Conversations stay with their worker, where their state is. When it is
lost, the call that it was in is to blame, and the other conversations are replayed in another worker when they go on.
"""

from __future__ import annotations

import itertools
import math
import pickle
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardproof.environments.link import Call, Conversation, Garbage, Link
from shardproof.environments.protocol import Answer, Failure, Opening, Reply
from shardproof.environments.spec import LEAVE_S, START_S, EnvironmentFacts, EnvironmentSpec
from shardproof.errors import fail

_STARTS = 4  # per worker that may be in vain, one after another
_LOOK_S = 0.5  # how often processes are looked at: a fork of a dead worker may keep its connection open


class Dispatcher:
    """Keeps a rank's workers busy and alive. `deliver` takes each conversation's answer, `tell` facts and rows."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        deliver: Callable[[Conversation, Answer], None],
        tell: Callable[[Any], None],
    ):
        self._spec, self._deliver, self._tell = spec, deliver, tell
        self._facts: EnvironmentFacts | None = None
        self._links: list[Link] = []
        self._homeless: deque[Conversation] = deque()  # that wait for a worker
        self._numbers = itertools.count(1)
        self._told, self._failed_starts = False, 0
        self._losses = 0  # of workers one after another, with nobody to blame and no answer in between
        self._split = ""  # whose rows were asked for

    def fill(self) -> None:
        """Start the workers that are missing."""
        while len(self._links) < self._spec.num_workers:
            link = Link(self._spec)
            self._links.append(link)
            spec = self._spec
            given = pickle.dumps((spec.name, dict(spec.options), spec.timeout_s, spec.max_reply_chars))
            link.submit(self._call("make", None, given, math.inf))

    def end(self) -> None:
        """End every worker, after a moment to close the environments that are left and for exit handlers."""
        for link in self._links:
            link.hang_up()
        until = time.monotonic() + LEAVE_S
        for link in self._links:
            link.end(max(0.0, until - time.monotonic()) if link.ready else 0.0)
        self._links = []

    def ask(self, conversation: Conversation, request: tuple[str, bytes]) -> None:
        """Have the conversation's environment asked; the answer is delivered."""
        if conversation.over:
            self._deliver(conversation, Failure("the conversation is over"))
            return
        conversation.requests.append(request)
        self._advance(conversation)

    def release(self, conversation: Conversation) -> None:
        """Close the conversation's environment; nothing waits for it."""
        conversation.over = True
        link, conversation.link = conversation.link, None
        if link is not None:
            link.conversations.discard(conversation)
            link.submit(self._call("close", conversation, b"", self._spec.timeout_s))

    def ask_rows(self, split: str) -> None:
        """Have a worker asked for the data rows of a split; they are told."""
        link = min(self._links, key=lambda link: len(link.calls))
        self._split = split
        link.submit(self._call("rows", None, pickle.dumps(split), START_S))

    def wait(self, wake: socket.socket) -> None:
        """Wait for answers, the nearest deadline, or a byte from `wake`; then deal with what came."""
        now = time.monotonic()
        patience = min((link.deadline for link in self._links), default=math.inf) - now
        with selectors.PollSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            for link in self._links:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
                selector.register(link.socket, events, link)
            ready = selector.select(min(max(0.0, patience), _LOOK_S))
        for key, events in ready:
            if key.data is not None and events & selectors.EVENT_WRITE:
                key.data.write()
        for link in list(self._links):
            self._look(link)

    def _look(self, link: Link) -> None:
        """Take what a worker said, and see whether it still lives and answers in time."""
        gone = link.process.poll() is not None
        try:
            for call, message in link.read():
                self._take(link, call, message)
                link.feed()
        except Garbage:
            self._lose(link, "it wrote to the connection of its worker")
        except EOFError:
            self._lose(link, None)
        else:
            if gone:
                self._lose(link, None)
            elif time.monotonic() >= link.deadline:
                self._lose(link, "")

    def _take(self, link: Link, call: Call, message: dict[str, Any]) -> None:
        if call.kind == "make":
            self._take_facts(link, message)
            return
        self._losses = 0
        if call.kind == "rows":
            self._tell(self._rows_of(message))
        elif call.conversation is not None and call.kind != "close" and not call.conversation.over:
            self._take_answer(call.conversation, call, message)

    def _take_facts(self, link: Link, message: dict[str, Any]) -> None:
        if "finding" in message:
            raise self._found(message)
        if "value" not in message:
            raise self._not_started(str(message.get("error", "it took too long")))
        said = message["value"]
        if self._facts is None:
            self._facts = EnvironmentFacts(tuple(said["roles"]), tuple(said["tools"]), said["replayable"])
        link.ready, self._failed_starts = True, 0
        if not self._told and all(each.ready for each in self._links):
            self._told = True
            self._tell(self._facts)
        for _ in range(len(self._homeless)):
            self._advance(self._homeless.popleft())

    def _rows_of(self, message: dict[str, Any]) -> Any:
        if "value" in message:
            return message["value"]
        if "finding" in message:
            return self._found(message)
        problem = message.get("error") or f"no answer in {START_S:g} s"
        return self._no_rows(str(problem))

    def _found(self, message: dict[str, Any]) -> Exception:
        code, text, fix = message["finding"]
        return fail(code, "environment", text, fix=fix)

    def _no_rows(self, problem: str) -> Exception:
        message = f"environment {self._spec.name!r} has no rows for the split {self._split!r}: {problem}."
        return fail("C005", "data", message, fix="name a data file, or a split that the environment has")

    def _take_answer(self, conversation: Conversation, call: Call, message: dict[str, Any]) -> None:
        replaying = conversation.position < len(conversation.answers)
        if not replaying:
            conversation.seconds += message["seconds"]
        answer = self._answer_of(call, message)
        if replaying:
            if not _same(answer, conversation.answers[conversation.position]):
                said = f": {answer.error}" if isinstance(answer, Failure) else ""
                where = _place(conversation.position)
                problem = f"its worker was lost ({conversation.lost}), and {where} answered something else in the replay"
                self._give_up(conversation, Failure(problem + said))
                return
        elif isinstance(answer, Failure):
            self._give_up(conversation, answer)
            return
        else:
            conversation.answers.append(answer)
            conversation.suspect = False
            self._deliver(conversation, answer)
        conversation.position += 1
        if conversation.position < len(conversation.requests):
            self._advance(conversation)

    def _answer_of(self, call: Call, message: dict[str, Any]) -> Answer:
        assert call.conversation is not None
        where = _place(call.conversation.position)
        if "late" in message:
            return self._late(call)
        if "value" not in message:
            return Failure(f"{where}: {message.get('error')}")
        try:
            return Opening(**message["value"]) if call.kind == "open" else Reply(**message["value"])
        except TypeError:
            return Failure(f"{where}: it wrote to the connection of its worker")

    def _late(self, call: Call) -> Failure:
        assert call.conversation is not None
        where = _place(call.conversation.position)
        if call.limit_s < self._spec.timeout_s:
            reason = f"more than environment.max_seconds={self._spec.max_seconds:g} in all"
            return Failure(f"{where}: {reason}", out_of_time=True)
        return Failure(f"{where}: no answer in {self._spec.timeout_s:g} s")

    def _advance(self, conversation: Conversation) -> None:
        """Send the conversation's next request to its worker, or to the one with the fewest conversations."""
        if conversation.over:
            return
        if conversation.link is None:
            if conversation.answers and not self._facts_known.replayable:
                problem = f"its worker was lost ({conversation.lost}), and this environment is not replayable"
                self._give_up(conversation, Failure(f"{_place(len(conversation.answers))}: {problem}"))
                return
            ready = [link for link in self._links if link.ready]
            if not ready:
                self._homeless.append(conversation)
                return
            conversation.link = min(ready, key=lambda link: len(link.conversations))
            conversation.link.conversations.add(conversation)
        limit_s = self._spec.timeout_s
        if self._spec.max_seconds is not None and conversation.position == len(conversation.answers):
            limit_s = min(limit_s, self._spec.max_seconds - conversation.seconds)
        kind, given = conversation.requests[conversation.position]
        call = self._call(kind, conversation, given, limit_s)
        if limit_s <= 0:
            self._give_up(conversation, self._late(call))
        else:
            conversation.link.submit(call)

    @property
    def _facts_known(self) -> EnvironmentFacts:
        assert self._facts is not None
        return self._facts

    def _give_up(self, conversation: Conversation, failure: Failure) -> None:
        self.release(conversation)
        self._deliver(conversation, failure)

    def _lose(self, link: Link, problem: str | None) -> None:
        """Replace a worker, blame the call that it was in, and go on with its other conversations elsewhere.

        `problem`: what the call did; None: its worker died; empty: it did not answer.
        """
        suspects = link.suspects
        blamed = suspects[0] if len(suspects) == 1 else None
        how = link.end(1.0 if problem is None else 0.0)
        died = f"its worker process died ({how})"
        self._links.remove(link)
        if not link.ready:
            self._failed_starts += 1
            # One that started before may start again: memory was short, or somebody ended it.
            if self._facts is None or self._failed_starts >= _STARTS * self._spec.num_workers:
                raise self._not_started(died if problem is None else problem or f"no answer in {START_S:g} s")
        self._losses = 0 if suspects else self._losses + 1
        if self._losses >= _STARTS * self._spec.num_workers:
            message = f"the workers of environment {self._spec.name!r} die one after another while no call runs ({how})."
            raise fail("R509", "environment", message, fix="look for threads and signals of its modules")
        interrupted = [*link.calls.values(), *link.waiting]
        failure = None if blamed is None else self._failure(blamed, problem, died)
        for conversation in link.conversations:
            conversation.link, conversation.position, conversation.lost = None, 0, problem or how
        self.fill()
        for call in interrupted:
            if call.kind == "rows":
                self._tell(self._no_rows(died if problem is None else problem or "no answer"))
            elif call.kind == "close" or call.conversation is None or call.conversation.over:
                continue
            elif failure is not None and call is blamed:
                self._give_up(call.conversation, failure)
            else:
                call.conversation.suspect |= blamed is None and call in suspects
                self._advance(call.conversation)

    def _failure(self, call: Call, problem: str | None, died: str) -> Failure | None:
        """What a conversation that lost its worker ends with."""
        if call.conversation is None:
            return None
        if problem == "":
            return self._late(call)
        return Failure(f"{_place(call.conversation.position)}: {problem or died}")

    def _not_started(self, problem: str) -> Exception:
        message = f"a worker for environment {self._spec.name!r} did not start: {problem}."
        fix = "check that the environment's module can be imported in a new Python process"
        return fail("C001" if self._facts is None else "R509", "environment", message, fix=fix)

    def _call(self, kind: str, conversation: Conversation | None, given: bytes, limit_s: float) -> Call:
        return Call(next(self._numbers), kind, conversation, given, limit_s)


def _place(position: int) -> str:
    """Which of a conversation's requests it is, for errors."""
    return "start" if position == 0 else f"turn {position}"


def _same(one: Answer, other: Answer) -> bool:
    """Whether two answers lead the conversation on alike; facts are for metrics, and may be times."""
    if isinstance(one, Reply) and isinstance(other, Reply):
        return replace(one, facts={}) == replace(other, facts={})
    return one == other
