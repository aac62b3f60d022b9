"""Settings that cannot be, and ranks that were started with different ones: one error on every rank."""

import copy
import itertools
import math
import os
import random
import re
import shutil
import types
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import shardproof as sp
from shardproof.cli import app
from shardproof.config.load import load_recipe, parse_recipe
from shardproof.config.schema import Recipe, keys_of
from shardproof.rl.checks import check_inputs
from shardproof.rollout.engine import Sampling
from shardproof.shard.settings import LoadSettings
from shardproof.train.loss import policy_gradient, value
from shardproof.train.optim import make_optimizer, make_schedule
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise, edit_config

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


# Recipes: every number.

RECIPE = {
    "model": {"path": "models/any"},
    "data": {"train": "rows.jsonl"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "train": {"steps": 1},
    "output": {"folder": "runs/any"},
}
# What a section needs of others before it may be there.
COMPANIONS = {
    "critic": {"algorithm": {"name": "ppo"}},
    "reference": {"algorithm": {"kl_coef": 0.1}},
    "optimizer": {"optimizer": {"name": "muon"}},
}
ODD_NUMBERS = (-1, 0, math.nan, math.inf, -math.inf, 10**12, 1e300)


def numbers_in(kind, path=()):
    """The path of every number that a type of the schema holds: nested, optional, and inside of lists and tuples."""
    if kind in (int, float):
        yield path
    elif get_origin(kind) is None and isinstance(kind, type):
        for name, annotation in keys_of(kind).items():
            yield from numbers_in(annotation, (*path, name))
    elif get_origin(kind) is Annotated:
        yield from numbers_in(get_args(kind)[0], path)
    elif get_origin(kind) in (Union, types.UnionType):
        for part in get_args(kind):
            yield from numbers_in(part, path)
    elif get_origin(kind) in (list, tuple):
        for index, part in enumerate(get_args(kind)):
            yield from numbers_in(part, (*path, index))


NUMBERS = sorted({".".join(map(str, path)): path for path in numbers_in(Recipe)}.items())


def recipe_with(path, value):
    """The recipe above with one number changed."""
    data = copy.deepcopy(RECIPE)
    for section, fields in COMPANIONS.get(path[0], {}).items():
        data.setdefault(section, {}).update(fields)
    target = data
    for part, following in itertools.pairwise(path):
        if isinstance(following, int):  # both betas, or the one reward
            target = target.setdefault(part, [0.5, 0.5])
        else:
            target = target[part] if isinstance(part, int) else target.setdefault(part, {})
    target[path[-1]] = value
    return data


def documented_numbers():
    """{key: values} of the table in docs/faults.md: what -1, 0 and huge numbers mean where they mean something."""
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (-?[0-9, *-]+) \| .+ \|$", text, re.MULTILINE)
    return {key: {eval(value) for value in values.split(",")} for key, values in rows}


def test_the_walk_finds_every_kind_of_number():
    keys = [key for key, _ in NUMBERS]
    expected = [
        "critic.lr",
        "optimizer.betas.0",
        "optimizer.betas.1",
        "reward.functions.0.weight",
        "model.lora.r",
    ]
    expected += [
        "model.checkpoint_activations",
        "rollout.vllm.port",
        "rollout.canary_tolerance",
        "train.seed",
    ]
    assert set(expected) <= set(keys)
    assert len(keys) > 45


@pytest.mark.parametrize(("key", "path"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_every_number_of_a_recipe_has_bounds(key, path):
    meaningful = documented_numbers().get(key, set())
    for number in ODD_NUMBERS:
        if number in meaningful:
            parse_recipe(recipe_with(path, number), "recipe")
            continue
        with pytest.raises(sp.ConfigError) as caught:
            parse_recipe(recipe_with(path, number), "recipe")
        assert caught.value.code == "C001"
        assert key in str(caught.value), f"{key}={number}"


def test_documented_numbers_are_numbers_of_the_schema():
    assert documented_numbers().keys() <= {key for key, _ in NUMBERS}


@pytest.mark.parametrize("value", ["none", 0.3])
def test_limits_that_may_be_off(value):
    for key in ("tis_cap", "value_clip", "clip_high"):
        parse_recipe(recipe_with(("algorithm", key), value), "recipe")
    parse_recipe(recipe_with(("optimizer", "max_grad_norm"), value), "recipe")


# Recipes: whole files.

BAD_RECIPES = {
    "not UTF-8": b"[model]\npath = '\xff\xfe'",
    "too deep": b"x = " + b"[" * 20_000 + b"]" * 20_000,
    "tables too deep": b"[" + b".".join([b"a"] * 20_000) + b"]",
    "a number of many digits": b"[train]\nsteps = " + b"9" * 10_000,
    "no TOML": b"{",
    "a NUL": b"\0",
    "a long path": b"[model]\npath = '" + b"x" * 100_000 + b"'",
    "many unknown keys": b"\n".join(b"key%d = 1" % index for index in range(5_000)),
    "too large": b"#" * (2 * 2**20),
}


@pytest.mark.parametrize("content", BAD_RECIPES.values(), ids=BAD_RECIPES.keys())
def test_recipe_file_that_cannot_be_used(tmp_path, content):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(sp.ConfigError) as caught:
        load_recipe(path)
    assert caught.value.code == "C001"
    assert "recipe.toml" in str(caught.value)
    assert len(str(caught.value)) < 5_000


def test_recipe_that_is_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "recipe.toml"
    os.mkfifo(path)
    with pytest.raises(sp.ConfigError, match="not a regular file"):
        load_recipe(path)


def test_recipe_that_is_not_there_is_told_what_to_pass(tmp_path):
    with pytest.raises(sp.ConfigError, match="cannot be opened: No such file or directory") as caught:
        load_recipe(tmp_path / "recipe.toml")
    assert "Fix: pass a recipe, a TOML file" in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 10_000, "[" * 20_000, "\x1b[31m", "nan", "-1"])
def test_override_that_cannot_be_used(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text("[model]\npath = 'm'\n[data]\ntrain = 'd'\n[train]\nsteps = 1\n[output]\nfolder = 'o'\n")
    with pytest.raises(sp.ConfigError, match=r"train\.steps"):
        load_recipe(path, [f"train.steps={text}", "algorithm.name=sft"])


# Arguments of the library.

BAD_ARGUMENTS = {
    "clip_low=nan": lambda: policy_gradient(clip_low=math.nan),
    "clip_low=-1": lambda: policy_gradient(clip_low=-1),
    "clip_high=-1": lambda: policy_gradient(clip_high=-1),
    "kl_coef=-1": lambda: policy_gradient(kl_coef=-1),
    "entropy_coef=inf": lambda: policy_gradient(entropy_coef=math.inf),
    "clip=0": lambda: value(clip=0),
    "clip=nan": lambda: value(clip=math.nan),
    "max_new_tokens=0": lambda: Sampling(0),
    "temperature=nan": lambda: Sampling(1, temperature=math.nan),
    "temperature=-1": lambda: Sampling(1, temperature=-1.0),
    "top_p=0": lambda: Sampling(1, top_p=0.0),
    "top_p=1.5": lambda: Sampling(1, top_p=1.5),
    "lr=nan": lambda: make_optimizer(None, lr=math.nan),
    "lr=-1": lambda: make_optimizer(None, lr=-1),
    "weight_decay=-1": lambda: make_optimizer(None, weight_decay=-1),
    "betas[0]=1.5": lambda: make_optimizer(None, betas=(1.5, 0.9)),
    "betas[1]=nan": lambda: make_optimizer(None, betas=(0.9, math.nan)),
    "eps=-1": lambda: make_optimizer(None, eps=-1),
    "warmup_steps=-1": lambda: make_schedule(None, warmup_steps=-1),
    "total_steps=-1": lambda: make_schedule(None, "cosine", total_steps=-1),
    "final_ratio=nan": lambda: make_schedule(None, final_ratio=math.nan),
}


@pytest.mark.parametrize("named", BAD_ARGUMENTS)
def test_argument_outside_of_its_bounds(named):
    with pytest.raises(sp.ConfigError, match=re.escape(named)) as caught:
        BAD_ARGUMENTS[named]()
    assert caught.value.code == "C001"


def step_with(**options):
    policy = sp.load(sp.RandomInit(tiny_config("llama")), compute_dtype=torch.float32)
    before = [param.detach().clone() for param in policy.parameters()]
    try:
        sp.train_step(policy, sp.Batch([[1, 2, 3]]), make_optimizer(policy, lr=1e-2), **options)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(
    "option",
    [{"max_grad_norm": -1.0}, {"max_grad_norm": 0}, {"max_grad_norm": math.nan}, {"micro_batch_tokens": 0}]
    + [{"temperature": math.nan}, {"router_coef": math.inf}, {"deadline_s": -1.0}],
    ids=str,
)
def test_step_with_a_number_outside_of_its_bounds(option):
    ((key, number),) = option.items()
    outcomes = run_ranks_outcomes(1, step_with_options, option)
    assert_refused(outcomes, "C001", f"{key}={number}")


def step_with_options(options):
    step_with(**options)


@pytest.mark.parametrize("rank", [10**9, 0, -1])
def test_rank_of_adapters(rank):
    option = {"r": rank} if rank > 0 else {"rank_pattern": {"q_proj": rank}}
    outcomes = run_ranks_outcomes(1, load_with_lora, option)
    assert outcomes[0][:2] == ("error", "LoadFault"), outcomes
    assert outcomes[0][2].startswith("L113 "), outcomes


def test_tokenizer_with_ids_that_the_model_does_not_have(tmp_path):
    root = Path(__file__).parents[2] / "recipes"
    model = Path(shutil.copytree(root / "tiny" / "model", tmp_path / "model"))
    edit_config(model, vocab_size=5)
    recipe = load_recipe(root / "tiny.toml", [f"model.path={model}", f"output.folder={tmp_path / 'run'}"])
    with pytest.raises(sp.ConfigError, match="vocabulary has 5") as caught:
        check_inputs(recipe)
    assert caught.value.code == "C005"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["doctor", "model", "--ranks", "100000"], "--ranks=100000"),
        (["doctor", "model", "--ranks", "-1"], "--ranks=-1"),
        (["doctor", "model", "--timeout", "nan"], "--timeout=nan"),
        (["doctor", "model", "--seq-len", "1000000000000"], "--seq-len=1000000000000"),
        (["doctor", "model", "--lora", "1000000000"], "--lora=1000000000"),
        (["doctor", "model", "--replicate", "0"], "--replicate=0"),
        (["estimate", "model", "--micro-batch-tokens", "-1"], "--micro-batch-tokens=-1"),
        (["estimate", "model", "--ranks", "1000000000000"], "--ranks=1000000000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_commands_have_bounds(arguments, named):
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 120, found.output
    assert "C001" in found.output and named in found.output
