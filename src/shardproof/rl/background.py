"""Trajectories that are sampled, answered by environments and scored while the rank trains.

A thread of the rank runs a coroutine for each trajectory, which reads from top to bottom: the environment's opening, the
policy's turn, the reply, the next turn, and so on to its rewards. Each goes on as soon as its own answer is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shardproof.background import BackgroundThread
from shardproof.environments.protocol import Answer, Failure
from shardproof.errors import fail
from shardproof.rl.conversations.conversation import Conversation
from shardproof.rl.conversations.measures import reward_sample, with_environment
from shardproof.rl.conversations.steps import (
    Start,
    begin,
    next_request,
    stopped_by,
    take_answer,
    take_turn,
    with_text,
)
from shardproof.rl.conversations.waves import Conversations
from shardproof.rl.rewards.runner import RewardRunner
from shardproof.rollout.engine import Answering, BackgroundEngine, Request, Sampling
from shardproof.rollout.sampling import Ends
from shardproof.rollout.token_ledger import TokenLedger, appended
from shardproof.rollout.trajectory import Reward, Segment, Trajectory

_LOOK_S = 1.0  # how often a caller that waits looks whether the thread still runs


class BackgroundRollouts(contextlib.AbstractContextManager["BackgroundRollouts"]):
    """Makes trajectories on a thread of its own, for engines that answer each request by itself. Nothing is collective.

    Any number of batches may be in progress, for training and for evaluation. Close it before the engine, the
    environment and the rewards that it uses. Of ranks that share sequences, the first one begins batches for all.
    """

    def __init__(
        self,
        engine: BackgroundEngine,
        tokenizer: Any,
        rewards: RewardRunner,
        conversations: Conversations | None = None,
        asks: str | None = None,
    ):
        self.engine, self.tokenizer = engine, tokenizer
        self.rewards, self.conversations, self.asks = rewards, conversations, asks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: BackgroundThread | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the thread's alone

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether batches that were begun still go on."""
        return self._thread is not None and not self._thread.has_ended

    def begin(
        self, starts: Sequence[Start], sampling: Sampling, ledger: TokenLedger | None = None
    ) -> BackgroundBatch:
        """Begin a trajectory for each start; returns at once. Only the thread writes to `ledger`, every turn as it comes."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            # Known before it runs: an interrupt may come at any time from then on, and it must be ended then too.
            self._thread = BackgroundThread("shardproof rollouts", self._work)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads can be had
                self._thread = None
                raise
        return BackgroundBatch(self, starts, sampling, ledger)

    def close(self) -> None:
        """Give up every trajectory that is not complete, and end the thread."""
        if self._loop is not None:
            self.call(self._loop.stop)
            if self._thread is not None:
                self._thread.join()
            self._loop.close()  # for a thread that never began
            self._thread = self._loop = None

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have the thread call a function, if it still runs."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *args)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is given up when the thread ends. On the thread."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _work(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            loop.run_forever()
            while self._tasks:
                tasks = list(self._tasks)
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()


class BackgroundBatch:
    """Trajectories that are made in the background, known by their place in the batch. Its methods are for one thread.

    What is taken by `wait` or given up by `cancel` is forgotten. The first error of any trajectory ends the batch: `wait`
    raises it from then on. An environment or a reward that fails is no error, unless the recipe says so.
    """

    def __init__(
        self,
        common: BackgroundRollouts,
        starts: Sequence[Start],
        sampling: Sampling,
        ledger: TokenLedger | None,
    ):
        self._common, self._sampling, self._ledger = common, sampling, ledger
        self._open = set(range(len(starts)))  # places that were neither taken nor given up
        self._found: dict[int, Trajectory] = {}
        self._failure: BaseException | None = None
        # From the thread: (place, trajectory) of what is complete, or what ended the batch.
        self._news: queue.SimpleQueue[tuple[int, Trajectory] | BaseException] = queue.SimpleQueue()
        # The thread's alone, but for a look at what is drawn so far.
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answering: dict[int, Answering] = {}
        self._answered: dict[int, Segment] = {}  # the last turn of those that are not complete
        self._is_over = False
        common.call(self._begin, list(starts))

    @property
    def num_in_progress(self) -> int:
        """How many trajectories are neither complete nor given up."""
        self._take_news()
        return 0 if self._failure is not None else len(self._open) - len(self._found)

    def done(self) -> list[int]:
        """The places whose trajectories are complete and scored, and not taken yet, in order.

        After an error these are all that were not taken: `wait` waits for none of them, and raises.
        """
        self._take_news()
        return sorted(self._found if self._failure is None else self._open)

    def wait(self, places: Iterable[int] | None = None) -> dict[int, Trajectory]:
        """The trajectories of these places with their rewards, as soon as all are there; raises what went wrong.

        None: of all places that were neither taken nor given up.
        """
        wanted = sorted(set(self._open if places is None else places))
        unknown = [place for place in wanted if place not in self._open]
        if unknown:
            raise ValueError(f"place {unknown[0]} was taken or given up before, or is not in the batch")
        while not self.settled(wanted, _LOOK_S):
            pass
        if self._failure is not None:
            raise self._failure
        self._open.difference_update(wanted)
        return {place: self._found.pop(place) for place in wanted}

    def settled(self, places: Iterable[int] | None = None, within_s: float = 0.0) -> bool:
        """Whether `wait` for these places returns or raises at once; looks for so many seconds until it does."""
        left = list(self._open if places is None else self._open.intersection(places))
        end = time.monotonic() + within_s
        self._take_news()
        while left and self._failure is None:
            if left[-1] in self._found:
                left.pop()
                continue
            seconds = end - time.monotonic()
            if seconds <= 0:
                return False
            self._wait_for_news(min(seconds, _LOOK_S))
        return True

    def so_far(self, place: int) -> Segment | None:
        """What the engine has drawn of a trajectory that was not taken, as `Start.begun` takes it; None for nothing.

        Conversations with an environment have none: it would begin anew.
        """
        if self._common.conversations is not None or place not in self._open:
            return None
        answering = self._answering.get(place)
        return self._answered.get(place) if answering is None else answering.so_far

    def cancel(self, places: Iterable[int] | None = None) -> None:
        """Give these places up, all that were not taken if None: requests, conversations and rewards."""
        given_up = self._open & set(self._open if places is None else places)
        self._open -= given_up
        for place in given_up:
            self._found.pop(place, None)
        if self._common.is_running:
            done: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._common.call(self._cancel, given_up, done)
            while self._common.is_running:
                with contextlib.suppress(queue.Empty):
                    done.get(timeout=_LOOK_S)
                    break
        self._take_news()

    def _take_news(self) -> None:
        is_running = self._common.is_running  # looked at before the queue, which it then fills no more
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._news.get_nowait())
        if not is_running and len(self._found) < len(self._open):
            self._failure = self._failure or RuntimeError("background rollouts are closed")

    def _wait_for_news(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self._news.get(timeout=seconds))
        self._take_news()

    def _take(self, news: tuple[int, Trajectory] | BaseException) -> None:
        if isinstance(news, BaseException):
            self._failure = self._failure or news
        elif news[0] in self._open:
            self._found[news[0]] = news[1]

    # From here on: on the thread.

    def _begin(self, starts: Sequence[Start]) -> None:
        for place, start in enumerate(starts):
            self._running[place] = task = self._common.spawn(self._run(place, start))
            # Not at the coroutine's end: one that is cancelled before its first step never runs.
            task.add_done_callback(partial(self._forget, place))

    def _forget(self, place: int, _: object) -> None:
        del self._running[place]
        self._answered.pop(place, None)

    def _cancel(self, places: set[int], done: queue.SimpleQueue[None]) -> None:
        tasks = [task for place, task in self._running.items() if place in places]
        for task in tasks:
            task.cancel()

        async def tell() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            done.put(None)

        self._common.spawn(tell())

    def _end(self, error: BaseException) -> None:
        """Give up the whole batch for an error; the first one counts."""
        if not self._is_over:
            self._is_over = True
            self._news.put(error)
            for task in list(self._running.values()):
                task.cancel()

    async def _run(self, place: int, start: Start) -> None:
        try:
            if self._common.conversations is None:
                trajectory = await self._complete(place, start)
            else:
                trajectory = await self._converse(place, start, self._common.conversations)
            self._news.put((place, await self._rewarded(place, start, trajectory)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            message = f"the engine gave up the request for prompt {start.group}, sample {start.sample}."
            self._end(fail("R500", "generate", message, fix="see docs/extending.md#an-engine"))
        except BaseException as error:
            self._end(error)

    async def _complete(self, place: int, start: Start) -> Trajectory:
        """A trajectory without an environment: the prompt and one turn of the policy."""
        asked = Trajectory.of_prompt(start.prompt.asked, start.group, start.sample)
        own = start.own_sampling(self._sampling)
        request = self._fitting(Request(asked, start.seed, begun=start.begun, sampling=own))
        answered = self._already(place, request) or await self._turn(place, request)
        common, include_stop = self._common, self._sampling.include_stop
        return with_text(answered, start.prompt, common.tokenizer, common.asks, include_stop)

    def _fitting(self, request: Request) -> Request:
        """Without what was drawn of it before, if that goes on behind its end: the run's settings are others since then."""
        if request.begun is None:
            return request
        ends, tokens = Ends(request.settings(self._sampling)), request.begun.tokens
        ends.look(tokens)
        most = min(ends.num or len(tokens), request.limit(self._sampling))
        return request if len(tokens) <= most else replace(request, begun=None)

    def _already(self, place: int, request: Request) -> Trajectory | None:
        """The answer, if all of it was drawn before the run was interrupted."""
        begun, ends = request.begun, Ends(request.settings(self._sampling))
        if begun is None or not begun.tokens or begun.version is None:
            return None
        finished = ends.look(begun.tokens)
        if not finished and len(begun.tokens) < request.limit(self._sampling):
            return None
        said = replace(begun, author="policy", trained=True)
        answered = request.trajectory.extended(said, finished, ends.stop_string)
        self._record(place, request, answered)
        return answered

    async def _converse(self, place: int, start: Start, common: Conversations) -> Trajectory:
        """A whole conversation with an environment."""
        conversation, pool, key = begin(start, common.rules), common.pool, next(common.keys)
        max_new_tokens, own = start.max_new_tokens(self._sampling), start.own_sampling(self._sampling)
        try:
            answer = await asyncio.wrap_future(pool.begin(key, start.prompt.row, start.environment_seed))
            self._answer(start, conversation, answer, pool.seconds(key))
            while not conversation.ended:
                trajectory = await self._turn(place, next_request(conversation, own))
                turn = take_turn(conversation, trajectory, max_new_tokens)
                if isinstance(turn, Failure):
                    answer = turn
                else:
                    answer = await asyncio.wrap_future(pool.reply(key, turn))
                self._answer(start, conversation, answer, pool.seconds(key))
            return conversation.result()
        finally:
            pool.release(key)

    def _answer(self, start: Start, conversation: Conversation, answer: Answer, seconds: float) -> None:
        common, engine = self._common.conversations, self._common.engine
        most = start.max_new_tokens(self._sampling)
        take_answer(conversation, answer, seconds, most, engine.version)
        if conversation.ended == "failed" and common is not None and common.stops:
            raise stopped_by(start, conversation)

    async def _turn(self, place: int, request: Request) -> Trajectory:
        """The engine's answer, which the ledger records; raises if it breaks what `Engine` promises."""
        answering = self._common.engine.start(request, self._sampling)
        self._answering[place] = answering
        try:
            answered = await asyncio.wrap_future(answering.future)
            self._record(place, request, answered)
            return answered
        finally:
            del self._answering[place]

    def _record(self, place: int, request: Request, answered: object) -> None:
        if not isinstance(answered, Trajectory):
            message = f"the engine answered with a {type(answered).__name__}, not a Trajectory."
            raise fail("R500", "generate", message, fix="see docs/extending.md#an-engine")
        check = appended if self._ledger is None else self._ledger.record
        check(request.trajectory, answered)
        self._answered[place] = answered.segments[-1]

    async def _rewarded(self, place: int, start: Start, trajectory: Trajectory) -> Trajectory:
        """With the rewards of functions and environment; the algorithm's penalty is not known here."""
        conversations = self._common.conversations
        scored = Reward(0.0)
        if trajectory.ended != "failed":
            sample = reward_sample(trajectory, start.prompt.row)
            found = self._common.rewards.score_later(sample, place)
            # Built-in functions have answered by now.
            scored = found.result() if found.done() else await asyncio.wrap_future(found)
        masks = conversations is not None and conversations.rules.masks
        return replace(trajectory, reward=with_environment(trajectory, scored, masks))
