"""vLLM on a CUDA device beside the trainer, in any version that is supported: weights arrive, and a fault is named."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rollout import vllm_ipc
from shardproof.rollout.engine import Sampling, generate
from shardproof.rollout.vllm_client import Deadline
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_server import VllmSettings
from shardproof.rollout.vllm_versions import installed_version, interface_of
from tests.gpu.servers import SMALL
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rollout.vllm.support import PROMPTS, ask, change, failure, sync
from tests.sockets import all_loopback, listening, session_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHAPE = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
FAMILIES = {"qwen3_tied": {}, "qwen3_moe": {"moe_intermediate_size": 128}}
BACKEND = "cpu:gloo,cuda:nccl"


def mean_gap(engine: VllmEngine, completions: list[Any]) -> float:
    """The mean difference between the engine's log-probs and the trainer's of the same tokens.

    The mean, because in half precision single tokens go to another expert here than there.
    """
    sequences = [list(c.tokens) for c in completions]
    gaps = []
    for k, row in enumerate(sp.logprobs(engine.policy, sequences, 0.7)):
        said = torch.tensor(completions[k].sampled[-1].logprobs)
        gaps.append((row.cpu()[len(PROMPTS[k % 3]) - 1 :] - said).abs())
    return float(torch.cat(gaps).mean())


def forget(engine: VllmEngine) -> None:
    """Let payload and manifest both lack a tensor: only the ledger of writes can tell."""
    assert engine.delivery is not None
    transfer, name = engine.delivery.transfer, "model.layers.1.self_attn.k_proj.weight"

    def lossy(payload: Any, deadline: Deadline) -> None:
        if payload.version == engine.policy.version:
            address = payload.update["address"]
            kept = [row for row in address["tensors"] if row[0] != name]
            manifest = [row for row in payload.update["manifest"] if row[0] != name]
            update = {"address": {**address, "tensors": kept}, "manifest": manifest}
            payload = replace(payload, update=update)
        transfer(payload, deadline)

    engine.delivery.transfer = lossy  # type: ignore[method-assign]


def serve(folder: str, log: str) -> dict[str, Any]:
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # FlashInfer is optional, and it compiles for minutes
    policy = sp.load(folder, device="cuda", compute_dtype=torch.bfloat16)
    settings = VllmSettings(max_model_len=128, log=log, **SMALL)
    engine = VllmEngine(policy, settings, sleeps=True)
    requests = ask(6)
    found: dict[str, Any] = {"gaps": [], "means": [], "versions": [], "freed": []}
    try:
        assert engine.delivery is not None
        for _ in range(3):
            sync(engine)
            completions = generate(engine, requests, Sampling(8, temperature=0.7))
            found["gaps"].append(engine.canary_gap)
            found["means"].append(mean_gap(engine, completions))
            found["versions"].append({c.version for c in completions})
            free = torch.cuda.mem_get_info()[0]
            engine.sleep()
            found["freed"].append(torch.cuda.mem_get_info()[0] - free)
            assert "R501 generate: the engine is asleep" in failure(generate, engine, requests, Sampling(1))
            engine.wake()
            change(policy)
        sync(engine)
        found["vllm"] = engine.delivery.interface.version if engine.delivery.interface else None
        found["seconds"] = dict(engine.proof.seconds) if engine.proof else {}
        assert engine.server.process is not None
        found["listening"] = listening(session_of(engine.server.process.pid))
        stops = tuple(range(0, 512, 3))
        stopped = generate(engine, requests, Sampling(24, temperature=1.0, stop_ids=stops))
        found["stopped"] = all((c.tokens[-1] in stops) == c.finished for c in stopped) and any(
            c.finished for c in stopped
        )
        change(policy)
        forget(engine)
        found["message"] = failure(sync, engine)
        found["after"] = {c.version for c in generate(engine, requests, Sampling(4))}
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_colocated_server_samples_from_the_policys_weights(tmp_path, family):
    folder = str(make_checkpoint(tmp_path / "model", family, **SHAPE, **FAMILIES[family]))
    (found,) = run_ranks(1, serve, folder, str(tmp_path / "log"), backend=BACKEND, timeout=600)
    print(f"vLLM {found['vllm']}: {found['gaps']}, {found['means']}, {found['seconds']}")
    served, installed = (interface_of(str(said)) for said in (found["vllm"], installed_version()))
    assert replace(served, version="") == replace(installed, version="")
    # Half precision on both sides; weights that are not the policy's are whole nats away.
    assert max(found["gaps"]) < 0.5 and max(found["means"]) < 0.3
    assert found["versions"] == [{0}, {1}, {2}]
    assert min(found["freed"]) > 2**30  # most of its cache
    assert found["stopped"]
    assert "R502 sync" in found["message"] and "layers.1.self_attn.qkv_proj" in found["message"]
    assert "the server is back at version 3" in found["message"]
    assert found["after"] == {3}
    assert all_loopback(found["listening"]), found["listening"]


def stand_in_for_ray(folder: Path) -> None:
    """vLLM 0.26 imports ray in its receiver for IPC and does not use it there."""
    if importlib.util.find_spec("ray") is None:
        folder.mkdir(exist_ok=True)
        (folder / "ray.py").touch()
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])


def serve_by_ipc(folder: str, log: str) -> dict[str, Any]:
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    stand_in_for_ray(Path(log).parent / "ray")
    policy = sp.load(folder, device="cuda", compute_dtype=torch.bfloat16)
    settings = VllmSettings(transport="ipc", max_model_len=128, log=log, **SMALL)
    engine = VllmEngine(policy, settings)
    found: dict[str, Any] = {"gaps": [], "means": [], "versions": [], "seconds": []}
    held = 0
    try:
        # Everything at once, then through a buffer that holds little more than the largest tensor.
        for chunk_bytes in (2**29, 2**29, 2**20, 2**20):
            vllm_ipc.CHUNK_BYTES = chunk_bytes
            sync(engine)
            completions = generate(engine, ask(6), Sampling(8, temperature=0.7))
            found["gaps"].append(engine.canary_gap)
            found["means"].append(mean_gap(engine, completions))
            found["versions"].append({c.version for c in completions})
            found["seconds"].append(dict(engine.proof.seconds) if engine.proof else {})
            change(policy)
            held = held or torch.cuda.memory_allocated()
        found["left"] = torch.cuda.memory_allocated() - held
        assert engine.server.process is not None
        found["listening"] = listening(session_of(engine.server.process.pid))
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_ipc_brings_every_version_of_the_weights(tmp_path, family):
    folder = str(make_checkpoint(tmp_path / "model", family, **SHAPE, **FAMILIES[family]))
    (found,) = run_ranks(1, serve_by_ipc, folder, str(tmp_path / "log"), backend=BACKEND, timeout=600)
    print(f"IPC: {found['gaps']}, {found['means']}, {found['seconds']}")
    assert max(found["gaps"]) < 0.5 and max(found["means"]) < 0.3
    assert found["versions"] == [{0}, {1}, {2}, {3}]
    assert found["left"] < 2**20  # the buffer is given back after each sync
    assert all_loopback(found["listening"]), found["listening"]
