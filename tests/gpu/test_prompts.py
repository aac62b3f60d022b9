"""Prompts on a CUDA device: every way of reading them says what the model in float32 says, as well as the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.rollout.paged.blocks import blocks_for
from shardproof.rollout.paged.cache import CacheShape, PagedCache
from shardproof.rollout.paged.reading import PromptReader, Reading
from tests.models import tiny_config

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    "max_position_embeddings": 4096,
}
LENGTHS = (1, 7, 64, 65, 130, 500, 1500)


def make_model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    extra = {} if family == "qwen2" else {"head_dim": 64}
    if family == "qwen3_moe":
        extra["moe_intermediate_size"] = 128
    config = tiny_config(family, **SHAPE, **extra)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval().to(CUDA)


def distance(truth: torch.Tensor, found: torch.Tensor) -> float:
    truth, found = torch.log_softmax(truth.float(), -1), torch.log_softmax(found.float(), -1)
    return float((truth.exp() * (found - truth).abs()).sum())


@pytest.mark.parametrize(
    ("family", "is_fused"),
    [
        ("qwen3", True),
        ("qwen2", True),
        ("qwen3_moe", True),
        ("mistral", False),
        ("gemma2", False),
        ("gpt_oss", False),
    ],
)
def test_prompts_are_read_as_well_as_by_the_model_itself(family: str, is_fused: bool) -> None:
    model = make_model(family, torch.bfloat16)
    exact = make_model(family, torch.float32)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    at, readings = 1, []
    for length in LENGTHS:
        tokens = [(31 * i * i + 17 * i + length) % 101 for i in range(length)]
        readings.append(Reading(tokens, 0, range(at, at + blocks_for(length))))
        at += blocks_for(length)
    reader = PromptReader(model)
    reads = []
    for chunk_tokens in (16384, 333):
        cache = PagedCache(CacheShape.of(model.config), at, torch.bfloat16, CUDA)
        reads.append(reader.read(readings, cache, chunk_tokens).logits)
    assert (reader.way in ("fused kernels", "attention for Hopper GPUs")) == is_fused, reader.way
    assert reader.way != "plain torch"
    with torch.no_grad():
        for number, reading in enumerate(readings):
            ids = torch.tensor([list(reading.tokens)], device=CUDA)
            truth, own = exact(ids).logits[0, -1], model(ids).logits[0, -1]
            for logits in reads:
                assert distance(truth, logits[number]) < 2 * distance(truth, own) + 0.05
