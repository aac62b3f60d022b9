"""What a rank holds: buffers, placeholders, ties. Each fault is made as the peer made it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

import shardproof as sp
from shardproof.shard import load as loading
from tests.models import make_checkpoint, make_model, tiny_config
from tests.museum.pieces import findings_of, piece
from tests.museum.skyrl_1709 import load_as_there
from tests.ranks import run_ranks_outcomes
from tests.shard.test_attest import hf_model, rotary, shard_fsdp2

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

INV_FREQ, EMBEDDING, HEAD = "model.rotary_emb.inv_freq", "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("held"), "llama"))


def attest_skyrl_1709(folder, dtype):
    module, _ = load_as_there(folder, dtype)
    return [f for f in sp.attest(module) if "original" not in f.tensor]


@piece("skyrl-1709")
def test_skyrl_1709(folder):
    found = findings_of(attest_skyrl_1709, folder, torch.bfloat16)
    assert ("S208", 1, INV_FREQ) in found
    assert {(rank, tensor) for _, rank, tensor in found} == {(1, INV_FREQ)}
    assert findings_of(attest_skyrl_1709, folder, torch.float32) == set()


def broadcast_what_nobody_wrote():
    module = shard_fsdp2(make_model("llama"))
    owner = rotary(module)
    owner.inv_freq.fill_(22675456.0 if dist.get_rank() == 0 else 0.0)  # what the allocator had there
    dist.broadcast(owner.inv_freq, src=0)
    return sp.attest(module)


@piece("skyrl-1709")
def test_skyrl_1709_the_fsdp2_helper_broadcasts_garbage():
    found = findings_of(broadcast_what_nobody_wrote)
    assert found == {("S209", 0, INV_FREQ), ("S209", 1, INV_FREQ)}


def load_on_rank_0_only(folder, placeholder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    if dist.get_rank() > 0:
        for param in model.parameters():
            param.data = placeholder(param)
    return sp.attest(shard_fsdp2(model))


def unwritten(param):
    return torch.empty_like(param).fill_(float("nan"))


@piece("transformers-45050")
def test_transformers_45050(folder):
    found = findings_of(load_on_rank_0_only, folder, unwritten)
    names = {name for name, _ in make_model("llama").named_parameters()}
    assert found == {("S205", 1, name) for name in names}


@piece("transformers-45649")
def test_transformers_45649(folder):
    assert findings_of(load_on_rank_0_only, folder, torch.zeros_like) == {("S206", 1, HEAD)}


def keep_garbage_on_every_rank():
    module = shard_fsdp2(make_model("llama"))
    rotary(module).inv_freq = torch.full_like(rotary(module).inv_freq, 3.5)
    return sp.attest(module)


@piece("transformers-48892")
def test_transformers_48892_garbage_that_all_ranks_share():
    found = findings_of(keep_garbage_on_every_rank)
    assert found == {("S209", 0, INV_FREQ), ("S209", 1, INV_FREQ)}


def load_with_an_unwritten(kind):
    """The model's own code gives a tensor memory and leaves it at that; what the load says first."""
    from transformers.models.llama import modeling_llama

    construct = modeling_llama.LlamaMLP.__init__

    def with_tensor(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        if kind == "buffer":
            self.register_buffer("scales", torch.empty(4), persistent=False)
        else:
            self.scales = nn.Parameter(torch.empty(4))

    modeling_llama.LlamaMLP.__init__ = with_tensor
    try:
        sp.load(sp.RandomInit(tiny_config("llama")))
    except sp.ShardproofError as error:
        return error.findings[:1]
    finally:
        modeling_llama.LlamaMLP.__init__ = construct
    return []


@piece("transformers-48892")
def test_transformers_48892_a_buffer_that_nothing_writes():
    found = findings_of(load_with_an_unwritten, "buffer")
    assert {(code, tensor) for code, _, tensor in found} == {("S204", "model.layers.0.mlp.scales")}


def test_a_parameter_that_nothing_initialises_stops_the_load_too():
    found = findings_of(load_with_an_unwritten, "parameter")
    assert {(code, tensor) for code, _, tensor in found} == {("L115", "model.layers.0.mlp.scales")}


def broadcast_buffers_in_another_order():
    """Rank 1 lists its buffers in another order; those of one size change places without a word."""
    module = shard_fsdp2(make_model("gemma3_text"))
    owner = next(inner for inner in module.modules() if "sliding_attention_inv_freq" in inner._buffers)
    names = sorted(name for name in owner._buffers if name.endswith("inv_freq") and "original" not in name)
    sent = {name: owner._buffers[name].clone() for name in names}
    order = names if dist.get_rank() == 0 else names[::-1]
    for name in order:
        dist.broadcast(owner._buffers[name], src=0)
    assert dist.get_rank() == 0 or not torch.equal(sent[names[0]], owner._buffers[names[0]])
    return sp.attest(module)


@piece("verl-6405")
def test_verl_6405():
    found = findings_of(broadcast_buffers_in_another_order)
    names = {f"model.rotary_emb.{kind}_attention_inv_freq" for kind in ("full", "sliding")}
    assert found == {(code, 1, name) for code in ("S207", "S209") for name in names}


def untie_by_to_empty():
    """Meta build, `to_empty`, full state dict: the values are right and the tie is gone."""
    source = make_model("llama_tied")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama_tied"))
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    rotary(model).load_state_dict(rotary(source).state_dict())
    for name, buffer in rotary(source)._buffers.items():
        rotary(model)._buffers[name] = buffer
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    return sp.attest(shard_fsdp2(model))


@piece("verl-7834")
def test_verl_7834():
    assert findings_of(untie_by_to_empty) == {("S203", 0, HEAD), ("S203", 1, HEAD)}


def build_the_optimizer_in_the_window():
    """The optimizer is built while head and embedding are two objects; then the model ties them again."""
    module = shard_fsdp2(make_model("llama_tied"))
    model = hf_model(module)
    tied = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(tied.detach().clone())
    model.model.embed_tokens.weight = nn.Parameter(tied.detach().clone())
    while_apart = sp.attest(module)
    optimizer = torch.optim.AdamW(module.parameters())
    model.lm_head.weight = model.model.embed_tokens.weight = tied
    return while_apart + sp.attest(module, optimizer)


@piece("skyrl-1767")
def test_skyrl_1767():
    found = findings_of(build_the_optimizer_in_the_window)
    expected = {("S203", HEAD), ("S211", EMBEDDING), ("S212", None)}
    assert found == {(code, rank, tensor) for code, tensor in expected for rank in (0, 1)}


def fail_on_rank_1(folder):
    """An error that one rank alone meets, in the middle of a load."""
    plan_shards = loading.plan_shards

    def plan(*args):
        if dist.get_rank() == 1:
            raise KeyError("model.layers.1.weight.absmax")
        return plan_shards(*args)

    loading.plan_shards = plan
    try:
        sp.load(folder)
    finally:
        loading.plan_shards = plan_shards


@piece("accelerate-alone")
def test_a_rank_that_raises_alone(folder):
    outcomes = run_ranks_outcomes(2, fail_on_rank_1, folder, timeout=60)
    for kind, error, message in outcomes:
        assert (kind, error) == ("error", "LoadFault")
        assert message.startswith("L100 plan: rank 1: KeyError: 'model.layers.1.weight.absmax'")
