"""Combinations of rewards with other sections that cannot work."""

from __future__ import annotations

from shardproof.config.algorithms import SPECS
from shardproof.config.sections import Sections


def reward_problem(recipe: Sections) -> str | None:
    """What in the recipe does not fit its rewards; None if all does."""
    return _counting(recipe) or _normalised(recipe)


def is_rewarded(recipe: Sections) -> bool:
    """Whether something is learned from rewards, not only measured."""
    weights = []
    if recipe.reward is not None:
        weights += [each.weight for each in recipe.reward.functions]
        weights += [each.weight for each in recipe.reward.models]
    return recipe.environment is not None or any(weights)


def _counting(recipe: Sections) -> str | None:
    """Rewards that are only measured, where something is to be learned from them, or to be told apart by them."""
    settings, spec = recipe.algorithm, SPECS.get(recipe.algorithm.name)
    if is_rewarded(recipe):
        return None
    learns = spec is not None and spec.samples and not spec.has_teacher
    if learns and settings.overlong_from is None:
        return (
            f"reward: all weights are 0, so there is nothing that {settings.name} could learn from; give a function or a "
            "model another weight"
        )
    if settings.dynamic_sampling and recipe.reward is None:
        return (
            f"algorithm.dynamic_sampling compares rewards, and this {settings.name} has none: remove the key"
        )
    if settings.dynamic_sampling and settings.dynamic_sampling_on is None:
        return (
            "algorithm.dynamic_sampling compares weighted totals, and all weights are 0: name a function in "
            "algorithm.dynamic_sampling_on, or remove the key"
        )
    return None


def _normalised(recipe: Sections) -> str | None:
    settings, algorithm = recipe.reward, recipe.algorithm
    if settings is None or settings.normalise == "sum":
        return _of_totals(recipe)
    if algorithm.baseline in ("critic", "greedy", "off"):
        return (
            f"reward.normalise='each' compares the completions of a group, and {algorithm.name} with baseline="
            f"{algorithm.baseline!r} does not: use algorithm.name='gdpo', or another that compares a group"
        )
    if algorithm.credit == "turn":
        return (
            "reward.normalise='each' with algorithm.credit='turn': it weighs whole conversations, not turns; "
            "set algorithm.credit='trajectory'"
        )
    if algorithm.turn_gamma != 1.0:
        return (
            f"reward.normalise='each' with algorithm.turn_gamma={algorithm.turn_gamma}: whole conversations are "
            "normalised, which leaves no turns to be discounted; set algorithm.turn_gamma=1.0"
        )
    if recipe.rollout.group_size < 2:
        return "reward.normalise='each' compares the completions of a prompt: rollout.group_size must be at least 2"
    return None


def _of_totals(recipe: Sections) -> str | None:
    if recipe.algorithm.name != "gdpo":
        return None
    return (
        "algorithm.name='gdpo' compares sums of rewards that are normalised within their groups, and nothing compares "
        "totals of different prompts: set reward.normalise='each', or use algorithm.name='grpo'"
    )
