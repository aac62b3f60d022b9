"""The held-out sets of a recipe with every setting filled in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardproof.config.evaluation import EvaluationSet
from shardproof.config.sections import Sections


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
    top_p: float
    pass_at: tuple[int, ...]

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


def named_sources(recipe: Sections) -> dict[str, str]:
    """Every source of rows in a recipe, by the key that names it."""
    train = recipe.data.sources
    keys = ["data.train"] if len(train) == 1 else [f"data.train.{number}" for number in range(len(train))]
    found = {key: each.source for key, each in zip(keys, train, strict=True)}
    return found | {each.key: each.source for each in held_out_sets(recipe)}


def _filled(recipe: Sections, given: EvaluationSet, name: str, key: str) -> HeldOut:
    output, whole, rollout = recipe.output, recipe.evaluation, recipe.rollout
    samples = given.samples or output.eval_samples
    temperature = whole.temperature if given.temperature is None else given.temperature
    if temperature is None:
        temperature = 0.0 if samples == 1 else rollout.temperature
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
        temperature=temperature,
        max_new_tokens=given.max_new_tokens or whole.max_new_tokens or rollout.max_new_tokens,
        top_p=rollout.top_p if whole.top_p is None else whole.top_p,
        pass_at=tuple(sorted(set(pass_at) or {samples})),
    )


def evaluation_problem(recipe: Sections) -> str | None:
    """What in the evaluation's settings cannot work; None if all can."""
    sets = held_out_sets(recipe)
    if recipe.output.eval_every and not sets:
        return "output.eval_every needs held-out prompts: set data.evaluation"
    for each in sets:
        where = f"evaluation of {each.name or 'data.evaluation'}"
        if each.pass_at[-1] > each.samples:
            keys = "samples, or lower pass_at of this set"
            if not each.name:
                keys = "output.eval_samples, or lower evaluation.pass_at"
            return f"{where}: pass@{each.pass_at[-1]} needs as many completions per row, not {each.samples}: raise {keys}"
        if each.samples > 1 and each.temperature == 0.0:
            return f"{where}: with temperature 0 all of the {each.samples} completions per row are the same: use 1"
        if each.every and each.max_new_tokens < recipe.rollout.min_new_tokens:
            return f"{where}: max_new_tokens={each.max_new_tokens} is below rollout.min_new_tokens={recipe.rollout.min_new_tokens}"
        if each.name and not each.every:
            return f"{where}: it is never evaluated; set its key every, or output.eval_every"
    best, sets = recipe.evaluation.best, [each for each in sets if each.every]
    if best is not None and not sets:
        return f"evaluation.best={best!r}: nothing is evaluated; set data.evaluation and output.eval_every"
    if best is not None and owner_of(best, sets) is None:
        names = ", ".join(f"{each.prefix}reward" for each in sets)
        return f"evaluation.best={best!r} is no metric of a held-out set; metrics begin as in {names}"
    return None
