"""What is compiled or has kernels of its own on CUDA computes what the plain code computes, and is compiled once."""

from __future__ import annotations

from collections.abc import Callable
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
from shardproof.rollout import graphs
from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.fused import FusedStep
from shardproof.rollout.progress import Progress
from shardproof.rollout.proof import CAPACITY
from shardproof.rollout.static import FixedDecoder
from shardproof.rollout.trajectory import Trajectory
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


def error_of(model: PreTrainedModel, requests: list[Request], drawn: list[Trajectory]) -> float:
    """How far the log-probs of what was drawn are from those of the same weights in float32.

    The median: where 16 bits choose another expert, a few are far off.
    """
    precise = deepcopy(model).float()
    distances = []
    for request, completion in zip(requests, drawn, strict=True):
        ids = torch.tensor([completion.tokens], device=CUDA)
        scores = torch.log_softmax(precise(ids).logits[0, len(request.tokens) - 1 : -1], -1)
        exact = scores.gather(1, ids[0, len(request.tokens) :, None]).squeeze(1)
        distances.append((exact.cpu() - torch.tensor(completion.sampled[-1].logprobs)).abs())
    return float(torch.cat(distances).median())


@pytest.mark.parametrize(
    "config",
    [DENSE, LlamaConfig(**_SHAPE), Qwen2Config(**{**_SHAPE, "num_attention_heads": 4}), MOE, MIXED],
    ids=["qwen3", "llama", "qwen2", "qwen3_moe", "qwen3_moe with a dense layer"],
)
def test_fused_decoding_is_as_exact_as_the_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(CUDA).eval()
    requests = [
        Request(Trajectory.of_prompt(tuple(range(3, 4 + n))), seed)
        for seed, n in enumerate((1, 30, 9, 64, 9))
    ]
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


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(CUDA).eval()


def requests_of(rows: int) -> list[Request]:
    prompts = [tuple((7 * row + 3 * at) % 1000 for at in range(3 + row % 9)) for row in range(rows)]
    return [Request(Trajectory.of_prompt(prompt), row) for row, prompt in enumerate(prompts)]


def complete(decoder: FixedDecoder, rows: int, tokens: int = 20) -> list[Trajectory]:
    with torch.no_grad():
        return decoder(requests_of(rows), Sampling(tokens, stop_ids=(5, 6)), 0)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("rows", [1, 5, 16, 32, 33, 64, 70])
def test_kernels_that_are_right_are_used_with_any_number_of_rows(caplog, rows, config):
    decoder = FixedDecoder(make_model(config), CUDA)
    complete(decoder, rows)
    assert decoder._fuses and decoder._draws and decoder._records
    assert "kernels" not in caplog.text
    assert decoder._proved == {("fused kernels", rows), ("kernels that draw", rows, 1.0, 2)}


def wrong_in_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    project = kernels.project

    def changed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        sums = project(x, *args)
        return sums.roll(1, 1) if kernels.rows_at_a_time(len(x)) > 16 else sums

    monkeypatch.setattr(kernels, "project", changed)


def wrong_in_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    gate_up = kernels.gate_up

    def changed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        gated = gate_up(x, *args)
        gated[-1] = 0
        return gated

    monkeypatch.setattr(kernels, "gate_up", changed)


def wrong_beyond_the_first_cached_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    attend = kernels.attend

    def changed(*args: Any) -> torch.Tensor:
        positions = args[4]
        return torch.where(positions > kernels._BLOCK_T, 0, attend(*args))

    monkeypatch.setattr(kernels, "attend", changed)


def wrong_when_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    attend = kernels.attend

    def changed(*args: Any) -> torch.Tensor:
        return attend(*args) * (0 if torch.cuda.is_current_stream_capturing() else 1)

    monkeypatch.setattr(kernels, "attend", changed)


def fails_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    monkeypatch.setattr(kernels, "_BLOCK_T", 48)  # Triton wants a power of two


