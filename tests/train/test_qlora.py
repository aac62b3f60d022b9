"""A frozen base in 4 bits: its values, training on it, what is exported and saved, and that nothing may change it."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config

import shardproof as sp
from shardproof.config.load import load_recipe
from shardproof.config.vllm import VllmSettings
from shardproof.dist.mesh import make_mesh
from shardproof.model import nf4
from shardproof.rl.sizing.model import Sharding, held_bytes, shape_of
from shardproof.rollout.vllm_engine import VllmEngine
from tests.models import tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import TINY, lines, run_recipe, small_recipe
from tests.shard.test_bad_checkpoints import assert_all_raise

CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=72,  # rows that are not a multiple of a block
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6]]
Q_PROJ = "model.layers.1.self_attn.q_proj.base_layer.weight"


def adapters():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def load(source=None, base="nf4", **settings):
    settings = {"compute_dtype": torch.float32, "lora": adapters(), "lora_base": base} | settings
    return sp.load(source or sp.RandomInit(CONFIG, seed=0), **settings)


def train(policy, optimizer, steps=2):
    """Log-probs after some steps, and the trained weights."""
    for _ in range(steps):
        old = sp.logprobs(policy, SEQUENCES)
        batch = sp.Batch(SEQUENCES, advantages=[0.7, -0.7], old_logps=old)
        batch = sp.weigh(batch, "sequence_mean", share=policy.sequence_parallel)
        assert sp.train_step(policy, batch, optimizer, loss="policy").stepped
    return [row.tolist() for row in sp.logprobs(policy, SEQUENCES)], trained(policy)


def trained(policy):
    return {
        name: param.full_tensor().tolist() for name, param in policy.named_parameters() if param.requires_grad
    }


def by_hand(weight):
    """NF4 of a matrix as QLoRA describes it, block by block, in numpy."""
    code, found = np.array(nf4.CODE, np.float32), np.zeros_like(weight)
    for row in range(len(weight)):
        for at in range(0, weight.shape[1], 64):
            block = weight[row, at : at + 64]
            scale = np.abs(block).max()
            nearest = np.abs(block[:, None] / scale - code).argmin(1)
            found[row, at : at + 64] = code[nearest] * scale
    return found


@pytest.mark.parametrize("columns", [64, 128, 72, 33, 1])
def test_values_are_those_of_the_published_scheme(columns):
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)) * 0.02
    packed = nf4.quantise(weight)
    assert packed.shape == (9, nf4.width(columns)) and packed.dtype == torch.uint8
    found = nf4.dequantise(packed, columns, torch.float32)
    assert torch.equal(found, torch.from_numpy(by_hand(weight.numpy())))
    assert torch.equal(nf4.dequantise(packed, columns, torch.bfloat16), found.bfloat16())
    assert torch.equal(nf4.quantise(found), packed)  # what it says is what it holds
    zeros = nf4.dequantise(nf4.quantise(torch.zeros(2, columns)), columns, torch.float32)
    assert torch.equal(zeros, torch.zeros(2, columns))


def test_the_code_book_is_the_published_one():
    """Quantiles of the normal distribution, as the paper's appendix says: 8 below zero, 9 above, scaled to 1."""
    offset = 0.9677083
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    expected = torch.cat([above, torch.zeros(1), below]).sort().values
    assert torch.allclose(torch.tensor(nf4.CODE), expected / expected.max(), atol=2e-6)


def test_gradients_flow_through_and_not_into_the_weight():
    layer = torch.nn.Linear(64, 5)
    plain = torch.nn.Linear(64, 5)
    packed = nf4.quantise(layer.weight.detach())
    plain.weight.data = nf4.dequantise(packed, 64, torch.float32)
    plain.bias.data = layer.bias.data
    layer.__class__ = nf4.Nf4Linear
    layer.weight = torch.nn.Parameter(packed.view(torch.float32), requires_grad=False)
    states = torch.randn(2, 3, 64, requires_grad=True)
    found, wanted = (torch.autograd.grad(each(states).square().sum(), states)[0] for each in (layer, plain))
    assert torch.equal(found, wanted) and layer.weight.grad is None
    torch.library.opcheck(nf4._linear, (states, packed, 64), test_utils=("test_schema", "test_faketensor"))


