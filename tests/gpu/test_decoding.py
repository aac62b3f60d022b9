"""Decoding on CUDA: what is drawn is what the model says, in graphs of all sizes, and kernels that fail are not used."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import GIB
from shardproof.rollout.paged import graphs, steps
from shardproof.rollout.paged.cache import CacheShape
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.trajectory import Trajectory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
_SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "initializer_range": 0.1,
    "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
DENSE = Qwen3Config(**_SHAPE)
MOE = Qwen3MoeConfig(**_SHAPE, **_EXPERTS)
FUSED = {
    "qwen3": DENSE,
    "llama": LlamaConfig(**_SHAPE),
    "qwen2": Qwen2Config(**{**_SHAPE, "num_attention_heads": 4}),
    "qwen3_moe": MOE,
    "qwen3_moe with a dense layer": Qwen3MoeConfig(**_SHAPE, **_EXPERTS, mlp_only_layers=[1]),
}
OTHERS = {
    "mistral": MistralConfig(**_SHAPE, sliding_window=48),
    "gemma3": Gemma3TextConfig(**_SHAPE, sliding_window=48, query_pre_attn_scalar=64, layer_types=_LAYERS),
    "gemma2": Gemma2Config(**_SHAPE, sliding_window=48, query_pre_attn_scalar=64, layer_types=_LAYERS),
    "gpt_oss": GptOssConfig(
        **{**_SHAPE, "tie_word_embeddings": False}, sliding_window=48, layer_types=_LAYERS, num_local_experts=8,
        num_experts_per_tok=2,
    ),
}  # fmt: skip


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(0)
    attention = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(CUDA).eval()


def requests_of(num: int, longest: int = 60) -> list[Request]:
    """Groups of three with one prompt, of lengths that cross blocks; answers of other lengths."""
    prompts = [tuple((7 * row + 3 * at) % 1000 for at in range(3 + 29 * (row % 5))) for row in range(num)]
    return [
        Request(Trajectory.of_prompt(prompts[row // 3]), row, max_new_tokens=1 + 37 * row % longest)
        for row in range(num)
    ]


def complete(decoder: PagedDecoder, num: int, tokens: int = 60) -> list[Trajectory]:
    return decoder(requests_of(num), Sampling(tokens, stop_ids=(5, 6)), 0)


def plainly(model: PreTrainedModel, requests: list[Request], sampling: Sampling) -> list[Trajectory]:
    with torch.no_grad():
        return decode(
            partial(last_logits, model), requests, sampling, config=model.config, device=CUDA, version=0
        )


@torch.no_grad()
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


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_decoding_is_as_exact_as_the_model(name, caplog):
    model = make_model({**FUSED, **OTHERS}[name])
    requests = requests_of(9, 100)
    fast, plain = PagedDecoder(model, CUDA, most_rows=4), PagedDecoder(model, CUDA, most_rows=4)
    plain.ways.fused = plain.ways.attention = plain.ways.draws = plain.ways.graphs = False
    for _ in range(2):
        errors = [error_of(model, requests, each(requests, Sampling(100), 0)) for each in (fast, plain)]
        with torch.no_grad():
            for parameter in model.parameters():  # graphs go on with what is written where they read
                parameter.mul_(0.9)
        assert fast.ways == steps.Ways(name in FUSED, True, True, True, True), caplog.text
        assert errors[0] < 1.2 * errors[1] + 1e-4
    assert "without" not in caplog.text


def test_rows_that_come_go_and_are_put_back_change_nothing_that_is_drawn():
    """In float32, token by token: the model's own forward, in any memory and with any number of rows."""
    model = make_model(DENSE, torch.float32)
    requests, sampling = requests_of(60), Sampling(60, stop_ids=(5, 6))
    expected = plainly(model, requests, sampling)
    block = CacheShape.of(model.config).block_bytes(model.dtype) / GIB
    for rows, gib in ((64, None), (7, None), (32, 6 * block)):
        decoder = PagedDecoder(model, CUDA, most_rows=rows, kv_cache_gib=gib)
        assert [t.tokens for t in decoder(requests, sampling, 0)] == [t.tokens for t in expected]


@pytest.mark.parametrize("rows", [1, 5, 33, 300])
def test_kernels_that_are_right_are_used_with_any_number_of_rows(caplog, rows):
    decoder = PagedDecoder(make_model(DENSE), CUDA, most_rows=300)
    found = complete(decoder, rows)
    assert decoder.ways == steps.Ways(True, True, True, True, True) and "without" not in caplog.text
    for temperature, top_p in ((0.0, 1.0), (1.0, 0.9)):
        decoder(requests_of(rows), Sampling(20, temperature, top_p), 0)
    assert complete(decoder, rows) == found
    decoder.release()
    assert complete(decoder, rows) == found
    assert "without" not in caplog.text


