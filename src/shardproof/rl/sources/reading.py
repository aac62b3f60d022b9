"""A recipe's rows, from all of its sources, and the prompts that are made of them."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardproof.config.evaluation_sets import HeldOut
from shardproof.config.schema import Recipe
from shardproof.environments.pool import EnvironmentPool
from shardproof.foreign import without_nulls
from shardproof.rl.algorithms.registry import find_algorithm
from shardproof.rl.conversations.conversation import Rules
from shardproof.rl.conversations.prepare import SOURCE, rows_of
from shardproof.rl.data import Prompt
from shardproof.rl.rewards.from_recipe import specs_of
from shardproof.rl.rewards.functions import needed_columns
from shardproof.rl.sources.encoding import encode_prompts, require_lengths
from shardproof.rl.sources.given import encode_given, given_kind, limited
from shardproof.rl.sources.rendering import Rendering
from shardproof.rl.sources.rows import ANSWER_COLUMN, Columns, Rows, read_columns
from shardproof.rl.sources.text_files import unusable
from shardproof.rollout.sampling import check_overrides

logger = logging.getLogger(__name__)
SAMPLING_COLUMN = "sampling"
_FEW = 5  # values of a column that an error shows
_GIVEN_COLUMNS = {  # that hold what is learned, by what a row holds
    "completions": ("completion_column", "messages_column"),
    "labelled": ("completion_column", "label_column"),
    "pairs": ("chosen_column", "rejected_column"),
}
TRAINING = "data.train"  # the key of the rows to train on


@dataclass(frozen=True)
class Limits:
    """What the model has room for."""

    context: int | None  # tokens of a sequence; None: any number
    max_new_tokens: int  # that may follow a prompt
    vocabulary: int | None = None  # tokens that the model has
    length_key: str = "rollout.max_new_tokens"  # of the recipe, that says how many may follow


@dataclass
class Reading:
    """Rows of one kind, to train on or of a held-out set, on their way to prompts."""

    key: str  # of the recipe, that names the source
    rows: Rows
    prompt_column: str
    sources: list[str] = field(default_factory=list)  # the name of each row's source, where there are several
    dropped: Counter[str] = field(default_factory=Counter)  # rows that are left out, by why
    num_read: int = 0

    def __post_init__(self) -> None:
        self.num_read = len(self.rows) + sum(self.dropped.values())

    @property
    def has_messages(self) -> bool:
        return any(isinstance(row.get(self.prompt_column), list) for row in self.rows)

    @property
    def described(self) -> str:
        """What is left out, in words; empty if nothing is."""
        reasons = ", ".join(f"{num} {why}" for why, num in self.dropped.items())
        num = sum(self.dropped.values())
        return f"{self.key}: left out {num} of {self.num_read} rows: {reasons}" if num else ""


def read_training(recipe: Recipe, environment: EnvironmentPool | None) -> Reading:
    """The rows to train on, of all sources one after the other; raises if some row cannot be used."""
    data, found, names = recipe.data, Rows([]), []
    dropped: Counter[str] = Counter()
    for each in data.sources:
        own_column = each.prompt_column not in (None, data.prompt_column)
        columns = _columns(
            recipe,
            prompt=data.prompt_column if each.prompt_column is None else each.prompt_column,
            answer=data.answer_column if each.answer_column is None else each.answer_column,
            prompt_under=data.prompt_column if own_column else None,
            source=each.name,
            environment=environment,
        )
        if _is_given(recipe):
            # Completions that are given are not scored, and need no answer: rewards are for the held-out rows.
            columns = replace(columns, rewards=(), needs_answer=False, drops_unanswered=False)
        rows = _read(each.source, columns, environment)
        found += rows
        found.places += rows.places
        names += [each.name] * len(rows)
        dropped += rows.dropped
    return Reading(TRAINING, found, data.prompt_column, names, dropped)


def read_held_out(recipe: Recipe, held_out: HeldOut, environment: EnvironmentPool | None) -> Reading:
    """The rows of a held-out set; raises if some row cannot be used."""
    data, own = recipe.data, held_out.prompt_column
    columns = _columns(
        recipe,
        prompt=own,
        answer=held_out.answer_column,
        prompt_under=data.prompt_column if own != data.prompt_column else None,
        source=held_out.name,
        environment=environment,
    )
    rows = _read(held_out.source, columns, environment)
    return Reading(held_out.key, rows, data.prompt_column, dropped=rows.dropped)


def check_chosen(recipe: Recipe, readings: Sequence[Reading]) -> None:
    """Raise for a reward function that is about none of the rows, or for whose parameters no row has a column."""
    rows = [row for each in readings for row in each.rows]
    for spec in specs_of(recipe):
        if any(map(spec.is_about, rows)):
            continue
        held = {column: list(dict.fromkeys(repr(row.get(column)) for row in rows)) for column in spec.only}
        there = "; ".join(
            f"{column!r} holds {', '.join(values[:_FEW])}{', ...' if len(values) > _FEW else ''}"
            for column, values in held.items()
        )
        raise unusable(
            f"reward {spec.key!r}: no row fits its 'only': {there}.",
            "name a column and values that rows have",
        )
    if recipe.environment is None:  # which may add columns
        _check_needed(recipe, readings)


def _check_needed(recipe: Recipe, readings: Sequence[Reading]) -> None:
    """Raise for a function of TRL's signature that no row of a set has a column for."""
    for spec in specs_of(recipe):
        for column, each in itertools.product(needed_columns(spec), readings):
            scored = each.rows if is_sampled(recipe, each.key == TRAINING) else []
            rows = [row for row in scored if spec.is_about(row)]
            if not rows or any(column in row for row in rows):
                continue
            there = ", ".join(map(repr, rows[0]))
            raise unusable(
                f"reward {spec.key!r} needs the column {column!r}, and no row of {each.key} has it; the first has {there}.",
                f"rename a column to {column!r}, or give the function's parameter a default",
            )


