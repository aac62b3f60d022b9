"""A replica's parameters stay the same objects, side by side, wherever their memory is."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardproof.config.schema import Rollout
from shardproof.model.adjacent import side_by_side
from shardproof.rl import engines
from shardproof.rollout import replica_memory
from shardproof.rollout.joined import join_weights
from shardproof.rollout.replica_memory import ReplicaMemory
from tests.models import tiny_config


class InPlace:
    """What `SleepingMemory` is on a GPU, in host memory."""

    def __init__(self, device):
        self.calls = []

    def empty(self, shape, dtype):
        self.region = torch.full(shape, 7, dtype=dtype)
        return self.region

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")


def make_model():
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).requires_grad_(False)
    join_weights(model)
    return model


def joined(model):
    layer = model.model.layers[0]
    attention = layer.self_attn
    return [
        side_by_side([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        side_by_side([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
    ]


@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_come_back_where_they_were(monkeypatch, in_place):
    monkeypatch.setattr(replica_memory, "can_sleep", lambda device: True)
    monkeypatch.setattr(replica_memory, "SleepingMemory", InPlace)
    model = make_model()
    before = {name: param.clone() for name, param in model.named_parameters()}
    objects = list(model.parameters())
    memory = ReplicaMemory(model, torch.device("cpu"), in_place)
    assert (memory.sleeping is not None) == in_place
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    if in_place:
        storages = {param.untyped_storage().data_ptr() for param in model.parameters()}
        assert storages == {memory.sleeping.region.untyped_storage().data_ptr()}
        assert all(param.data_ptr() % 16 == 0 for param in model.parameters())
    memory.sleep()
    if not in_place:
        assert not any(param.untyped_storage().nbytes() for param in model.parameters())
    memory.wake()
    assert all(bool(param.isnan().all()) for param in model.parameters())
    for param, value in zip(model.parameters(), before.values(), strict=True):
        param.copy_(value)
    assert all(each is not None and bool(each.isfinite().all()) for each in joined(model))
    assert not in_place or memory.sleeping.calls == ["sleep", "wake"]


def test_the_embedded_engine_sleeps_by_default_where_that_costs_little(monkeypatch):
    gpu = torch.device("cuda")
    for can in (True, False):
        monkeypatch.setattr(engines, "can_sleep", lambda device, can=can: can and device.type == "cuda")
        assert engines.sleeps(Rollout(), gpu) == can
        assert engines.sleeps(Rollout(sleep=True), gpu)
        assert not engines.sleeps(Rollout(sleep=False), gpu)
        assert not engines.sleeps(Rollout(), torch.device("cpu"))
        assert not engines.sleeps(Rollout(fp8="weights"), gpu)
        assert not engines.sleeps(Rollout(engine="vllm"), gpu)
