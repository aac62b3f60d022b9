"""Decoding with a paged cache draws what decoding in a growing cache draws, whatever is decoded at the same time."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.errors import ShardproofError
from shardproof.rollout.decode import decode, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import GIB
from shardproof.rollout.paged.cache import CacheShape
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.paged.memory import Memory, Needs
from shardproof.rollout.paged.model_step import why_not_paged
from shardproof.rollout.trajectory import Trajectory
from tests.models import tiny_config

CPU = torch.device("cpu")
PROMPTS = [(5, 6, 7), (9,), (5, 6, 7), tuple(range(20, 97)), (5, 6, 7), tuple(range(1, 65)), (8, 3)]


def make_model(family: str, **overrides: object):
    torch.manual_seed(0)
    config = tiny_config(family, **overrides)
    # SDPA knows no soft caps and no sinks.
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_tied")


def ask(prompts, first_seed=0, limits=None):
    return [
        Request(Trajectory.of_prompt(p), first_seed + row, max_new_tokens=limits[row] if limits else None)
        for row, p in enumerate(prompts)
    ]


def grown(model, requests, sampling, **others):
    with torch.no_grad():
        return decode(
            partial(last_logits, model),
            requests,
            sampling,
            config=model.config,
            device=CPU,
            version=3,
            **others,
        )


def gib_of(model, blocks: int) -> float:
    """Just enough for that many blocks, and the one that is never given out."""
    return (blocks + 1.5) * CacheShape.of(model.config).block_bytes(model.dtype) / GIB


def assert_same(found, wanted):
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert [(c.finished, c.version) for c in found] == [(c.finished, c.version) for c in wanted]
    for one, other in zip(found, wanted, strict=True):
        said, expected = (torch.tensor(each.sampled[-1].logprobs) for each in (one, other))
        assert torch.allclose(said, expected, atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(20),
        Sampling(20, temperature=0.0),
        Sampling(20, temperature=1.3, top_p=0.8),
        Sampling(90, stop_ids=tuple(range(0, 64, 5))),
        Sampling(1),
        Sampling(17, stop_ids=tuple(range(101))),
    ],
    ids=["plain", "greedy", "nucleus", "stops", "one token", "stops at once"],
)
def test_the_same_tokens_and_log_probs(model, sampling):
    requests = ask(PROMPTS)
    decoder = PagedDecoder(model, CPU, most_rows=2 if sampling.stop_ids else 64)
    assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "mixtral",
        "gemma3_text",
        "mistral",
        "gpt_oss",
        "gemma2",
        "olmo2",
        "cohere",
        "glm4_moe",
    ],
)
def test_families(family):
    model = make_model(family)
    assert why_not_paged(model) is None
    requests, sampling = ask(PROMPTS[:5]), Sampling(20, stop_ids=(3, 4))
    decoder = PagedDecoder(model, CPU, most_rows=4)
    assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))


def many(num: int) -> list[Request]:
    prompts = [
        tuple((7 * row // 3 + 3 * at) % 101 for at in range(1 + 11 * (row // 3 % 7))) for row in range(num)
    ]
    return ask(prompts, limits=[1 + (37 * row) % 100 for row in range(num)])


@pytest.mark.parametrize("blocks", [3, 30])
def test_rows_that_find_no_room_are_put_back_and_go_on(model, blocks):
    requests, sampling = many(16), Sampling(100, stop_ids=(1, 2))
    decoder = PagedDecoder(model, CPU, most_rows=8, kv_cache_gib=gib_of(model, blocks))
    assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))
    assert bool(decoder.stats["put_back"]) == (blocks == 3)


def test_a_prompt_is_read_once_for_all_that_share_it(model):
    requests = ask([tuple(range(1, 71))] * 6 + [(5, 6)] * 6)
    decoder = PagedDecoder(model, CPU, most_rows=4)
    assert_same(decoder(requests, Sampling(20), 3), grown(model, requests, Sampling(20)))
    assert decoder.stats["tokens_read"] == 72


def test_memory_is_used_again_and_leaves_nothing_behind(model):
    """Other batches, after weights have changed; then the first again. Larger ones make it grow."""
    decoder = PagedDecoder(model, CPU, most_rows=8)
    batches = [
        (ask(PROMPTS), Sampling(12)),
        (ask([prompt[::-1] for prompt in PROMPTS], 7), Sampling(12)),
        (many(20), Sampling(30, stop_ids=(1, 2, 3))),
        (ask(PROMPTS[:1]), Sampling(5)),
        (ask(PROMPTS), Sampling(12)),
    ]
    for requests, sampling in batches:
        assert_same(decoder(requests, sampling, 3), grown(model, requests, sampling))
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.01)
    decoder.release()
    assert_same(decoder(*batches[0], 3), grown(model, *batches[0]))


def test_a_request_that_never_fits_is_refused_by_name(model):
    decoder = PagedDecoder(model, CPU, kv_cache_gib=gib_of(model, 2))
    with pytest.raises(ShardproofError, match=r"have 177 tokens.*room for 128(.|\n)*rollout\.kv_cache_gib"):
        decoder(ask(PROMPTS), Sampling(100), 3)
    assert decoder([], Sampling(4), 3) == []


def test_the_size_that_a_refusal_names_is_enough(model):
    for longest in range(64, 64 * 20, 64):
        needs = Needs(rows=1, longest=longest, most_new=1, num_stops=0, blocks=1, num_tokens=1)
        with pytest.raises(ShardproofError) as refused:
            Memory(model, CPU, most_rows=1, kv_cache_gib=1e-9).begin(needs)
        (said,) = re.findall(r"rollout\.kv_cache_gib to at least (\S+),", str(refused.value))
        Memory(model, CPU, most_rows=1, kv_cache_gib=float(said)).begin(needs)
