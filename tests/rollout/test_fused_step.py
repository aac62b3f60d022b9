"""The fused decoding step around its kernels: which models it takes, and what it makes of prompts of other lengths.

The kernels need a GPU and are compared there (tests/gpu/test_fast_paths.py); here plain torch stands in for them.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

import shardproof.rollout
from shardproof.model import hf_private
from shardproof.model.experts import grouped_experts
from shardproof.rollout import fused
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.fused import FusedStep, can_fuse
from shardproof.rollout.paged.blocks import BLOCK
from shardproof.rollout.paged.memory import Memory, Needs
from shardproof.rollout.paged.model_step import ModelStep, attend_plain
from shardproof.rollout.paged.proof import compare_step, find_truth
from shardproof.rollout.trajectory import Trajectory
from tests.models import tiny_config

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def make_model(family, **overrides):
    torch.manual_seed(0)
    config = tiny_config(family, **{**SIZES, **overrides})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def project(x, weights, biases=None):
    out = torch.cat([x @ weight.T for weight in weights], -1)
    out = out + torch.cat(list(biases)) if biases is not None else out
    return torch.stack([out - 1.0, torch.ones_like(out)])  # two shares


def add_norm(states, sums, weight, eps):
    if sums is not None:
        states += sums.sum(0)
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


def gate_up(x, gate, up):
    return silu(x @ gate.T) * (x @ up.T)


def attend(sums, rotary, norms, cache, tables, positions, scale):
    rows, width = len(positions), cache[0].shape[-1]
    key_heads = cache[0].shape[1]
    states = sums.sum(0).view(rows, -1, width)
    heads = states.shape[1] - 2 * key_heads
    query, key, value = states.split([heads, key_heads, key_heads], 1)
    if norms is not None:
        query, key = add_norm(query, None, norms[0], norms[2]), add_norm(key, None, norms[1], norms[2])
    cos, sin = (table[positions[:, 0]][:, None] for table in rotary)
    query, key = (
        x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin for x in (query, key)
    )
    return attend_plain(query, key, value, cache, tables, positions, scale)


@pytest.fixture
def plain_kernels(monkeypatch):
    kernels = SimpleNamespace(project=project, add_norm=add_norm, gate_up=gate_up)
    attention = SimpleNamespace(attend=attend)
    monkeypatch.setitem(sys.modules, "shardproof.rollout.paged.attention_kernels", attention)
    monkeypatch.setitem(sys.modules, "shardproof.rollout.kernels", kernels)
    monkeypatch.setattr(shardproof.rollout, "kernels", kernels, raising=False)
    experts = SimpleNamespace(FEW_ROWS="test_few_rows")
    monkeypatch.setitem(sys.modules, "shardproof.rollout.expert_kernels", experts)
    hf_private.register_experts("test_few_rows", grouped_experts)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_tied", {}),
        ("llama", {}),
        ("qwen2", {}),
        ("llama_tied", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("mixtral", {}),
    ],
    ids=str,
)
def test_step_by_step_what_the_model_says(plain_kernels, family, overrides):
    model = make_model(family, **overrides)
    before = getattr(model.config, "_experts_implementation", None)
    memory = memory_for(model, 4)
    slots, logits = memory.slots, torch.empty(2, 4, 101)
    slots.tables.copy_(torch.arange(1, 5)[:, None])
    with torch.no_grad():
        plain = ModelStep(model, memory.cache, attend_plain)
        fused = FusedStep(model, memory.cache, slots.tables.shape[1])
        slots.ids.copy_(torch.tensor([[5], [9], [5], [20]]))
        for _ in range(6):
            plain(slots, logits[0])
            fused(slots, logits[1])
            torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
            slots.ids.copy_(logits[0].argmax(-1, keepdim=True))
            slots.positions.add_(1)
    assert getattr(model.config, "_experts_implementation", None) == before


@pytest.mark.parametrize("overrides", [{}, {"mlp_only_layers": [2, 3]}], ids=str)
def test_a_rehearsal_launches_what_a_step_launches_with_fewer_layers(plain_kernels, monkeypatch, overrides):
    model = make_model("qwen3_moe", num_hidden_layers=5, **overrides)
    memory = memory_for(model, 4)
    kernels, seen = sys.modules["shardproof.rollout.kernels"], []
    for name in ("project", "add_norm", "gate_up"):
        plain = getattr(kernels, name)

        def noted(*args, name=name, plain=plain):
            seen.append((name, *(each.shape if hasattr(each, "shape") else None for each in args)))
            return plain(*args)

        monkeypatch.setattr(kernels, name, noted)
    step = FusedStep(model, memory.cache, 4)
    with torch.no_grad():
        step(memory.slots, memory.logits)
        every = list(seen)
        seen.clear()
        step.keep_one_of_each_kind()
        step(memory.slots, memory.logits)
    assert set(seen) == set(every) and len(seen) < len(every)


def memory_for(model, rows):
    memory = Memory(model, CPU, rows)
    request = Request(Trajectory.of_prompt((5, 6)), 0)
    memory.begin(Needs.of([request] * rows, Sampling(256), rows))
    return memory


def without(first):
    """`attend` that does not see what stands before position `first(position)`."""

    def changed(sums, rotary, norms, cache, tables, positions, scale):
        kept = [states.clone() for states in cache]
        for row, position in enumerate(positions[:, 0].tolist()):
            for states in cache:
                # Another token stands where those were.
                start = first(position)
                other = states[tables[row, start // BLOCK], :, start % BLOCK].clone()
                for at in range(start):
                    states[tables[row, at // BLOCK], :, at % BLOCK] = other
        out = attend(sums, rotary, norms, cache, tables, positions, scale)
        for states, before in zip(cache, kept, strict=True):
            new = [
                states[tables[row, at // BLOCK], :, at % BLOCK].clone()
                for row, at in enumerate(positions[:, 0].tolist())
            ]
            states.copy_(before)
            for row, at in enumerate(positions[:, 0].tolist()):
                states[tables[row, at // BLOCK], :, at % BLOCK] = new[row]
        return out

    return changed


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("qwen3_tied", None),
        ("mixtral", None),
        ("qwen3_moe", lambda position: max(0, position - 64)),
        ("llama", lambda position: position // 128 * 64),
    ],
)
def test_what_is_compared_before_it_is_used(plain_kernels, monkeypatch, family, fault, rows):
    model = make_model(family, initializer_range=0.1, max_position_embeddings=512)
    if fault is not None:
        kernels = sys.modules["shardproof.rollout.paged.attention_kernels"]
        monkeypatch.setattr(kernels, "attend", without(fault))
    memory = memory_for(model, rows)
    before = memory.pool.num_free, memory.slots.state.clone()
    with torch.no_grad():
        step = FusedStep(model, memory.cache, memory.slots.tables.shape[1])
        truth = find_truth(model, CPU)
        has_experts = "moe" in family or family == "mixtral"
        problem = compare_step(lambda: step(memory.slots, memory.logits), rows, memory, truth, has_experts)
    assert (problem is None) == (fault is None)
    assert memory.pool.num_free == before[0] and torch.equal(memory.slots.state, before[1])


@pytest.mark.parametrize("free", [8, 33, 160])
def test_rows_that_are_exchanged_are_noticed_in_any_memory(plain_kernels, monkeypatch, free):
    model = make_model("qwen3", initializer_range=0.1, max_position_embeddings=512)
    memory = memory_for(model, 32)
    held = memory.pool.take(memory.pool.num_free - free)
    assert held is not None
    with torch.no_grad():
        truth = find_truth(model, CPU)
    kernels = sys.modules["shardproof.rollout.kernels"]
    project = kernels.project

    def compare() -> str | None:
        with torch.no_grad():
            step = FusedStep(model, memory.cache, memory.slots.tables.shape[1])
            return compare_step(lambda: step(memory.slots, memory.logits), 32, memory, truth, False)

    assert compare() is None and memory.pool.num_free == free
    monkeypatch.setattr(kernels, "project", lambda *args: project(*args).roll(1, 1))
    assert "differ" in str(compare())


def test_experts_that_fail_leave_the_model_as_it_was(plain_kernels):
    def fail(module, *args):
        raise RuntimeError("no such instruction")

    hf_private.register_experts("test_few_rows", fail)
    model = make_model("qwen3_moe")
    before = model.config._experts_implementation
    memory = memory_for(model, 1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no such instruction"):
        FusedStep(model, memory.cache, 4)(memory.slots, memory.logits)
    assert model.config._experts_implementation == before


@pytest.mark.parametrize(
    ("family", "overrides", "wanted"),
    [
        ("qwen3", {}, True),
        ("llama_tied", {}, True),
        ("qwen2", {}, True),
        ("qwen3", {"hidden_size": 96}, False),
        ("qwen3", {"head_dim": 48, "num_attention_heads": 8, "num_key_value_heads": 8}, False),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, False),
        ("llama", {"mlp_bias": True}, False),
        ("olmo2", {}, False),
        ("cohere", {}, False),
        ("gemma3_text", {}, False),
        ("mistral", {}, False),  # it has a sliding window
        ("mistral", {"sliding_window": None}, True),
        ("qwen3_moe", {"moe_intermediate_size": 128}, True),
        ("qwen3_moe", {"moe_intermediate_size": 96}, False),
        ("mixtral", {}, True),
        ("glm4_moe", {"moe_intermediate_size": 128}, False),  # it rotates half of a head
        ("gpt2", {}, False),
    ],
    ids=str,
)
def test_which_models_it_takes(monkeypatch, family, overrides, wanted):
    monkeypatch.setattr(fused, "can_compile", lambda device, dtype: True)
    sizes = {} if family == "gpt2" else {**SIZES, **overrides}
    config = tiny_config(family, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert can_fuse(model, CPU) is wanted


def test_it_is_for_bfloat16_on_cuda():
    assert not can_fuse(make_model("qwen3"), CPU)
