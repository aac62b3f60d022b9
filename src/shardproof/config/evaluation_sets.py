"""The held-out sets of a recipe with every setting filled in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardproof.config.algorithms import SPECS
from shardproof.config.evaluation import Evaluation, EvaluationSet
from shardproof.config.reward_problems import is_rewarded
from shardproof.config.sections import Sections

_COUNTED = re.compile(r"(pass|avg|maj)@([1-9][0-9]{0,8})(?:_low|_high)?")  # metrics of so many completions

_GREEDY = "changes nothing: with one completion per row and no temperature the most likely token is taken"


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out rows, and how it is evaluated. The one of `data.evaluation` has no name."""

    name: str
    key: str  # of the recipe, that names its source
    source: str
    prompt_column: str
    answer_column: str | None
    every: int  # 0: never
    prompts: int
    samples: int
    temperature: float
    max_new_tokens: int
    length_key: str  # of the recipe, that says max_new_tokens
    top_p: float
    top_k: int
    min_p: float
    pass_at: tuple[int, ...]

    @property
    def drawing(self) -> dict[str, Any]:
        """The settings of `Sampling` that an evaluation has of its own."""
        keys = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p")
        return {key: getattr(self, key) for key in keys}

    @property
    def prefix(self) -> str:
        """Of its metrics."""
        return f"eval/{self.name}/" if self.name else "eval/"

    def is_due(self, step: int) -> bool:
        """Whether it is evaluated after this step; step 0 is before the first."""
        return bool(self.every) and step % self.every == 0


def held_out_sets(recipe: Sections) -> list[HeldOut]:
    """The set of `data.evaluation`, if there is one, and those of `evaluation.sets`."""
    data, found = recipe.data, []
    if data.evaluation is not None:
        default = EvaluationSet(name="default", source=data.evaluation)
        found.append(_filled(recipe, default, "", "data.evaluation"))
    for number, each in enumerate(recipe.evaluation.sets):
        found.append(_filled(recipe, each, each.name, f"evaluation.sets.{number}.source"))
    return found


def owner_of(metric: str, sets: Iterable[HeldOut]) -> HeldOut | None:
    """The set that a metric is of: the one whose prefix says most; None if it is of none."""
    found = [each for each in sets if metric.startswith(each.prefix)]
    return max(found, key=lambda each: len(each.prefix), default=None)


def draws_of(metric: str, sets: Iterable[HeldOut]) -> dict[str, Any]:
    """How many rows and completions a metric is measured on, and how they are drawn; empty if it is of no set."""
    owner = owner_of(metric, sets)
    return {} if owner is None else {"prompts": owner.prompts, "samples": owner.samples, **owner.drawing}


def named_sources(recipe: Sections) -> dict[str, str]:
    """Every source of rows in a recipe, by the key that names it."""
    train = recipe.data.sources
    keys = ["data.train"] if len(train) == 1 else [f"data.train.{number}" for number in range(len(train))]
    found = {key: each.source for key, each in zip(keys, train, strict=True)}
    return found | {each.key: each.source for each in held_out_sets(recipe)}


def _filled(recipe: Sections, given: EvaluationSet, name: str, key: str) -> HeldOut:
    output, whole, rollout = recipe.output, recipe.evaluation, recipe.rollout
    samples = given.samples or output.eval_samples

    def first(field: str) -> Any:
        """What the set says, or else the whole evaluation, or else sampling in training."""
        said = (getattr(each, field) for each in (given, whole, rollout))
        return next(value for value in said if value is not None)

    is_greedy = samples == 1 and given.temperature is None and whole.temperature is None
    own_length = key.replace(".source", ".max_new_tokens") if given.max_new_tokens is not None else None
    whole_length = "rollout.max_new_tokens" if whole.max_new_tokens is None else "evaluation.max_new_tokens"
    pass_at = whole.pass_at if given.pass_at is None else given.pass_at
    return HeldOut(
        name=name,
        key=key,
        source=given.source,
        prompt_column=given.prompt_column or recipe.data.prompt_column,
        answer_column=given.answer_column or recipe.data.answer_column,
        every=output.eval_every if given.every is None else given.every,
        prompts=given.prompts or output.eval_prompts,
        samples=samples,
        temperature=0.0 if is_greedy else first("temperature"),
        max_new_tokens=first("max_new_tokens"),
        length_key=own_length or whole_length,
        top_p=first("top_p"),
        top_k=first("top_k"),
        min_p=first("min_p"),
        pass_at=tuple(sorted(set(pass_at) or {samples})),
    )


