"""Prompts read into a paged cache, packed and in chunks, against transformers' own forward on each prompt alone."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, DynamicCache

import shardproof.rollout.paged
from shardproof.model.routing import Routers
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.paged import reading, reading_ways
from shardproof.rollout.paged.blocks import BLOCK, blocks_for
from shardproof.rollout.paged.cache import CacheShape, PagedCache
from shardproof.rollout.paged.reading import PromptReader, Reading
from shardproof.rollout.paged.reading_chunks import pack, queries_per_program
from shardproof.rollout.recording import Recorder
from tests.models import tiny_config

CPU = torch.device("cpu")
LENGTHS = (1, 7, 63, 64, 65, 101)


def make_model(family, **overrides):
    torch.manual_seed(0)
    config = tiny_config(family, **overrides)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def make_cache(model, num_blocks=24):
    cache = PagedCache(CacheShape.of(model.config), num_blocks, torch.float32, CPU)
    for kind in (cache.keys, cache.values):
        for layer in kind:
            layer.fill_(float("nan"))  # what nobody wrote must not count
    return cache


def make_prompts(lengths=LENGTHS, vocabulary=101):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def whole_readings(prompts):
    """Each prompt in blocks of its own, in no order."""
    blocks = list(range(1, 24))
    blocks = blocks[::2] + blocks[1::2]
    return [Reading(prompt, 0, [blocks.pop() for _ in range(blocks_for(len(prompt)))]) for prompt in prompts]


@torch.no_grad()
def expected(model, prompts):
    """(logits after each prompt, its keys and values per layer), of each prompt alone."""
    found = []
    for prompt in prompts:
        cache = DynamicCache()  # grows, also where a window is
        logits = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append((logits, [(layer.keys[0], layer.values[0]) for layer in cache.layers]))
    return found


def check(model, readings, read, cache, prompts):
    for number, (logits, layers) in enumerate(expected(model, prompts)):
        torch.testing.assert_close(read.logits[number], logits, atol=2e-5, rtol=1e-4)
        states = cache.states(readings[number].blocks, len(prompts[number]))
        for layer, held in enumerate(layers):
            for mine, theirs in zip(states, held, strict=True):
                torch.testing.assert_close(mine[layer], theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt_oss", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("chunk_tokens", [16384, 50])
def test_prompts_read_in_chunks_are_read_as_alone(family, chunk_tokens):
    # mistral and gpt_oss have windows, gpt_oss sinks, gemma2 soft caps of scores and logits.
    model = make_model(family)
    cache, prompts = make_cache(model), make_prompts()
    readings = whole_readings(prompts)
    read = PromptReader(model, chunk_tokens=chunk_tokens).read(readings, cache)
    assert read.experts is None
    check(model, readings, read, cache, prompts)


def test_a_reading_goes_on_behind_what_is_in_its_blocks():
    model = make_model("gpt_oss")
    cache, prompts = make_cache(model), make_prompts()
    readings = whole_readings(prompts)
    reader = PromptReader(model)
    cuts = [len(prompt) // 3 for prompt in prompts]
    first = [Reading(r.tokens[:cut], 0, r.blocks) for r, cut in zip(readings, cuts, strict=True) if cut]
    reader.read(first, cache)
    rest = [Reading(r.tokens[cut:], cut, r.blocks) for r, cut in zip(readings, cuts, strict=True)]
    check(model, readings, reader.read(rest, cache, 70), cache, prompts)


def test_full_blocks_may_be_shared_and_stay_as_they_are():
    model = make_model("qwen3")
    cache = make_cache(model)
    beginning, *ends = make_prompts((2 * BLOCK, 5, 70))
    reader = PromptReader(model)
    reader.read([Reading(beginning, 0, [9, 4])], cache)
    before = cache.states([9, 4], 2 * BLOCK)
    readings = [Reading(ends[0], 2 * BLOCK, [9, 4, 2]), Reading(ends[1], 2 * BLOCK, [9, 4, 7, 1])]
    read = reader.read(readings, cache)
    check(model, readings, read, cache, [beginning + end for end in ends])
    for mine, theirs in zip(cache.states([9, 4], 2 * BLOCK), before, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chunk_tokens", [16384, 40])
def test_experts_of_read_tokens_come_back(chunk_tokens):
    model = make_model("qwen3_moe")
    routers = Routers(model)
    routers.settle(lambda: model(torch.zeros(1, 2, dtype=torch.int64), use_cache=False))
    recorder = Recorder(routers, ExpertShape(routers.layers, routers.num_experts, routers.num_chosen))
    prompts = make_prompts()
    readings = whole_readings(prompts)
    read = PromptReader(model, recorder, chunk_tokens).read(readings, make_cache(model))
    for prompt, found in zip(prompts, read.experts, strict=True):
        recorder.watch(lambda ids: model(ids, use_cache=False).logits, torch.tensor([prompt]))
        assert torch.equal(found, recorder.last())
        assert found.dtype == recorder.dtype


def test_chunks_are_filled_and_keep_the_order():
    readings = [Reading(list(range(n)), n, [1] * 9) for n in (5, 30, 1, 12)]
    chunks = list(pack(readings, 16))
    assert [[piece.length for piece in chunk] for chunk in chunks] == [[5, 11], [16], [3, 1, 12]]
    assert [[piece.is_last for piece in chunk] for chunk in chunks] == [[True, False], [False], [True] * 3]
    for number, each in enumerate(readings):
        parts = [piece.reading for chunk in chunks for piece in chunk if piece.number == number]
        assert [token for part in parts for token in part.tokens] == list(each.tokens)
        ends = [part.start + len(part.tokens) for part in parts]
        assert [part.start for part in parts] == [each.start, *ends[:-1]]
    with pytest.raises(ValueError, match="at least one token"):
        list(pack([Reading([], 0, [])], 16))


# Plain torch in place of the kernels, which need a GPU (tests/gpu/test_fast_paths.py).


def add_norm(states, new, weight, eps):
    if new is not None:
        states += new
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


def gate(gate, up):
    return gate.copy_(silu(gate) * up)


def rotate_store(states, rotary, norms, cache, chunk):
    width = cache[0].shape[-1]
    query, key, value = (each.view(len(each), -1, width) for each in states)
    if norms is not None:
        query, key = add_norm(query, None, norms.query, norms.eps), add_norm(key, None, norms.key, norms.eps)
    cos, sin = (table[chunk.positions][:, None] for table in rotary)
    query, key = (
        x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin for x in (query, key)
    )
    for held, new in zip(cache, (key, value), strict=True):
        held[chunk.places // BLOCK, :, chunk.places % BLOCK] = new
    return query.flatten(1)


def attend(query, cache, chunk, scaling, *, window=None, softcap=None, sinks=None):
    """Program by program, as the kernel goes."""
    width = cache[0].shape[-1]
    out = torch.full_like(query, float("nan"))
    for sequence, token, first, num in chunk.tiles.tolist():
        assert num <= queries_per_program(width)
        held = [
            each[chunk.tables[sequence]].transpose(0, 1).flatten(1, 2)[:, : first + num] for each in cache
        ]
        new = query[token : token + num].view(num, -1, width).transpose(0, 1)
        part = reading_ways.attend_plainly(new, *held, scaling, window, softcap, sinks)
        out[token : token + num] = part.transpose(0, 1).flatten(1)
    return out


def gate_visits(inner, scores):
    gate, up = inner.chunk(2, -1)
    return silu(gate) * up * scores[:, None]


def add_visits(rows, places):
    return rows[places].sum(1)


@pytest.fixture
def kernels(monkeypatch):
    norms = namedtuple("Norms", "query key eps")
    found = SimpleNamespace(
        **{
            "add_norm": add_norm,
            "gate": gate,
            "rotate_store": rotate_store,
            "attend": attend,
            "Norms": norms,
        },
        **{"gate_visits": gate_visits, "add_visits": add_visits},
    )
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.reading_kernels", found)
    monkeypatch.setattr(shardproof.rollout.paged, "reading_kernels", found, raising=False)
    monkeypatch.setattr(reading_ways, "can_compile", lambda device, dtype: True)
    monkeypatch.setattr(reading, "can_fuse", lambda model, device: model.config.model_type in FUSED)
    return found


FUSED = {"qwen3", "llama", "qwen2", "qwen3_moe"}


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3_moe", "gpt_oss"])
def test_kernels_read_what_the_model_reads(kernels, family, caplog):
    model = make_model(family, hidden_size=64)  # the kernels take heads of 16 and more
    cache, prompts = make_cache(model), make_prompts()
    readings = whole_readings(prompts)
    reader = PromptReader(model, chunk_tokens=90)
    read = reader.read(readings, cache)
    assert reader.way == ("fused kernels" if family != "gpt_oss" else "the attention kernel")
    assert not caplog.records
    check(model, readings, read, cache, prompts)


@pytest.mark.parametrize("fault", ["wrong place", "one token less", "fails"])
def test_kernels_that_are_wrong_are_not_used(kernels, monkeypatch, fault, caplog):
    model = make_model("qwen3")
    cache, prompts = make_cache(model), make_prompts()
    readings = whole_readings(prompts)

    def misplaced(states, rotary, norms, cache, chunk):
        places = chunk.places - chunk.places % 2
        return rotate_store(
            states, rotary, norms, cache, SimpleNamespace(places=places, positions=chunk.positions)
        )

    def blind(query, cache, chunk, scaling, **extras):
        return attend(query, cache, chunk, scaling, **(extras | {"window": 60}))

    def failing(*args):
        raise RuntimeError("no kernel image")

    name, broken = {
        "wrong place": ("rotate_store", misplaced),
        "one token less": ("attend", blind),
        "fails": ("gate", failing),
    }[fault]
    monkeypatch.setattr(kernels, name, broken)
    reader = PromptReader(model)
    read = reader.read(readings, cache)
    assert reader.way == ("plain torch" if fault == "one token less" else "the attention kernel")
    assert "reading prompts without fused kernels" in caplog.text
    check(model, readings, read, cache, prompts)


def test_a_kernel_that_fails_later_is_given_up_and_nothing_is_lost(kernels, monkeypatch, caplog):
    model = make_model("qwen3")
    cache, prompts = make_cache(model), make_prompts()
    readings = whole_readings(prompts)
    reader = PromptReader(model, chunk_tokens=60)
    reader.read(readings[:2], cache)

    def failing(*args):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(kernels, "gate", failing)
    check(model, readings, reader.read(readings, cache), cache, prompts)
    assert "illegal address" in caplog.text


def test_a_family_that_does_not_pass_keywords_on_is_no_fault_of_the_user():
    """What is raised is no finding: an engine that meets it decodes without a paged cache."""
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="Identity does not pass on what its attention needs"):
        reading_ways.paged_attention(torch.nn.Identity(), states, states, states, None)
