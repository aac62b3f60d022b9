"""The decoding step's matmuls on a GPU: kernels against float64, and an engine with 8-bit weights against plain decoding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.fp8 import Float8Weights
from shardproof.rollout.joined import join_weights
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.trajectory import Trajectory
from tests.models import tiny_config
from tests.rollout.matmul_cases import problems

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "initializer_range": 0.05,
}


def test_kernels_equal_float64():
    found = problems(torch.bfloat16, torch.device("cuda"), 0.01)
    assert not {name: problem for name, problem in found.items() if problem is not None}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 30, 90])
def test_kernels_that_read_float8_decode_what_the_rounded_model_decodes(family, rows):
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = AutoModelForCausalLM.from_config(tiny_config(family, **SIZES), dtype=torch.bfloat16)
    model = model.to(device).eval().requires_grad_(False)
    join_weights(model)
    Float8Weights(model, copies=True).round()
    decoder = PagedDecoder(model, device, most_rows=96)
    prompts = [tuple((7 * row + 3 * at) % 100 for at in range(5 + row % 40)) for row in range(rows)]
    requests = [Request(Trajectory.of_prompt(prompt), row) for row, prompt in enumerate(prompts)]
    found = decoder(requests, Sampling(8), 0)
    with torch.no_grad():
        truth = decode(
            partial(last_logits, model), requests, Sampling(8), config=model.config, device=device, version=0
        )
    assert decoder.ways.fused
    first = [abs(a.sampled[0].logprobs[1] - b.sampled[0].logprobs[1]) for a, b in zip(found, truth, strict=True)
             if a.sampled[0].tokens[:2] == b.sampled[0].tokens[:2]]  # fmt: skip
    assert len(first) > rows // 2 and sum(first) / len(first) < 0.05
