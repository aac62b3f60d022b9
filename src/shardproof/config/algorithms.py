"""What a run must know of an algorithm before it is made: a table of presets over switches, free of torch.

A name stands for values of the switches (config/switches.py) and of other keys of [algorithm]. `fill_in` writes them into
a recipe where it is read, so that every later reader finds values, and a run's record holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PER_COMPLETION = ("mean", "leave_one_out")  # baselines of a completion; the others are of a token's return
UNCLIPPED = ("sapo", "vespo", "kl_cov")  # surrogates without a clip
# Surrogates that take a ratio of their own, which the switch `ratio` says nothing about.
OWN_RATIO = ("vespo", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl")
BOUNDED = ("clip", "dppo_tv", "dppo_kl")  # surrogates that know a largest ratio, dual_clip
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class AlgorithmSpec:
    """What distinguishes an algorithm from the others."""

    compares_group: bool = (
        False  # its advantages compare the completions of one prompt: at least 2 are needed
    )
    has_critic: bool = False  # it trains a critic beside the policy
    samples: bool = True  # False: completions are given, and nothing is rewarded (SFT)
    given: Literal["", "completions", "pairs", "labelled"] = ""  # what a row holds where nothing is sampled
    has_preference: bool = False  # it has the losses of [algorithm.preference]
    has_teacher: bool = False  # it learns from a [teacher], and may do without rewards
    role: Literal["policy", "reward"] = "policy"  # of the model that is trained
    weights: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = (
        "token_mean"  # see train.batching.weigh
    )
    clip_high: float | None = None  # where the recipe sets none; None: as clip_low
    dynamic_sampling: bool = False  # where the recipe does not say
    switches: Mapping[str, Any] = field(default_factory=dict)  # other settings, where the recipe is silent
    trl: Mapping[str, Any] | None = None  # those that TRL has otherwise; None: there is no variant of TRL's
    verl: Mapping[str, Any] | None = None


# What algorithms have in common unless they say otherwise.
_DEFAULTS = {
    "baseline": "mean",
    "compared_over": "group",
    "scale": "population",
    "scale_over": "group",
    "scale_eps": 1e-4,
    "ratio": "token",
    "surrogate": "clip",
    "dual_clip": 0.0,
}
_PRESETS = {
    "trl": {"scale": "sample", "kl_ratio_correction": True},
    "verl": {"scale": "sample", "scale_eps": 1e-6, "dual_clip": 3.0},
}
_UNSCALED = {"scale": "off"}
_OVER_TOKENS = {"scale_over": "tokens", "scale_eps": 1e-8}
_RETURNS = {"baseline": "off", **_OVER_TOKENS}
_OF_VERL = {"scale": "sample", "scale_eps": 1e-6}
_GSPO_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}

SPECS: dict[str, AlgorithmSpec] = {
    "grpo": AlgorithmSpec(
        compares_group=True, weights="sequence_mean", trl=NOTHING, verl={"aggregation": "token_mean"}
    ),
    "gdpo": AlgorithmSpec(
        compares_group=True,
        weights="sequence_mean",
        switches={"compared_over": "batch", "scale": "sample", "scale_over": "batch"},
        trl=NOTHING,
    ),
    "dr_grpo": AlgorithmSpec(
        compares_group=True, weights="constant", switches=_UNSCALED, trl=_UNSCALED, verl=_UNSCALED
    ),
    "dapo": AlgorithmSpec(
        compares_group=True,
        clip_high=0.28,
        dynamic_sampling=True,
        trl={"clip_high": None, "dynamic_sampling": False},  # None: as clip_low
        verl={"dual_clip": 10.0},
    ),
    "rloo": AlgorithmSpec(
        compares_group=True,
        switches={"baseline": "leave_one_out", **_UNSCALED},
        trl={
            **_UNSCALED,
            "aggregation": "sequence_mean",
            "ratio": "product",
            "kl_in": "reward",
            "kl_coef": 0.05,
        },
        verl=_UNSCALED,
    ),
    "reinforce_pp": AlgorithmSpec(switches=_RETURNS, verl={"scale_eps": 1e-8}),
    "reinforce_pp_baseline": AlgorithmSpec(
        compares_group=True,
        switches={"scale": "sample", **_OVER_TOKENS, "dual_clip": 3.0},
        verl={"scale_eps": 1e-8},
    ),
    "remax": AlgorithmSpec(
        switches={"baseline": "greedy", **_UNSCALED, **_OVER_TOKENS, "dual_clip": 3.0}, verl=_UNSCALED
    ),
    "ppo": AlgorithmSpec(
        has_critic=True,
        switches={"baseline": "critic", **_OVER_TOKENS},
        verl={"scale_eps": 1e-8, "gae_lambda": 1.0, "value_clip": 0.5},
    ),
    "gspo": AlgorithmSpec(
        compares_group=True,
        weights="sequence_mean",
        switches={"ratio": "sequence"},
        trl=_GSPO_CLIP,
        verl={**_GSPO_CLIP, "dual_clip": 0.0},
    ),
    "luspo": AlgorithmSpec(
        compares_group=True,
        weights="sequence_sum",
        switches={"ratio": "sequence", "scale": "sample"},
        trl=NOTHING,
    ),
    "cispo": AlgorithmSpec(
        compares_group=True,
        clip_high=0.28,
        switches={"surrogate": "cispo", "clip_low": 1.0},
        trl={"clip_high": 4.0},
        verl={"clip_low": 0.2, "clip_high": 0.2},
    ),
    "sapo": AlgorithmSpec(
        compares_group=True,
        weights="sequence_mean",
        switches={"surrogate": "sapo", "scale": "sample"},
        trl=NOTHING,
        verl=NOTHING,
    ),
    "vespo": AlgorithmSpec(
        compares_group=True, switches={"surrogate": "vespo", "scale": "sample"}, trl=NOTHING
    ),
    "gmpo": AlgorithmSpec(
        compares_group=True,
        weights="sequence_mean",
        clip_high=0.4,
        switches={"surrogate": "geo_mean", "clip_low": 0.4, **_OF_VERL},
        verl=NOTHING,
    ),
    "dppo": AlgorithmSpec(
        compares_group=True,
        weights="constant",
        switches={"surrogate": "dppo_tv", **_UNSCALED},
        verl=_UNSCALED,
    ),
    "clip_cov": AlgorithmSpec(
        compares_group=True, switches={"surrogate": "clip_cov", **_OF_VERL}, verl=NOTHING
    ),
    "kl_cov": AlgorithmSpec(compares_group=True, switches={"surrogate": "kl_cov", **_OF_VERL}, verl=NOTHING),
    "distillation": AlgorithmSpec(has_teacher=True),
    "sft": AlgorithmSpec(samples=False, given="completions"),
    "dpo": AlgorithmSpec(samples=False, given="pairs", has_preference=True, weights="sequence_mean"),
    "kto": AlgorithmSpec(samples=False, given="labelled", has_preference=True, weights="sequence_mean"),
    "reward_model": AlgorithmSpec(samples=False, given="pairs", role="reward", weights="sequence_mean"),
}


def preset_values(spec: AlgorithmSpec, preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that an algorithm has where a recipe is silent; some depend on what is `given`."""
    own: dict[str, Any] = {"aggregation": spec.weights, "dynamic_sampling": spec.dynamic_sampling}
    if spec.clip_high is not None:
        own["clip_high"] = spec.clip_high
    values: dict[str, Any] = {**_DEFAULTS, **own, **spec.switches}
    if preset is not None:
        values |= {**_PRESETS[preset], **(getattr(spec, preset) or {})}
        values = {key: value for key, value in values.items() if value is not None}
    values = _of_surrogate(values, given.get("surrogate", values["surrogate"]), given.get("ratio"))
    chosen = {**values, **given}
    low = chosen.get("clip_low", 0.2)
    if isinstance(low, int | float) and 0 < low <= 1:  # else it is refused, and nothing follows from it
        values.setdefault("clip_high", low)
    if given.get("baseline", "mean") not in PER_COMPLETION:
        values |= {
            "scale_over": "tokens",
            "compared_over": "group",
        }  # a token's return is compared with all tokens'
    elif given.get("compared_over") == "batch" and values["scale_over"] == "group":
        values["scale_over"] = "batch"
    in_loss = chosen.get("kl_in", "loss") == "loss"
    if preset is not None:
        values["kl_estimator"] = "k3" if in_loss else "k1"
    if not in_loss or given.get("kl_estimator", "k3") != "k3":
        values.pop("kl_ratio_correction", None)
    return values


