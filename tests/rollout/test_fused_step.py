"""The fused decoding step around its kernels: which models it takes, and what it makes of prompts of other lengths.

The kernels need a GPU and are compared there (tests/gpu/test_fast_paths.py); here plain torch stands in for them.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

import shardproof.rollout
from shardproof.model import hf_private
from shardproof.model.experts import grouped_experts
from shardproof.rollout import fused
from shardproof.rollout.decode import Prefilled
from shardproof.rollout.engine import Request
from shardproof.rollout.fused import FusedStep, can_fuse
from shardproof.rollout.proof import CAPACITY, compare_steps
from shardproof.rollout.static import ModelStep
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


def attend(sums, tables, norms, cache, positions, scale):
    keys, values = cache
    rows, key_heads, _, width = keys.shape
    states = sums.sum(0).view(rows, -1, width)
    heads = states.shape[1] - 2 * key_heads
    query, key, value = states.split([heads, key_heads, key_heads], 1)
    if norms is not None:
        query, key = add_norm(query, None, norms[0], norms[2]), add_norm(key, None, norms[1], norms[2])
    cos, sin = (table[positions[:, 0]][:, None] for table in tables)
    query, key = (
        x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin for x in (query, key)
    )
    out = []
    for row, position in enumerate(positions[:, 0].tolist()):
        keys[row, :, position], values[row, :, position] = key[row], value[row]
        held = [x[row : row + 1, :, : position + 1] for x in (keys, values)]
        new = query[row : row + 1, :, None]
        out.append(scaled_dot_product_attention(new, *held, scale=scale, enable_gqa=True).flatten())
    return torch.stack(out)


@pytest.fixture
def plain_kernels(monkeypatch):
    kernels = SimpleNamespace(project=project, add_norm=add_norm, gate_up=gate_up, attend=attend)
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
    requests = [Request(Trajectory.of_prompt(tuple(range(3, 4 + n))), n) for n in (1, 7, 3, 12)]
    with torch.no_grad():
        started = Prefilled(model, requests, CPU)
        steps = [FusedStep(model, 4, 32), ModelStep(model, 4, 32, CPU)]
        ids, positions = started.logits.argmax(-1, keepdim=True), started.last_positions + 1
        for step in steps:
            step.fill(started)
        for _ in range(5):
            found, expected = (step(ids, positions) for step in steps)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            ids, positions = expected.argmax(-1, keepdim=True), positions + 1
    assert getattr(model.config, "_experts_implementation", None) == before


def seen_from(first):
    """`attend` that does not see what stands before position `first(position)`."""

    def changed(sums, tables, norms, cache, positions, scale):
        kept = [states.clone() for states in cache]
        for row, position in enumerate(positions[:, 0].tolist()):
            start = first(position)
            for states in cache:
                # Moved out of sight: the rest of the row stands where its own positions are.
                states[row, :, :start] = states[row, :, start : start + 1]
        out = attend(sums, tables, norms, cache, positions, scale)
        for states, before in zip(cache, kept, strict=True):
            for row, position in enumerate(positions[:, 0].tolist()):
                states[row, :, :position] = before[row, :, :position]
        return out

    return changed


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("qwen3_tied", None),
        ("qwen2", None),
        ("qwen3_moe", None),
        ("mixtral", None),
        ("qwen3_tied", lambda position: max(0, position - 64)),
        ("qwen3_moe", lambda position: max(0, position - 64)),
        ("llama", lambda position: position // 128 * 64),
    ],
)
def test_what_is_compared_before_it_is_used(plain_kernels, monkeypatch, family, fault, rows):
    model = make_model(family, initializer_range=0.1)
    if fault is not None:
        monkeypatch.setattr(sys.modules["shardproof.rollout.kernels"], "attend", seen_from(fault))
    steps = [FusedStep(model, rows, CAPACITY), ModelStep(model, rows, CAPACITY, CPU)]
    with torch.no_grad():
        problem = compare_steps(model, CPU, rows, *steps, has_experts="moe" in family or family == "mixtral")
    assert (problem is None) == (fault is None)


def test_experts_that_fail_leave_the_model_as_it_was(plain_kernels):
    def fail(module, *args):
        raise RuntimeError("no such instruction")

    hf_private.register_experts("test_few_rows", fail)
    model = make_model("qwen3_moe")
    before = model.config._experts_implementation
    with torch.no_grad(), pytest.raises(RuntimeError, match="no such instruction"):
        FusedStep(model, 1, 32)(torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
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
