"""All conversations of a batch, wave by wave: each wave is a turn of the policy and the environment's replies to it.

Environments work while the engine still samples other turns of the wave. Draws depend on a conversation's seed and the
number of its turns alone, so that conversations are the same at any number of ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from shardproof.dist.collectives import together
from shardproof.environments.pool import EnvironmentPool
from shardproof.environments.protocol import Answer, Failure, Opening, Reply
from shardproof.rl.conversations.conversation import Rules
from shardproof.rl.conversations.steps import (
    Start,
    begin,
    next_request,
    stopped_by,
    take_answer,
    take_turn,
)
from shardproof.rollout.engine import Engine, Sampling, answers, forget
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Trajectory

_KINDS: dict[str, type[Opening] | type[Reply] | type[Failure]] = {
    "opening": Opening,
    "reply": Reply,
    "failure": Failure,
}


class Conversations:
    """What a run's conversations have in common: the environment's workers on this rank, and the rules.

    Of ranks that share sequences, the first one's workers answer for all: environments need not be deterministic.
    """

    def __init__(self, pool: EnvironmentPool, rules: Rules, stops: bool = False, sequence_parallel: int = 1):
        self.pool, self.rules = pool, rules
        self.stops = stops  # at the first failure
        self._sequence_parallel = sequence_parallel
        self.is_shared = sequence_parallel > 1
        self.waited_s = 0.0  # for replies, so far
        self.keys = itertools.count()  # of conversations in the pool

    @property
    def leader(self) -> int:
        """The rank whose workers answer this one's conversations."""
        return dist.get_rank() - dist.get_rank() % self._sequence_parallel

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def run(
        self,
        engine: Engine,
        starts: Sequence[Start],
        sampling: Sampling,
        ledger: TokenLedger | None = None,
    ) -> Iterator[list[tuple[int, Trajectory]]]:
        """(place in `starts`, trajectory) of the conversations that are over, as they come; `ledger` gets every turn.

        Collective: every rank.
        """
        batch = _Batch(self, engine, sampling, starts)
        try:
            while True:
                over, num_going = batch.settle()
                yield over
                if not num_going:
                    return
                places = list(batch.going)
                requests = [
                    next_request(conversation, starts[place].own_sampling(sampling))
                    for place, conversation in batch.going.items()
                ]
                for ready in answers(engine, requests, sampling, ledger):
                    for k, trajectory in ready:
                        batch.take(places[k], trajectory)
        finally:
            forget(engine)
            batch.release(batch.going)


class _Batch:
    """The conversations of one batch on this rank; those in `going` are not over."""

    def __init__(self, common: Conversations, engine: Engine, sampling: Sampling, starts: Sequence[Start]):
        self._common, self._engine = common, engine
        self._max_new_tokens = [start.max_new_tokens(sampling) for start in starts]
        self._pool = common.pool if common.leader == dist.get_rank() else None
        self._starts = starts
        self.going = {place: begin(start, common.rules) for place, start in enumerate(starts)}
        self._keys: dict[int, int] = {}  # of open conversations in the pool
        self._unopened = list(enumerate(starts)) if self._pool is not None else []
        self._broken: dict[int, Failure] = {}  # turns that cannot be read, and why

    def take(self, place: int, trajectory: Trajectory) -> None:
        """Take a turn of the policy, and ask the environment for its reply."""
        conversation = self.going[place]
        turn = take_turn(conversation, trajectory, self._max_new_tokens[place])
        if isinstance(turn, Failure):
            self._broken[place] = turn
        elif self._pool is not None:
            self._pool.step(self._keys[place], turn)

    def settle(self) -> tuple[list[tuple[int, Trajectory]], int]:
        """([(place, trajectory)] of what is over now, how many conversations of all ranks go on), once all answers came.

        The first time, these are the environment's openings. Collective: every rank.
        """
        found = self._answers()
        with together("rollout") as message:
            for place, conversation in self.going.items():
                most = self._max_new_tokens[place]
                take_answer(conversation, *found[place], most, self._engine.version)
                if conversation.ended == "failed" and self._common.stops:
                    raise stopped_by(self._starts[place], conversation)
            over = {place: c for place, c in self.going.items() if c.ended}
            results = [(place, conversation.result()) for place, conversation in over.items()]
            self.release(over)
            self.going = {place: c for place, c in self.going.items() if not c.ended}
            message.mine = len(self.going)
        return results, sum(message.rows)

    def release(self, places: Iterable[int]) -> None:
        """Let the environment give up what these conversations hold."""
        for key in (self._keys.pop(place, None) for place in places):
            if self._pool is not None and key is not None:
                self._pool.release(key)

    def _answers(self) -> dict[int, tuple[Answer, float]]:
        """The environment's answer to every conversation that goes on, and its time so far. Collective: every rank."""
        started = time.perf_counter()
        found: dict[int, tuple[Answer, float]] = {}
        with together("rollout") as message:
            if self._pool is not None:
                self._open(self._pool)
                places = {key: place for place, key in self._keys.items()}
                for key, answer in self._pool.answers():
                    found[places[key]] = answer, self._pool.seconds(key)
                if self._common.is_shared:
                    message.mine = [[place, *_to_json(answer), s] for place, (answer, s) in found.items()]
        if self._common.is_shared:
            rows = message.rows[self._common.leader] or []
            found = {place: (_from_json(kind, given), s) for place, kind, given, s in rows}
        for place, failure in self._broken.items():
            found[place] = failure, self.going[place].seconds
        self._broken.clear()
        self._common.waited_s += time.perf_counter() - started
        return found

    def _open(self, pool: EnvironmentPool) -> None:
        """Ask for every conversation's opening that was not asked for yet."""
        for place, start in self._unopened:
            key = next(self._common.keys)
            pool.open(key, start.prompt.row, start.environment_seed)
            self._keys[place] = key
        self._unopened = []


def _to_json(answer: Answer) -> tuple[str, dict[str, Any]]:
    kind = next(kind for kind, made in _KINDS.items() if isinstance(answer, made))
    return kind, asdict(answer)


def _from_json(kind: str, given: Mapping[str, Any]) -> Answer:
    return _KINDS[kind](**given)
