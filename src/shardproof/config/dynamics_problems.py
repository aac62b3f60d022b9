"""What cannot work around an algorithm's loss: controllers, the moving reference, dynamic sampling, discounts, the critic."""

from __future__ import annotations

from shardproof.config.algorithms import PER_COMPLETION, SPECS
from shardproof.config.sections import Sections

_ENVIRONMENT = "environment"  # the environment's part of a reward


def dynamics_problem(recipe: Sections) -> str | None:
    """The first of these combinations in the recipe; None if there is none."""
    checks = (_targets, _moving_reference, _signal, _success, _discounts, _warmup)
    return next(filter(None, (check(recipe) for check in checks)), None)


def _targets(recipe: Sections) -> str | None:
    settings, spec = recipe.algorithm, SPECS.get(recipe.algorithm.name)
    if settings.kl_target is not None and not settings.kl_coef:
        return "algorithm.kl_target needs the coefficient that it begins with: set algorithm.kl_coef"
    if settings.entropy_target is not None and spec is not None and not spec.samples:
        return f"algorithm.entropy_target is for algorithms that sample, not for {settings.name}"
    for key, needed in (("kl_horizon", "kl_target"), ("entropy_step", "entropy_target")):
        if _is_set(settings, key) and getattr(settings, needed) is None:
            return f"algorithm.{key} is for algorithm.{needed}: set it, or remove the key"
    return None


def _is_set(settings: object, key: str) -> bool:
    return bool(getattr(settings, key) != type(settings).model_fields[key].default)  # type: ignore[attr-defined]


def _moving_reference(recipe: Sections) -> str | None:
    settings, spec = recipe.algorithm, SPECS.get(recipe.algorithm.name)
    if not settings.reference_sync_every:
        if _is_set(settings, "reference_mix"):
            return "algorithm.reference_mix is for algorithm.reference_sync_every: set it, or remove the key"
        return None
    key = f"algorithm.reference_sync_every={settings.reference_sync_every}"
    if not settings.kl_coef and spec is not None and not spec.has_preference:
        return f"{key}: there is no reference when algorithm.kl_coef is 0; set it, or remove the key"
    if recipe.model.lora is not None:
        return (
            f"{key} with model.lora: the reference is the frozen base under the adapters, which cannot move without "
            "the policy; train all weights, or remove the key"
        )
    strategy = recipe.reference.strategy if recipe.reference is not None else None
    if strategy not in (None, recipe.model.strategy):
        return f"{key}: reference.strategy={strategy!r} holds other parts on each rank than model.strategy; remove it"
    return None


def _signal(recipe: Sections) -> str | None:
    settings, spec = recipe.algorithm, SPECS.get(recipe.algorithm.name)
    chosen = settings.dynamic_sampling
    drops = chosen if chosen is not None or spec is None else spec.dynamic_sampling
    if drops is False:
        for key in ("dynamic_sampling_on", "dynamic_sampling_rounds"):
            if _is_set(settings, key):
                return f"algorithm.{key} is for algorithm.dynamic_sampling=true: set it, or remove the key"
    on = settings.dynamic_sampling_on
    return None if on is None else _reward_problem(recipe, "dynamic_sampling_on", on)


def _success(recipe: Sections) -> str | None:
    problems = (_reward_problem(recipe, "success_on", name) for name in recipe.algorithm.success_on)
    return next(filter(None, problems), None)


def _reward_problem(recipe: Sections, key: str, name: str) -> str | None:
    rewards, names = recipe.reward, list[str]()
    if rewards is not None:
        names += [each.key for each in rewards.functions] + [each.name for each in rewards.models]
    names += [_ENVIRONMENT] if recipe.environment is not None else []
    if name in names:
        return None
    return f"algorithm.{key}={name!r} is not one of the rewards: {', '.join(names)}"


def _discounts(recipe: Sections) -> str | None:
    """A user's own algorithm may read all of them, whatever its baseline."""
    settings, spec = recipe.algorithm, SPECS.get(recipe.algorithm.name)
    if spec is None or not spec.samples:
        return None
    if _is_set(settings, "gamma") and settings.baseline in PER_COMPLETION:
        return (
            f"algorithm.gamma discounts the returns of tokens, and with baseline={settings.baseline!r} all tokens of a "
            "completion have one return: remove the key"
        )
    for key in ("gae_lambda", "value_clip"):
        if _is_set(settings, key) and not spec.has_critic:
            return f"algorithm.{key}: {settings.name} has no critic; remove it or use algorithm.name='ppo'"
    return None


def _warmup(recipe: Sections) -> str | None:
    settings, spec = recipe.algorithm, SPECS.get(recipe.algorithm.name)
    if settings.critic_warmup_steps and spec is not None and not spec.has_critic:
        return f"algorithm.critic_warmup_steps: {settings.name} has no critic; remove it or use algorithm.name='ppo'"
    if settings.critic_warmup_steps >= recipe.train.steps:
        return (
            f"algorithm.critic_warmup_steps={settings.critic_warmup_steps} leaves no step to the policy: "
            f"train.steps is {recipe.train.steps}"
        )
    return None
