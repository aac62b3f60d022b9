"""vLLM as a child of rank 0: it dies at every stage of a sync, and it serves experts and adapters."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoConfig

import shardproof as sp
from shardproof.rollout.vllm_client import Deadline
from tests.ranks import run_ranks
from tests.rollout.vllm.support import change, connect, failure, load_policy, sample, sync, worst

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

STARTS = 600  # seconds that a test may need whose server is started several times


def kill_server(engine: Any) -> None:
    os.killpg(engine.server.process.pid, signal.SIGKILL)


def kill_during_transfer(engine: Any) -> None:
    """Kill the server while its workers hold the request that brings the new payload."""
    transfer = engine.delivery.transfer

    def doomed(payload: Any, deadline: Deadline) -> None:
        del engine.delivery.transfer
        for child in psutil.Process(engine.server.process.pid).children(recursive=True):
            child.suspend()
        threading.Timer(1.0, kill_server, [engine]).start()
        transfer(payload, deadline)

    engine.delivery.transfer = doomed


def kill_before_commit(engine: Any) -> None:
    commit = engine.delivery.commit

    def doomed(payload: Any, deadline: Deadline) -> None:
        del engine.delivery.commit
        kill_server(engine)
        commit(payload, deadline)

    engine.delivery.commit = doomed


def survive(folder: str) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(folder)
    config.architectures = None  # as in a config of one's own: the server is told which class it is
    policy = load_policy(sp.RandomInit(config, seed=1))
    engine = connect(policy)
    sync(engine)
    before = sample(engine)
    found: dict[str, Any] = {}
    on_rank_0: Callable[..., None] = lambda act: act(engine) if engine.delivery is not None else None  # noqa: E731
    on_rank_0(kill_server)
    found["between"] = sample(engine) == before
    change(policy)
    for name, fault in (("during", kill_during_transfer), ("before", kill_before_commit)):
        on_rank_0(fault)
        found[name] = failure(sync, engine)
        found[f"after {name}"] = sample(engine) == before
    sync(engine)
    found["gap"] = engine.canary_gap
    found["versions"] = {c.version for c in sample(engine)}
    found["starts"] = engine.server.num_starts if engine.delivery is not None else None
    engine.close()
    return found


@pytest.mark.slow
def test_a_killed_server_costs_a_sync_and_never_a_version(models):
    first, second = run_ranks(2, survive, models["tied"], timeout=STARTS)
    assert first.pop("starts") == 4
    second.pop("starts")
    assert first == second
    assert first["between"] and first["after during"] and first["after before"]
    for name in ("during", "before"):
        assert first[name].startswith("R505 sync: rank 0: the server stopped or did not answer in time"), (
            first[name]
        )
        assert "Version 1 was not committed; the server is back at version 0." in first[name]
    assert first["gap"] < 1e-4
    assert first["versions"] == {1}


def experts(folder: str) -> dict[str, Any]:
    policy = load_policy(folder, strategy="fsdp1")
    engine = connect(policy, args=["--worker-extension-cls", "tests.rollout.vllm.faulty.FaultyExtension"])
    gaps, worsts = [], []
    for _ in range(3):
        sync(engine)
        gaps.append(engine.canary_gap)
        worsts.append(worst_untrimmed(engine))
        change(policy)
    if engine.delivery is not None:
        transfer = engine.delivery.transfer

        def as_vllm_leaves_it(payload: Any, deadline: Deadline) -> None:
            spoiled = replace(payload, update={**payload.update, "renew": False})
            transfer(spoiled if payload.version == policy.version else payload, deadline)

        engine.delivery.transfer = as_vllm_leaves_it
    message = failure(sync, engine)
    versions = {c.version for c in sample(engine)}
    broken = None
    if engine.delivery is not None:
        del engine.delivery.transfer
        (broken,) = engine.server.client.rpc("break_expert_loader", Deadline(30.0))
    twice = failure(sync, engine)
    engine.close()
    found = {"gaps": gaps, "worsts": worsts, "message": message, "versions": versions}
    return {**found, "broken": broken, "twice": twice}


def worst_untrimmed(engine: Any) -> float:
    from shardproof.rollout.engine import Sampling, generate
    from tests.rollout.vllm.support import ask

    completions = generate(engine, ask(), Sampling(6, temperature=0.7))
    # Every token of the vocabulary ends a completion by the checkpoint's generation config, which does not count.
    assert {c.num_sampled for c in completions} == {6}
    return worst(engine, completions)


@pytest.mark.slow
def test_experts_are_right_after_every_sync_and_vllm_alone_would_not_be(models):
    for rank, found in enumerate(run_ranks(2, experts, models["moe"], timeout=STARTS)):
        assert max(found["gaps"]) < 1e-4
        assert max(found["worsts"]) < 1e-4
        assert "R503 sync: rank 0: engine and trainer log-probs of the canary differ by" in found["message"]
        assert "the server is back at version 2" in found["message"]
        assert found["versions"] == {2}
        # A loader that writes one expert twice and another never: vLLM's own count is satisfied.
        assert "were not written, from [2, 0, 0]" in found["twice"]
        assert "were written more than once, from [1, 0, 0]" in found["twice"]
        if rank == 0:
            name = found["broken"]["parameter"]
            assert found["twice"].startswith(f"R502 sync: rank 0: '{name}'"), found["twice"]


def adapters(folder: str) -> dict[str, Any]:
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    policy = load_policy(folder, "bfloat16", lora=lora)
    engine = connect(policy, lora="adapter")
    found: dict[str, Any] = {"gaps": []}
    for _ in range(3):
        sync(engine)
        found["gaps"].append(engine.canary_gap)
        grow(policy)
    sync(engine)
    found["versions"] = {c.version for c in sample(engine)}
    before = sample(engine)
    if engine.delivery is not None:
        kill_server(engine)
    found["restarted"] = sample(engine) == before
    if engine.delivery is not None:
        transfer, first = engine.delivery.transfer, engine._folder / "adapter-3"

        def old_adapter(payload: Any, deadline: Deadline) -> None:
            transfer(replace(payload, adapter=str(first)) if payload.version == 4 else payload, deadline)

        engine.delivery.transfer = old_adapter
    grow(policy, 3.0)
    found["message"] = failure(sync, engine)
    found["after"] = sample(engine) == before
    engine.close()
    return found


def grow(policy: Any, factor: float = 1.5) -> None:
    """Move the adapters far: B begins at zero, where an adapter changes nothing."""
    import torch

    with torch.no_grad():
        for name, param in policy.named_parameters():
            if "lora_B" in name:
                param.add_(0.1 * policy.version + 0.1).mul_(factor)
    policy.version += 1
    policy.num_updates += 1


@pytest.mark.slow
def test_an_adapter_is_really_served(models):
    first, second = run_ranks(2, adapters, models["tied"], timeout=STARTS)
    assert first == second
    assert max(first["gaps"]) < 0.2
    assert first["versions"] == {3}
    assert first["restarted"]
    assert "R503 sync: rank 0: engine and trainer log-probs of the canary differ by" in first["message"]
    assert "the adapter is not applied" in first["message"]
    assert "the server is back at version 3" in first["message"]
    assert first["after"]


TRAINER = """
import json, os, sys
from shardproof.rollout.engine import Sampling
from tests.rollout.vllm.support import ask, connect, load_policy, sync

