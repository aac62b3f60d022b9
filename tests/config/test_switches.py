"""Switches of algorithms: what names and presets stand for, that each can be set alone, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardproof.config.algorithms import PER_COMPLETION, SPECS
from shardproof.config.defaults import differences_from_defaults
from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.config.schema import Algorithm
from shardproof.config.switches import SWITCHES
from shardproof.errors import ConfigError
from tests.rl.runs import RECIPES, TINY

DOCS = Path(__file__).resolve().parents[2] / "docs"
SURROGATES = ("clip", "cispo", "sapo", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl")
DISTILLATION = RECIPES / "tiny-distillation.toml"
UNWEIGHED = "reward.functions=[{name='exact_match',weight=0}]"
SAMPLING = [name for name, spec in SPECS.items() if spec.samples]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"aggregation": "sequence_mean", "scale": "population", "scale_eps": 1e-4, "clip_high": 0.2}),
        ({"preset": "trl"}, {"aggregation": "sequence_mean", "scale": "sample", "kl_ratio_correction": True}),
        ({"preset": "verl"}, {"aggregation": "token_mean", "scale_eps": 1e-6, "dual_clip": 3.0}),
        ({"name": "rloo", "preset": "trl"}, {"ratio": "product", "kl_in": "reward", "kl_estimator": "k1"}),
        ({"name": "rloo", "preset": "trl", "kl_in": "loss"}, {"kl_estimator": "k3"}),
        ({"name": "gspo", "preset": "trl"}, {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        ({"name": "dapo"}, {"clip_high": 0.28, "dynamic_sampling": True, "dual_clip": 0.0}),
        ({"name": "dapo", "preset": "trl"}, {"clip_high": 0.2, "dynamic_sampling": False}),
        ({"name": "dapo", "preset": "trl", "clip_low": 0.1}, {"clip_high": 0.1}),  # as TRL's epsilon_high
        ({"name": "dapo", "clip_low": 0.1}, {"clip_high": 0.28}),
        ({"name": "cispo"}, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.28}),
        ({"name": "cispo", "preset": "verl"}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}),
        ({"name": "ppo", "preset": "verl"}, {"value_clip": 0.5, "gae_lambda": 1.0, "scale": "sample"}),
        ({"name": "ppo", "preset": "verl", "value_clip": None}, {"value_clip": None}),
        ({"clip_low": 0.1}, {"clip_high": 0.1}),
        ({"baseline": "off"}, {"scale_over": "tokens"}),
        ({"compared_over": "batch"}, {"scale_over": "batch"}),
        ({"preset": "verl", "surrogate": "cispo"}, {"dual_clip": 0.0}),
        ({"name": "dapo", "surrogate": "sapo"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "gdpo", "scale_over": "tokens"}, {"compared_over": "batch", "scale": "sample"}),
        ({"name": "dapo", "surrogate": "cispo"}, {"clip_low": 0.2, "clip_high": 0.28}),
        ({"name": "cispo", "surrogate": "clip"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "cispo", "preset": "trl", "surrogate": "clip"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "cispo", "surrogate": "clip_cov", "clip_low": 0.3}, {"clip_low": 0.3, "clip_high": 0.3}),
        ({"name": "gspo", "preset": "trl", "surrogate": "kl_cov"}, {"ratio": "token", "clip_low": 0.2}),
        ({"name": "rloo", "preset": "trl", "surrogate": "clip_cov"}, {"ratio": "token"}),
        ({"name": "gspo", "preset": "trl", "ratio": "token"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "gspo", "preset": "trl", "ratio": "sequence"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        ({"name": "gspo", "preset": "verl", "surrogate": "geo_mean"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "gmpo", "surrogate": "clip"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "gmpo", "clip_low": 0.1}, {"clip_low": 0.1, "clip_high": 0.4}),
        ({"name": "cispo", "ratio": "sequence"}, {"clip_low": 1.0, "clip_high": 0.28}),
        ({"name": "my:Own"}, dict.fromkeys(SWITCHES)),
        ({"name": "my:Own", "scale": "none"}, dict.fromkeys(SWITCHES)),
        ({"preset": "none", "ratio": "none"}, {"ratio": "token", "preset": None}),
        ({"name": "sft"}, dict.fromkeys(SWITCHES)),
    ],
)
def test_a_name_and_a_preset_stand_for_values(given, expected):
    settings = Algorithm(**given)
    assert {key: getattr(settings, key) for key in expected} == expected
    assert Algorithm(**settings.model_dump()) == settings


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize(
    "given",
    [
        *({"aggregation": how} for how in ("token_mean", "sequence_mean", "sequence_sum", "constant")),
        *({"scale": scale} for scale in ("off", "sample", "population")),
        *({"surrogate": each} for each in SURROGATES),
        {"clip_low": 0.1, "clip_high": 0.3},
        {"ratio": "sequence"},
        {"baseline": "leave_one_out"},
        {"baseline": "greedy"},
    ],
    ids=str,
)
def test_each_switch_can_be_set_alone(name, given):
    key = next(iter(given))
    refused = {
        "clip_low": ("sapo", "vespo", "kl_cov"),
        "ratio": ("vespo", "clip_cov", "kl_cov", "gmpo", "dppo"),
        "baseline": ("ppo",),
    }.get(key, ())
    if name in refused:
        with pytest.raises(ValidationError, match=key):
            Algorithm(name=name, **given)
    else:
        assert getattr(Algorithm(name=name, **given), key) == given[key]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "ppo", "baseline": "mean"}, "ppo's baseline is its critic"),
        ({"baseline": "critic"}, "baseline='critic' is for name='ppo'"),
        ({"baseline": "off", "scale_over": "group"}, "scale_over='group' with baseline='off'"),
        ({"baseline": "greedy", "compared_over": "batch"}, "compared_over='batch' is for baseline='mean'"),
        ({"compared_over": "batch", "scale_over": "group"}, "divided by nothing"),
        ({"name": "dppo", "dual_clip": 1.0}, "dual_clip=1.0 must be above 1, the ratio of"),
        (
            {"name": "gmpo", "dual_clip": 3.0},
            "dual_clip is for surrogate='clip', 'dppo_tv' or 'dppo_kl', not for 'geo_mean'",
        ),
        ({"dual_clip": 1.1}, "dual_clip=1.1 must be above 1 + clip_high, which is 1.2"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip is for surrogate='clip'"),
        ({"name": "kl_cov", "ratio": "sequence"}, "takes its own ratio"),
        ({"name": "sapo", "clip_high": 0.3}, "has no clip"),
        ({"name": "dapo", "surrogate": "sapo", "clip_high": 0.28}, "has no clip"),
        ({"name": "gspo", "surrogate": "clip_cov", "ratio": "sequence"}, "takes its own ratio"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos is for surrogate='sapo'"),
        ({"vespo_k_neg": 2.0}, "vespo_k_neg is for surrogate='vespo'"),
        ({"name": "vespo", "preset": "verl"}, "vespo has no variant of verl"),
        ({"entropy_share": 0.0}, "greater than 0"),
        ({"name": "kl_cov", "cov_bounds": (0.5, 1.0)}, "cov_bounds is for surrogate='clip_cov'"),
        ({"name": "clip_cov", "cov_bounds": (2.0, 1.0)}, "the first must be below the second"),
        ({"name": "sft", "ratio": "token"}, "ratio is for algorithms that sample"),
        ({"name": "luspo", "preset": "verl"}, "luspo has no variant of verl"),
        ({"name": "remax", "preset": "trl"}, "remax has no variant of TRL"),
        ({"name": "my:Own", "preset": "trl"}, "has no presets"),
        ({"name": "dr_grpo", "scale_over": "batch"}, "dr_grpo divides by no deviation (scale='off')"),
        ({"name": "rloo", "preset": "trl", "scale_eps": 0.1}, "scale_eps=0.1: rloo divides by no deviation"),
        ({"name": "remax", "scale_over": "group"}, "scale='sample' or 'population', or remove the key"),
        ({"kl_in": "reward"}, "kl_in='reward' needs the weight of the KL: set kl_coef, or remove the key"),
        ({"preset": "verl", "kl_estimator": "k2"}, "kl_estimator='k2' needs the weight of the KL"),
        ({"kl_ratio_correction": True}, "kl_ratio_correction=True needs the weight of the KL"),
        ({"trust_region": "behaviour", "tis_cap": 3.0}, "trust_region='behaviour' corrects nothing"),
        ({"scale": "none"}, "scale='none' could mean two things: write scale='off', or remove the key"),
        ({"name": "rloo", "preset": "verl", "dual_clip": "none"}, "write dual_clip=0, or remove the key"),
        ({"name": "dapo", "dynamic_sampling": "none"}, "write dynamic_sampling=false"),
        ({"baseline": "none"}, "write baseline='off'"),
        ({"scale_eps": 0.0}, "greater than 0"),
        ({"dual_clip": -1.0}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(given, said):
    with pytest.raises(ValidationError) as caught:
        Algorithm(**given)
    assert said in str(caught.value)


def test_a_bound_that_cannot_be_is_the_only_one_that_is_named():
    with pytest.raises(ConfigError) as caught:
        load_recipe(TINY, ["algorithm.clip_low=-1"])
    assert "algorithm.clip_low" in str(caught.value) and "clip_high" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "dr_grpo", "scale_over": "group", "scale_eps": 1e-4},
        {"name": "dr_grpo", "scale_over": "batch", "scale": "sample"},
        {"scale": "off", "scale_over": "batch"},
        {"name": "dppo", "baseline": "off"},
        {"kl_in": "reward", "kl_estimator": "k2", "kl_coef": 0.0},
        {"name": "rloo", "preset": "trl", "kl_in": "loss"},
        {"preset": "trl", "kl_ratio_correction": False},
        {"trust_region": "behaviour", "tis_cap": None},
    ],
    ids=str,
)
def test_what_somebody_switched_off_by_name_may_keep_its_other_keys(given):
    settings = Algorithm(**given)
    assert Algorithm(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.group_size=1"], "compares completions of one prompt"),
        (
            ["algorithm.trust_region=behaviour", "algorithm.correction=tis"],
            "correction='tis' has nothing to correct",
        ),
        (["algorithm.credit=turn", "algorithm.compared_over=batch"], "algorithm.credit='turn'"),
        (
            ["algorithm.off_policy_limit=0.1", "rollout.top_p=0.9"],
            "algorithm.off_policy_limit with rollout.top_p",
        ),
        ([UNWEIGHED], "reward: all weights are 0, so there is nothing that grpo could learn from"),
        (
            [UNWEIGHED, "algorithm.overlong_from=2", "algorithm.dynamic_sampling=true"],
            "compares weighted totals, and all weights are 0: name a function in algorithm.dynamic_sampling_on",
        ),
    ],
)
def test_a_recipe_is_held_to_its_switches(overrides, said):
    with pytest.raises((ConfigError, ValidationError)) as caught:
        load_recipe(TINY, overrides)
    assert said in str(caught.value)


def test_rewards_that_are_only_measured_may_tell_completions_apart():
    load_recipe(TINY, [UNWEIGHED, "algorithm.overlong_from=2"])
    load_recipe(
        DISTILLATION, ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_on=exact_match"]
    )


def test_one_completion_per_prompt_is_enough_where_the_batch_is_compared():
    load_recipe(TINY, ["rollout.group_size=1", "algorithm.compared_over=batch"])
    load_recipe(TINY, ["rollout.group_size=1", "algorithm.baseline=greedy", "algorithm.gamma=0.9"])


def test_a_recorded_recipe_has_the_values_and_shows_what_differs_from_its_preset():
    recipe = load_recipe(TINY, ["algorithm.name=rloo", "algorithm.preset=verl", "algorithm.scale=sample"])
    assert from_json(to_json(recipe)) == recipe
    changed = {key for key in differences_from_defaults(recipe) if key.startswith("algorithm.")}
    assert changed == {"algorithm.name", "algorithm.preset", "algorithm.scale"}


def test_of_an_entry_what_differs_from_its_own_defaults_is_shown():
    functions = "[{name='exact_match'}, {name='numeric', weight=0.5, label='number'}]"
    sets = "[{name='other', source='rows.jsonl', samples=4}]"
    recipe = load_recipe(TINY, [f"reward.functions={functions}", f"evaluation.sets={sets}"])
    changed = differences_from_defaults(recipe)
    shown = [{"name": "exact_match"}, {"name": "numeric", "weight": 0.5, "label": "number"}]
    assert changed["reward.functions"]["value"] == shown
    assert set(changed["evaluation.sets"]["value"][0]) == {"name", "source", "samples"}


def table_row(name, preset):
    """A row of docs/presets.md."""
    s = Algorithm(name=name, preset=preset)
    over = f"{s.baseline}, {s.compared_over}" if s.baseline in PER_COMPLETION else s.baseline
    scale = "off" if s.scale == "off" else f"{s.scale}, {s.scale_over}, {s.scale_eps:g}"
    clip = "-" if s.surrogate in ("sapo", "vespo", "kl_cov") else f"{s.clip_low:g}, {s.clip_high:g}"
    cells = [over, scale, s.ratio, s.surrogate, clip, f"{s.dual_clip:g}", s.aggregation]
    return f"| `{name}` | {preset or ''} | {' | '.join(cells)} |"


def test_the_page_says_what_names_stand_for():
    page = (DOCS / "presets.md").read_text()
    shown = page.partition("## What names stand for")[2].partition("## Surrogates")[0]
    rows = [line for line in shown.splitlines() if line.startswith("| `")]
    assert rows == [
        table_row(name, preset)
        for name in SAMPLING
        if not SPECS[name].has_teacher
        for preset in (None, "trl", "verl")
        if preset is None or getattr(SPECS[name], preset) is not None
    ]
    assert all(f"`{key}`" in page for key in SWITCHES)


def changes(name, preset):
    """What a preset changes in the algorithm with this name, for docs/algorithms.md."""
    if getattr(SPECS[name], preset) is None:
        return "-"
    own, variant = (Algorithm(name=name, preset=each).model_dump() for each in (None, preset))
    unread = {"preset"} | ({"scale_eps"} if variant["scale"] == "off" else set())
    values = {key: value for key, value in variant.items() if value != own[key] and key not in unread}
    shown = {key: json.dumps(value).strip('"') for key, value in values.items()}
    return ", ".join(f"`{key}` {value}" for key, value in shown.items()) or "nothing"


def largest_differences(name, library):
    """The largest difference of loss and gradient that docs/data/parity.json has for an algorithm's cases."""
    measured = json.loads((DOCS / "data" / "parity.json").read_text())[library]
    cases = [found for case, found in measured.items() if re.split(r"[ ,]", case)[0] == name]
    largest = [max((case[of] for case in cases), default=None) for of in ("loss", "gradient")]
    return ", ".join(f"{value:.0e}" if value else "0" for value in largest) if cases else "-"


def test_the_page_says_what_presets_change_and_how_near_they_are():
    page = (DOCS / "algorithms.md").read_text()
    shown = page.partition("## Presets at a glance")[2].partition("\n## ")[0]
    rows = [line for line in shown.splitlines() if line.startswith("| `")]
    metrics = page.partition("\n## Metrics")[2]
    names = [name for name in SAMPLING if not SPECS[name].has_teacher]
    for name, row in zip(names, rows, strict=True):
        *cells, watched = (cell.strip() for cell in row.strip("|").split(" | "))
        assert cells == [
            f"`{name}`",
            *(changes(name, preset) for preset in ("trl", "verl")),
            *(largest_differences(name, library) for library in ("trl", "verl")),
        ]
        assert all(f"| `{metric}`" in metrics for metric in watched.strip("`").split("`, `"))
