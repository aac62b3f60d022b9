"""Combinations about given completions that cannot work: columns and masks, preference losses."""

from __future__ import annotations

from typing import get_args

from shardproof.config.algorithms import SPECS, AlgorithmSpec
from shardproof.config.given import GivenColumns
from shardproof.config.preference import LabelLoss, Preference
from shardproof.config.sections import Sections

_OF_KTO = ("desirable_weight", "undesirable_weight")
_OF_DPO = (
    *("loss_weights", "label_smoothing", "precompute", "divergence", "divergence_alpha", "ld_alpha"),
    "discopop_tau",
)
# Keys of [algorithm] that algorithms on given completions read; all others are about what is sampled.
_READ = {"name", "preset", "preference", "router_coef", "success_threshold", "success_on", "options"}
_OF_REFERENCE = {"reference_sync_every", "reference_mix"}
_OF_REWARD_MODELS = {"center_rewards_coef"}
_USERS = {  # of each key, what a row of the algorithms that read it holds
    "chosen_column": ("pairs",),
    "rejected_column": ("pairs",),
    "label_column": ("labelled",),
    "messages_column": ("completions",),
    "train_on": ("completions",),
    "max_length": ("completions", "pairs", "labelled"),
    "on_max_length": ("completions", "pairs", "labelled"),
}


def given_problem(recipe: Sections) -> str | None:
    """What in the recipe about given completions does not fit; None if all does, or the algorithm is a user's."""
    spec = SPECS.get(recipe.algorithm.name)
    if spec is None:
        return None
    checks = (
        _columns(recipe, spec.given),
        _unread(recipe, spec),
        _preference(recipe, spec.has_preference),
    )
    return next(filter(None, checks), None)


def _unread(recipe: Sections, spec: AlgorithmSpec) -> str | None:
    settings = recipe.algorithm
    if spec.samples:
        return None
    plain = type(settings)(name=settings.name)
    read = _READ | (_OF_REFERENCE if spec.has_preference else set())
    read |= _OF_REWARD_MODELS if spec.role == "reward" else set()
    for key in type(settings).model_fields:
        if key not in read and getattr(settings, key) != getattr(plain, key):
            return f"algorithm.{key} is not for {settings.name}: remove it"
    return None


def _columns(recipe: Sections, given: str) -> str | None:
    data, name = recipe.data, recipe.algorithm.name
    for key, users in _USERS.items():
        if given not in users and getattr(data, key) != GivenColumns.model_fields[key].default:
            return f"data.{key} is not for {name}: remove it"
    if data.messages_column is not None and data.train_on == "completion":
        return "data.messages_column: whole conversations have no completion; set data.train_on to 'assistant' or 'all'"
    if data.on_max_length != "refuse" and data.max_length is None:
        return f"data.on_max_length={data.on_max_length!r} needs data.max_length"
    return None


def _preference(recipe: Sections, has_preference: bool) -> str | None:
    name, preference = recipe.algorithm.name, recipe.algorithm.preference
    if not has_preference:
        return (
            None if preference == Preference() else f"algorithm.preference is for dpo and kto, not for {name}"
        )
    every = recipe.algorithm.reference_sync_every
    if every and (preference.precompute or preference.reference_free):
        key = "precompute" if preference.precompute else "reference_free"
        return f"algorithm.reference_sync_every={every}: with algorithm.preference.{key} there is no reference to move"
    labelled = name == "kto"
    wrong = [each for each in preference.loss if (each in get_args(LabelLoss)) is not labelled]
    if wrong:
        return f"algorithm.preference.loss: {wrong[0]!r} is not a loss of {name}"
    if labelled and len(preference.loss) > 1:
        return "algorithm.preference.loss: kto takes one loss"
    plain = Preference()
    for key in _OF_DPO if labelled else _OF_KTO:
        if getattr(preference, key) != getattr(plain, key):
            return f"algorithm.preference.{key} is not for {name}: remove it"
    if labelled and "apo_zero_unpaired" not in preference.loss and recipe.train.prompts_per_step < 2:
        return "train.prompts_per_step=1: kto measures the KL on completions of other prompts of the step and needs 2"
    return None
