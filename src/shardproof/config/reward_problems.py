"""Combinations of rewards with other sections that cannot work."""

from __future__ import annotations

from shardproof.config.sections import Sections


def reward_problem(recipe: Sections) -> str | None:
    """What in the recipe does not fit its rewards; None if all does."""
    settings, algorithm = recipe.reward, recipe.algorithm
    if settings is None or settings.normalise == "sum":
        return None
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
    if recipe.rollout.group_size < 2:
        return "reward.normalise='each' compares the completions of a prompt: rollout.group_size must be at least 2"
    return None