def _columns(
    recipe: Recipe,
    *,
    prompt: str,
    answer: str | None,
    environment: EnvironmentPool | None,
    prompt_under: str | None = None,
    source: str = "",
) -> Columns:
    # Given completions need no answer, unless held-out ones are sampled and scored.
    rewards, answer = specs_of(recipe), answer if recipe.reward is not None else None
    _require_apart(recipe, prompt, answer)
    return Columns(
        prompt,
        answer,
        rewards,
        needs_prompt=environment is None and _needs_prompt(recipe),
        drops_unanswered=recipe.data.no_answer == "drop",
        prompt_under=prompt_under,
        source=source,
        takes_conversations=given_kind(recipe) == "completions",
    )


def _require_apart(recipe: Recipe, prompt: str, answer: str | None) -> None:
    """Raise if answers, which rewards find under one name, would take the place of something else that is read there."""
    data, keys = recipe.data, ("prompt_column", *_GIVEN_COLUMNS.get(given_kind(recipe), ()))
    for key in keys if answer is not None else ():
        column = getattr(data, key)
        own = prompt if key == "prompt_column" else column
        if column == ANSWER_COLUMN and {own, answer} != {ANSWER_COLUMN}:
            raise unusable(
                f"data.{key}={column!r}: under that name rewards find the answer, which is in column {answer!r} "
                "(data.answer_column); one would take the place of the other.",
                f"rename the column {column!r}, or set data.answer_column=none if no reward reads an answer",
            )


def _read(source: str, columns: Columns, environment: EnvironmentPool | None) -> Rows:
    return read_columns(source, columns, rows_of(environment, source) if source.startswith(SOURCE) else None)


def _is_given(recipe: Recipe) -> bool:
    return bool(given_kind(recipe))


def _needs_prompt(recipe: Recipe) -> bool:
    """Whether a row needs a prompt of its own: pairs may have it in their completions, and conversations are whole."""
    return given_kind(recipe) != "pairs" and recipe.data.messages_column is None


def encode(
    recipe: Recipe, reading: Reading, tokenizer: Any, rules: Rules | None, limits: Limits
) -> list[Prompt]:
    """The prompts of rows; those that are too long are refused, or left out and counted in `reading`, as the recipe says."""
    data, tools = recipe.data, rules.tools if rules is not None else ()
    chat = data.chat or (rules is not None and rules.is_templated)
    drops = data.too_long == "drop"
    longest = None if drops else data.max_prompt_tokens
    most = limits.max_new_tokens if is_sampled(recipe, reading.key == TRAINING) else 0
    if _is_given(recipe):
        prompts = encode_given(recipe, reading.rows, tokenizer, reading.prompt_column)
        require_lengths(reading.rows.places, [p.text for p in prompts], [p.tokens for p in prompts], longest)
    else:
        prompts = encode_prompts(
            reading.rows, tokenizer, reading.prompt_column, chat, longest, tools, Rendering.of(recipe)
        )
    prompts = [
        _with_sampling(recipe, *each, limits) for each in zip(prompts, reading.rows.places, strict=True)
    ]
    if reading.sources:
        prompts = [
            replace(prompt, source=name) for prompt, name in zip(prompts, reading.sources, strict=True)
        ]
    if _is_given(recipe):
        prompts, dropped = limited(recipe, prompts)
        reading.dropped.update(dropped)
    if drops:
        prompts = _without_long(recipe, reading, prompts, limits.context, most)
    if not prompts:
        raise unusable(
            f"{reading.described}: none is left.", "raise the limits of lengths, or use other rows"
        )
    _require_room(recipe, reading.key, prompts, limits, most)
    return prompts


