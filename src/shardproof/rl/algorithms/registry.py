"""Algorithms by name: those of this package, and users' own as `module:name`."""

from __future__ import annotations

from shardproof.config.algorithms import AlgorithmSpec
from shardproof.config.schema import Algorithm as Settings
from shardproof.config.schema import Recipe, Rollout, spec_problem
from shardproof.errors import fail
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.algorithms.grouped import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO
from shardproof.rl.algorithms.returns import PPO, ReinforcePP
from shardproof.rl.algorithms.sft import SFT
from shardproof.train.loss import Loss
from shardproof.user_code import import_named

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "ppo": PPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "sft": SFT,
}


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
    algorithm = find_algorithm(settings.name)(settings, rollout)
    losses: dict[str, Loss | None] = {"loss": algorithm.loss}
    if algorithm.spec.has_critic:
        losses["value_loss"] = algorithm.value_loss
    for name, found in losses.items():
        if not isinstance(found, Loss):
            message = f"algorithm {settings.name!r}: {name} is a {type(found).__name__}; expected a shardproof.Loss."
            raise fail("C001", "algorithm", message, fix="see docs/extending.md#an-algorithm")
    known = {"ref_logps", "old_logps"} | ({"values"} if algorithm.spec.has_critic else set())
    unknown = sorted(algorithm.columns - known)
    if unknown:
        message = f"algorithm {settings.name!r}: no model computes the column {unknown[0]!r}."
        raise fail("C001", "algorithm", message, fix=f"use {', '.join(sorted(known))}")
    return algorithm


def check_algorithm(recipe: Recipe) -> None:
    """Raise if the recipe's algorithm cannot be imported or made, or the recipe does not fit it."""
    problem = spec_problem(recipe, find_algorithm(recipe.algorithm.name).spec)
    if problem is not None:
        raise fail("C001", "recipe", f"{problem}.", fix="repair these keys")
    make_algorithm(recipe.algorithm, recipe.rollout)
