"""Exact mode on a CUDA device: tiles of all sizes give the same bits, and so do engine and trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.model.exact import make_exact
from shardproof.model.roles import RoleModule
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.rollout.trajectory import Trajectory
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
PARTS = [(0, 1), (7, 5), (30, 33), (100, 300)]


def test_tiles_of_all_sizes_give_the_same_bits():
    from shardproof.model import exact_block_kernels, exact_kernels, exact_matmul  # Triton is not everywhere

    torch.manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    for n, k in ((2048, 2048), (1000, 200), (2048, 6144)):
        x, weight, bias = (
            torch.randn(520, k, **draw),
            torch.randn(n, k, **draw) / k**0.5,
            torch.randn(n, **draw),
        )
        found = exact_matmul.linear(x, weight, bias)
        expected = x.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.01)
        for tile in exact_matmul.TILES:
            if k % tile.inner == 0 or not tile.by_descriptor:
                assert torch.equal(exact_matmul.linear(x, weight, bias, tile), found), tile
        for at, num in PARTS:
            assert torch.equal(exact_matmul.linear(x[at : at + num], weight, bias), found[at : at + num])
    hidden, gate_up, down = (
        torch.randn(*s, **draw) / 16 for s in ((4000, 256), (16, 256, 256), (16, 256, 128))
    )
    scores, chosen = torch.rand(4000, 16, device="cuda").topk(4)
    arguments = (gate_up, down)
    whole = exact_kernels.experts(hidden, *arguments, chosen, scores.bfloat16())
    logits, tokens = torch.randn(500, 5003, **draw), torch.randint(0, 5003, (500,), device="cuda")
    logps, _ = exact_kernels.token_logprobs(logits, tokens, 0.7)
    truth = torch.log_softmax(logits.double() / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), truth, atol=1e-4, rtol=0)
    weight = torch.randn(256, **draw)
    normed = exact_block_kernels.norm(hidden, weight, 1e-6)
    for at, num in PARTS:
        rows = slice(at, at + num)
        part = exact_kernels.experts(hidden[rows], *arguments, chosen[rows], scores[rows].bfloat16())
        assert torch.equal(part, whole[rows])
        assert torch.equal(exact_kernels.token_logprobs(logits[rows], tokens[rows], 0.7)[0], logps[rows])
        assert torch.equal(exact_block_kernels.norm(hidden[rows], weight, 1e-6), normed[rows])


def largest_gaps(folder: str) -> dict[str, Any]:
    """The largest difference between log-probs of engine and trainer, by temperature and micro-batch; and an update."""
    policy = sp.load(folder, device="cuda", compute_dtype=torch.bfloat16, compile=False)
    roots = (module for module in policy.module.modules() if isinstance(module, RoleModule))
    make_exact(policy.model, policy.device, *roots)
    engine = EmbeddedEngine(policy, 8, exact=True)  # fewer rows than requests: they come and go
    engine.load_weights(sp.WeightStream(policy, torch.bfloat16))
    lengths = [1, 3, 63, 64, 65, 130, 200, 40]
    prompts = [tuple((7 * n + 3 * k * k) % 500 + 3 for k in range(lengths[n % 8])) for n in range(16)]
    requests = [Request(Trajectory.of_prompt(prompt, n, 0), 100 + n) for n, prompt in enumerate(prompts)]
    gaps = {}
    for temperature in (1.0, 0.7):
        found = generate(engine, requests, Sampling(40, temperature))
        sequences = [list(each.tokens) for each in found]
        for size in (300, 8192):
            scores = sp.logprobs(policy, sequences, temperature, micro_batch_tokens=size)
            differences = [
                (score.cpu()[-len(drawn.tokens) :] - torch.tensor(drawn.logprobs)).abs().max()
                for score, (drawn,) in zip(scores, (each.sampled for each in found), strict=True)
            ]
            gaps[f"{temperature}, {size}"] = float(max(differences))
    batch = sp.Batch(sequences, advantages=[1.0, -1.0] * 8, old_logps=scores)
    optimizer = sp.make_optimizer(policy, lr=1e-4)
    result = sp.train_step(
        policy, sp.weigh(batch, "sequence_mean"), optimizer, loss="policy", temperature=0.7
    )
    ratio = result.metrics["ratio/max"]
    return {"gaps": gaps, "ways": vars(engine.decoder.ways), "ratio": ratio, "stepped": result.stepped}  # type: ignore[union-attr]


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {}), ("llama", {}), ("qwen3_moe", EXPERTS)])
def test_engine_and_trainer_give_the_same_bits(tmp_path, family, sizes):
    make_checkpoint(tmp_path, family, **SHAPE, **sizes)
    (found,) = run_ranks(1, largest_gaps, str(tmp_path), backend="cpu:gloo,cuda:nccl")
    assert set(found["gaps"].values()) == {0.0}, found
    assert found["ways"]["graphs"], "exact models decode in CUDA graphs"
    assert found["stepped"] and found["ratio"] == 1.0, "the update's log-probs are those that were scored"
