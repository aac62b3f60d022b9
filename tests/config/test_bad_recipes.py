"""Recipes with numbers that mean nothing, and files that are no recipes: each is refused by its key."""

import copy
import itertools
import math
import os
import re
import types
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin

import pytest

import shardproof as sp
from shardproof.config import foreign_names
from shardproof.config.foreign_names import names_here
from shardproof.config.load import all_keys, from_json, load_recipe, parse_recipe, to_json
from shardproof.config.schema import Recipe, keys_of
from shardproof.rl.checks import model_folder

pytestmark = pytest.mark.fault

RECIPE = {
    "model": {"path": "models/any"},
    "data": {"train": "rows.jsonl"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "train": {"steps": 1},
    "output": {"folder": "runs/any"},
}
# What a section, or a key, needs of others before it may be there.
COMPANIONS = {
    "data": {"data": {"train": [{"source": "rows.jsonl"}], "pass_rates": "rates.jsonl"}},
    "critic": {"algorithm": {"name": "ppo"}},
    "algorithm.preference": {"algorithm": {"name": "dpo"}},
    "algorithm.preference.loss_weights": {"algorithm": {"preference": {"loss": ["sigmoid", "sft"]}}},
    "algorithm.preference.desirable_weight": {"algorithm": {"name": "kto"}},
    "algorithm.preference.undesirable_weight": {"algorithm": {"name": "kto"}},
    **{f"algorithm.{key}": {"algorithm": {"name": "ppo"}} for key in ("gamma", "gae_lambda", "value_clip")},
    "algorithm.cov_bounds": {"algorithm": {"name": "clip_cov"}},
    "algorithm.cov_kl_coef": {"algorithm": {"name": "kl_cov"}},
    "reference": {"algorithm": {"kl_coef": 0.1}},
    "teacher": {"algorithm": {"name": "distillation"}, "teacher": {"url": "http://localhost:8000"}},
    "algorithm.teacher_coef": {"algorithm": {"name": "distillation"}, "teacher": {"path": "models/other"}},
    "evaluation.sets": {"evaluation": {"sets": [{"name": "other", "source": "rows.jsonl", "every": 1}]}},
    "evaluation.sets.0.pass_at": {
        "evaluation": {
            "sets": [{"name": "other", "source": "rows.jsonl", "every": 1, "samples": 2, "pass_at": [1, 2]}]
        }
    },
    "optimizer": {"optimizer": {"name": "muon"}},
    "reward.models": {"reward": {"models": [{"path": "models/judge"}]}},
    "rollout.stop_ids": {"rollout": {"stop_ids": [3, 3]}},
    "reward.clip": {"reward": {"clip": [-2, 2]}},
    "reward.functions": {"reward": {"functions": [{"name": "exact_match", "clip": [-2, 2]}]}},
    "reward.functions.0.weight": {"reward": {"models": [{"path": "models/judge"}]}},  # another that counts
    "environment": {"environment": {"tools": {"functions": ["my_tools:search"], "python": {}}}},
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
    for length in range(1, len(path) + 1):
        for section, fields in COMPANIONS.get(".".join(map(str, path[:length])), {}).items():
            data.setdefault(section, {}).update(copy.deepcopy(fields))
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


# TRL's sync_ref_model=true and use_adaptive_entropy=true would be every step and a nat; overlong_from=false all lengths.
@pytest.mark.parametrize("switch", [True, False])
def test_a_switch_is_no_number(switch):
    for key in (key for key, _ in NUMBERS if key != "model.checkpoint_activations"):
        with pytest.raises(sp.ConfigError) as caught:
            parse_recipe(recipe_with(dict(NUMBERS)[key], switch), "recipe")
        assert f"{key}: expected a number, not {str(switch).lower()}" in str(caught.value)


def test_documented_numbers_are_numbers_of_the_schema():
    assert documented_numbers().keys() <= {key for key, _ in NUMBERS}


@pytest.mark.parametrize("value", ["none", 0.3])
def test_limits_that_may_be_off(value):
    for key in ("tis_cap", "value_clip", "clip_high"):
        parse_recipe(recipe_with(("algorithm", key), value), "recipe")
    parse_recipe(recipe_with(("optimizer", "max_grad_norm"), value), "recipe")


@pytest.mark.parametrize(
    ("algorithm", "rollout", "said"),
    [
        ({"correction": "icepop", "icepop_bounds": [5.0, 0.5]}, {}, "icepop_bounds: the first must be below"),
        (
            {"correction": "icepop", "icepop_bounds": 5.0},
            {},
            "icepop_bounds: expected a list, such as [1, 2]",
        ),
        ({"correction": "mis", "tis_cap": 3.0}, {}, "tis_cap is for correction='tis', not for 'mis'"),
        ({"mis_cap": 3.0}, {}, "mis_cap is for correction='mis', not for 'tis'"),
        ({"correction": "none", "icepop_bounds": [0.1, 2.0]}, {}, "icepop_bounds is for correction='icepop'"),
        ({"correction": "mis", "trust_region": "behaviour"}, {}, "has nothing to correct"),
        ({"correction": "mis"}, {"top_p": 0.9}, "algorithm.correction='mis' with rollout.top_p=0.9"),
        ({"trust_region": "behaviour"}, {"top_p": 0.9}, "algorithm.trust_region='behaviour' with"),
        ({"name": "sft", "correction": "none"}, {}, "are for algorithms that sample, not for sft"),
        ({"correction": "iceberg"}, {}, "algorithm.correction"),
        ({}, {"fp8": "weights", "engine": "vllm"}, "rollout.fp8='weights' is for rollout.engine='embedded'"),
        ({}, {"fp8": "weights", "exact": True}, "with rollout.exact=true: rounded weights cannot give"),
        ({"name": "sft"}, {"fp8": "weights"}, "rollout.fp8 is for algorithms that sample, not for sft"),
    ],
)
def test_corrections_that_do_not_fit_together(algorithm, rollout, said):
    with pytest.raises(sp.ConfigError) as caught:
        parse_recipe(RECIPE | {"algorithm": algorithm, "rollout": rollout}, "recipe")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": "mis", "mis_cap": 3.0, "tis_cap": 2.0},
        {"correction": "icepop", "icepop_bounds": [0.1, 2.0]},
        {"correction": "none"},
        {"trust_region": "behaviour"},
    ],
)
def test_corrections_that_do(algorithm):
    parse_recipe(RECIPE | {"algorithm": algorithm}, "recipe")


