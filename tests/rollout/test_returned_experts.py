"""Experts that servers return: asked for once per token, put together over versions, and refused if they do not fit."""

from __future__ import annotations

import base64
import importlib.util
import io
from typing import Any

import numpy as np
import pytest

from shardproof.errors import ShardproofError
from shardproof.rollout.engine import Request
from shardproof.rollout.expert_records import sequence_experts
from shardproof.rollout.experts import Experts, ExpertShape
from shardproof.rollout.returned_experts import check_returns
from shardproof.rollout.trajectory import Segment, Trajectory
from tests.rollout import test_dispatcher
from tests.rollout.fake_vllm import FakeVllm, Running
from tests.rollout.test_dispatcher import EIGHT, at_work, make, request, sync

pytestmark = pytest.mark.usefixtures("nothing_left")

__all__ = ["make"]

SHAPE = ExpertShape(layers=(1, 3), num_experts=12, num_chosen=2)
NUM_LAYERS = 4


def experts_at(weights: int, place: int) -> list[list[int]]:
    """Those of the layers with a router, which tell the weights and the token's place."""
    return [[(layer + place) % 10, 10 + weights % 2] for layer in SHAPE.layers]


def rows(*spans: tuple[int, range]) -> list[list[list[int]]]:
    return [experts_at(weights, place) for weights, places in spans for place in places]


class RoutingVllm(FakeVllm):
    """Returns experts as vLLM does; `loses` rows at the end of an interrupted answer."""

    loses = 0
    returns = True

    def _choice(self, running: Running, reason: str) -> dict[str, Any]:
        choice = super()._choice(running, reason)
        first = running.body["sampling_params"].get("routed_experts_prompt_start", 0)
        stop = len(running.body["token_ids"]) + len(running.tokens) - 1
        stop -= self.loses if reason == "abort" else 0
        found = np.zeros((max(stop - first, 0), NUM_LAYERS, 2), np.uint8)
        for place in range(first, stop):
            found[place - first, list(SHAPE.layers)] = experts_at(self.weights, place)
        if self.returns and running.tokens:
            file = io.BytesIO()
            np.save(file, found)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return choice


@pytest.fixture(autouse=True)
def routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_dispatcher, "FakeVllm", RoutingVllm)


def test_each_turn_asks_for_the_experts_that_are_missing(make: Any) -> None:
    dispatcher, (server,) = make(experts=SHAPE)
    said = dispatcher.start(request(6), EIGHT).future.result()
    going = said.extended(Segment((4, 5), "environment"))
    said = dispatcher.start(Request(going, 7), EIGHT).future.result()
    assert [body["sampling_params"]["routed_experts_prompt_start"] for body in server.bodies] == [0, 10]
    assert sequence_experts(said, SHAPE)[:-1].tolist() == rows((0, range(20)))
    assert [segment.experts.start for segment in said.sampled] == [0, 10]


@pytest.mark.parametrize("vllm", ["0.26.0", "0.32.0"])
def test_an_interrupted_answer_keeps_the_experts_that_drew_its_tokens(make: Any, vllm: str) -> None:
    dispatcher, servers = make(2, vllm=vllm, experts=SHAPE)
    for server in servers:
        server.hold_back()
    asked = dispatcher.start(request(6, prompt=(9, 9)), EIGHT)
    at_work(servers).draw(3)
    sync(dispatcher, servers, 1)
    at_work(servers)
    begun = asked.so_far
    assert begun is not None and begun.experts is not None
    assert begun.experts.rows.tolist() == rows((0, range(4)))
    for server in servers:
        server.go_on()
    (segment,) = asked.future.result().sampled
    assert segment.parts == ((3, 0), (5, 1))
    assert segment.experts == Experts(
        0, np.array(rows((0, range(4)), (1, range(4, 9))), np.uint8), SHAPE.layers
    )
    # What a checkpoint has of an answer goes on too.
    again = dispatcher.start(request(6, prompt=(9, 9), begun=begun), EIGHT)
    assert again.future.result().sampled == (segment,)


def test_tokens_whose_experts_were_lost_are_drawn_again(make: Any) -> None:
    dispatcher, (server,) = make(experts=SHAPE)
    server.hold_back()
    server.loses = 2
    asked = dispatcher.start(request(6, prompt=(9, 9)), EIGHT)
    at_work([server]).draw(5)
    sync(dispatcher, [server], 1)
    at_work([server]).go_on()
    (segment,) = asked.future.result().sampled
    assert segment.parts == ((3, 0), (5, 1))
    assert segment.experts.rows.tolist() == rows((0, range(4)), (1, range(4, 9)))


def test_a_beginning_without_experts_is_drawn_anew(make: Any) -> None:
    dispatcher, (server,) = make(experts=SHAPE)
    begun = Segment((1, 2), "policy", (-1.0, -1.0), 0, trained=True)
    found = dispatcher.start(request(6, begun=begun), EIGHT).future.result()
    assert server.bodies[-1]["token_ids"] == [1, 2, 3]
    assert sequence_experts(found, SHAPE)[:-1].tolist() == rows((0, range(10)))


def test_a_server_that_returns_no_experts_is_named_with_the_flag(make: Any) -> None:
    dispatcher, (server,) = make(experts=SHAPE)
    server.returns = False
    with pytest.raises(ShardproofError, match=r"R511.*(?s:.)*--enable-return-routed-experts"):
        dispatcher.start(request(6), EIGHT).future.result()


def test_without_replay_nothing_is_asked_for(make: Any) -> None:
    dispatcher, (server,) = make()
    found = dispatcher.start(request(6), EIGHT).future.result()
    assert "routed_experts_prompt_start" not in server.bodies[0]["sampling_params"]
    assert found.sampled[0].experts is None


def test_experts_of_another_model_are_refused() -> None:
    from shardproof.rollout.returned_experts import Recorded

    file = io.BytesIO()
    np.save(file, np.zeros((3, 2, 2), np.uint8))  # of two layers: the policy has a router in layer 3
    recorded = Recorded(Trajectory.of_prompt((1, 2)), SHAPE)
    with pytest.raises(ValueError, match="shape"):
        recorded.read(base64.b64encode(file.getvalue()).decode())


def test_vllm_on_a_cpu_without_triton_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_returns("cuda")
    with pytest.raises(ShardproofError, match=r"C001.*rollout.replay_experts.*Triton"):
        check_returns("cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_returns("cpu")
