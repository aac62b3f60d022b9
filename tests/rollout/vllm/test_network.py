"""Weights over the network to real servers: one of this host, and one in a network namespace whose link is cut."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.export import packing, sender
from shardproof.export.channel import read_secret
from shardproof.export.receiver import Receiver
from shardproof.rollout import vllm_engine
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Trajectory
from tests.ranks import run_ranks
from tests.rollout.engine_host import EngineHost, Link
from tests.rollout.vllm.support import PROMPTS, change, connect, failure, load_policy, sample, sync

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

LIMIT_S = 60.0


@pytest.fixture
def receiver(secret):
    """A receiver on the host of the shared server."""
    found = Receiver("127.0.0.1", 0, read_secret(secret, "test"))
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    found.close()
    thread.join()


def until(condition: Any) -> None:
    """Wait, on all ranks, for what rank 0 sees."""
    end = time.monotonic() + LIMIT_S
    while True:
        found = [condition() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        if found[0]:
            return
        assert time.monotonic() < end
        time.sleep(0.05)


def serving(engine: Any) -> list[str]:
    found = [engine.replicas.serving if engine.replicas is not None else None]
    dist.broadcast_object_list(found)
    return found[0]


def cut_during_sync(engine: Any, link: Link) -> None:
    """Sync; the link is cut when rank 0 has sent its first block."""
    get = sender.Blocks.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_BYTES", 2**12)

        def get_and_cut(blocks: Any, index: int) -> Any:
            if index == 1 and dist.get_rank() == 0:
                link.cut()
            return get(blocks, index)

        patch.setattr(sender.Blocks, "get", get_and_cut)
        sync(engine)


def tell(folder: str, urls: list[str], receivers: list[str], secret: str, link: Link) -> dict[str, Any]:
    """What a rank sees of two engine hosts, one of which is lost and comes back."""
    policy = load_policy(folder)
    how = {"transport": "network", "secret_file": secret, "allow_remote": True, "sync_timeout_s": 20.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "Dispatcher", functools.partial(Dispatcher, silent_s=2.0))
        engine = connect(policy, url=urls, receivers=receivers, **how)
    found: dict[str, Any] = {}
    try:
        sync(engine)
        found["first"] = serving(engine), engine.canary_gap < 1e-4
        change(policy)
        cut_during_sync(engine, link)
        found["cut"] = serving(engine), {c.version for c in sample(engine)}
        link.mend()
        change(policy)
        sync(engine)
        until(lambda: engine.replicas.serving == ["0", "1"])
        requests = [Request(Trajectory.of_prompt(PROMPTS[k % 3]), seed=k) for k in range(8)]
        both, end = [], time.monotonic() + LIMIT_S
        while {c.facts["replica"] for c in both} != {"0", "1"}:  # each rank looks for itself who is back
            assert time.monotonic() < end
            started = [engine.start(request, Sampling(20, temperature=0.7)) for request in requests]
            both += [answer.future.result(LIMIT_S) for answer in started]
        found["mended"] = {c.version for c in both}
        dist.barrier()
        started = [engine.start(request, Sampling(100, temperature=0.7)) for request in requests]
        link.cut()
        again = [answer.future.result(LIMIT_S) for answer in started]
        sequences = [list(c.tokens) for c in again]
        scored = sp.logprobs(policy, sequences, 0.7)
        mine = [row[-len(c.sampled[-1].tokens) :] for c, row in zip(again, scored, strict=True)]
        said = [torch.tensor(c.sampled[-1].logprobs) for c in again]
        found["generating"] = {c.version for c in again}
        found["worst"] = max(float((a - b).abs().max()) for a, b in zip(mine, said, strict=True))
    finally:
        link.mend()
        engine.close()
    return found


@pytest.fixture
def host(secret, models):
    """An engine host with a real server."""
    found = EngineHost(secret, models["tied"])
    try:
        found.wait_up()
        yield found
    finally:
        found.close()


@pytest.mark.slow
def test_a_host_whose_link_is_cut_is_left_out_and_brought_back(models, shared_server, receiver, secret, host):
    urls = [shared_server.client.url, host.url]
    receivers = ["{}:{}".format(*receiver.address), host.receiver]
    for found in run_ranks(2, tell, models["tied"], urls, receivers, secret, host.link, timeout=300):
        assert found.pop("worst") < 1e-4
        assert found == {
            "first": (["0", "1"], True),
            "cut": (["0"], {1}),
            "mended": {2},
            "generating": {2},
        }


def lose_the_only_receiver(folder: str, url: str, receiver: str, secret: str) -> dict[str, Any]:
    """A run whose only receiver refuses one version: the server goes on with the one it has."""
    policy = load_policy(folder)
    how = {"transport": "network", "secret_file": secret}
    engine = connect(policy, url=url, receivers=[receiver], **how)
    try:
        sync(engine)
        found: dict[str, Any] = {"gaps": [engine.canary_gap]}
        change(policy)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(sender, "connect", lambda *args: (_ for _ in ()).throw(sender.Lost("no route")))
            found["said"] = failure(sync, engine)
        found["versions"] = {c.version for c in sample(engine)}
        sync(engine)
        found["gaps"].append(engine.canary_gap)
        found["last"] = {c.version for c in sample(engine)}
    finally:
        engine.close()
    return found


def test_without_a_receiver_the_server_keeps_its_version(models, shared_server, receiver, secret):
    name = "{}:{}".format(*receiver.address)
    for found in run_ranks(2, lose_the_only_receiver, models["tied"], shared_server.client.url, name, secret):
        assert max(found["gaps"]) < 1e-4
        assert found["said"].startswith("R505 sync:") and name in found["said"]
        assert "Version 1 was not committed; the server is back at version 0" in found["said"]
        assert found["versions"] == {0}
        assert found["last"] == {1}
