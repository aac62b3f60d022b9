"""Routing replay on a CUDA device: what vLLM and our own kernels record is what the trainer would choose."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.rl.batches import make_batch
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.recording import expert_shape
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.train.routing import routers_of
from tests.gpu.servers import SMALL
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

SHAPE = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 128},
    **{"num_experts": 16, "num_experts_per_tok": 4},
}
BACKEND = "cpu:gloo,cuda:nccl"
has_vllm = importlib.util.find_spec("vllm") is not None


def make_engine(policy: Any, kind: str, log: str) -> Any:
    shape = expert_shape(policy)
    if kind == "embedded":
        return EmbeddedEngine(policy, 32, experts=shape)
    from shardproof.rollout.vllm_engine import VllmEngine
    from shardproof.rollout.vllm_server import VllmSettings

    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    settings = VllmSettings(max_model_len=256, log=log, **SMALL)
    return VllmEngine(policy, settings, experts=shape)


def replay(folder: str, kind: str, log: str) -> dict[str, Any]:
    """Two turns; how many experts are the trainer's own choice, and how far its log-probs are, with replay and without."""
    policy = sp.load(folder, device="cuda", compute_dtype=torch.bfloat16)
    engine = make_engine(policy, kind, log)
    ledger = TokenLedger()
    try:
        engine.load_weights(sp.WeightStream(policy, torch.bfloat16))
        said = [Trajectory.of_prompt(tuple(range(3 + k, 43 + 2 * k)), k, 0) for k in range(16)]
        for turn in range(2):
            requests = [Request(t, 100 * turn + t.group, turn == 0) for t in said]
            said = generate(engine, requests, Sampling(24), ledger)
            if turn == 0:
                said = [t.extended(Segment((5, 6, 7), "environment")) for t in said]
    finally:
        engine.close()
    batch = make_batch(said, expert_shape(policy))
    findings = [finding.message for finding in sp.attest_batch(batch, said, ledger)]
    assert batch.experts is not None
    drawn, mask = batch.flat("rollout_logps"), batch.flat_mask().bool()
    gaps = []
    for experts in (None, batch.experts):
        logps = torch.cat(sp.logprobs(policy, batch.sequences, experts=experts)).cpu()
        gaps.append(float((logps - drawn)[mask].abs().mean()))
    same = num = 0
    for tokens, experts in zip(batch.sequences, batch.experts, strict=True):
        with torch.no_grad(), routers_of(policy).noting() as noted:
            policy.module(task="logits", input_ids=torch.tensor([tokens], device="cuda"), use_cache=False)
        own = np.sort(torch.stack([each for _, each in noted], 1).cpu().numpy(), -1)
        equal = (own == np.sort(experts.numpy(), -1))[:-1]
        same, num = same + int(equal.sum()), num + equal.size
    return {"findings": findings, "gaps": gaps, "same": same / num, "num": num}


@pytest.mark.parametrize(
    "kind",
    [
        "embedded",
        pytest.param(
            "vllm", marks=[pytest.mark.vllm, pytest.mark.skipif(not has_vllm, reason="vLLM is not installed")]
        ),
    ],
)
def test_recorded_experts_are_the_trainers_and_bring_it_nearer(tmp_path: Any, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", **SHAPE)
    log = str(tmp_path / "log")
    (found,) = run_ranks(1, replay, str(folder), kind, log, backend=BACKEND, timeout=500)
    print(kind, found)
    assert found["findings"] == [] and found["num"] > 5000
    assert found["same"] > 0.9  # in 16 bits, near ties fall either way
    own, replayed = found["gaps"]
    assert replayed <= own
