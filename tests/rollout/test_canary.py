"""The canary of a sync: what is not a number is within no tolerance, wherever it stands."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import pytest

from shardproof.dist.deadline import Deadline
from shardproof.errors import ShardproofError
from shardproof.rollout.sync import Delivered, Delivery, distance
from shardproof.rollout.vllm_versions import interface_of


class Server:
    """A server that takes every call."""

    def __init__(self) -> None:
        self.client = self
        self.calls: list[str] = []

    def post(self, path: str, body: Any, deadline: Any) -> None:
        self.calls.append(path)


def make_delivery(said: list[float]) -> Delivery:
    delivery = Delivery(Server(), "run", [1, 2, 3], 0.5, {})  # type: ignore[arg-type]
    delivery.interface = interface_of("0.32.0")
    delivery.ask_canary = lambda payload, deadline: said  # type: ignore[method-assign]
    return delivery


@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_on_either_side_fails_the_canary(place):
    good, bad = [-1.0, -2.0], [-1.0, -2.0]
    bad[place] = nan
    assert isnan(distance(good, bad)) and isnan(distance(bad, good))
    for said, expected in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(
            ShardproofError, match="R503 sync: engine and trainer log-probs of the canary differ by nan"
        ):
            make_delivery(said)._check_canary(Delivered(1, expected), said)


@pytest.mark.parametrize("said", [[nan, -2.0], [-1.0, nan]])
def test_an_engine_that_says_nan_after_a_batch_has_changed(said):
    delivery = make_delivery(said)
    delivery.committed, delivery.said, delivery.said_at_start = Delivered(0, [-1.0, -2.0]), [-1.0, -2.0], said
    with pytest.raises(ShardproofError, match="R503 generate") as caught:
        delivery.check_alone(Deadline(1.0))
    assert "reload_weights was called" not in str(
        caught.value
    )  # a NaN is not what it said at the start either
    assert delivery.server.client.calls[-1] == "/update_weight_version"  # type: ignore[attr-defined]
