"""A rank's requests on their way: which wait, which replica has which, and what becomes of each answer.

Used in one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from shardproof.errors import fail
from shardproof.rollout.draft import BadAnswer, Choice, Draft, read_choice
from shardproof.rollout.fleet import Fleet
from shardproof.rollout.labels import label_of, version_of
from shardproof.rollout.replica_link import ReplicaLink
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.rollout.vllm_client import GENERATE, Refused, Unreachable

_MOST_FAILURES = 4  # attempts at one request in vain: it, and not the replicas, may be the reason
_TEMPORARY = (408, 425, 429)  # refusals of a request that is right


@dataclass(frozen=True)
class Sent:
    """What was known of a replica when it got a request."""

    version: int
    marks: int | None
    epoch: int


class Asked:
    """A request that is answered in the background; see `engine.Answering`."""

    def __init__(self, draft: Draft, number: int):
        self.future: Future[Trajectory] = Future()
        self.draft, self.number = draft, number
        self.refused: dict[str, str] = {}  # by replica: what it said
        self.stuck_since: float | None = None  # all that serve have refused it
        self.num_failures, self.spent_s = 0, 0.0
        self.attempt: asyncio.Task[None] | None = None

    @property
    def so_far(self) -> Segment | None:
        """What was drawn so far, as `Request.begun` takes it; None for nothing."""
        return self.draft.so_far


class Sending:
    """The requests of a rank that have no answer. Nothing is kept of those that have one."""

    def __init__(self, in_flight: int, timeout_s: float, adapter: bool):
        self._in_flight, self._timeout_s, self._adapter = in_flight, timeout_s, adapter
        self._waiting: dict[int, Asked] = {}
        self._order: list[int] = []  # a heap of numbers; some may no longer wait
        self._num_sent, self._closing = 0, False
        self.fleet: Fleet  # set once the loop runs

    def __len__(self) -> int:
        """How many there are."""
        return len(self._waiting) + self._num_sent

    def take(self, asked: Asked) -> None:
        """Begin with a request."""
        if asked.draft.complete:  # it was before the run was interrupted
            self._answer(asked, "")
        else:
            self._queue(asked)
            self.send()

    def give_up(self, asked: Asked) -> None:
        """Forget a request whose future was cancelled, and have its replica forget it."""
        self._waiting.pop(asked.number, None)
        if asked.attempt is not None:
            asked.attempt.cancel()

    def fail_waiting(self, code: str, message: str) -> None:
        """Answer all that wait with an error."""
        waiting, self._waiting, self._order = self._waiting, {}, []
        for asked in waiting.values():
            _fail(asked, code, message)

    def fail_refused(self, seconds: float) -> None:
        """Answer those with an error that only replicas could take which are out for so long. To be called now and then."""
        now = time.monotonic()
        serving = {link.name for link in self.fleet.links if link.serving}
        for number, asked in list(self._waiting.items()):
            if not serving or not serving <= asked.refused.keys():
                asked.stuck_since = None
                continue
            asked.stuck_since = asked.stuck_since or now
            if now - asked.stuck_since >= seconds:
                del self._waiting[number]
                self._fail_refused(asked)

    def _fail_refused(self, asked: Asked) -> None:
        *_, said = asked.refused.values()
        _fail(asked, "R506", f"the server refused a request: {said}.")

    def send(self) -> None:
        """Give waiting requests to replicas while there is room, first in, first out."""
        passed_over = []
        while self._order and not self.fleet.held:
            asked = self._waiting.get(self._order[0])
            link = None if asked is None else self.fleet.choose(self._in_flight, asked.refused)
            if asked is not None and link is None and not asked.refused:
                break
            number = heapq.heappop(self._order)
            if asked is not None and link is not None:
                del self._waiting[number]
                self._give(asked, link)
            elif asked is not None:
                passed_over.append(number)  # only some replicas may get it: the others need not wait for it
        for number in passed_over:
            heapq.heappush(self._order, number)

    async def close(self) -> None:
        """Give up everything."""
        self._closing = True
        unanswered = [*self._waiting.values()]
        for link in self.fleet.links:
            unanswered += link.attempts.values()
        await self.fleet.close()
        for asked in unanswered:
            asked.future.cancel()
        self._waiting.clear()

    def _queue(self, asked: Asked) -> None:
        """Let a request wait, before all that came after it."""
        self._waiting[asked.number] = asked
        heapq.heappush(self._order, asked.number)

    def _give(self, asked: Asked, link: ReplicaLink) -> None:
        work = asked.draft.work
        link.give(work)
        self._num_sent += 1
        sent = Sent(self.fleet.version, link.marks, self.fleet.epoch)
        task = asyncio.ensure_future(self._attempt(asked, link, sent))
        link.attempts[task] = asked
        asked.attempt = task

        def ended(task: asyncio.Task[None]) -> None:
            del link.attempts[task]
            asked.attempt = None
            link.take_back(work)
            self._num_sent -= 1
            if not self._closing:
                if not asked.future.done():
                    self._queue(asked)
                self.send()

        task.add_done_callback(ended)

    async def _attempt(self, asked: Asked, link: ReplicaLink, sent: Sent) -> None:
        """Ask a replica once. Without an answer or an error afterwards, the request waits again."""
        if sent.epoch != self.fleet.epoch:
            return  # held since
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s - asked.spent_s):
                model = label_of(self.fleet.run, sent.version) if self._adapter else None
                choice = read_choice(await link.client.post(GENERATE, asked.draft.body(sent.version, model)))
                link.heard = time.monotonic()
                versions = await self._versions(choice, link, sent)
            self._add(asked, link, sent, choice, versions)
        except TimeoutError:
            _fail(asked, "R505", f"{link} did not answer a request within {self._timeout_s:g} s.")
        except Refused as error:
            await self._be_refused(asked, link, error)
        except (Unreachable, BadAnswer) as error:
            self._blame(asked, link, str(error))
        except Exception as error:  # a bug of ours must not leave anybody waiting
            with suppress(InvalidStateError):
                asked.future.set_exception(error)
        finally:
            asked.spent_s += time.monotonic() - started

    async def _versions(self, choice: Choice, link: ReplicaLink, sent: Sent) -> list[tuple[int, int]]:
        """(number of tokens, version) of an answer; -1 for what does not count."""
        fleet, num = self.fleet, len(choice.tokens)
        if fleet.says_versions:
            labels = choice.labels if choice.labels is not None else ((num, ""),)
            found = [(count, version_of(fleet.run, label)) for count, label in labels]
            return [(count, each if each <= fleet.version else -1) for count, each in found]
        # Completions say nothing. What a sync interrupts was drawn by the weights before it, as the sync sets the label
        # before it interrupts anything, and again at its end. What is interrupted or answered later than that may have
        # met weights that never were committed, even if the label is the old one again.
        label, marks = await link.look_again(fleet.silent_s)
        since = None if marks is None or sent.marks is None else marks - sent.marks
        if choice.reason == "abort":
            same = since in (0, 1) or (since == 2 and version_of(fleet.run, label) >= 0)
        else:
            same = since in (0, None) and label == label_of(fleet.run, sent.version)
        return [(num, sent.version if same else -1)]

    def _add(
        self,
        asked: Asked,
        link: ReplicaLink,
        sent: Sent,
        choice: Choice,
        versions: Sequence[tuple[int, int]],
    ) -> None:
        """Take what counts of an answer."""
        all_counts = asked.draft.add(choice, versions)
        if asked.draft.complete:
            link.num_failures = 0
            self._answer(asked, link.name)
        elif sent.epoch != self.fleet.epoch:
            pass  # a sync of ours came between
        elif all_counts:
            # Somebody else interrupted it: the label tells whether it still serves.
            link.num_failures += 1
            self.fleet.leave(link, "it interrupted its requests")
        else:
            self._blame(asked, link, "it answered with weights that this run has not committed")

    def _answer(self, asked: Asked, replica: str) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            asked.future.set_result(asked.draft.answer(replica))

    async def _be_refused(self, asked: Asked, link: ReplicaLink, error: Refused) -> None:
        """See whose fault it is that a replica refused a request."""
        text = f"{error} (status {error.status})"
        if not 400 <= error.status < 500 or error.status in _TEMPORARY:
            self._blame(asked, link, text)
            return
        try:
            label, _ = await link.look(self.fleet.silent_s)
        except (Unreachable, Refused) as problem:
            self._blame(asked, link, str(problem))
            return
        if label != self.fleet.label:  # a request for weights that it lost, and not the request's fault
            self.fleet.leave(link, f"its weights have the label {label!r}, not {self.fleet.label!r}")
            return
        asked.refused[link.name] = text
        if all(each.name in asked.refused for each in self.fleet.links if each.serving):
            self._fail_refused(asked)

    def _blame(self, asked: Asked, link: ReplicaLink, error: str) -> None:
        """Note a failure of a replica at a request, which another is to answer."""
        asked.num_failures += 1
        link.num_failures += 1
        self.fleet.leave(link, error)
        if asked.num_failures >= _MOST_FAILURES:
            message = f"a request failed {asked.num_failures} times, at last at {link}: {error}."
            _fail(asked, "R505", message)


def _fail(asked: Asked, code: str, message: str) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        asked.future.set_exception(fail(code, "generate", message))
