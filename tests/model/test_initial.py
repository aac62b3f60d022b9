"""How a model initialises itself, recorded on the meta device, and drawn piece by piece."""

from functools import cache

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardproof.model import initial
from shardproof.model.initial import InitSpec, draw, initialise_whole, record_initialisation
from shardproof.model.inventory import take_inventory
from shardproof.model.skeleton import build_skeleton
from tests.models import EXTRA_FAMILIES, FAMILIES, tiny_config


@cache
def recorded(family):
    """(inventory, specs) of a tiny skeleton."""
    model = build_skeleton(tiny_config(family), role="policy").model
    return take_inventory(model), record_initialisation(model)


def hybrid_config():
    """A linear-attention family, whose decay rates are no draw from one distribution."""
    return AutoConfig.for_model(
        "qwen3_next",
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    )


@pytest.mark.parametrize(
    ("family", "name", "spec"),
    [
        ("llama", "model.embed_tokens.weight", "normal(0, 0.1)"),
        ("llama", "model.layers.1.self_attn.q_proj.weight", "normal(0, 0.1)"),
        ("llama", "model.layers.1.input_layernorm.weight", "constant(1)"),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", "normal(0, 0.1)"),
        ("qwen3_moe", "model.layers.0.mlp.experts.down_proj", "normal(0, 0.1)"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "normal(0, 0.1)"),
        ("qwen3_moe", "model.layers.0.self_attn.q_norm.weight", "constant(1)"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", "normal(0, 0.1)"),
        # Residual projections are scaled by 1 / sqrt(2 * layers), in a second pass of the block's own initialisation.
        ("gpt2", "transformer.h.0.attn.c_proj.weight", "normal(0, 0.05)"),
        ("gpt2", "transformer.h.1.mlp.c_proj.weight", "normal(0, 0.05)"),
        ("gpt2", "transformer.h.1.mlp.c_proj.bias", "constant(0)"),
        ("gpt2", "transformer.ln_f.bias", "constant(0)"),
        ("cohere", "model.norm.weight", "constant(1)"),
        ("cohere", "model.layers.0.self_attn.k_norm.weight", "constant(1)"),
        ("cohere", "model.layers.0.mlp.down_proj.weight", "normal(0, 0.1)"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", "constant(0)"),
    ],
)
def test_kinds(family, name, spec):
    assert str(recorded(family)[1][name]) == spec


@pytest.mark.parametrize("family", FAMILIES + EXTRA_FAMILIES)
def test_every_stored_tensor_is_drawn_as_transformers_draws_it(family):
    """The same distribution, tensor by tensor; rows that are zero there, such as the padding token's, are zero here."""
    inventory, specs = recorded(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = dict(AutoModelForCausalLM.from_config(tiny_config(family)).named_parameters())
    for info in inventory.stored:
        spec = specs[info.name]
        assert spec.kind in ("normal", "uniform", "constant"), info.name
        if info.is_buffer:
            continue
        expected = reference[info.name].detach()
        drawn = draw(spec, 0, info.shape, 0, info.numel).view(info.shape)
        if spec.kind == "constant":
            assert torch.equal(drawn, expected), info.name
            continue
        assert torch.equal(drawn == 0, expected == 0), f"{info.name}: other elements are zero"
        if info.numel >= 256:  # of fewer numbers the deviation says little
            # Five standard errors of the difference between two samples' deviations.
            tolerance = 5 / info.numel**0.5
            assert drawn.std().item() == pytest.approx(expected.std().item(), rel=tolerance), info.name
            assert abs(drawn.mean() - expected.mean()).item() < expected.std().item() * 2**0.5 * tolerance


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe", "cohere"])
def test_the_padding_row_is_zero(family):
    spec = recorded(family)[1]["model.embed_tokens.weight"]
    assert spec.rows == {0: 0.0}
    drawn = draw(spec, 0, (101, 32), 0, 101 * 32).view(101, 32)
    assert not drawn[0].any()
    assert drawn[1:].all()


SPECS = [
    InitSpec("normal", "normal", 0.5, 2.0),
    InitSpec("uniform", "uniform", -0.25, 0.75),
    InitSpec("constant", "constant", 3.0),
    InitSpec("with zero rows", "normal", 0.0, 1.0, rows={0: 0.0, 6: 0.0, 9: 4.0}),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("block", [1, 7, 16, 64, 1 << 20])
def test_any_part_equals_the_same_part_of_the_whole(monkeypatch, spec, block):
    monkeypatch.setattr(initial, "_BLOCK", block)
    shape = (10, 13)
    whole = draw(spec, 3, shape, 0, 130)
    assert whole.dtype == torch.float32
    for start in range(0, 131, 5):
        for stop in range(start, 131, 3):
            assert torch.equal(draw(spec, 3, shape, start, stop), whole[start:stop]), (start, stop)


def test_parts_across_the_border_of_a_real_block():
    spec = InitSpec("w", "normal", 0.0, 1.0)
    numel = initial._BLOCK + 1000
    whole = draw(spec, 0, (numel,), 0, numel)
    for start, stop in [
        (initial._BLOCK - 3, initial._BLOCK + 5),
        (initial._BLOCK, numel),
        (5, initial._BLOCK + 1),
    ]:
        assert torch.equal(draw(spec, 0, (numel,), start, stop), whole[start:stop])
    assert not torch.equal(whole[:1000], whole[initial._BLOCK :])


def test_draws_depend_on_seed_and_name_alone():
    spec = InitSpec("w", "normal", 0.0, 1.0)
    values = draw(spec, 0, (1000,), 0, 1000)
    torch.manual_seed(99)
    assert torch.equal(draw(spec, 0, (1000,), 0, 1000), values)
    assert not torch.equal(draw(spec, 1, (1000,), 0, 1000), values)
    assert not torch.equal(draw(InitSpec("v", "normal", 0.0, 1.0), 0, (1000,), 0, 1000), values)
    assert values.mean().item() == pytest.approx(0.0, abs=0.15)
    assert values.std().item() == pytest.approx(1.0, abs=0.1)


def test_uniform_draws_stay_inside_their_bounds():
    values = draw(InitSpec("w", "uniform", -0.25, 0.75), 0, (5000,), 0, 5000)
    assert -0.25 <= values.min() < -0.2
    assert 0.7 < values.max() < 0.75


def test_recording_moves_no_random_state_and_allocates_nothing():
    model = build_skeleton(tiny_config("qwen3_moe"), role="policy").model
    before = torch.get_rng_state()
    record_initialisation(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize(
    ("init", "spec_a"), [(True, f"uniform({-(32**-0.5):g}, {32**-0.5:g})"), ("gaussian", "normal(0, 0.25)")]
)
def test_adapters_answer_for_themselves(init, spec_a):
    """peft's initialisation, not the model's: a bound of 1 / sqrt(fan in), or a deviation of 1 / r; B is zero."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    model = build_skeleton(tiny_config("llama"), role="policy", lora=lora).model
    specs = record_initialisation(model)
    assert str(specs["model.layers.0.self_attn.q_proj.lora_A.default.weight"]) == spec_a
    assert str(specs["model.layers.0.self_attn.q_proj.lora_B.default.weight"]) == "constant(0)"


def test_a_value_head_is_drawn_as_a_linear_layer():
    model = build_skeleton(tiny_config("llama"), role="critic").model
    assert str(record_initialisation(model)["score.weight"]) == "normal(0, 0.1)"


def test_what_no_distribution_describes_is_left_to_its_module():
    model = build_skeleton(hybrid_config(), role="policy").model
    spec = record_initialisation(model)["model.layers.0.linear_attn.A_log"]
    assert spec.kind == "module"
    assert "model.layers.0.linear_attn" in str(spec)
    values = initialise_whole(spec, seed=0)
    assert values.shape == (4,)
    assert torch.isfinite(values).all()
    torch.manual_seed(99)
    assert torch.equal(initialise_whole(spec, seed=0), values)
    assert not torch.equal(initialise_whole(spec, seed=1), values)