def _while_capturing(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], object]) -> None:
    from shardproof.rollout import kernels

    attend = kernels.attend

    def changed(*args: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            fail()
        return attend(*args)

    monkeypatch.setattr(kernels, "attend", changed)


def fails_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("not while a graph is captured")

    _while_capturing(monkeypatch, fail)


def breaks_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    _while_capturing(monkeypatch, torch.cuda.synchronize)


def fails_at_capture_of_a_longer_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing goes well; what is decoded with does not."""
    import shardproof.rollout.static as static

    class Step(FusedStep):
        def __init__(self, model: Any, rows: int, capacity: int):
            super().__init__(model, rows, capacity)
            self._fails = capacity != CAPACITY

        def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if self._fails and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("not while a graph is captured")
            return super().__call__(ids, positions)

    monkeypatch.setattr(static, "FusedStep", Step)


def fails_at_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first graph that is replayed to decode, which runs our kernels."""
    capture, made = graphs.capture, []

    def changed(step: Any, *args: Any) -> Any:
        made.append(capture(step, *args))
        return fail if len(made) == 3 else made[-1]  # after those of the two comparisons

    def fail() -> None:
        raise RuntimeError("this graph cannot be launched")

    monkeypatch.setattr(graphs, "capture", changed)


FAULTS = [
    (wrong_in_large_blocks, "differ", (32, 64)),
    (wrong_in_the_last_row, "differ", (5, 64)),
    (wrong_beyond_the_first_cached_block, "differ", (5, 64)),
    (wrong_when_captured, "differ", (5, 64)),
    (fails_to_compile, "failed", (1, 5)),
    (fails_at_capture, "not while a graph is captured", (5,)),
    (breaks_the_capture, "failed", (5,)),
    (fails_at_capture_of_a_longer_cache, "not while a graph is captured", (5,)),
    (fails_at_replay, "this graph cannot be launched", (5,)),
]


@pytest.mark.parametrize(
    ("fault", "said", "rows"), [(fault, said, rows) for fault, said, all_rows in FAULTS for rows in all_rows]
)
def test_kernels_that_are_wrong_or_fail_are_not_used(monkeypatch, caplog, fault, said, rows):
    model = make_model(DENSE)
    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patch:
        fault(patch)
        decoder = FixedDecoder(model, CUDA)
        found = complete(decoder, rows)
        again = complete(decoder, rows)
    assert not decoder._fuses
    assert said in caplog.text
    assert torch.cuda.current_stream() == stream
    plain = FixedDecoder(model, CUDA)
    plain._fuses, plain._draws, plain._records = False, decoder._draws, decoder._records
    # The model as it is written, in graphs.
    assert decoder._records
    assert found == again == complete(plain, rows)


def test_kernels_that_are_wrong_in_large_blocks_are_used_in_small_ones(monkeypatch, caplog):
    wrong_in_large_blocks(monkeypatch)
    decoder = FixedDecoder(make_model(DENSE), CUDA)
    complete(decoder, 16)
    assert decoder._fuses
    complete(decoder, 17)
    assert not decoder._fuses


def test_graphs_that_fail_are_given_up(monkeypatch, caplog):
    def fail(*args: Any) -> None:
        raise RuntimeError("no graphs today")

    model = make_model(DENSE)
    plain = FixedDecoder(model, CUDA)
    plain._fuses = plain._draws = plain._records = False
    expected = complete(plain, 5)
    monkeypatch.setattr(graphs, "capture", fail)
    decoder = FixedDecoder(model, CUDA)
    assert complete(decoder, 5) == expected
    assert not decoder._fuses and not decoder._records
    assert "without CUDA graphs" in caplog.text


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rows", [2, 64])
def test_draws_that_are_wrong_are_not_used(monkeypatch, caplog, rows, temperature):
    from shardproof.rollout import draw_kernels

    record = draw_kernels.record

    def changed(progress: Progress, temperature: float, logits: torch.Tensor) -> None:
        record(progress, temperature + 0.3, logits)

    monkeypatch.setattr(draw_kernels, "record", changed)
    model = make_model(DENSE)
    decoder, plain = FixedDecoder(model, CUDA), FixedDecoder(model, CUDA)
    plain._draws = False
    sampling = Sampling(9, temperature=temperature)
    with torch.no_grad():
        found, expected = (each(requests_of(rows), sampling, 0) for each in (decoder, plain))
    assert decoder._fuses and not decoder._draws
    assert found == expected
    assert "without kernels that draw" in caplog.text


def test_a_step_for_which_the_host_waits_is_not_captured(caplog):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MOE, dtype=torch.float32, experts_implementation="eager").to(
        CUDA
    )
    decoder = FixedDecoder(model.eval(), CUDA)
    prompts, sampling = ((5, 6, 7), (8, 9)), Sampling(9)
    requests = [Request(Trajectory.of_prompt(prompt), row) for row, prompt in enumerate(prompts)]
    with torch.no_grad():
        found = decoder(requests, sampling, 0)
        expected = decode(
            partial(last_logits, model), requests, sampling, config=model.config, device=CUDA, version=0
        )
    assert "synchronises with the host" in caplog.text
    assert torch.cuda.get_sync_debug_mode() == 0
    assert [c.tokens for c in found] == [c.tokens for c in expected]