def save_plain(folder):
    """A folder with the values of the base in 4 bits, and what training on the base gave."""
    policy = load()
    receipt = sp.save_pretrained(policy, folder / "plain", dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    results = train(policy, optimizer)
    sp.save_pretrained(policy, folder / "merged", dtype=torch.float32)
    sp.save_pretrained(policy, folder / "adapters", merge_lora=False)
    sp.save_checkpoint(folder / "run", policy, optimizer)
    after = train(policy, optimizer, 1)
    return results, after, receipt.num_tensors, sp.attest(policy, optimizer)


def train_plain(folder):
    policy = load(folder / "plain", base=None)
    return train(policy, sp.make_optimizer(policy, lr=1e-2))


def go_on(folder):
    policy = load()
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    sp.resume(folder / "run", policy, optimizer)
    return train(policy, optimizer, 1)


def close(one, other, tolerance=2e-5):
    for mine, theirs in ((one[0], other[0]), (one[1].values(), other[1].values())):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=tolerance, rtol=1e-4)


@pytest.mark.distributed
def test_two_ranks_train_on_what_the_base_holds_and_one_goes_on(tmp_path):
    results, after, num_tensors, findings = run_ranks(2, save_plain, tmp_path)[0]
    assert findings == [] and num_tensors == 25
    close(results, run_ranks(1, train_plain, tmp_path)[0])
    close(after, run_ranks(1, go_on, tmp_path)[0])
    wanted = torch.tensor(results[0][0])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logps_of(merged), wanted, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert torch.allclose(logps_of(adapted), wanted, atol=1e-5)


@torch.no_grad()
def logps_of(model):
    """Log-probs of the first sequence, as transformers and peft compute them."""
    ids = torch.tensor([SEQUENCES[0]])
    return model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]


def bytes_held(lora_base):
    policy = load(base=lora_base, param_dtype=torch.float32, compute_dtype=torch.bfloat16)
    shape = shape_of(CONFIG, "policy", torch.float32, adapters(), lora_base=lora_base)
    estimated = held_bytes(shape, Sharding(), 2).parameters - shape.buffer_bytes
    held = {shard.name: shard.nbytes for shard in policy.local_shards()}
    return sum(held.values()), held[Q_PROJ], estimated, policy.provenance[Q_PROJ].detail


@pytest.mark.distributed
def test_a_rank_holds_its_rows_in_4_bits_and_the_estimate_knows(tmp_path):
    total, projection, estimated, detail = run_ranks(2, bytes_held, "nf4")[0]
    assert projection == 32 * 64 * 0.5625 and total == estimated
    assert "held in nf4, digest " in detail


def change_a_byte(what, folder, name=Q_PROJ):
    policy = load()
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    if what == "resume":
        sp.save_checkpoint(folder, policy, optimizer)
    victim = next(shard for shard in policy.local_shards() if shard.name == name)
    if torch.distributed.get_rank() == 1:
        victim.flat.view(torch.uint8)[7] ^= 16
    if what == "save":
        sp.save_checkpoint(folder, policy, optimizer)
    elif what == "export":
        sp.save_pretrained(policy, folder)
    else:
        policy.base_digests = {
            name: digest ^ (name == Q_PROJ) for name, digest in policy.base_digests.items()
        }
        sp.resume(folder, policy, optimizer)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["save", "export", "resume"])
def test_a_changed_base_is_named_on_every_rank(what, tmp_path):
    outcomes = run_ranks_outcomes(2, change_a_byte, what, tmp_path)
    rank = "rank 0" if what == "resume" else "rank 1"
    assert_all_raise(outcomes, "E410", what, rank, Q_PROJ, "frozen base", kind="ExportFault")


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"])
def test_what_of_the_base_is_not_in_4_bits_is_proved_too(name, tmp_path):
    outcomes = run_ranks_outcomes(2, change_a_byte, "save", tmp_path, name)
    assert_all_raise(outcomes, "E410", "save", "rank 1", name, "frozen base", kind="ExportFault")