def _of_surrogate(values: Mapping[str, Any], surrogate: str, ratio: str | None) -> dict[str, Any]:
    """An algorithm's values without those that belong to its own surrogate or ratio, where it is given another one."""
    # CISPO's range bounds a weight, GMPO's a logarithm, GSPO's the mean over a completion: as the clip of another they
    # would hold nothing back, or everything.
    another_ratio = surrogate == "clip" and ratio not in (None, values["ratio"])
    own_range = "clip_low" in values and (surrogate != values["surrogate"] or another_ratio)
    without = ("clip_low", "clip_high") if surrogate in UNCLIPPED or own_range else ()
    found = {key: value for key, value in values.items() if key not in without}
    if surrogate not in BOUNDED:
        found["dual_clip"] = 0.0
    return found | ({"ratio": "token"} if surrogate in OWN_RATIO else {})


def fill_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section [algorithm] as a recipe has it, with the values that its name and preset stand for.

    A user's own algorithm has its values from its class: nothing is known of it before it is imported.
    """
    spec = SPECS.get(str(data.get("name", "grpo")))
    preset = data.get("preset")
    preset = None if preset == "none" else preset
    if spec is None or not spec.samples or preset not in (None, *_PRESETS):
        return dict(data)
    return {**data, **_missing(spec, preset, data)}


def _missing(spec: AlgorithmSpec, preset: str | None, data: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in data.items() if value is not None and value != "none"}
    values = preset_values(spec, preset, given)
    # An explicit none of these is a value of its own.
    return {
        key: value
        for key, value in values.items()
        if key not in given and not (key == "value_clip" and key in data)
    }


def preset_problem(name: str, preset: str | None) -> str | None:
    """Why there is no such preset of this algorithm; None if there is."""
    spec = SPECS.get(name)
    if preset is None:
        return None
    if spec is None:
        return f"preset={preset!r}: your own algorithm ({name}) has no presets; set the switches themselves"
    if not spec.samples:
        return f"preset={preset!r}: presets are for algorithms that sample, not for {name}; remove the key"
    if getattr(spec, preset) is None:
        library = {"trl": "TRL", "verl": "verl"}[preset]
        return f"preset={preset!r}: {name} has no variant of {library}; remove the key"
    return None


def compares_group(settings: Any, spec: AlgorithmSpec) -> bool:
    """Whether the completions of one prompt are compared, by the switches or, where they are open, by the algorithm."""
    if settings.baseline is None or not spec.samples or spec.has_teacher:
        return spec.compares_group
    return settings.baseline in PER_COMPLETION and settings.compared_over == "group"
