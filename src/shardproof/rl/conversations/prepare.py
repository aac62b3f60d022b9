"""A recipe's environment before the first conversation: its workers, its format, and whether both fit the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardproof.config.schema import Environment, Recipe
from shardproof.environments.pool import EnvironmentPool, EnvironmentSpec
from shardproof.environments.protocol import Failure, Opening, Schema
from shardproof.environments.registry import resolve
from shardproof.errors import fail
from shardproof.rl.chat.format import ChatFormat, PlainFormat
from shardproof.rl.conversations.conversation import Conversation, Rules
from shardproof.rl.data import Prompt, Row
from shardproof.rl.templates import panics_as_errors
from shardproof.rollout.trajectory import Trajectory
from shardproof.user_code import describe_error

SOURCE = "environment:"  # what begins the name of a data source that an environment has
_TRIALS = 3  # rows of which one must open before a run starts


def environment_spec(settings: Environment) -> EnvironmentSpec:
    """What the workers need to know of a recipe's section."""
    options = dict(settings.options)
    if settings.name == "tools":
        options |= settings.tools.model_dump()
    return EnvironmentSpec(
        name=resolve(settings.name),
        options=options,
        timeout_s=settings.timeout_s,
        max_seconds=settings.max_seconds,
        num_workers=settings.num_workers,
        max_reply_chars=settings.max_reply_chars,
        python=settings.python,
    )


def start_workers(settings: Environment) -> EnvironmentPool:
    """The environment's workers on this rank, each of which has made one; raises C001 if one cannot be made."""
    return EnvironmentPool(environment_spec(settings))


@contextmanager
def environment_of(recipe: Recipe, pool: EnvironmentPool | None = None) -> Iterator[EnvironmentPool | None]:
    """The recipe's environment inside the block: `pool`, or one worker that ends with it; None without an environment."""
    if recipe.environment is None or pool is not None:
        yield pool
        return
    with start_workers(recipe.environment.model_copy(update={"num_workers": 1})) as own:
        yield own


def rows_of(pool: EnvironmentPool | None, source: str) -> list[tuple[str, Row]]:
    """The rows that an environment has for `environment:SPLIT`, each with its place in words."""
    assert pool is not None, "a recipe with such a source has an environment"
    rows = pool.rows(source.removeprefix(SOURCE))
    return [(f"{source}, row {number}", row) for number, row in enumerate(rows, 1)]


def make_rules(
    recipe: Recipe, tokenizer: Any, rows: Iterable[Row], pool: EnvironmentPool, context: int | None
) -> Rules:
    """What all conversations follow; raises R508 if the template rewrites earlier turns and the recipe refuses that."""
    settings, facts = recipe.environment, pool.facts
    assert settings is not None
    chat = _uses_template(recipe, tokenizer, rows, facts.tools)
    if chat:
        found = ChatFormat.of(tokenizer, settings.tool_format)
        rewrites = found.probe(facts.roles, bool(facts.tools)) if settings.max_turns > 1 else []
        if rewrites and settings.on_rewrite == "refuse":
            raise fail("R508", "data", f"{'; '.join(map(str, rewrites))}.")
    limits = [limit for limit in (settings.max_tokens, context) if limit is not None]
    end = tokenizer.eos_token_id or 0

    def decode(tokens: Sequence[int], without_special: bool) -> str:
        with panics_as_errors():
            return str(tokenizer.decode(tokens, skip_special_tokens=without_special))

    return Rules(
        format=found if chat else PlainFormat(tokenizer),
        decode=decode,
        prompt_column=recipe.data.prompt_column,
        roles=facts.roles,
        tools=facts.tools,
        max_turns=settings.max_turns,
        max_tokens=min(limits, default=None),
        max_seconds=settings.max_seconds,
        splits=chat and bool(rewrites) and settings.on_rewrite == "split",
        masks=settings.truncation == "mask",
        filler=(end, end),
        reward_weight=settings.reward_weight,
    )


def _uses_template(recipe: Recipe, tokenizer: Any, rows: Iterable[Row], tools: Sequence[Schema]) -> bool:
    """Whether conversations go through the chat template: with tools, or unless all prompts are plain text."""
    if not getattr(tokenizer, "chat_template", None):
        if tools:
            message = "the environment has tools, and the tokenizer has no chat template that could show them to the model."
            raise fail(
                "C005", "data", message, fix="use a model whose tokenizer has a chat template with tools"
            )
        return False
    column = recipe.data.prompt_column
    return bool(tools) or recipe.data.chat or not all(isinstance(row.get(column), str) for row in rows)


def try_opening(
    pool: EnvironmentPool, rules: Rules, prompts: Sequence[Prompt], max_new_tokens: int, seed: int
) -> tuple[int, ...]:
    """The tokens that a conversation about one of the first rows begins with; raises R509 if none of them can begin."""
    error = ""
    for key, prompt in enumerate(prompts[:_TRIALS], -_TRIALS):
        pool.open(key, prompt.row, seed)
        ((_, answer),) = pool.answers()
        pool.release(key)
        conversation = Conversation(prompt, seed, Trajectory.of_prompt(prompt.tokens), rules)
        try:
            if isinstance(answer, Opening):
                conversation.begin(answer, max_new_tokens)
                return conversation.current.tokens
            error = error or (answer.error if isinstance(answer, Failure) else "start() gave a reply")
        except Exception as problem:  # a template that rejects the messages
            error = error or describe_error(problem)
    message = f"the environment cannot begin a conversation about any of the first {min(len(prompts), _TRIALS)} rows: {error}."
    raise fail("R509", "data", message, fix="repair the environment's start, or the rows that it reads")
