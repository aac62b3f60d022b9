"""Attestation: each fault is reported by its code, rank and tensor, alike on every rank; a clean module is silent."""

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

import shardproof as sp
from tests.models import make_checkpoint, make_model, tiny_config
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

INV_FREQ = "model.rotary_emb.inv_freq"
HEAD = "lm_head.weight"
REPLICATED = ["plain", "ddp"]
SHARDED = ["fsdp1", "fsdp2", "loaded_fsdp1", "loaded_fsdp2"]
ANY = [*REPLICATED, *SHARDED]


def layers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def shard_fsdp2(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_fsdp1(model, use_orig_params=True):
    policy = ModuleWrapPolicy({type(layer) for layer in layers_of(model)})
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device
    )


def wrap(model, kind):
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        return shard_fsdp2(model)
    return shard_fsdp1(model, use_orig_params=kind == "fsdp1")


def build(kind, family="llama"):
    """A clean module: a Hugging Face model wrapped as users do it, or loaded by this project."""
    if kind.startswith("loaded_"):
        return sp.load(sp.RandomInit(tiny_config(family)), strategy=kind.removeprefix("loaded_")).module
    return wrap(make_model(family), kind)


def hf_model(module):
    return next(inner for inner in module.modules() if isinstance(inner, PreTrainedModel))


def rotary(module):
    return next(inner for inner in module.modules() if "inv_freq" in inner._buffers)


def local(module, name):
    """This rank's memory of a parameter, whatever wrappers are around it."""
    (param,) = [
        p for n, p in module.named_parameters() if n.replace("_fsdp_wrapped_module.", "").endswith(name)
    ]
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def attest_spoiled(kind, spoil, *args, family="llama"):
    module = build(kind, family)
    spoil(module, *args)
    return sp.attest(module)


def findings_of(num_ranks, fn, *args):
    """The findings, the same on every rank."""
    results = run_ranks(num_ranks, fn, *args)
    assert all(result == results[0] for result in results), results
    for finding in results[0]:
        assert str(finding).startswith(f"{finding.code} attest: ")
        assert "Fix: " in str(finding)
    return results[0]


def summary(findings):
    return {(finding.code, finding.rank, finding.tensor) for finding in findings}


# Clean modules.


def attest_clean(kind, family, with_optimizer, forward, step):
    module = build(kind, family)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3) if with_optimizer else None
    if forward:
        loss = module(torch.arange(1, 9).view(1, -1)).logits.float().square().mean()
        if step:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return sp.attest(module, optimizer)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("kind", [*ANY, "fsdp1_flat"])
def test_clean_module(kind, family):
    assert findings_of(2, attest_clean, kind, family, True, False, False) == []


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "gpt_oss", "deepseek_v3", "gpt2"])
def test_clean_replica_of_a_family_with_buffers_of_its_own(family):
    assert findings_of(2, attest_clean, "plain", family, False, False, False) == []


@pytest.mark.parametrize("kind", [*ANY, "fsdp1_flat"])
def test_clean_after_a_step(kind):
    assert findings_of(2, attest_clean, kind, "llama", True, True, True) == []


@pytest.mark.parametrize("kind", [*ANY, "fsdp1_flat"])
def test_clean_after_a_forward(kind):
    # FSDP leaves the root gathered after a forward that no backward follows.
    assert findings_of(2, attest_clean, kind, "llama", True, True, False) == []


def attest_from_pretrained(folder, kind):
    return sp.attest(wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), kind))


@pytest.mark.parametrize("kind", ["plain", "fsdp2", "fsdp1", "fsdp1_flat"])
def test_clean_from_pretrained_in_bf16(tmp_path, kind):
    folder = make_checkpoint(tmp_path, "llama_tied")
    assert findings_of(2, attest_from_pretrained, folder, kind) == []


def attest_peft(kind):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    return sp.attest(wrap(peft.get_peft_model(make_model("llama_tied"), config), kind))


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
def test_clean_with_adapters(kind):
    assert findings_of(2, attest_peft, kind) == []


def attest_after_forwards_of_different_lengths():
    model = make_model("phi3")
    length = 70 if dist.get_rank() == 0 else 5
    with torch.no_grad():
        model(torch.arange(length).view(1, -1))
    frequencies = rotary(model).inv_freq.clone()
    everyone = [torch.empty_like(frequencies) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, frequencies)
    assert not torch.equal(everyone[0], everyone[1])
    return sp.attest(model)


