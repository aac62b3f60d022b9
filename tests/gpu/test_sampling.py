"""Settings of sampling on CUDA: drawn from what is left of the model's distribution, in few graphs, cut at stop strings."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import GIB
from shardproof.rollout.paged.cache import CacheShape
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.shaping import Kind, Shaping, sorted_threshold
from shardproof.rollout.stop_strings import StopStrings
from shardproof.rollout.trajectory import Trajectory
from tests.gpu.test_decoding import CUDA, DENSE, make_model, plainly, requests_of

pytestmark = pytest.mark.gpu


class Numbers:
    """A tokenizer that writes each token as its number, so that stop strings go across tokens."""

    def decode(self, tokens, **how):
        return "".join(f"{token}." for token in tokens)


PLAIN = Sampling(60, stop_ids=(5, 6))
OWN = [
    None,
    replace(PLAIN, top_k=20),
    replace(PLAIN, top_p=0.8, min_p=0.001),
    replace(PLAIN, top_k=200, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, min_new_tokens=10),
    replace(PLAIN, stop=StopStrings(["1.6", "7.2", ".9"], Numbers()), stop_ids=(5, 6, 700)),
]


def mixed(num: int, shift: int = 0) -> list[Request]:
    return [replace(each, sampling=OWN[(row + shift) % 5]) for row, each in enumerate(requests_of(num))]


def test_rows_of_all_settings_draw_what_they_draw_in_a_growing_cache(caplog):
    """In float32, token by token: also where rows are put back, and with stop strings found a look late."""
    model = make_model(DENSE, torch.float32)
    requests = mixed(60)
    expected = plainly(model, requests, PLAIN)
    assert any(each.stop_string for each in expected)
    block = CacheShape.of(model.config).block_bytes(model.dtype) / GIB
    for rows, gib in ((64, None), (7, None), (32, 6 * block)):
        decoder = PagedDecoder(model, CUDA, most_rows=rows, kv_cache_gib=gib)
        for _ in range(2):
            found = decoder(requests, PLAIN, 0)
            assert [t.tokens for t in found] == [t.tokens for t in expected]
            assert [t.stop_string for t in found] == [t.stop_string for t in expected]
    assert "without" not in caplog.text


@torch.no_grad()
def errors_of(model, requests: list[Request], found: list[Trajectory]) -> torch.Tensor:
    """How far log-probs are from those of the model's own forward over what was drawn, with the settings of each row."""
    errors = []
    for request, answer in zip(requests, found, strict=True):
        sampling, said = request.settings(PLAIN), answer.sampled[-1]
        ids = torch.tensor([answer.tokens], device=CUDA)
        logits = model(ids).logits[0, len(request.tokens) - 1 : -1].float().cpu()
        kind = Kind.of([sampling])
        for step, (token, logprob) in enumerate(zip(said.tokens, said.logprobs, strict=True)):
            scores = logits[step : step + 1]
            if kind is not None:
                shaping = Shaping(1, scores.shape[1], len(sampling.stop_ids), True, scores.device)
                shaping.begin([0], [sampling], [request.tokens], [said.tokens[:step]])
                at = torch.zeros(1, dtype=torch.int64)
                scores = shaping.apply(scores, at, at + step, sampling.temperature, kind)
            errors.append(float(torch.log_softmax(scores / sampling.temperature, -1)[0, token]) - logprob)
    return torch.tensor(errors)


def test_fused_steps_say_how_likely_what_they_drew_was(caplog):
    model, requests = make_model(DENSE), mixed(15)
    decoder = PagedDecoder(model, CUDA, most_rows=16)
    found = decoder(requests, PLAIN, 0)
    assert decoder.ways.fused and decoder.ways.draws and decoder.ways.ranks and "without" not in caplog.text
    errors = errors_of(model, requests, found)
    # 16 bits may put a token at the border on the other side of it: then it has no log-prob there.
    assert float(errors.isfinite().float().mean()) > 0.98
    assert float(errors[errors.isfinite()].abs().median()) < 0.02


def test_other_settings_need_no_other_graphs(caplog):
    model = make_model(DENSE)
    decoder = PagedDecoder(model, CUDA, most_rows=32)
    decoder(mixed(30), PLAIN, 0)
    with caplog.at_level(logging.INFO):
        for shift in range(1, 4):
            decoder(mixed(30, shift), replace(PLAIN, top_k=10 * shift, presence_penalty=0.1 * shift), 0)
    assert "preparing the decoding step" not in caplog.text


@pytest.mark.parametrize("rows", [1, 33, 256])
def test_thresholds_of_a_large_vocabulary(rows):
    from shardproof.rollout.paged.truncation_kernels import threshold

    torch.manual_seed(0)
    scores = (2 * torch.randn(rows, 151_936, device=CUDA)).bfloat16().float()
    at = torch.arange(rows, device=CUDA)
    top_k = torch.tensor([50, 2**30, 1000, 2**30], device=CUDA)[at % 4]
    top_p = torch.tensor([0.9, 0.95, 2.0, 2.0], device=CUDA)[at % 4]
    found, wanted = (each(scores, top_k, top_p, 0.7) for each in (threshold, sorted_threshold))
    kept = [
        torch.softmax(scores / 0.7, -1).masked_fill(scores < lowest, 0.0).sum(-1)
        for lowest in (found, wanted)
    ]
    assert torch.allclose(kept[0], kept[1], atol=1e-3)
    exact = at % 4 == 2
    assert torch.equal(found[exact], wanted[exact]) and bool((found[at % 4 == 3] == -torch.inf).all())


def test_a_growing_cache_on_cuda_is_shaped_too():
    """Where a model has no paged cache: the same code, on the device."""
    model, requests = make_model(DENSE, torch.float32), mixed(10)
    on_gpu = plainly(model, requests, PLAIN)
    model = model.cpu()
    forward = partial(last_logits, model)
    with torch.no_grad():
        on_cpu = decode(forward, requests, PLAIN, config=model.config, device=torch.device("cpu"), version=0)
    same = [one.tokens == other.tokens for one, other in zip(on_gpu, on_cpu, strict=True)]
    assert sum(same) >= 8  # rounding may decide a draw
