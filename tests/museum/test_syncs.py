"""Weights on their way out: what is sent, what arrives, and what the receiver computes with.

The pieces that are faults of an engine use a small receiver that has the fault; tests/rollout/vllm has the engine itself.
"""

from dataclasses import replace

import peft
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.doctor.probes import Patient, probe_generate, probe_round_trip
from shardproof.doctor.request import Layout, Request
from shardproof.export.payload import Payload
from shardproof.rollout.engine import Sampling, generate
from shardproof.rollout.local import EmbeddedEngine
from shardproof.shard.torch_private import local_tensor
from tests.models import make_checkpoint
from tests.museum.pieces import findings_of, piece
from tests.ranks import run_ranks_outcomes

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [9, 10, 11]]
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("syncs")
    return {name: str(make_checkpoint(root / name, name)) for name in ("llama", "llama_tied", "qwen3_moe")}


def load(folder, **options):
    return sp.load(folder, **{"compute_dtype": torch.float32, **options})


def train(policy):
    """One step that moves the weights far enough to tell versions apart."""
    result = sp.train_step(policy, sp.Batch(SEQUENCES), sp.make_optimizer(policy, lr=0.05))
    assert result.stepped


# What is sent.


def move_an_offloaded_module(folder):
    policy = load(folder, cpu_offload=True)
    if dist.get_rank() == 1:
        # The peer moved it to the GPU; as far as a machine without one can show it, the export expects it elsewhere.
        policy.settings = replace(policy.settings, cpu_offload=False, device=torch.device("cuda"))
    for _ in sp.WeightStream(policy):
        pass


@piece("verl-6188")
def test_verl_6188(folders):
    for kind, error, message in run_ranks_outcomes(2, move_an_offloaded_module, folders["llama"]):
        assert (kind, error) == ("error", "ExportFault")
        assert message.startswith("E401 export: rank 1: 'model.embed_tokens.weight'")


def ship_the_base(folder):
    policy = load(folder, lora=peft.LoraConfig(**LORA))
    first = sp.WeightStream(policy)
    list(first)
    train(policy)
    local_values, needed = Payload.local_values, Payload.adapters_needed
    # The merge is undone before the tensors are read.
    Payload.adapters_needed = lambda self, names: []
    Payload.local_values = lambda self, name, adapters: self.shards[self.infos[name].name].flat.to(
        self.dtypes[name]
    )
    try:
        second = sp.WeightStream(policy)
        list(second)
    finally:
        Payload.local_values, Payload.adapters_needed = local_values, needed
    right = sp.WeightStream(policy)
    list(right)
    return [*second.receipt.findings, *right.receipt.findings]


@piece("verl-7014")
def test_verl_7014(folders):
    assert findings_of(ship_the_base, folders["llama"]) == {("E405", None, None)}


def never_send_the_adapter(folder):
    policy = load(folder, lora=peft.LoraConfig(**LORA))
    train(policy)
    stream = sp.WeightStream(policy, merge_lora=False)
    assert all("lora" in name for name, _ in stream)
    # The engine has a slot for the adapter, and nothing ever fills it.
    return stream.receipt.manifest.compare([], "the engine")


@piece("verl-7495")
def test_verl_7495(folders):
    found = findings_of(never_send_the_adapter, folders["llama"])
    layers = [
        f"base_model.model.model.layers.{i}.self_attn.{proj}" for i in (0, 1) for proj in ("q_proj", "v_proj")
    ]
    assert found == {("E404", None, f"{layer}.lora_{side}.weight") for layer in layers for side in "AB"}


def merge_in_place_and_undo(folder):
    """Merge and unmerge in bf16, in place, as often as a short run syncs; then compare the base with its files."""
    policy = load(folder, param_dtype=torch.bfloat16, lora=peft.LoraConfig(**LORA))
    request = Request(source=folder, config=None, layouts=(Layout(dtype="fp32", param_dtype="bf16", lora=4),))
    patient = Patient(request, request.layouts[0], folder)
    patient.policy = policy
    clean = probe_round_trip(patient)[1]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for name, param in policy.named_parameters():
        if name.endswith("layers.0.self_attn.q_proj.base_layer.weight"):
            shard = local_tensor(param)
            for _ in range(20):
                delta = (0.01 * torch.randn(shard.shape, generator=generator)).to(shard.dtype)
                shard.add_(delta).sub_(delta)
    return [*clean, *probe_round_trip(patient)[1]]


@piece("ms-swift-10154")
def test_ms_swift_10154(folders):
    found = findings_of(merge_in_place_and_undo, folders["llama"])
    assert {(code, tensor) for code, _, tensor in found} == {
        ("E404", "model.layers.0.self_attn.q_proj.weight")
    }


# What arrives, and what is computed with it.