def load_badly(family, settings):
    config = CONFIG if family == "own" else tiny_config(family)
    if family != "own":
        settings = {"lora": LoraConfig(r=2, target_modules=["q_proj", "c_attn"])} | settings
    load(sp.RandomInit(config), **settings)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("own", {"strategy": "fsdp1"}, ("C001", "fsdp1", "lora_base='nf4'")),
        ("own", {"lora": None}, ("C001", "without lora")),
        ("own", {"lora_base": "int4"}, ("C001", "'nf4'")),
        ("qwen3_moe", {}, ("L113", "experts", "Qwen3Moe")),
        ("gpt2", {}, ("L113", "GPT2", "no block")),
    ],
)
def test_what_cannot_be_is_refused_by_name(family, settings, words):
    (outcome,) = run_ranks_outcomes(1, load_badly, family, settings)
    assert outcome[0] == "error" and all(word in outcome[2] for word in words), outcome


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.lora.base=nf4", "model.strategy=fsdp1"],
        ["algorithm.name=ppo", "critic.lora.base=nf4", "critic.strategy=fsdp1"],
        ["algorithm.name=ppo", "critic.lora.base=nf4", "model.strategy=fsdp1"],
    ],
)
def test_a_recipe_that_would_cut_rows_in_4_bits_is_refused_before_anything_is_loaded(overrides):
    with pytest.raises(sp.ConfigError, match=r"C001.*\n?.*lora\.base='nf4' with strategy='fsdp1'"):
        load_recipe(TINY, overrides)


def serve_adapter():
    VllmEngine(load(), VllmSettings(lora="adapter"))


@pytest.mark.distributed
def test_an_adapter_is_not_served_beside_a_base_that_it_was_not_trained_on():
    """vLLM would load the base as it is on disk; what training computes with is its values in 4 bits."""
    served = ["model.lora.base=nf4", "rollout.engine=vllm", "rollout.vllm.lora=adapter"]
    with pytest.raises(sp.ConfigError, match=r"rollout\.vllm\.lora='adapter' with model\.lora\.base='nf4'"):
        load_recipe(TINY, served)
    assert load_recipe(TINY, [*served, "rollout.vllm.lora=merge"]).model.lora.base == "nf4"
    (outcome,) = run_ranks_outcomes(1, serve_adapter)
    assert outcome[1] == "ConfigError" and "needs a base that vLLM has too, not one in nf4" in outcome[2]


@pytest.mark.distributed
def test_a_run_samples_with_what_it_trains(tmp_path):
    recipe = small_recipe(
        tmp_path, "model.lora.r=4", "model.lora.base=nf4", "output.save_every=1", "train.steps=1"
    )
    run_ranks(2, run_recipe, recipe)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")][-1] == 1
    events = [line for line in lines(tmp_path / "events.jsonl") if line["kind"] == "proof"]
    loads = [line for line in events if line["proof"] == "load"]
    assert all(line["details"]["frozen_base"]["weights"] == 29 for line in loads)
    assert {line["proof"] for line in events} >= {"load", "sync", "checkpoint"}
    assert all(line["passed"] for line in events)


LAYOUTS = {
    "host memory": {"cpu_offload": True},
    "replicas": {"replicate": 2},
    "split sequences": {"sequence_parallel": 2},
    "recomputed": {"checkpoint_activations": True},
}


def train_everywhere(names):
    """A step with 8-bit means on a base in 4 bits, in each layout."""
    found = {}
    for name in names:
        settings = dict(LAYOUTS.get(name, {}))
        if settings.pop("replicate", None):
            settings["mesh"] = make_mesh(replicate=2)
        policy = load(**settings)
        optimizer = sp.make_optimizer(policy, lr=1e-2, eps=1e-4, name="adamw_8bit")
        found[name] = train(policy, optimizer, 1)[0]
        assert policy.changed_base("test") == []
    return found


@pytest.mark.distributed
def test_layouts_agree():
    (alone,) = run_ranks(1, train_everywhere, ["alone"])
    for name, found in run_ranks(2, train_everywhere, list(LAYOUTS))[0].items():
        for mine, theirs in zip(found, alone["alone"], strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=1e-3), name