engine = connect(load_policy(sys.argv[1]), max_model_len=8192)
sync(engine)
drawing = [engine.start(request, Sampling(8000)) for request in ask(4)]
print(json.dumps([engine.server.process.pid, engine.delivery.committed.update["address"]["token"]]), flush=True)
sys.stdin.read()
"""


def holders(token: str) -> list[str]:
    """The processes that have memory of this name open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if token in os.readlink(link):
                found.append(link.parts[2])
    return found


@pytest.mark.slow
def test_a_trainer_that_is_killed_while_it_draws_leaves_no_server_and_no_memory(models):
    command = [sys.executable, "-c", TRAINER, models["long"]]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pid, token = json.loads(trainer.stdout.readline())
    server = psutil.Process(pid)
    everything = [server, *server.children(recursive=True)]
    assert len(everything) >= 3  # the one that watches, the server, its engine
    assert str(trainer.pid) in holders(token)
    trainer.kill()
    trainer.wait()
    assert not psutil.wait_procs(everything, timeout=60)[1]
    assert holders(token) == []


def source(folder: str) -> tuple[list[str], list[str], int, str]:
    import shardproof as sp
    from shardproof.rollout.vllm_senders import make_sender
    from shardproof.rollout.vllm_source import StreamSource

    policy = load_policy(folder)
    stream = StreamSource(sp.WeightStream(policy))
    said = [meta.name for meta in stream.metadata()]
    # vLLM checks the order itself here, and raises where it is another.
    sent = [name for names, _ in stream.iter_groups() for name in names]
    return said, sent, len(stream.groups()), failure(make_sender, "nccl", None, 1, None)


def test_the_stream_is_a_weight_source_for_vllms_own_transports(models):
    first, second = run_ranks(2, source, models["tied"])
    assert first == second
    said, sent, num_groups, message = first
    assert sorted(said) == sorted(sent) and len(set(said)) == len(said)
    assert num_groups == 4  # embedding, two layers, final norm
    assert "transport='nccl' moves tensors between GPUs, and this machine has none" in message
