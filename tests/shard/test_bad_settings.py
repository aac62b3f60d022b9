"""Settings that cannot be, and ranks that were started with different ones: one error on every rank."""

import random

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardproof as sp
from shardproof.shard.settings import LoadSettings
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def load_random(*options, **fields):
    """Load a tiny random model with this rank's options; with one set of options, all ranks use that."""
    sp.load(sp.RandomInit(tiny_config("llama", **fields)), **options[dist.get_rank() % len(options)])


def load_with_lora(*settings):
    lora = peft.LoraConfig(**{"target_modules": ["q_proj"], **settings[dist.get_rank() % len(settings)]})
    sp.load(sp.RandomInit(tiny_config("llama")), lora=lora)


def assert_refused(outcomes, code, *words):
    assert_all_raise(outcomes, code, *words, kind="ConfigError")


def test_settings_that_are_fine():
    run_ranks(2, load_random, {"role": "critic", "strategy": "fsdp1"})


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"role": "plicy"}, "'policy'"),
        ({"role": "critc"}, "'critic'"),
        ({"strategy": "fsdp"}, "'fsdp2'"),
        ({"strategy": "FSDP1"}, "'fsdp1'"),
    ],
    ids=str,
)
def test_misspelt_choice(option, hint):
    ((key, value),) = option.items()
    outcomes = run_ranks_outcomes(2, load_random, option)
    assert_refused(outcomes, "C001", f"{key}={value!r}", f"Did you mean {hint}?")


@pytest.mark.parametrize("option", [{"role": None}, {"strategy": "zero"}, {"role": 3}], ids=str)
def test_choice_that_resembles_nothing(option):
    ((key, value),) = option.items()
    valid = "policy, reference, critic" if key == "role" else "fsdp2, fsdp1"
    outcomes = run_ranks_outcomes(2, load_random, option)
    assert_refused(outcomes, "C001", f"{key}={value!r}", valid)


@pytest.mark.parametrize("number", [-1, -(10**12)])
def test_activations_of_every_minus_first_block(number):
    outcomes = run_ranks_outcomes(2, load_random, {"checkpoint_activations": number})
    assert_refused(outcomes, "C001", f"checkpoint_activations={number}")


def test_activations_that_cannot_be_chosen_so():
    outcomes = run_ranks_outcomes(2, load_random, {"checkpoint_activations": "some"})
    assert_refused(outcomes, "C001", "checkpoint_activations='some'", "'auto'")


def test_parameters_that_fsdp1_cannot_hold():
    outcomes = run_ranks_outcomes(2, load_random, {"strategy": "fsdp1", "reshard_after_forward": False})
    assert_refused(outcomes, "C001", "reshard_after_forward=False", "fsdp2")


@pytest.mark.parametrize("key", ["param_dtype", "compute_dtype", "reduce_dtype"])
@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16"], ids=str)
def test_dtype_that_is_not_floating(key, dtype):
    assert_refused(run_ranks_outcomes(2, load_random, {key: dtype}), "C001", f"{key}={dtype!r}")


def test_fsdp1_offload_without_an_accelerator():
    option = {"strategy": "fsdp1", "cpu_offload": True, "device": "cpu"}
    assert_refused(run_ranks_outcomes(2, load_random, option), "C001", "cpu_offload", "strategy='fsdp2'")


def test_fsdp1_compiled():
    option = {"strategy": "fsdp1", "compile": True}
    assert_refused(run_ranks_outcomes(2, load_random, option), "C001", "compile=True", "strategy='fsdp2'")


def test_unknown_device():
    assert_refused(run_ranks_outcomes(2, load_random, {"device": "gpu"}), "C001", "device='gpu'")


def load_with_odd_heads(size):
    load_random(
        {"sequence_parallel": size}, num_attention_heads=3, num_key_value_heads=3, head_dim=8, hidden_size=24
    )


def test_sequence_parallel_that_does_not_divide_the_heads():
    assert_refused(
        run_ranks_outcomes(2, load_with_odd_heads, 2), "C001", "sequence_parallel=2", "3 attention"
    )


@pytest.mark.parametrize("size", [0, -2, 3])
def test_sequence_parallel_that_does_not_divide_the_ranks(size):
    outcomes = run_ranks_outcomes(2, load_random, {"sequence_parallel": size})
    assert_refused(outcomes, "C001", f"sequence_parallel={size}", "2 ranks")


def load_untyped(source):
    sp.load(source)


@pytest.mark.parametrize("source", [None, 5, sp.RandomInit("llama")], ids=str)
def test_source_of_another_type(source):
    assert_refused(run_ranks_outcomes(2, load_untyped, source), "C001")


# Meshes.


def make_mesh_of(replicate, shard):
    sp.make_mesh(replicate=replicate, shard=shard)


@pytest.mark.parametrize(("replicate", "shard"), [(3, None), (0, None), (1, 3), (2, 2)])
def test_mesh_that_is_not_all_ranks(replicate, shard):
    outcomes = run_ranks_outcomes(2, make_mesh_of, replicate, shard)
    assert_refused(outcomes, "C002", f"replicate={replicate}", "2 ranks")


def load_on_part_of_a_mesh(ranks_with_it):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    load_random({"mesh": mesh if dist.get_rank() in ranks_with_it else None})


