"""An exact model decodes with a paged cache to the bits of a growing cache, and of the trainer's packed sequences."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shardproof.model import hf_private
from shardproof.model.exact import make_exact, token_logprobs
from shardproof.model.exact_attention import PACKED
from shardproof.model.packing import Packing
from shardproof.rollout.decode import decode, exact_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.trajectory import Trajectory
from tests.models import make_model

CPU = torch.device("cpu")
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 83)), (5, 6, 7)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_both_caches_and_the_trainer_give_the_same_bits(family):
    model = make_model(family, dtype=torch.bfloat16)
    make_exact(model, CPU)
    requests = [Request(Trajectory.of_prompt(prompt), seed) for seed, prompt in enumerate(PROMPTS)]
    sampling = Sampling(5, 0.8, exact=True)
    decoder = PagedDecoder(model, CPU, most_rows=3)
    found = decoder(requests, sampling, version=0)
    with torch.no_grad():
        forward = partial(exact_logits, model)
        grown = decode(forward, requests, sampling, config=model.config, device=CPU, version=0)
    assert found == grown
    for trajectory in found:
        ids, (drawn,) = torch.tensor(trajectory.tokens), trajectory.sampled
        packing, positions = Packing([len(ids)], CPU), torch.arange(len(ids))
        with torch.no_grad(), hf_private.attention_implementation(model, PACKED):
            given = {"input_ids": ids[None], "position_ids": positions[None], "packing": packing}
            logits = model(**given, use_cache=False).logits[0, :-1]
        logps, _ = token_logprobs(logits, ids[1:], 0.8)
        assert logps[-len(drawn.tokens) :].tolist() == list(drawn.logprobs)