def test_frequencies_that_follow_the_longest_sequence_may_differ():
    assert findings_of(2, attest_after_forwards_of_different_lengths) == []


# Buffers: SkyRL issue 1709.


def cast_frequencies_to_garbage(module, ranks, value):
    owner = rotary(module)
    if dist.get_rank() in ranks:
        owner._buffers["inv_freq"] = torch.full_like(owner.inv_freq, value, dtype=torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), 0.0], ids=str)
@pytest.mark.parametrize("kind", ANY)
def test_skyrl_1709_frequencies_cast_on_meta_and_never_written(kind, value):
    findings = findings_of(2, attest_spoiled, kind, cast_frequencies_to_garbage, [1], value)
    assert ("S208", 1, INV_FREQ) in summary(findings)
    assert {(rank, tensor) for _, rank, tensor in summary(findings)} == {(1, INV_FREQ)}


def broadcast_garbage_frequencies(module):
    garbage = torch.full_like(rotary(module).inv_freq, 0.25 + dist.get_rank())
    dist.broadcast(garbage, src=0)
    rotary(module).inv_freq.copy_(garbage)


@pytest.mark.parametrize("kind", ANY)
def test_skyrl_1709_rank_0_broadcasts_garbage(kind):
    findings = findings_of(2, attest_spoiled, kind, broadcast_garbage_frequencies)
    assert summary(findings) == {("S209", 0, INV_FREQ), ("S209", 1, INV_FREQ)}
    assert "begins [0.25, 0.25" in findings[0].message


def attest_loaded_with_garbage(strategy):
    policy = sp.load(sp.RandomInit(tiny_config("llama")), strategy=strategy)
    broadcast_garbage_frequencies(policy.module)
    return sp.attest(policy)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_skyrl_1709_garbage_written_into_a_loaded_model(strategy):
    findings = findings_of(2, attest_loaded_with_garbage, strategy)
    assert summary(findings) == {("S209", 0, INV_FREQ), ("S209", 1, INV_FREQ)}


def round_frequencies(module):
    rotary(module).inv_freq.copy_(rotary(module).inv_freq.bfloat16())


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_frequencies_rounded_to_bf16_and_back(kind):
    findings = findings_of(2, attest_spoiled, kind, round_frequencies)
    assert summary(findings) == {("S209", 0, INV_FREQ), ("S209", 1, INV_FREQ)}


# Values.


def put(module, name, value, rank):
    if dist.get_rank() == rank:
        local(module, name).view(-1)[-1] = value


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (float("nan"), "S205", "1 NaN and 0 Inf"),
        (float("inf"), "S205", "0 NaN and 1 Inf"),
        (float("-inf"), "S205", "0 NaN and 1 Inf"),
        (-3e33, "S206", "holds 3e+33"),
    ],
    ids=["nan", "inf", "minus_inf", "huge"],
)
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_value_that_no_model_has(kind, value, code, said):
    findings = findings_of(2, attest_spoiled, kind, put, HEAD, value, 1)
    expected = {(code, 1, HEAD)} | ({("S207", 1, HEAD)} if kind in REPLICATED else set())
    assert summary(findings) == expected
    assert said in findings[0].message


def test_nan_in_a_flat_parameter():
    name = "model.layers.1._flat_param"
    findings = findings_of(2, attest_spoiled, "fsdp1_flat", put, name, float("nan"), 1)
    assert summary(findings) == {("S205", 1, name)}


def put_huge_values_that_cancel(module):
    flat = local(module, HEAD).view(-1)
    flat[-2:] = torch.tensor([1e30, -1e30])


def test_huge_values_that_cancel():
    findings = findings_of(2, attest_spoiled, "fsdp2", put_huge_values_that_cancel)
    assert summary(findings) == {("S206", 0, HEAD), ("S206", 1, HEAD)}


def fill_all(module, value, rank):
    if dist.get_rank() == rank:
        for param in module.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).detach().fill_(value)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp1", "fsdp2", "fsdp1_flat"])
def test_transformers_45649_zero_placeholders(kind):
    findings = findings_of(2, attest_spoiled, kind, fill_all, 0.0, 1)
    placeholders = [finding for finding in findings if finding.code == "S206"]
    assert [finding.rank for finding in placeholders] == [1]
    assert "all zero" in placeholders[0].message
    assert {finding.code for finding in findings} <= {"S206", "S207"}


