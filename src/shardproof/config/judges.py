"""Combinations about reward models and teachers that cannot work."""

from __future__ import annotations

from shardproof.config.algorithms import SPECS
from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.sections import Sections

_OF_DISTILLATION = {"teacher_coef": 1.0, "teacher_gamma": 0.0}


def judge_paths(recipe: Sections) -> dict[str, str]:
    """The folders or hub ids of a recipe's teacher and reward models, by their keys."""
    models = recipe.reward.models if recipe.reward is not None else []
    found = {f"reward.models.{each.name}": each.path for each in models}
    if recipe.teacher is not None and recipe.teacher.path is not None:
        found["teacher.path"] = recipe.teacher.path
    return found


def judge_problem(recipe: Sections) -> str | None:
    """What in the recipe about models that judge the policy does not fit; None if all does."""
    return _teacher(recipe) or _models(recipe) or _trained(recipe)


def _teacher(recipe: Sections) -> str | None:
    name, settings, teacher = recipe.algorithm.name, recipe.algorithm, recipe.teacher
    spec = SPECS.get(name)
    learns = spec is not None and spec.has_teacher
    if learns and teacher is None:
        return f"teacher is missing: {name} learns from a teacher; set teacher.path or teacher.url"
    if not learns:
        changed = [key for key, default in _OF_DISTILLATION.items() if getattr(settings, key) != default]
        if teacher is not None:
            return f"teacher: {name} learns from no teacher; remove the section or use algorithm.name='distillation'"
        return f"algorithm.{changed[0]} is for distillation, not for {name}" if changed else None
    assert teacher is not None
    if teacher.url is not None and recipe.rollout.temperature != 1.0:
        return (
            f"teacher.url with rollout.temperature={recipe.rollout.temperature}: a server scores at temperature 1; set "
            "rollout.temperature=1.0, or load the teacher with teacher.path"
        )
    unscored = recipe.reward is None and recipe.environment is None
    if unscored and any(each.every for each in held_out_sets(recipe)):
        return (
            "output.eval_every: nothing scores held-out completions; add a reward function, with weight=0 if it is only "
            "to be measured"
        )
    return None


def _models(recipe: Sections) -> str | None:
    models = recipe.reward.models if recipe.reward is not None else []
    if recipe.environment is not None:
        for each in models:
            if each.format == "chat":
                return (
                    f"reward.models: {each.name!r} reads conversations of one turn, not those of an environment; set its "
                    "format='text'"
                )
    return None


def _trained(recipe: Sections) -> str | None:
    spec = SPECS.get(recipe.algorithm.name)
    trains = spec is not None and spec.role == "reward"
    if recipe.algorithm.center_rewards_coef and not trains:
        return f"algorithm.center_rewards_coef is for reward_model, not for {recipe.algorithm.name}"
    if not trains:
        return None
    if recipe.reward is not None:
        return "reward: reward_model learns from pairs, and samples nothing; remove the section"
    if recipe.algorithm.router_coef:
        return (
            "algorithm.router_coef is for policies: a reward model's router is not balanced; remove the key"
        )
    return None
