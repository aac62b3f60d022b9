"""Engine hosts in network namespaces of their own, whose link is cut during a sync and while they generate."""

from __future__ import annotations

import functools
import logging
import time

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.config.vllm import VllmSettings
from shardproof.export import packing, sender
from shardproof.rollout import vllm_engine
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Trajectory
from tests.export.test_stream import load, train
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rollout.engine_host import EngineHost

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

LIMIT_S = 60.0
SYNC_S = 10.0
EVERYTHING = 1e9  # the stand-ins say nothing that a trainer would


class Hosts:
    """Two engine hosts, which rank 0 starts, and what all ranks know of them."""

    def __init__(self, secret):
        self.mine = [EngineHost(secret) for _ in range(2)] if dist.get_rank() == 0 else []
        for host in self.mine:
            host.wait_up()
        known = [[(host.url, host.receiver) for host in self.mine]]
        dist.broadcast_object_list(known)
        self.urls, self.receivers = ([pair[k] for pair in known[0]] for k in range(2))

    def do(self, number, what, *args):
        """Rank 0 does something to a host, and all ranks go on."""
        found = [getattr(self.mine[number], what)(*args) if self.mine else None]
        dist.broadcast_object_list(found)
        return found[0]

    def link(self, number, what):
        """Cut or mend the way to a host."""
        if self.mine:
            getattr(self.mine[number].link, what)()
        dist.barrier()

    def close(self):
        for host in self.mine:
            host.close()


def until(condition):
    """Wait, on all ranks, for what rank 0 sees."""
    end = time.monotonic() + LIMIT_S
    while True:
        found = [condition() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        if found[0]:
            return
        assert time.monotonic() < end
        time.sleep(0.05)


def sync(engine, policy):
    """Bring the policy's weights; returns (seconds, what was said about hosts on rank 0, who serves)."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardproof.rollout").addHandler(handler)
    started = time.monotonic()
    engine.load_weights(sp.WeightStream(policy, dtype=torch.float32))
    seconds = time.monotonic() - started
    logging.getLogger("shardproof.rollout").removeHandler(handler)
    serving = [engine.replicas.serving if engine.replicas is not None else None]
    dist.broadcast_object_list(serving)
    return seconds, lines, serving[0]


def cut_during(engine, policy, hosts, number):
    """The same; the link is cut when rank 0 has sent its first block."""
    get, done = sender.Blocks.get, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_BYTES", 2**12)

        def get_and_cut(blocks, index):
            if index == 1 and hosts.mine and not done:
                done.append(hosts.mine[number].link.cut())
            return get(blocks, index)

        patch.setattr(sender.Blocks, "get", get_and_cut)
        return sync(engine, policy)


def start(engine, num):
    """Ask for completions of this rank."""
    first = 100 * dist.get_rank()
    return [
        engine.start(Request(Trajectory.of_prompt([5, 6, 7]), seed=first + k), Sampling(max_new_tokens=4))
        for k in range(num)
    ]


def answers(waiting):
    """(versions, replicas) of completions, over all ranks."""
    found = [answering.future.result(LIMIT_S) for answering in waiting]
    mine = [[list(t.segments[-1].token_versions), t.facts["replica"]] for t in found]
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    flat = [row for rank in rows for row in rank]
    return sorted({version for versions, _ in flat for version in versions}), sorted(
        {name for _, name in flat}
    )


def cut_and_mend(folder, secret):
    """What each rank saw, step by step."""
    hosts = Hosts(secret)
    policy = load(folder)
    optimizer = sp.make_optimizer(policy, lr=1e-3)
    settings = VllmSettings(
        mode="server",
        url=hosts.urls,
        allow_remote=True,
        transport="network",
        receivers=hosts.receivers,
        secret_file=secret,
        sync_timeout_s=SYNC_S,
        start_timeout_s=SYNC_S,
        request_timeout_s=LIMIT_S,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "Dispatcher", functools.partial(Dispatcher, silent_s=1.0, look_s=0.1))
        engine = vllm_engine.VllmEngine(policy, settings, tolerance=EVERYTHING)
    seen = {}
    try:
        seen["first"] = sync(engine, policy)[2], answers(start(engine, 8))
        train(policy, optimizer)
        seconds, lines, serving = cut_during(engine, policy, hosts, 1)
        seen["cut"] = serving, answers(start(engine, 4)), seconds < 2 * SYNC_S
        named = [line for line in lines if hosts.receivers[1] in line or hosts.urls[1] in line]
        seen["named"] = bool(named) or dist.get_rank() != 0
        hosts.link(1, "mend")
        train(policy, optimizer)
        sync(engine, policy)
        until(lambda: engine.replicas.serving == ["0", "1"])
        seen["mended"] = [hosts.do(k, "tell", "state")["weights"] for k in range(2)]
        end = time.monotonic() + LIMIT_S
        while "1" not in answers(start(engine, 4))[1]:  # ranks look for themselves who is back
            assert time.monotonic() < end
        # While it generates.
        hosts.do(1, "tell", "hold")
        waiting = start(engine, 8)
        until(lambda: hosts.mine[1].tell("state")["running"] > 0)
        hosts.link(1, "cut")
        seen["generating"] = answers(waiting)
        hosts.link(1, "mend")
        hosts.do(1, "tell", "go")
        train(policy, optimizer)
        sync(engine, policy)
        until(lambda: engine.replicas.serving == ["0", "1"])
        seen["last"] = [hosts.do(k, "tell", "state")["weights"] for k in range(2)]
    finally:
        engine.close()
        hosts.close()
    return seen


def test_a_host_whose_link_is_cut_is_named_left_out_and_brought_back(tmp_path, secret):
    folder = make_checkpoint(tmp_path / "model", "llama")
    replies = run_ranks(2, cut_and_mend, folder, secret, timeout=300)
    for seen in replies:
        assert seen == {
            "first": (["0", "1"], ([0], ["0", "1"])),
            "cut": (["0"], ([1], ["0"]), True),
            "named": True,
            "mended": [2, 2],
            "generating": ([2], ["0"]),
            "last": [3, 3],
        }
