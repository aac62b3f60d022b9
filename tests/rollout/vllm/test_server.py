"""A server that was there before: exact tokens and log-probs, and every way in which a sync can go wrong."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.dist.region import map_region
from shardproof.export.shared import SharedAddress
from shardproof.rollout import sync as rollout_sync
from shardproof.rollout import vllm_engine
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_client import GENERATE, Deadline
from shardproof.rollout.vllm_http import AsyncClient
from tests.ranks import run_ranks
from tests.rollout.vllm.support import (
    PROMPTS,
    ask,
    change,
    connect,
    failure,
    load_policy,
    sample,
    sync,
    worst,
)

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]


@pytest.fixture
def url(shared_server):
    return shared_server.client.url


def exact(folder: str, url: str) -> dict[str, Any]:
    policy = load_policy(folder)
    engine = connect(policy, url=url)
    found: dict[str, Any] = {"gaps": [], "versions": []}
    for _ in range(3):
        receipt = sync(engine)
        completions = sample(engine)
        found["gaps"].append(engine.canary_gap)
        found["versions"].append({c.version for c in completions} | {receipt.version})
        change(policy)
    sync(engine)
    found["again"] = sample(engine) == sample(engine)
    plain = Sampling(6, temperature=0.7)
    requests = [Request(Trajectory.of_prompt(prompt), seed=3) for prompt in PROMPTS]
    found["worst"] = worst(engine, generate(engine, requests, plain))
    greedy = Sampling(8, temperature=0.0)
    embedded = EmbeddedEngine(policy)
    embedded.load_weights(sp.WeightStream(policy, torch.float32))
    mine, theirs = generate(engine, requests, greedy), generate(embedded, requests, greedy)
    found["greedy"] = [c.tokens for c in mine] == [c.tokens for c in theirs]
    found["uneven"] = len(generate(engine, requests[: dist.get_rank()], plain))
    engine.close()
    return found


def test_log_probs_and_tokens_are_exact_after_every_sync(models, url):
    for rank, found in enumerate(run_ranks(2, exact, models["tied"], url)):
        assert max(found["gaps"]) < 1e-4
        assert found["versions"] == [{0}, {1}, {2}]
        assert found["again"]
        assert found["worst"] < 1e-4
        assert found["greedy"]
        assert found["uneven"] == rank


def labelled_by_workers(folder: str, url: str) -> dict[str, Any]:
    """The same with a vLLM that puts no version on completions, as before 0.32."""
    with pytest.MonkeyPatch.context() as patch:
        for place in (rollout_sync, vllm_engine):
            known = place.interface_of
            silent = lambda *said, known=known: replace(known(*said), weight_versions=False)  # noqa: E731
            patch.setattr(place, "interface_of", silent)
        policy = load_policy(folder)
        engine = connect(policy, url=url)
        sync(engine)
        found: dict[str, Any] = {"first": {c.version for c in sample(engine)}}
        started = [engine.start(request, Sampling(100)) for request in ask()]
        change(policy)
        sync(engine)
        whole = [each.future.result(60.0) for each in started]
        found["interrupted"] = all(len(c.sampled[-1].tokens) == 100 for c in whole)
        found["second"] = {c.version for c in sample(engine)}
        post, client = AsyncClient.post, engine.delivery and engine.server.client

        async def overtaken(self: Any, path: str, body: Any) -> Any:
            reply = await post(self, path, body)
            if client is not None and path == GENERATE:
                patch.setattr(AsyncClient, "post", post)
                client.rpc("shardproof_mark", Deadline(30.0), "somebody/7")
            return reply

        # Somebody begins an update in the middle of a batch: what was committed is brought again, and asked again.
        patch.setattr(AsyncClient, "post", overtaken)
        found["during"] = {c.version for c in sample(engine)}
        engine.close()
    return found


def test_workers_keep_the_label_for_a_vllm_that_does_not(models, url):
    for found in run_ranks(2, labelled_by_workers, models["tied"], url):
        assert found == {"first": {0}, "interrupted": True, "second": {1}, "during": {1}}


def stop_tokens(folder: str, url: str) -> list[Any]:
    engine = connect(load_policy(folder), url=url)
    sync(engine)
    requests = [Request(Trajectory.of_prompt((5, 6)), seed=k) for k in range(200)]
    return generate(engine, requests, Sampling(4, stop_ids=(7, 9, 30)))


def test_a_completion_ends_with_its_stop_token_or_at_its_length(models, url):
    (completions,) = run_ranks(1, stop_tokens, models["tied"], url)
    assert {c.finished for c in completions} == {True, False}
    for completion in completions:
        tokens = completion.sampled[-1].tokens
        assert completion.finished == (tokens[-1] in (7, 9, 30))
        assert completion.finished or len(tokens) == 4
        assert not set(tokens[:-1]) & {7, 9, 30}


def faulty(folder: str, url: str, spoil: str) -> tuple[str, str, int, list[int], float]:
    """Sync once well, then with a fault; afterwards the engine must sample from the first version again."""
    policy = load_policy(folder)
    engine = connect(policy, url=url)
    sync(engine)
    before = sample(engine)
    change(policy)
    if engine.delivery is not None:
        _SPOILERS[spoil](engine)
    message = failure(sync, engine)
    after = sample(engine)
    if engine.delivery is not None:
        del engine.delivery.transfer
    receipt = sync(engine)
    return (
        message,
        "same" if before == after else "changed",
        engine.version,
        sorted({c.version for c in sample(engine)}),
        receipt.version,
    )


def _with_payload(engine: Any, edit: Any) -> None:
    """Let the new payload pass through `edit` on its way; what is brought back is left alone."""
    transfer = engine.delivery.transfer

    def spoiled(payload: Any, deadline: Deadline) -> None:
        transfer(edit(payload) if payload.version > 0 else payload, deadline)

    engine.delivery.transfer = spoiled


def _drop_tensor(engine: Any) -> None:
    def edit(payload: Any) -> Any:
        address = payload.update["address"]
        kept = [t for t in address["tensors"] if t[0] != "model.layers.1.mlp.up_proj.weight"]
        return replace(payload, update={**payload.update, "address": {**address, "tensors": kept}})

    _with_payload(engine, edit)


def _drop_from_both(engine: Any) -> None:
    """As if the manifest itself had forgotten a tensor: only the count of written elements can tell."""

    def edit(payload: Any) -> Any:
        name = "model.layers.1.self_attn.k_proj.weight"
        address = payload.update["address"]
        kept = [t for t in address["tensors"] if t[0] != name]
        manifest = [row for row in payload.update["manifest"] if row[0] != name]
        return replace(payload, update={"address": {**address, "tensors": kept}, "manifest": manifest})

    _with_payload(engine, edit)


def _flip_element(engine: Any) -> None:
    def edit(payload: Any) -> Any:
        name = "model.layers.0.mlp.gate_proj.weight"
        address = SharedAddress.from_json(payload.update["address"])
        _, dtype, _, offset = next(row for row in address.tensors if row[0] == name)
        memory = map_region(address.region, writable=True)
        memory[offset:].view(getattr(torch, dtype))[35] *= -1
        return payload

    _with_payload(engine, edit)


def _give_a_file(engine: Any) -> None:
    """As anybody could who reaches the server: the address of a file."""

    def edit(payload: Any) -> Any:
        address = {**payload.update["address"], "path": "/etc/hostname"}
        return replace(payload, update={**payload.update, "address": address})

    _with_payload(engine, edit)


def _leave_head(engine: Any) -> None:
    _with_payload(engine, lambda payload: replace(payload, update={**payload.update, "renew": False}))


def _send_nothing(engine: Any) -> None:
    """A transport that reports success and does nothing."""
    engine.delivery._check_reports = lambda payload, deadline: None
    transfer = engine.delivery.transfer
    engine.delivery.transfer = lambda payload, deadline: (
        None if payload.version > 0 else transfer(payload, deadline)
    )


_SPOILERS = {
    "drop": _drop_tensor,
    "forget": _drop_from_both,
    "flip": _flip_element,
    "file": _give_a_file,
    "head": _leave_head,
    "nothing": _send_nothing,
}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        ("drop", "R502 sync: 'model.layers.1.mlp.up_proj.weight' did not arrive"),
        (
            "forget",
            "R502 sync: 'model.layers.1.self_attn.qkv_proj.weight' was not written exactly once: 4096 of",
        ),
        ("file", "R502 sync: the payload: '/etc/hostname' is not the address of shared memory"),
        ("flip", "R502 sync: 'model.layers.0.mlp.gate_proj.weight' differs from what was sent"),
        ("head", "R503 sync: engine and trainer log-probs of the canary differ by"),
        ("nothing", "R503 sync: engine and trainer log-probs of the canary differ by"),
    ],
)
def test_a_bad_sync_is_named_and_leaves_the_old_version(models, url, spoil, expected):
    results = run_ranks(2, faulty, models["tied"], url, spoil)
    assert results[0] == results[1]
    message, samples, version, versions, sent = results[0]
    assert message.replace("rank 0: ", "").startswith(expected), message
    assert "Version 1 was not committed; the server is back at version 0." in message
    assert samples == "same"
    assert (version, versions, sent) == (1, [1], 1)


def reload(folder: str, url: str) -> tuple[str, list[int]]:
    policy = load_policy(folder)
    engine = connect(policy, url=url)
    if engine.delivery is not None:
        # What the server held before this run: the checkpoint, as after its start.
        engine.server.client.rpc("reload_weights", Deadline(30.0))
    change(policy)
    sync(engine)
    sample(engine)
    if engine.delivery is not None:
        engine.server.client.rpc("reload_weights", Deadline(30.0))
    message = failure(sample, engine)
    return message, sorted({c.version for c in sample(engine)})


def test_reload_weights_after_a_sync_is_named_and_made_good(models, url):
    (first, second) = run_ranks(2, reload, models["tied"], url)
    assert first == second
    assert "R503 generate: rank 0: the server" in first[0]
    assert "reload_weights was called after the sync" in first[0]
    assert first[1] == [1]


def wrong_model(folder: str, url: str, dtype: str) -> str:
    return failure(sync, connect(load_policy(folder, dtype), url=url))


def test_another_model_on_the_server_is_named(models, url):
    (first, second) = run_ranks(2, wrong_model, models["wide"], url, "float32")
    assert first == second
    assert "R506 sync: rank 0: the server has another model: hidden_size is 64 there, 96 here." in first
    (message,) = run_ranks(1, wrong_model, models["tied"], url, "bfloat16")
    assert "the server has dtype 'float32', this run needs 'bfloat16'" in message


def slow(folder: str, url: str, pids: list[int]) -> tuple[str, float, list[int]]:
    policy = load_policy(folder)
    engine = connect(policy, url=url, sync_timeout_s=4.0)
    sync(engine)
    change(policy)
    if engine.delivery is not None:
        transfer = engine.delivery.transfer

        def stalled(payload: Any, deadline: Deadline) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            transfer(payload, deadline)

        engine.delivery.transfer = stalled
    started = time.monotonic()
    message = failure(sync, engine)
    taken = time.monotonic() - started
    if engine.delivery is not None:
        del engine.delivery.transfer
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    return message, taken, sorted({c.version for c in sample(engine)})


def test_a_slow_server_ends_a_sync_at_its_deadline_on_every_rank(models, shared_server):
    workers = [child.pid for child in psutil.Process(shared_server.process.pid).children(recursive=True)]
    try:
        (first, second) = run_ranks(2, slow, models["tied"], shared_server.client.url, workers)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    assert first[0] == second[0]
    assert "R505 sync: rank 0: the server stopped or did not answer in time: no answer from" in first[0]
    assert "version 0 could not be restored either" in first[0]
    assert 4.0 <= first[1] < 15.0
    # Let go, it is brought to the committed version before it gets a request.
    assert first[2] == second[2] == [0]


def unreachable(folder: str, url: str) -> tuple[str, float]:
    policy = load_policy(folder)
    started = time.monotonic()
    return failure(lambda: connect(policy, url=url, start_timeout_s=2.0)), time.monotonic() - started


def test_a_server_that_is_not_there_is_named_within_the_deadline(models):
    (first, second) = run_ranks(2, unreachable, models["tied"], "http://127.0.0.1:9")
    assert first[0] == second[0]
    assert "R505 rollout: rank 0: no vLLM server answered at http://127.0.0.1:9 within 2 s" in first[0]
    assert first[1] < 10.0
