"""The rewards that a recipe asks for."""

from __future__ import annotations

import os

from shardproof.config.schema import Recipe, Reward
from shardproof.rl.rewards.functions import find_reward
from shardproof.rl.rewards.runner import RewardRunner, Shaping
from shardproof.rl.rewards.specs import RewardSpec, Surroundings


def spec_of(section: Reward) -> RewardSpec:
    """One function, as its processes read it."""
    clip = section.clip
    return RewardSpec(
        section.name,
        section.weight,
        section.label or "",
        section.options,
        section.signature,
        section.batch_size,
        section.concurrency,
        None if clip is None else (clip[0], clip[1]),
        {name: tuple(held) if isinstance(held, list) else (held,) for name, held in section.only.items()},
    )


def specs_of(recipe: Recipe) -> list[RewardSpec]:
    """The functions of a recipe."""
    return [] if recipe.reward is None else [spec_of(each) for each in recipe.reward.functions]


def check_rewards(recipe: Recipe) -> None:
    """Raise C001 for a function that cannot be used on this machine, or not with its options."""
    for spec in specs_of(recipe):
        find_reward(spec, _around(recipe, 1))


def make_rewards(recipe: Recipe, num_ranks: int) -> RewardRunner | None:
    """What scores completions: None where nothing does, and without functions where an environment or a teacher alone does."""
    settings, environment = recipe.reward, recipe.environment
    if settings is None:
        return RewardRunner([]) if environment is not None or recipe.teacher is not None else None
    clip = settings.clip
    return RewardRunner(
        specs_of(recipe),
        timeout_s=settings.timeout_s,
        num_workers=settings.num_workers,
        on_error=settings.on_error,
        around=_around(recipe, num_ranks),
        shaping=Shaping(
            clip=None if clip is None else (clip[0], clip[1]),
            each=settings.normalise == "each",
            environment_weight=1.0 if environment is None else environment.reward_weight,
        ),
    )


def _around(recipe: Recipe, num_ranks: int) -> Surroundings:
    settings, data = recipe.reward, recipe.data
    assert settings is not None
    return Surroundings(
        timeout_s=settings.timeout_s,
        num_workers=settings.num_workers,
        folder=os.path.abspath(os.path.expanduser(recipe.output.folder)),
        num_ranks=num_ranks,
        prompt_column=data.prompt_column,
        chat=data.chat,
    )
