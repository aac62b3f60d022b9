"""What is compiled or has kernels of its own on CUDA computes what the plain code computes, and is compiled once."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import shardproof as sp
from shardproof.model import hf_private
from shardproof.model.compiling import is_compiled
from shardproof.model.experts import grouped_experts
from shardproof.model.head import HeadFacts, token_logprobs
from shardproof.rollout.decode import Prefilled, decode, last_logits
from shardproof.rollout.engine import Completion, Request, Sampling
from shardproof.rollout.progress import Progress
from shardproof.rollout.static import FixedDecoder, ModelStep
from tests.gpu.test_cuda import ONE_NCCL, TWO_GLOO, on_ranks

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
MIXED = Qwen3MoeConfig(**_SHAPE, **_EXPERTS, mlp_only_layers=[1])


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
    return is_compiled(policy.model), results, graphs


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
    # Compiled in the first steps, and never again for other lengths.
    graphs = compiled[2]
    assert graphs[0] > 0
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


@pytest.mark.parametrize("vocabulary", [50, 2048, 151936])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_are_those_of_plain_torch(vocabulary, temperature):
    from shardproof.rollout.draw_kernels import record

    torch.manual_seed(0)
    sampling = Sampling(20, temperature=temperature, stop_ids=tuple(range(0, vocabulary, 7)))
    kernels, plain = (Progress(33, sampling, CUDA) for _ in range(2))
    for progress in (kernels, plain):
        progress.begin(torch.arange(33, device=CUDA)[:, None], range(33))
    for step in range(20):
        logits = torch.randn(33, vocabulary, device=CUDA, dtype=torch.bfloat16) * (1 + step % 4)
        logits[5, : vocabulary // 2] = -float("inf")
        record(kernels, temperature, logits)
        plain.record(logits)
        exact = torch.softmax(logits.double() / temperature, -1)
        token, number = kernels.tokens[step][:, None], kernels.uniform[step][:, None]
        probability, end = exact.gather(1, token), exact.cumsum(-1).gather(1, token)
        # In float64, the drawn token is where the running sum passes the row's number.
        assert ((number < end + 1e-6) & (number > end - probability - 1e-6)).all()
        assert (kernels.logprobs[step][:, None] - probability.log()).abs().max() < 1e-4
        assert torch.equal(kernels.ids[:, 0], kernels.tokens[step])
    # Rounding may choose a neighbour where thousands of tokens are as likely.
    assert (kernels.tokens == plain.tokens).float().mean() > 0.97
    assert torch.equal(kernels.positions, plain.positions) and torch.equal(kernels.step, plain.step)
    assert torch.equal(kernels.done, torch.isin(kernels.tokens, kernels.stops).any(0))


def error_of(model: PreTrainedModel, requests: list[Request], drawn: list[Completion]) -> float:
    """How far the log-probs of what was drawn are from those of the same weights in float32.

    The median: where 16 bits choose another expert, a few are far off.
    """
    precise = deepcopy(model).float()
    distances = []
    for request, completion in zip(requests, drawn, strict=True):
        ids = torch.tensor([[*request.tokens, *completion.tokens]], device=CUDA)
        scores = torch.log_softmax(precise(ids).logits[0, len(request.tokens) - 1 : -1], -1)
        exact = scores.gather(1, ids[0, len(request.tokens) :, None]).squeeze(1)
        distances.append((exact.cpu() - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(distances).median())


@pytest.mark.parametrize(
    "config",
    [DENSE, LlamaConfig(**_SHAPE), Qwen2Config(**{**_SHAPE, "num_attention_heads": 4}), MOE, MIXED],
    ids=["qwen3", "llama", "qwen2", "qwen3_moe", "qwen3_moe with a dense layer"],
)
def test_fused_decoding_is_as_exact_as_the_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(CUDA).eval()
    requests = [Request(tuple(range(3, 4 + n)), seed) for seed, n in enumerate((1, 30, 9, 64, 9))]
    fused, plain = FixedDecoder(model, CUDA), FixedDecoder(model, CUDA)
    plain._fuses = False
    for _ in range(2):
        with torch.no_grad():
            errors = [
                error_of(model, requests, decoder(requests, Sampling(100), 0)) for decoder in (fused, plain)
            ]
            for parameter in model.parameters():  # graphs go on with what is written where they read
                parameter.mul_(0.9)
        assert fused._fuses is True
        assert errors[0] < 1.2 * errors[1] + 1e-4


class _Wrong:
    """A step that computes something else."""

    def __init__(self, model: Any, rows: int, capacity: int):
        self._step = ModelStep(model, rows, capacity, CUDA)

    def fill(self, started: Prefilled) -> None:
        self._step.fill(started)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._step(ids, positions).roll(1, -1)


class _Failing(_Wrong):
    """A step whose kernels do not compile."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(("step", "reason"), [(_Wrong, "differ"), (_Failing, "no such instruction")])
def test_kernels_that_are_wrong_are_not_used(monkeypatch, caplog, step, reason):
    import shardproof.rollout.static as static

    monkeypatch.setattr(static, "FusedStep", step)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DENSE, dtype=torch.bfloat16).to(CUDA).eval()
    decoder = FixedDecoder(model, CUDA)
    with torch.no_grad():
        assert len(decoder([Request((5, 6, 7), 0)], Sampling(4), 0)[0].tokens) == 4
    assert decoder._fuses is False
    assert reason in caplog.text


def test_a_step_for_which_the_host_waits_is_not_captured(caplog):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MOE, dtype=torch.float32, experts_implementation="eager").to(
        CUDA
    )
    decoder = FixedDecoder(model.eval(), CUDA)
    requests, sampling = [Request((5, 6, 7), 0), Request((8, 9), 1)], Sampling(9)
    with torch.no_grad():
        found = decoder(requests, sampling, 0)
        expected = decode(
            partial(last_logits, model), requests, sampling, config=model.config, device=CUDA, version=0
        )
    assert "host waits" in caplog.text
    assert torch.cuda.get_sync_debug_mode() == 0
    assert [c.tokens for c in found] == [c.tokens for c in expected]
