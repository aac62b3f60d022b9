"""Requests of several ranks to servers: each asks for its own, what is asked twice is drawn once, all fail together."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from shardproof.errors import ShardproofError
from shardproof.rollout.asking import CollectiveRequests
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.replica_link import ReplicaAddress
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_versions import interface_of
from tests.ranks import run_ranks
from tests.rollout.fake_vllm import FakeVllm, token_of

pytestmark = pytest.mark.distributed

EIGHT = Sampling(8)


def connect(url: str) -> tuple[Dispatcher, CollectiveRequests]:
    dispatcher = Dispatcher(
        [ReplicaAddress("0", url)], "run", interface_of("0.32"), in_flight=2, request_timeout_s=20.0
    )
    dispatcher.release(0, ["0"])
    return dispatcher, CollectiveRequests(dispatcher.start, nullcontext, share=2)


def ask(seeds: list[int], first: int = 0) -> list[Request]:
    return [Request(Trajectory.of_prompt((1, 2), first + k), seed) for k, seed in enumerate(seeds)]


def collect(asking: CollectiveRequests) -> dict[int, Trajectory]:
    found = {}
    while asking.busy:
        answers = asking.poll()
        assert not {ticket for ticket, _ in answers} & set(found)
        found |= dict(answers)
    return found


def on_rank(url: str) -> Any:
    dispatcher, asking = connect(url)
    try:
        rank = dist.get_rank()
        assert asking.poll() == []
        # Both ask for 5 and 6, rank 1 for 6 twice; the rest is their own. Then once more while requests are open.
        tickets = asking.submit(ask([(1, 2, 5, 6), (5, 6, 3, 6)][rank], first=10 * rank), EIGHT)
        tickets += asking.submit(ask([(6,), (6, 7)][rank], first=100), EIGHT)
        found = collect(asking)
        assert sorted(found) == tickets
        # A rank that asks for nothing still takes part.
        more = asking.submit(ask([[8], []][rank]), EIGHT)
        found |= collect(asking)
        rows = [
            [found[t].group, found[t].sampled[0].tokens, found[t].facts["replica"]] for t in tickets + more
        ]
        # One request that fails ends all of them, on every rank; what comes next is answered.
        asking.submit(ask([[9, 900], [4]][rank]), EIGHT)
        message = ""
        try:
            collect(asking)
        except ShardproofError as error:
            message = str(error)
        assert not asking.busy
        asking.submit(ask([11]), EIGHT)
        (last,) = collect(asking).values()
        return rows, message, last.sampled[0].tokens
    finally:
        dispatcher.close()


def tokens_of(seed: int) -> tuple[int, ...]:
    return tuple(token_of(0, seed, place) for place in range(8))


def test_what_several_ranks_ask_for_is_drawn_once() -> None:
    with FakeVllm() as server:
        server.serve("run", 0)
        server.refuses_seeds[900] = (400, "too long")
        first, second = run_ranks(2, on_rank, server.url)
        seeds = [body["sampling_params"]["seed"] for body in server.bodies]
    assert sorted(seed for seed in seeds if seed in range(1, 9) and seed != 4) == [1, 2, 3, 5, 6, 7, 8]
    assert [row[0] for row in first[0]] == [0, 1, 2, 3, 100, 0]
    assert [row[1] for row in first[0]] == [tokens_of(seed) for seed in (1, 2, 5, 6, 6, 8)]
    assert [row[0] for row in second[0]] == [10, 11, 12, 13, 100, 101]
    assert [row[1] for row in second[0]] == [tokens_of(seed) for seed in (5, 6, 3, 6, 6, 7)]
    assert {row[2] for row in first[0] + second[0]} == {"0"}
    assert first[1] == second[1] and first[1].startswith("R506") and "too long" in first[1]
    assert first[2] == second[2] == tokens_of(11)
