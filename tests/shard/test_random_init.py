"""`RandomInit`: one seed gives one model, whatever the number of ranks, the strategy and the layout."""

import pytest
import torch

import shardproof as sp
from shardproof.digest import digest
from shardproof.model.initial import initialise_whole, record_initialisation
from shardproof.model.skeleton import build_skeleton
from tests.model.test_initial import hybrid_config
from tests.models import make_model, tiny_config
from tests.ranks import run_ranks
from tests.shard.test_load import full_state, replicated_mesh

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

FAMILIES = ("qwen3", "qwen3_moe", "gpt2", "deepseek_v3", "gemma3_text", "llama")
# Compared with FSDP2 on one rank.
LAYOUTS = [
    *(("fsdp1", 1, 1), ("fsdp1", 3, 1), ("fsdp1", 4, 2)),
    *(("fsdp2", 2, 1), ("fsdp2", 3, 1), ("fsdp2", 4, 2)),
]


def load(config, strategy, replicas=1, *, seed=0, **options):
    mesh = replicated_mesh(replicas) if replicas > 1 else None
    source = sp.RandomInit(config, seed=seed)
    settings = {"compute_dtype": torch.float32, "device": "cpu", **options}
    return sp.load(source, strategy=strategy, mesh=mesh, **settings)


def digests(configs, strategy, replicas=1, options=None):
    """{label: {name: digest of the whole tensor}}."""
    policies = {
        label: load(config, strategy, replicas, **(options or {})) for label, config in configs.items()
    }
    return {
        label: {n: digest(t) for n, t in full_state(policy).items()} for label, policy in policies.items()
    }


def whole_weights(config, strategy, options):
    policy = load(config, strategy, **options)
    return full_state(policy), {name: str(writer) for name, writer in policy.provenance.items()}


@pytest.fixture(scope="module")
def configs():
    return {family: tiny_config(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(configs):
    return run_ranks(1, digests, configs, "fsdp2")[0]


@pytest.mark.parametrize(("strategy", "num_ranks", "replicas"), LAYOUTS)
def test_weights_are_the_same_in_every_layout(configs, expected, strategy, num_ranks, replicas):
    for reply in run_ranks(num_ranks, digests, configs, strategy, replicas):
        odd = {
            family: [name for name in names if reply[family].get(name) != names[name]]
            for family, names in expected.items()
        }
        assert {family: names for family, names in odd.items() if names} == {}
        assert {family: set(names) for family, names in reply.items()} == {
            family: set(names) for family, names in expected.items()
        }


@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [("fsdp1", 1), ("fsdp1", 2), ("fsdp1", 4), ("fsdp2", 1), ("fsdp2", 3)]
)
def test_tensors_that_only_their_module_can_initialise(strategy, num_ranks):
    """Decay rates of linear attention: written by the module's own code, and still the same everywhere."""
    unsharded = make_hybrid_decay(seed=0)
    for state, provenance in run_ranks(num_ranks, whole_weights, hybrid_config(), strategy, {}):
        name = "model.layers.0.linear_attn.A_log"
        assert provenance[name].startswith("init: _init_weights of model.layers.0.linear_attn")
        assert torch.equal(state[name], unsharded)


def make_hybrid_decay(seed):
    model = build_skeleton(hybrid_config(), role="policy").model
    return initialise_whole(record_initialisation(model)["model.layers.0.linear_attn.A_log"], seed)


def test_another_seed_gives_other_weights(configs, expected):
    (other,) = run_ranks(1, digests, configs, "fsdp2", 1, {"seed": 1})
    for family, names in expected.items():
        changed = {name for name, value in names.items() if other[family][name] != value}
        assert [name for name in changed if "down_proj" in name or "c_proj.weight" in name]
        # What is constant, such as norms, biases and rotary frequencies, has no seed.
        assert not [name for name in changed if "norm" in name or name.endswith(("bias", "inv_freq"))]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_no_two_tensors_are_alike(configs, strategy):
    """A generator seeded once per tensor, without its name, would draw the same numbers again and again."""
    ((state, _),) = run_ranks(1, whole_weights, configs["qwen3"], strategy, {})
    heads = [tuple(tensor.reshape(-1)[64:72].tolist()) for tensor in state.values() if tensor.ndim == 2]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_padding_row_is_zero_and_no_other(configs, family):
    assert configs[family].pad_token_id == 0
    for state, _ in run_ranks(2, whole_weights, configs[family], "fsdp2", {}):
        embedding = state["model.embed_tokens.weight"]
        assert not embedding[0].any()
        assert embedding[1:].any(dim=1).all()


def test_weights_stored_in_bfloat16_are_the_float32_weights_rounded(configs):
    ((exact, _),) = run_ranks(1, whole_weights, configs["qwen3_moe"], "fsdp2", {})
    for rounded, _ in run_ranks(
        2, whole_weights, configs["qwen3_moe"], "fsdp1", {"param_dtype": torch.bfloat16}
    ):
        for name, value in exact.items():
            assert torch.equal(rounded[name], value if name.endswith("inv_freq") else value.bfloat16()), name


def test_provenance_says_how_each_tensor_was_drawn(configs):
    ((_, provenance),) = run_ranks(1, whole_weights, configs["gpt2"], "fsdp2", {"seed": 5})
    assert provenance["transformer.h.0.attn.c_proj.weight"] == "init: normal(0, 0.05), seed 5"
    assert provenance["transformer.ln_f.weight"] == "init: constant(1), seed 5"
    assert provenance["lm_head.weight"] == "tie: transformer.wte.weight"


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_the_value_head_of_a_critic_is_the_same_on_any_number_of_ranks(configs, strategy):
    ((reference, _),) = run_ranks(1, whole_weights, configs["qwen3"], "fsdp2", {"role": "critic"})
    assert reference["score.weight"].shape == (1, 32)
    assert reference["score.weight"].std() > 0.01
    for num_ranks in (1, 2, 3):
        for state, _ in run_ranks(num_ranks, whole_weights, configs["qwen3"], strategy, {"role": "critic"}):
            assert torch.equal(state["score.weight"], reference["score.weight"])


def test_a_random_model_computes(configs):
    """The scale of the weights is the family's own: logits of a fresh model are close to those of transformers' own."""
    ((state, _),) = run_ranks(1, whole_weights, configs["llama"], "fsdp2", {})
    model = make_model("llama")
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 23).view(1, 20)).logits
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
