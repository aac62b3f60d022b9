"""Steps of rows with settings of their own: few graphs for all of them, and a kernel that is used where it is right."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shardproof.rollout.engine import Sampling
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.shaping import sorted_threshold
from tests.rollout.paged.test_decoder import CPU, assert_same, grown
from tests.rollout.paged.test_steps import capturing, decoder_with, many, model

__all__ = ["capturing", "model"]  # fixtures

PLAIN = Sampling(9, stop_ids=(3,))
OWN = [
    None,
    replace(PLAIN, top_k=7),
    replace(PLAIN, top_p=0.6, min_p=0.01),
    replace(PLAIN, top_k=30, top_p=0.9, repetition_penalty=1.2, min_new_tokens=4, stop_ids=(3, 9, 20)),
]


def mixed(shift: int) -> list:
    return [replace(each, sampling=OWN[(row + shift) % 4]) for row, each in enumerate(many(6))]


def test_one_graph_serves_rows_of_all_settings(model, monkeypatch, capturing):
    decoder = decoder_with(model, monkeypatch, capturing)
    counts = []
    for requests, sampling in (
        (many(6), PLAIN),
        (mixed(0), PLAIN),
        (mixed(1), PLAIN),
        (mixed(3), replace(PLAIN, top_k=3, presence_penalty=0.5)),
        (many(6), PLAIN),
        (many(6), replace(PLAIN, top_p=0.7)),
        (many(6), replace(PLAIN, top_k=2)),
    ):
        assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))
        counts.append(capturing.captured)
    # Memory for what penalties need is made once, and graphs are captured anew over it.
    assert counts == [1, 2, 2, 2, 3, 4, 4]
    assert decoder.ways.fused and decoder.ways.graphs


def threshold_with(fault, calls):
    def changed(scores, top_k, top_p, temperature):
        if fault == "fails":
            raise RuntimeError("no such instruction")
        calls.append(len(scores))
        found = sorted_threshold(scores, top_k, top_p, temperature)
        return torch.full_like(found, -torch.inf) if fault == "differs" else found

    return changed


@pytest.mark.parametrize(
    ("fault", "said"), [(None, None), ("differs", "keep other tokens"), ("fails", "no such instruction")]
)
def test_a_kernel_that_finds_what_is_kept_is_used_if_it_is_right(model, monkeypatch, caplog, fault, said):
    calls: list[int] = []
    kernels = SimpleNamespace(threshold=threshold_with(fault, calls))
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.truncation_kernels", kernels)
    decoder = PagedDecoder(model, CPU)
    decoder.ways.ranks = True
    for requests, sampling in ((many(6), PLAIN), (mixed(0), PLAIN), (many(6), replace(PLAIN, top_p=0.5))):
        assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))
    assert decoder.ways.ranks == (fault is None) == (len(calls) > 2)
    assert said is None or said in caplog.text


def test_requests_that_share_more_stop_ids_than_the_call_has(model):
    own = replace(PLAIN, stop_ids=tuple(range(0, 100, 2)), min_new_tokens=2)
    requests = [replace(each, sampling=own) for each in many(4)]
    decoder = PagedDecoder(model, CPU)
    assert_same(decoder(requests, PLAIN, 3), grown(model, requests, PLAIN))