def replace_with_placeholders(module):
    """What RAM-efficient loading leaves on the ranks that wait for a broadcast."""
    if dist.get_rank() == 1:
        for inner in module.modules():
            for name, param in inner._parameters.items():
                if param is not None:
                    inner._parameters[name] = nn.Parameter(torch.empty_like(param).fill_(float("nan")))


def test_transformers_45050_nan_placeholders():
    findings = findings_of(2, attest_spoiled, "plain", replace_with_placeholders)
    names = {name for name, _ in make_model("llama").named_parameters()}
    assert {f.tensor for f in findings if f.code == "S205"} == names
    assert {f.rank for f in findings if f.code == "S205"} == {1}
    assert {f.code for f in findings} == {"S205", "S207"}


# Replicas.


def nudge(module, name, rank):
    if dist.get_rank() == rank:
        flat = local(module, name).view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(10.0))


@pytest.mark.parametrize("kind", REPLICATED)
@pytest.mark.parametrize(
    ("num_ranks", "odd", "same"), [(2, 1, [0]), (3, 0, [1, 2])], ids=["2_ranks", "3_ranks"]
)
def test_replica_with_one_differing_element(kind, num_ranks, odd, same):
    name = "model.layers.0.mlp.up_proj.weight"
    findings = findings_of(num_ranks, attest_spoiled, kind, nudge, name, odd)
    assert summary(findings) == {("S207", odd, name)}
    assert f"on ranks [{odd}] than on ranks {same}" in findings[0].message


def attest_hsdp(strategy, replicate, name, rank):
    mesh = sp.make_mesh(replicate=replicate)
    policy = sp.load(sp.RandomInit(tiny_config("llama")), strategy=strategy, mesh=mesh)
    clean = sp.attest(policy)
    nudge(policy.module, name, rank)
    return clean, sp.attest(policy)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("num_ranks", "odd", "same"), [(2, 1, 0), (4, 3, 1), (4, 2, 0)])
def test_hsdp_replica_with_a_changed_shard(strategy, num_ranks, odd, same):
    name = HEAD if odd % 2 else "model.embed_tokens.weight"
    results = run_ranks(num_ranks, attest_hsdp, strategy, 2, name, odd)
    assert all(result == results[0] for result in results)
    clean, findings = results[0]
    assert clean == []
    assert summary(findings) == {("S207", odd, name)}
    assert f"on ranks [{odd}] than on ranks [{same}]" in findings[0].message


def replace(module, name, new):
    """Give rank 1 another parameter under this name."""
    if dist.get_rank() == 1:
        parent, _, leaf = name.rpartition(".")
        owner = hf_model(module).get_submodule(parent)
        owner._parameters[leaf] = nn.Parameter(new(owner._parameters[leaf].detach()))


def to_bf16(tensor):
    return tensor.bfloat16()


def drop_row(tensor):
    return tensor[:-1].clone()


@pytest.mark.parametrize("new", [to_bf16, drop_row])
def test_parameter_of_another_dtype_or_shape_on_one_rank(new):
    findings = findings_of(2, attest_spoiled, "plain", replace, HEAD, new)
    assert summary(findings) == {("S208", 1, HEAD)}
    assert "ranks [1]" in findings[0].message


# Ties, meta tensors, optimizers, different models.


def attest_untied(kind, ranks):
    model = make_model("llama_tied")
    if dist.get_rank() in ranks:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return sp.attest(wrap(model, kind))


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_untied_embeddings(kind):
    findings = findings_of(2, attest_untied, kind, [0, 1])
    assert summary(findings) == {("S203", 0, HEAD), ("S203", 1, HEAD)}
    assert "model.embed_tokens.weight" in findings[0].message


def test_embeddings_untied_on_one_rank():
    findings = findings_of(2, attest_untied, "plain", [1])
    assert summary(findings) == {("S203", 1, HEAD), ("S213", 1, HEAD)}


def leave_on_meta(module, name, ranks):
    if dist.get_rank() in ranks:
        parent, _, leaf = name.rpartition(".")
        owner = hf_model(module).get_submodule(parent)
        for tensors in (owner._parameters, owner._buffers):
            if leaf in tensors:
                meta = tensors[leaf].detach().to("meta")
                tensors[leaf] = nn.Parameter(meta) if tensors is owner._parameters else meta


@pytest.mark.parametrize("name", [HEAD, INV_FREQ])
@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=str)
def test_tensor_left_on_meta(name, ranks):
    findings = findings_of(2, attest_spoiled, "plain", leave_on_meta, name, ranks)
    assert summary(findings) == {("S210", rank, name) for rank in ranks}