def load_on_named_mesh(*names):
    load_random({"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=names)})


def test_mesh_that_does_not_cover_the_ranks():
    outcomes = run_ranks_outcomes(2, load_on_part_of_a_mesh, [0, 1])
    assert_refused(outcomes, "C002", "the mesh has 1 ranks", "2")


def test_mesh_with_other_axes():
    assert_refused(
        run_ranks_outcomes(2, load_on_named_mesh, "dp", "tp"), "C002", "dp", "('replicate', 'shard')"
    )


def test_mesh_that_one_rank_alone_passes():
    outcomes = run_ranks_outcomes(2, load_on_part_of_a_mesh, [1], timeout=20, group_timeout=5)
    kinds = [outcome[1] for outcome in outcomes]
    assert kinds == ["ConfigError", "ConfigError"], outcomes
    assert outcomes[0] == outcomes[1]


# Ranks with different settings.


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("role", "policy", "reference"),
        ("strategy", "fsdp2", "fsdp1"),
        ("param_dtype", torch.float32, torch.bfloat16),
        ("reduce_dtype", torch.float32, torch.bfloat16),
        ("cpu_offload", False, True),
        ("sequence_parallel", 1, 2),
        ("checkpoint_activations", False, True),
        ("checkpoint_activations", True, "auto"),
        ("reshard_after_forward", True, False),
        ("revision", None, "v2"),
        ("attn_implementation", "eager", "sdpa"),
    ],
)
def test_ranks_with_different_settings(key, one, other):
    outcomes = run_ranks_outcomes(2, load_random, {key: one}, {key: other})
    assert_refused(outcomes, "C003", "rank 1", key, str(one), str(other))


@pytest.mark.parametrize("option", [{"role": "plicy"}, {"device": "gpu"}], ids=str)
def test_setting_that_is_bad_on_one_rank(option):
    ((key, value),) = option.items()
    outcomes = run_ranks_outcomes(2, load_random, {}, option, timeout=20, group_timeout=5)
    assert_refused(outcomes, "C001", f"{key}={value!r}")


def load_own_random(*fields_and_seeds):
    fields, seed = fields_and_seeds[dist.get_rank()]
    sp.load(sp.RandomInit(tiny_config("llama", **fields), seed=seed))


@pytest.mark.parametrize("other", [({}, 1), ({"rms_norm_eps": 1e-3}, 0)], ids=["seed", "config"])
def test_ranks_with_different_random_models(other):
    assert_refused(run_ranks_outcomes(2, load_own_random, ({}, 0), other), "C003", "rank 1", "seed")


def load_folder_or_random(folder, random_rank):
    sp.load(sp.RandomInit(tiny_config("llama")) if dist.get_rank() == random_rank else folder)


@pytest.mark.parametrize("random_rank", [0, 1])
def test_folder_on_one_rank_and_random_weights_on_the_other(tmp_path, random_rank):
    folder = make_checkpoint(tmp_path, "llama")
    outcomes = run_ranks_outcomes(2, load_folder_or_random, folder, random_rank, timeout=20, group_timeout=5)
    assert_refused(outcomes, "C003", "rank 1")


# LoRA.


def test_plain_lora_is_fine():
    run_ranks(2, load_with_lora, {"init_lora_weights": "gaussian", "use_rslora": True})


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters=['mlp.up_proj.weight']"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2}}, "use_bdlora"),
        ({"velora_config": {}}, "velora_config"),
        ({"kasa_config": peft.KasaConfig()}, "kasa_config"),
        ({"monteclora_config": peft.MontecloraConfig()}, "monteclora_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_lora_variant_is_refused_by_name(setting, named):
    assert_all_raise(run_ranks_outcomes(2, load_with_lora, setting), "L113", named)


def test_lora_on_layers_that_do_not_exist():
    outcomes = run_ranks_outcomes(2, load_with_lora, {"target_modules": ["q_porj"]})
    assert_all_raise(outcomes, "L113", "q_porj")


@pytest.mark.parametrize("lora", [{"r": 8}, peft.LoKrConfig(target_modules=["q_proj"])], ids=["dict", "LoKr"])
def test_lora_that_is_not_a_lora_config(lora):
    outcomes = run_ranks_outcomes(2, load_random, {"lora": lora})
    assert_all_raise(outcomes, "L113", type(lora).__name__, "peft.LoraConfig")


def test_ranks_with_different_lora():
    assert_refused(run_ranks_outcomes(2, load_with_lora, {"r": 8}, {"r": 4}), "C003", "rank 1", "lora")


def described_lora(names):
    options = dict.fromkeys(LoadSettings.__dataclass_fields__)
    options.update(device=torch.device("cpu"), lora=peft.LoraConfig(target_modules=names))
    return LoadSettings(**options).described()["lora"]


def test_order_of_target_modules_is_no_difference():
    # peft keeps them in a set, which every process prints in an order of its own.
    names = [
        f"{layer}.{name}" for layer in range(3) for name in ("q_proj", "k_proj", "v_proj", "up", "down", "o")
    ]
    orders = [random.Random(seed).sample(names, len(names)) for seed in range(20)]
    assert len({str(set(order)) for order in orders}) > 1
    assert len({described_lora(order) for order in orders}) == 1


@pytest.mark.parametrize("rank", [10**9, 0, -1])
def test_rank_of_adapters(rank):
    option = {"r": rank} if rank > 0 else {"rank_pattern": {"q_proj": rank}}
    outcomes = run_ranks_outcomes(1, load_with_lora, option)
    assert outcomes[0][:2] == ("error", "LoadFault"), outcomes
    assert outcomes[0][2].startswith("L113 "), outcomes
