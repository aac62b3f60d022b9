"""Decoding in fixed memory draws what decoding in a growing cache draws."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.rollout import static
from shardproof.rollout.decode import decode
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.static import FixedDecoder, ModelStep, fits
from tests.models import make_checkpoint

CPU = torch.device("cpu")
PROMPTS = [(5, 6, 7), (9,), (5, 6, 7), tuple(range(20, 37))]


def model_of(family, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(family), family)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of("qwen3_tied", tmp_path_factory)


def grown(model, requests, sampling):
    def forward(ids, mask, positions, cache):
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[:, -1]

    with torch.no_grad():
        return decode(forward, requests, sampling, config=model.config, device=CPU, version=3)


def fixed(decoder, requests, sampling):
    with torch.no_grad():
        return decoder(requests, sampling, 3)


def assert_same(found, wanted):
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert [(c.finished, c.version) for c in found] == [(c.finished, c.version) for c in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(40),
        Sampling(40, temperature=0.0),
        Sampling(40, temperature=1.3, top_p=0.8),
        Sampling(40, stop_ids=tuple(range(0, 64, 5))),
        Sampling(1),
        Sampling(17, stop_ids=tuple(range(64))),
    ],
    ids=["plain", "greedy", "nucleus", "stops", "one token", "stops at once"],
)
def test_the_same_tokens_and_log_probs(model, sampling):
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    decoder = FixedDecoder(model, CPU)
    assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_mixtures_of_experts(family, tmp_path_factory):
    model = model_of(family, tmp_path_factory)
    assert fits(model)
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    assert_same(fixed(FixedDecoder(model, CPU), requests, Sampling(12)), grown(model, requests, Sampling(12)))


def test_memory_is_used_again_and_leaves_nothing_behind(model):
    """Another batch of the same size, after weights have changed; then the first again."""
    decoder = FixedDecoder(model, CPU)
    sampling = Sampling(12)
    first = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    second = [Request(prompt[::-1], seed + 7) for seed, prompt in enumerate(PROMPTS)]
    for requests in (first, second, first):
        assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.01)
    assert len(decoder._loops) == 1


class OtherStep(ModelStep):
    """A fused step that can be told to compute something else, or to fail."""

    fault = None

    def __init__(self, model, rows, capacity):
        super().__init__(model, rows, capacity, CPU)

    def __call__(self, ids, positions):
        if self.fault == "fails":
            raise RuntimeError("no such instruction")
        logits = super().__call__(ids, positions)
        return logits.roll(1, -1) if self.fault == "differs" else logits


@pytest.mark.parametrize(
    ("fault", "used", "said"),
    [(None, True, ""), ("differs", False, "differ by"), ("fails", False, "no such instruction")],
)
def test_a_fused_step_is_used_if_it_computes_what_the_model_does(
    model, monkeypatch, caplog, fault, used, said
):
    monkeypatch.setattr(static, "FusedStep", type("Step", (OtherStep,), {"fault": fault}))
    decoder = FixedDecoder(model, CPU)
    decoder._fuses = None  # it could, and has not been compared
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    assert_same(fixed(decoder, requests, Sampling(9)), grown(model, requests, Sampling(9)))
    assert decoder._fuses is used
    assert said in caplog.text


@pytest.mark.parametrize(
    ("fault", "used", "said"),
    [(None, True, ""), ("differs", False, "draw other tokens"), ("fails", False, "no such instruction")],
)
def test_kernels_that_draw_are_used_if_they_draw_what_was_asked_for(
    model, monkeypatch, caplog, fault, used, said
):
    def record(progress, temperature, logits):
        if fault == "fails":
            raise RuntimeError("no such instruction")
        calls.append(temperature)
        progress.record(logits.roll(1, -1) if fault == "differs" else logits)

    calls = []
    monkeypatch.setattr(static, "fused_record", record)
    decoder = FixedDecoder(model, CPU)
    decoder._draws = None
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    for sampling in (
        Sampling(9),
        Sampling(9, temperature=0.7),
        Sampling(9, temperature=0.0),
        Sampling(9, top_p=0.5),
    ):
        assert_same(fixed(decoder, requests, sampling), grown(model, requests, sampling))
    assert decoder._draws is used
    assert said in caplog.text
    # Once to compare; then all draws of the two that they are for.
    assert calls == {None: [1.0] * 10 + [0.7] * 9, "differs": [1.0], "fails": []}[fault]


def test_no_requests(model):
    assert fixed(FixedDecoder(model, CPU), [], Sampling(4)) == []


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("llama", True), ("qwen3_tied", True), ("qwen3_moe", True), ("gpt_oss", False), ("gemma3_text", False)],
)
def test_which_models_fit(family, wanted, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp(family), family)
    assert fits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) == wanted