def _with_sampling(recipe: Recipe, prompt: Prompt, place: str, limits: Limits) -> Prompt:
    """The prompt with its row's own settings of sampling, where the recipe allows them."""
    allowed, given = recipe.rollout.row_overrides, prompt.row.get(SAMPLING_COLUMN)
    if not allowed or given is None:
        return prompt
    problem = check_overrides(given, allowed, limits.max_new_tokens, limits.vocabulary)
    if problem is not None:
        raise unusable(f"{place}: column {SAMPLING_COLUMN!r}: {problem}.", "repair the row")
    return replace(prompt, sampling=without_nulls(given) or None)


def is_sampled(recipe: Recipe, is_training: bool) -> bool:
    """Whether completions of these rows are sampled: to train on, or of held-out ones to be scored."""
    if is_training:
        return not _is_given(recipe)
    return recipe.reward is not None or recipe.environment is not None


def num_following(recipe: Recipe, prompt: Prompt, most: int) -> int:
    """How many tokens may follow a prompt; `most`: how many are sampled, if its row does not say, 0 for none."""
    sampled = 0
    if most:
        sampled = (prompt.sampling or {}).get("max_new_tokens", most) + len(prompt.asked) - len(prompt.tokens)
    return max(len(prompt.completion), len(prompt.rejected), sampled) + _after_text(recipe)


def longest(recipe: Recipe, prompts: Sequence[Prompt], most: int) -> int:
    """The most tokens of a prompt and what may follow it: see `num_following`."""
    return max(len(each.tokens) + num_following(recipe, each, most) for each in prompts)


def _after_text(recipe: Recipe) -> int:
    """How many tokens stand behind a text that a reward model learns from: see `train.score.scored_text`."""
    return int(find_algorithm(recipe.algorithm.name).spec.role == "reward")


def _without_long(
    recipe: Recipe, reading: Reading, prompts: list[Prompt], context: int | None, most: int
) -> list[Prompt]:
    longest, kept = recipe.data.max_prompt_tokens, []
    for prompt in prompts:
        num = len(prompt.tokens)
        if longest is not None and num > longest:
            reading.dropped[f"longer than data.max_prompt_tokens={longest}"] += 1
        elif context is not None and num + num_following(recipe, prompt, most) > context:
            reading.dropped[f"too long for {context} positions"] += 1
        else:
            kept.append(prompt)
    return kept


def _require_room(recipe: Recipe, source: str, prompts: Sequence[Prompt], limits: Limits, most: int) -> None:
    """Raise if some prompt and what follows it are longer than the model's context, or than a conversation may be."""
    limit, key = limits.context, limits.length_key
    if limit is None:
        return
    longest = max(prompts, key=lambda prompt: len(prompt.tokens) + num_following(recipe, prompt, most))
    num, following = len(longest.tokens), num_following(recipe, longest, most)
    if num + following > limit:
        after = _after_text(recipe)
        given = max(len(longest.completion), len(longest.rejected))
        is_given = bool(given) and following == given + after
        what = f"{key}={most}" if following == most else f"a completion of {following - after}"
        where = f"the model's {limit} positions" + ", of which a score needs one behind the text" * after
        if recipe.environment is not None and limit == recipe.environment.max_tokens:
            where = f"environment.max_tokens={limit}"
        message = (
            f"{source}: a prompt of {num} tokens with {what} does not fit {where}: {longest.text[:60]!r}."
        )
        fix = f'set data.too_long="drop", or lower {key}'
        if is_given:
            fix = f'set data.max_length={limit - after} and data.on_max_length="truncate" or "drop"'
        raise unusable(message, fix)


def say_dropped(readings: Sequence[Reading]) -> None:
    """Say in the log which rows are left out."""
    for each in readings:
        if each.described:
            logger.info("%s", each.described)


def dropped_of(readings: Sequence[Reading]) -> dict[str, dict[str, int]]:
    """{key: {why: number of rows}} of what is left out."""
    return {each.key: dict(each.dropped) for each in readings if each.dropped}


def sizes_of(prompts: Sequence[Prompt]) -> Mapping[str, int]:
    """How many prompts each source has, in the order of the sources; one without a name if there are not several."""
    return dict(Counter(prompt.source for prompt in prompts))
