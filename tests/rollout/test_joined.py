"""Weights side by side in memory: the same parameters and numbers, one tensor for all, and an engine that still sleeps."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.model.adjacent import side_by_side
from shardproof.rollout.joined import join_weights
from shardproof.rollout.local import EmbeddedEngine
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks


def test_joined_weights_are_the_same_parameters_with_the_same_numbers():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"), dtype=torch.float32)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    groups = [
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias],
        [mlp.gate_proj.weight, mlp.up_proj.weight],
    ]
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    assert all(side_by_side(group) is None for group in groups)
    join_weights(model)
    for name, param in model.named_parameters():
        old, numbers = before[name]
        assert param is old and torch.equal(param, numbers)
    for group in groups:
        joined = side_by_side(group)
        assert joined is not None and torch.equal(joined, torch.cat(group))
        joined.data.fill_(3.0)
        assert all((each == 3.0).all() for each in group)
        assert side_by_side(group[::-1]) is None and side_by_side(group[:1]) is not None


def slept(folder: str) -> list[bool]:
    policy = sp.load(folder)
    plain, engine = EmbeddedEngine(policy), EmbeddedEngine(policy)
    join_weights(engine.model)
    found = []
    for _ in range(2):
        for each in (plain, engine):
            each.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
        found.append(all(map(torch.equal, plain.model.parameters(), engine.model.parameters())))
        engine.sleep()
        found.append(not any(each.untyped_storage().nbytes() for each in engine.model.parameters()))
        engine.wake()
        found.append(all(each.isnan().all() for each in engine.model.parameters()))
    return found


@pytest.mark.distributed
def test_an_engine_with_joined_weights_sleeps_wakes_and_takes_weights_again(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen2")
    assert run_ranks(1, slept, str(folder)) == [[True] * 6]
