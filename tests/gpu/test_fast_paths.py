"""What is compiled or has kernels of its own on CUDA computes what the plain code computes, and is compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

import shardproof as sp
from shardproof.model import hf_private, plain_block
from shardproof.model.compiling import is_compiled
from shardproof.model.experts import grouped_experts
from shardproof.model.head import HeadFacts, token_logprobs
from tests.gpu.test_cuda import ONE_NCCL, TWO_GLOO, on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.gpu]

CUDA = torch.device("cuda")
_SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
DENSE = Qwen3Config(**_SHAPE)
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
MOE = Qwen3MoeConfig(**_SHAPE, **_EXPERTS)


def batch_of(lengths: list[int], seed: int = 0) -> sp.Batch:
    draw = torch.Generator().manual_seed(seed)
    return sp.Batch([torch.randint(0, 1000, (n,), generator=draw).tolist() for n in lengths])


def train(
    config: PreTrainedConfig, options: dict[str, Any]
) -> tuple[bool, list[tuple[float, float]], list[int]]:
    """(whether blocks stayed compiled, each step's loss and gradient norm, graphs that exist after each step)."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    policy = sp.load(sp.RandomInit(config), device="cuda", progress=False, **options)
    optimizer = sp.make_optimizer(policy, 1e-3)
    results, graphs = [], []
    for seed, lengths in enumerate([[40, 90, 17], [300, 20], [5] * 9, [64], [511, 2, 130, 77]]):
        step = sp.train_step(policy, batch_of(lengths, seed), optimizer, micro_batch_tokens=256)
        results.append((step.loss, step.grad_norm))
        sp.logprobs(policy, batch_of(lengths, seed).sequences)
        graphs.append(counters["stats"]["unique_graphs"])
    return is_compiled(policy.model), results, graphs, list(plain_block.verdicts().values())


@pytest.mark.parametrize(
    ("config", "group", "options"),
    [
        (DENSE, ONE_NCCL, {}),
        (DENSE, TWO_GLOO, {"checkpoint_activations": 2}),
        (MOE, ONE_NCCL, {"checkpoint_activations": True}),
        (MOE, TWO_GLOO, {"sequence_parallel": 2}),
    ],
    ids=["dense", "dense, half recomputed", "moe, recomputed", "moe, sequence parallel"],
)
def test_compiled_blocks_train_as_plain_ones_do(config, group, options):
    plain = on_ranks(group, train, config, {**options, "compile": False})[0]
    compiled = on_ranks(group, train, config, options)[0]
    assert (plain[0], compiled[0]) == (False, True)
    for (loss, norm), (want_loss, want_norm) in zip(compiled[1], plain[1], strict=True):
        assert loss == pytest.approx(want_loss, abs=0.02)
        assert norm == pytest.approx(want_norm, rel=0.05)
    assert compiled[3] and all(compiled[3])  # our own kernels for blocks are used, and compared
    # What torch compiles it compiles in the first steps, and never again for other lengths.
    graphs = compiled[2]
    assert graphs[1:] == [graphs[1]] * (len(graphs) - 1)


@pytest.mark.parametrize("num_tokens", [3, 500])
def test_grouped_experts_equal_a_loop(num_tokens):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MOE, dtype=torch.bfloat16).to(CUDA)
    experts = hf_private.expert_modules(model)[0]
    hf_private.set_experts_implementation([experts], "eager")
    scores, chosen = torch.softmax(torch.randn(num_tokens, 16, device=CUDA), -1).topk(4, -1)
    hidden = torch.randn(num_tokens, 256, device=CUDA, dtype=torch.bfloat16)
    found = []
    for forward in (grouped_experts, lambda module, *args: module(*args)):
        leaves = [x.clone().requires_grad_() for x in (hidden, scores.bfloat16())]
        experts.zero_grad()
        out = forward(experts, leaves[0], chosen, leaves[1])
        out.backward(torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out).bfloat16())
        found.append([out, *(x.grad for x in (*leaves, experts.gate_up_proj, experts.down_proj))])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() <= 0.02 * other.float().norm()


@pytest.mark.parametrize(("num_rows", "top"), [(1, 4), (5, 3), (32, 4), (64, 8), (70, 4)])
def test_experts_of_few_rows_equal_grouped_ones(num_rows, top):
    from shardproof.rollout.expert_kernels import few_rows_experts

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MOE, dtype=torch.bfloat16).to(CUDA)
    experts = hf_private.expert_modules(model)[0]
    scores, chosen = torch.softmax(3 * torch.randn(num_rows, 16, device=CUDA), -1).topk(top, -1)
    hidden = torch.randn(num_rows, 256, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        one, other = (
            run(experts, hidden, chosen, scores.bfloat16()) for run in (few_rows_experts, grouped_experts)
        )
    assert (one - other).float().norm() <= 0.01 * other.float().norm()


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("facts", [HeadFacts(), HeadFacts(0.5, 20.0)], ids=["plain", "scaled and capped"])
def test_the_fused_head_equals_float64(facts, want_entropy):
    torch.manual_seed(0)
    head = nn.Linear(256, 1000, bias=False, dtype=torch.bfloat16, device=CUDA)
    hidden = torch.randn(300, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 1000, (300,), device=CUDA)
    wide = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    logits = wide[0] @ wide[1].T * facts.scale
    if facts.softcap is not None:
        logits = torch.tanh(logits / facts.softcap) * facts.softcap
    every = torch.log_softmax(logits / 0.7, -1)
    expected = [every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)]
    options: dict[str, Any] = {"temperature": 0.7, "facts": facts, "want_entropy": want_entropy}
    found = token_logprobs(hidden, head, targets, **options)
    weights = torch.randn(300, device=CUDA)
    sum((weights * x).sum() for x in found[: 1 + want_entropy]).backward()
    sum((weights * x).sum() for x in expected[: 1 + want_entropy]).backward()
    for one, other in zip(found[: 1 + want_entropy], expected, strict=False):
        assert (one - other).abs().max() < 0.02
    for one, other in zip((hidden.grad, head.weight.grad), (x.grad for x in wide), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
