"""Combinations of rewards with other sections that cannot work."""

from __future__ import annotations

from shardproof.config.sections import Sections


def reward_problem(recipe: Sections) -> str | None:
    """What in the recipe does not fit its rewards; None if all does."""
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