class Receiver(EmbeddedEngine):
    """An engine that keeps what it was sent, as a fault makes it."""

    def __init__(self, policy):
        super().__init__(policy)
        self.held = {}
        self.num_loads = 0

    def load_weights(self, stream):
        self.num_loads += 1
        receipt = super().load_weights(stream)
        self.held = {name: tensor.clone() for name, tensor in sp.WeightStream(stream.policy, digests=False)}
        self.spoil()
        return receipt

    def spoil(self):
        """A receiver without a fault."""


class SwapsExpertHalves(Receiver):
    """vLLM 42821: after the first load gate and up have changed places, and the second load does not know."""

    @torch.no_grad()
    def spoil(self):
        if self.num_loads < 2:
            return
        for module in self.model.modules():
            if "gate_up_proj" in module._parameters:
                gate, up = module.gate_up_proj.clone().chunk(2, dim=1)
                module.gate_up_proj.copy_(torch.cat([up, gate], dim=1))
        for name in [name for name in self.held if name.endswith("gate_proj.weight")]:
            other = name.replace("gate_proj", "up_proj")
            self.held[name], self.held[other] = self.held[other], self.held[name]


class ReloadsFromDisk(Receiver):
    """TRL 5312: before it generates, the engine restores what it was started with."""

    @torch.no_grad()
    def spoil(self):
        if self.num_loads == 1:
            self.on_disk = ({n: t.clone() for n, t in self.held.items()}, self.model.state_dict())
            self.on_disk = (self.on_disk[0], {n: t.clone() for n, t in self.on_disk[1].items()})
        else:
            self.held = self.on_disk[0]
            self.model.load_state_dict(self.on_disk[1])


class KeepsItsPackedHead(Receiver):
    """vLLM on CPU: every byte of a tied head arrives, and a copy from the first load is computed with."""

    @torch.no_grad()
    def spoil(self):
        if self.num_loads == 1:
            self.packed = self.model.lm_head.weight.clone()
        else:
            self.model.lm_head.weight = torch.nn.Parameter(self.packed, requires_grad=False)


def sync_twice(folder, kind):
    """Findings after the first sync, and (of bytes, of log-probs) after a step and the second one."""
    policy = load(folder)
    request = Request(source=folder, config=None, layouts=(Layout(dtype="fp32"),))
    patient = Patient(request, request.layouts[0], folder)
    patient.policy, patient.sequences, patient.engine = policy, SEQUENCES, kind(policy)
    receipt = patient.engine.load_weights(sp.WeightStream(policy, torch.float32))
    first = [
        *receipt.manifest.compare(patient.engine.held.items(), "the engine"),
        *probe_generate(patient)[1],
    ]
    assert first == [], "the first sync is right, which is why the fault is not noticed"
    train(policy)
    receipt = patient.engine.load_weights(sp.WeightStream(policy, torch.float32))
    assert receipt.findings == []
    of_bytes = receipt.manifest.compare(patient.engine.held.items(), "the engine")
    return [*of_bytes, *probe_generate(patient)[1]]


def generate_before_the_first_sync(folder):
    generate(EmbeddedEngine(load(folder)), [], Sampling(1))


def test_an_engine_that_was_never_sent_anything_says_so(folders):
    for kind, error, message in run_ranks_outcomes(2, generate_before_the_first_sync, folders["llama"]):
        assert (kind, error) == ("error", "RolloutFault")
        assert message.startswith("R501 generate: the engine has no weights yet.")


def test_a_receiver_without_a_fault_is_silent(folders):
    assert findings_of(sync_twice, folders["qwen3_moe"], Receiver) == set()


@piece("vllm-42821")
def test_vllm_42821(folders):
    found = findings_of(sync_twice, folders["qwen3_moe"], SwapsExpertHalves)
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight"
        for layer in (0, 1)
        for expert in range(8)
        for proj in ("gate", "up")
    }
    assert {tensor for code, _, tensor in found if code == "E404"} == experts
    assert {(code, rank) for code, rank, _ in found if code != "E404"} == {("R503", 0), ("R503", 1)}


@piece("trl-5312")
def test_trl_5312(folders):
    found = findings_of(sync_twice, folders["llama"], ReloadsFromDisk)
    assert ("E404", None, "model.layers.0.mlp.up_proj.weight") in found
    assert {(code, rank) for code, rank, _ in found if code != "E404"} == {("R503", 0), ("R503", 1)}


@piece("vllm-tied-head")
def test_vllm_tied_head_every_byte_arrives_and_the_canary_sees_it(folders):
    found = findings_of(sync_twice, folders["llama_tied"], KeepsItsPackedHead)
    assert {(code, rank) for code, rank, _ in found} == {("R503", 0), ("R503", 1)}