def test_memory_is_given_up():
    model = make_model(DENSE)
    decoder = PagedDecoder(model, CUDA, kv_cache_gib=1.0)
    complete(decoder, 3)
    decoder.release()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    complete(decoder, 40)
    assert torch.cuda.memory_reserved() > before + GIB // 2
    decoder.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**27


def wrong_in_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    project = kernels.project

    def changed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        sums = project(x, *args)
        return sums.roll(1, 1) if len(x) > 16 else sums

    monkeypatch.setattr(kernels, "project", changed)


def wrong_in_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.rollout import kernels

    gate_up = kernels.gate_up

    def changed(x: torch.Tensor, *args: Any) -> torch.Tensor:
        gated = gate_up(x, *args)
        gated[-1] = 0
        return gated

    monkeypatch.setattr(kernels, "gate_up", changed)


def _attending(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    from shardproof.rollout.paged import attention_kernels

    attend = attention_kernels.attend
    monkeypatch.setattr(attention_kernels, "attend", lambda *args: change(attend(*args), args[5]))


def wrong_beyond_the_first_cached_block(monkeypatch: pytest.MonkeyPatch) -> None:
    _attending(monkeypatch, lambda out, positions: torch.where(positions > 64, 0, out))


def wrong_when_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    _attending(monkeypatch, lambda out, _: out * (0 if torch.cuda.is_current_stream_capturing() else 1))


def fails_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while a graph is captured")
        return out

    _attending(monkeypatch, fail)


def breaks_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return out

    _attending(monkeypatch, fail)


def fails_at_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the comparison, when it decodes."""
    capture, replays = graphs.capture, []

    def changed(*args: Any) -> Any:
        replay = capture(*args)
        return replay if replays else partial(fail, replay)

    def fail(replay: Any) -> None:
        replays.append(1)
        if len(replays) == 20:
            raise RuntimeError("this graph cannot be launched")
        replay()

    monkeypatch.setattr(graphs, "capture", changed)


FAULTS = [
    (wrong_in_large_blocks, "differ", 32),
    (wrong_in_the_last_row, "differ", 5),
    (wrong_beyond_the_first_cached_block, "differ", 64),
    (wrong_when_captured, "differ", 5),
    (fails_at_capture, "not while a graph is captured", 5),
    (breaks_the_capture, "failed", 5),
    (fails_at_replay, "this graph cannot be launched", 16),
]


@pytest.mark.parametrize(("fault", "said", "rows"), FAULTS)
def test_kernels_that_are_wrong_or_fail_are_not_used(monkeypatch, caplog, fault, said, rows):
    model = make_model(DENSE)
    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patch:
        fault(patch)
        decoder = PagedDecoder(model, CUDA)
        found = complete(decoder, rows)
        again = complete(decoder, rows)
    assert not decoder.ways.fused and said in caplog.text
    assert torch.cuda.current_stream() == stream
    assert decoder.ways.graphs  # the model as it is written
    plain = PagedDecoder(model, CUDA)
    plain.ways.fused, plain.ways.draws = False, decoder.ways.draws
    assert again == complete(plain, rows)
    # Answers that were there before a graph failed are the fused kernels'.
    assert fault is fails_at_replay or found == again


def test_graphs_that_fail_are_given_up(monkeypatch, caplog):
    def fail(*args: Any) -> None:
        raise RuntimeError("no graphs today")

    model = make_model(DENSE)
    plain = PagedDecoder(model, CUDA)
    plain.ways.fused = plain.ways.attention = plain.ways.graphs = False
    expected = complete(plain, 5)
    monkeypatch.setattr(graphs, "capture", fail)
    decoder = PagedDecoder(model, CUDA)
    assert complete(decoder, 5) == expected
    assert not decoder.ways.fused and not decoder.ways.graphs
    assert "without CUDA graphs" in caplog.text


def test_draws_that_are_wrong_are_not_used(monkeypatch, caplog):
    from shardproof.rollout.paged import draw_kernels

    record = draw_kernels.record
    monkeypatch.setattr(draw_kernels, "record", lambda slots, t, logits: record(slots, t + 0.3, logits))
    model = make_model(DENSE)
    decoder, plain = PagedDecoder(model, CUDA), PagedDecoder(model, CUDA)
    plain.ways.draws = False
    assert complete(decoder, 20) == complete(plain, 20)
    assert decoder.ways.fused and not decoder.ways.draws
    assert "without kernels that draw" in caplog.text


def test_a_step_for_which_the_host_waits_is_not_captured(caplog):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MOE, dtype=torch.bfloat16, experts_implementation="eager")
    decoder = PagedDecoder(model.to(CUDA).eval(), CUDA)
    decoder.ways.fused = False
    complete(decoder, 5)
    assert "synchronises with the host" in caplog.text
    assert decoder.ways.attention and not decoder.ways.graphs
    assert torch.cuda.get_sync_debug_mode() == 0
