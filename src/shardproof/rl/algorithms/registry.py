"""Algorithms by name: those of this package, and users' own as `module:name`."""

from __future__ import annotations

from pydantic import ValidationError

from shardproof.config.algorithms import SPECS, AlgorithmSpec
from shardproof.config.combinations import spec_problem
from shardproof.config.schema import Algorithm as Settings
from shardproof.config.schema import Recipe, Rollout
from shardproof.config.switches import ADVANTAGE_SWITCHES, filled, switch_problem
from shardproof.errors import did_you_mean, fail
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.algorithms.distillation import TEACHER_LOGPS, Distillation
from shardproof.rl.algorithms.dpo import DPO
from shardproof.rl.algorithms.kto import KTO
from shardproof.rl.algorithms.presets import GRPO, PolicyGradient, preset
from shardproof.rl.algorithms.reward_model import RewardModelling
from shardproof.rl.algorithms.sft import SFT
from shardproof.rl.algorithms.uncertainty import OLD_ENTROPY
from shardproof.train.loss import Loss
from shardproof.user_code import import_named

# Those with code of their own; every other name of the table is a preset.
_OWN: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "distillation": Distillation,
    "sft": SFT,
    "dpo": DPO,
    "kto": KTO,
    "reward_model": RewardModelling,
}
ALGORITHMS: dict[str, type[Algorithm]] = {name: _OWN.get(name) or preset(name) for name in SPECS}


def find_algorithm(name: str) -> type[Algorithm]:
    """The class that `name` stands for: one of `ALGORITHMS`, or a user's `module:name`."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    found = import_named("algorithm", name)
    is_algorithm = isinstance(found, type) and issubclass(found, Algorithm)
    if not is_algorithm or not isinstance(getattr(found, "spec", None), AlgorithmSpec):
        message = f"algorithm {name!r} is {found!r}; expected a subclass of Algorithm with a `spec`."
        raise fail("C001", "algorithm", message, fix="see docs/extending.md")
    return found


def make_algorithm(settings: Settings, rollout: Rollout) -> Algorithm:
    """The algorithm that a recipe names, with its settings. Raises if its losses are not what they should be."""
    kind = find_algorithm(settings.name)
    _check_switches(kind, settings)
    algorithm = kind(settings, rollout)
    losses: dict[str, Loss | None] = {"loss": algorithm.loss}
    if algorithm.spec.has_critic:
        losses["value_loss"] = algorithm.value_loss
    for name, found in losses.items():
        if not isinstance(found, Loss):
            message = f"algorithm {settings.name!r}: {name} is a {type(found).__name__}; expected a shardproof.Loss."
            raise fail("C001", "algorithm", message, fix="see docs/extending.md#an-algorithm")
    known = {"ref_logps", "old_logps", OLD_ENTROPY} | ({"values"} if algorithm.spec.has_critic else set())
    known |= {TEACHER_LOGPS} if algorithm.spec.has_teacher else set()
    unknown = sorted(algorithm.columns - known)
    if unknown:
        message = f"algorithm {settings.name!r}: no model computes the column {unknown[0]!r}."
        raise fail("C001", "algorithm", message, fix=f"use {', '.join(sorted(known))}")
    return algorithm


def _check_switches(kind: type[Algorithm], settings: Settings) -> None:
    """Raise if switches are set that a user's own algorithm does not look at, or that do not go together in it."""
    if settings.name in SPECS:
        return
    _check_own_switches(kind.spec, settings)
    by_switches = (
        issubclass(kind, PolicyGradient)
        and kind.advantages is PolicyGradient.advantages
        and kind.compare is PolicyGradient.compare
    )
    ignored = [key for key in ADVANTAGE_SWITCHES if getattr(settings, key) is not None and not by_switches]
    if ignored:
        message = f"algorithm.{ignored[0]}: {settings.name!r} computes its advantages itself."
        raise fail("C001", "algorithm", message, fix="remove the key, or read it in your class")
    problem = switch_problem(filled(settings, kind.spec), kind.spec) if by_switches else None
    if problem is not None:
        raise fail("C001", "algorithm", f"algorithm.{problem}.", fix="repair these keys")


def _check_own_switches(spec: AlgorithmSpec, settings: Settings) -> None:
    """Raise if a user's class has values for keys that there are not, that do not go there, or that a recipe always has."""
    where, fields = f"algorithm {settings.name!r}: AlgorithmSpec.switches", type(settings).model_fields
    for key, value in spec.switches.items():
        if key not in fields:
            message = f"{where} has {key!r}, which is no key of [algorithm].{did_you_mean(key, fields)}"
            raise fail("C001", "algorithm", message, fix="see docs/presets.md#the-switches")
        default = fields[key].get_default(call_default_factory=True)
        if default is not None and getattr(settings, key) == default != value:
            message = f"{where} has {key}={value!r}, but the recipe has {default!r}, as every recipe that does not say otherwise."
            fix = f"set algorithm.{key} in the recipe, and leave it out of the class"
            raise fail("C001", "algorithm", message, fix=fix)
    try:
        type(settings).model_validate({**settings.model_dump(), **spec.switches})
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            if problem["loc"] and problem["loc"][0] in spec.switches:
                message = f"{where} has {problem['loc'][0]}={problem['input']!r}: {problem['msg']}."
                raise fail("C001", "algorithm", message, fix="see docs/presets.md#the-switches") from error


def check_algorithm(recipe: Recipe) -> None:
    """Raise if the recipe's algorithm cannot be imported or made, or the recipe does not fit it."""
    problem = spec_problem(recipe, find_algorithm(recipe.algorithm.name).spec)
    if problem is not None:
        raise fail("C001", "recipe", f"{problem}.", fix="repair these keys")
    make_algorithm(recipe.algorithm, recipe.rollout)