# Whole files.

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


@pytest.mark.parametrize(
    ("is_offline", "hint"), [(True, "HF_HUB_OFFLINE is set"), (False, "needs the network")]
)
def test_a_model_that_is_not_found_says_where_was_searched(monkeypatch, is_offline, hint):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    with pytest.raises(sp.ShardproofError, match=hint):
        model_folder("./nowhere")


def test_paths_above_the_recipe_are_written_plainly(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("recipe.toml").write_text(
        "[model]\npath = '../model'\n[data]\ntrain = 'recipe.toml'\n[reward]\nfunctions = [{name = 'numeric'}]\n"
        "[train]\nsteps = 1\n[output]\nfolder = 'o'\n"
    )
    recipe = load_recipe("recipe.toml")
    assert (recipe.model.path, recipe.data.train) == ("../model", "./recipe.toml")


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


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("rollout.vllm.gpu_memory", "rollout.vllm.gpu_memory_utilization"),
        ("algorithm.epochs", "algorithm.epochs_per_batch"),
        ("algorithm.preference.bta", "algorithm.preference.beta"),
        ("train.max_steps", "train.steps"),
        ("evaluaton", "evaluation"),
        ("rollout.seed", "train.seed"),
        ("rollout.num_generations", "rollout.group_size"),
        ("num_generations", "rollout.group_size"),
        ("output.eval_steps", "output.eval_every"),
        ("algorithm.clip_ratio", "algorithm.clip_low"),
        ("train.batch_size", "train.prompts_per_step"),
    ],
)
def test_an_unknown_key_is_told_with_the_one_that_was_meant(key, meant):
    with pytest.raises(sp.ConfigError, match=re.escape(f"unknown key {key!r}, did you mean {meant!r}?")):
        parse_recipe(recipe_with(tuple(key.split(".")), 1), "the recipe")


@pytest.mark.parametrize("key", ["train.fsdp", "model.attn_implementation", "output.wandb"])
def test_an_unknown_key_that_resembles_none_is_told_with_none(key):
    with pytest.raises(sp.ConfigError, match=f"unknown key '{key}'\\n"):
        parse_recipe(recipe_with(tuple(key.split(".")), 1), "the recipe")


def test_names_of_other_libraries_stand_for_keys_of_ours():
    keys = set(all_keys(Recipe))
    assert {key for found in map(names_here, foreign_names._ELSEWHERE) for key in found} <= keys
    assert not keys & set(foreign_names._ELSEWHERE)


@pytest.mark.parametrize("name", ["grpo.yaml", "grpo.json", "run.sh"])
def test_a_config_of_another_library_is_told_how_to_become_a_recipe(tmp_path, name):
    (tmp_path / name).write_text("num_generations: 8\nbeta: 0.04\n")
    with pytest.raises(sp.ConfigError, match=f"`shardproof import-config .*{name}`"):
        load_recipe(tmp_path / name)


def test_dates_are_text_for_all_who_read_a_recipe(tmp_path):
    """Ranks read it as JSON: what looked at the data first gave chat templates dates, and ranks gave them text."""
    given = "{ today = 2024-01-02, at = [07:32:00, 2024-01-02T07:32:00Z] }"
    path = tmp_path / "dates.toml"
    text = f"[data]\ntrain = 't'\nchat_template_kwargs = {given}\n"
    path.write_text(f"{text}[model]\npath = 'm'\n[train]\nsteps = 1\n[output]\nfolder = 'f'\n")
    recipe = load_recipe(path, ["data.chat_template_kwargs.tomorrow=2024-01-03", "algorithm.name=sft"])
    found = recipe.data.chat_template_kwargs
    assert found["today"] == "2024-01-02" and found["tomorrow"] == "2024-01-03"
    assert found["at"] == ["07:32:00", "2024-01-02T07:32:00+00:00"]
    assert from_json(to_json(recipe)) == recipe


def test_a_value_in_place_of_a_section_is_told_so():
    with pytest.raises(sp.ConfigError, match=r"data.curriculum: this is a section; write its keys under \["):
        parse_recipe(recipe_with(("data", "curriculum"), "pools"), "the recipe")