def attest_meta_fsdp2():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    return sp.attest(shard_fsdp2(model))


def test_fsdp2_model_that_was_never_materialised():
    findings = findings_of(2, attest_meta_fsdp2)
    assert {finding.code for finding in findings} == {"S210"}
    model = make_model("llama")
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for rank in (0, 1):
        assert {finding.tensor for finding in findings if finding.rank == rank} == names


def attest_with_partial_optimizer(kind, frozen):
    module = build(kind)
    left_out = [param for name, param in module.named_parameters() if name.endswith(HEAD)]
    left_out[0].requires_grad_(not frozen)
    others = [param for param in module.parameters() if param is not left_out[0]]
    return sp.attest(module, torch.optim.AdamW(others))


@pytest.mark.parametrize("kind", ANY)
def test_optimizer_without_a_trainable_parameter(kind):
    findings = findings_of(2, attest_with_partial_optimizer, kind, False)
    assert summary(findings) == {("S211", 0, HEAD), ("S211", 1, HEAD)}


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_optimizer_without_a_frozen_parameter_is_fine(kind):
    assert findings_of(2, attest_with_partial_optimizer, kind, True) == []


def attest_with_early_optimizer(kind):
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    return sp.attest(wrap(model, kind), optimizer)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1_flat"])
def test_optimizer_built_before_sharding(kind):
    findings = findings_of(2, attest_with_early_optimizer, kind)
    assert {(finding.code, finding.rank) for finding in findings} == {
        ("S211", 0),
        ("S212", 0),
        ("S211", 1),
        ("S212", 1),
    }


def attest_with_foreign_parameter(rank):
    model = make_model("llama")
    foreign = [nn.Parameter(torch.zeros(7))] if dist.get_rank() == rank else []
    return sp.attest(model, torch.optim.SGD([*model.parameters(), *foreign], lr=1.0))


def test_optimizer_with_a_parameter_of_no_model():
    (finding,) = findings_of(2, attest_with_foreign_parameter, 1)
    assert (finding.code, finding.rank) == ("S212", 1)
    assert "(7,)" in finding.message


def attest_models_that_differ(rank, change):
    model = make_model("llama")
    if dist.get_rank() == rank:
        change(model)
    return sp.attest(model)


def add_bias(model):
    model.lm_head.bias = nn.Parameter(torch.ones(101))


def drop_layer(model):
    del model.model.layers[1]


@pytest.mark.parametrize("change", [add_bias, drop_layer])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_different_tensors(rank, change):
    findings = findings_of(2, attest_models_that_differ, rank, change)
    assert [finding.code for finding in findings] == ["S213"]
    assert findings[0].rank == 1
    assert findings[0].tensor.startswith("lm_head.bias" if change is add_bias else "model.layers.1.")


def attest_other_order():
    names = ["one", "two"] if dist.get_rank() == 0 else ["two", "one"]
    module = nn.Module()
    for name in names:
        module.add_module(name, nn.Linear(4, 4))
    return sp.attest(module)


def test_tensors_in_another_order_are_not_passed_over():
    # The two ranks draw the same numbers for layers of different names, so every tensor differs.
    findings = findings_of(2, attest_other_order)
    assert findings != []
    assert {finding.code for finding in findings} <= {"S207", "S213"}


# Attest never raises.


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        if dist.get_rank() == 1:
            self.linear = nn.LazyLinear(3)
        else:
            self.linear = nn.Linear(2, 3)


class Odd(nn.Module):
    """Tensors of types that cannot be summed or viewed as others can."""

    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.ones(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("none", torch.empty(0))
        self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())


def attest_made(make):
    return sp.attest(make())


def identity():
    return nn.Identity()


def plain_linear():
    return nn.Linear(3, 3)


@pytest.mark.parametrize("make", [identity, plain_linear, Odd])
def test_module_that_is_no_hugging_face_model(make):
    assert findings_of(2, attest_made, make) == []


def test_module_that_cannot_be_looked_at():
    assert findings_of(2, attest_made, Lazy) != []


def spoil_config(module):
    hf_model(module).config.hidden_act = "no such function"


def test_check_that_fails_is_a_finding():
    findings = findings_of(2, attest_spoiled, "plain", spoil_config)
    assert summary(findings) == {("L100", 0, None), ("L100", 1, None)}
    assert "a check failed" in findings[0].message