def evaluation_problem(recipe: Sections) -> str | None:
    """What in the evaluation's settings cannot work; None if all can."""
    sets = held_out_sets(recipe)
    if recipe.output.eval_every and not sets:
        return "output.eval_every needs held-out prompts: set data.evaluation"
    for each in sets:
        where = f"evaluation of {each.name or 'data.evaluation'}"
        if not each.every:
            if each.name:
                return f"{where}: it is never evaluated; set its key every, or output.eval_every"
            continue
        if each.pass_at[-1] > each.samples:
            keys = "samples, or lower pass_at of this set"
            if not each.name:
                keys = "output.eval_samples, or lower evaluation.pass_at"
            return f"{where}: pass@{each.pass_at[-1]} needs as many completions per row, not {each.samples}: raise {keys}"
        if each.samples > 1 and each.temperature == 0.0:
            return (
                f"{where}: with temperature 0 all of the {each.samples} completions per row are the same: use 1, or a "
                "temperature above 0"
            )
        if each.max_new_tokens < recipe.rollout.min_new_tokens:
            return f"{where}: max_new_tokens={each.max_new_tokens} is below rollout.min_new_tokens={recipe.rollout.min_new_tokens}"
    if (unread := _unread_by_greedy(recipe, [each for each in sets if each.every])) is not None:
        return unread
    best = recipe.evaluation.best
    return None if best is None else _best_problem(recipe, best, [each for each in sets if each.every])


def _unread_by_greedy(recipe: Sections, sets: list[HeldOut]) -> str | None:
    """A setting of drawing that no evaluation reads, because nobody set a temperature and one completion per row has 0."""
    whole, own = recipe.evaluation, {each.name: each for each in recipe.evaluation.sets}
    if whole.temperature is not None or (recipe.reward is None and recipe.environment is None):
        return None
    for each in sets:
        given = own.get(each.name)
        if given is not None and each.temperature == 0.0 and given.temperature is None:
            key = _truncating(given)
            if key is not None:
                return f"evaluation of {each.name}: {key} {_GREEDY}; set temperature of this set, or remove the key"
    key = _truncating(whole)
    if key is not None and sets and all(each.temperature == 0.0 for each in sets):
        return f"evaluation.{key} {_GREEDY}; set evaluation.temperature, or remove the key"
    return None


def _truncating(given: EvaluationSet | Evaluation) -> str | None:
    """The first setting by which only some of the tokens can be drawn."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values = {key: getattr(given, key) for key in off}
    return next((f"{k}={v}" for k, v in values.items() if v is not None and v != off[k]), None)


def _best_problem(recipe: Sections, best: str, sets: list[HeldOut]) -> str | None:
    """Why no evaluation can have the metric of the best model, as far as settings say; None if one may have it."""
    if not sets:
        return f"evaluation.best={best!r}: nothing is evaluated; set data.evaluation and output.eval_every"
    owner = owner_of(best, sets)
    if owner is None:
        names = ", ".join(f"{each.prefix}reward" for each in sets)
        return f"evaluation.best={best!r} is no metric of a held-out set; metrics begin as in {names}"
    counted = _COUNTED.fullmatch(best.removeprefix(owner.prefix))
    why = _unmeasured(recipe, best.removeprefix(owner.prefix), owner.prefix)
    if why is not None:
        return f"evaluation.best={best!r} is not measured: {why}"
    if counted is None:
        return None
    kind, known = counted[1], owner.pass_at
    if kind != "pass":  # measured of several completions, all of them
        known = (owner.samples,) * (owner.samples > 1)
    if int(counted[2]) in known:
        return None
    names = ", ".join(f"{owner.prefix}{kind}@{each}" for each in known)
    if kind == "pass":
        return f"evaluation.best={best!r} is not measured: add {counted[2]} to pass_at, or use {names}"
    why = f"each row has {owner.samples} completion{'s' * (owner.samples > 1)}"
    return f"evaluation.best={best!r} is not measured: {why}{f'; use {names}' if names else ''}"


def _unmeasured(recipe: Sections, name: str, prefix: str) -> str | None:
    """Why a run with these rewards and this algorithm has no such metric of an evaluation; None if it may have it."""
    settings, spec = recipe.reward, SPECS.get(recipe.algorithm.name)
    of_totals = name in ("reward", "reward_se")
    if settings is None and recipe.environment is None:
        if of_totals or _COUNTED.fullmatch(name):
            return f"nothing scores held-out completions; use {prefix}loss, or name a function in reward.functions"
        return None
    if of_totals and not is_rewarded(recipe) and settings is not None:
        keys = [*(each.key for each in settings.functions), *(each.name for each in settings.models)]
        return f"all weights are 0; use {prefix}{keys[0]}"
    if name == "loss" and spec is not None and spec.samples:
        return f"{recipe.algorithm.name} samples its completions, and none are given; use {prefix}reward"
    return None
