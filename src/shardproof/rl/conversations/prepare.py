"""A recipe's environment before the first conversation: its workers, its format, and whether both fit the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardproof.config.schema import Environment, Recipe
from shardproof.environments.pool import EnvironmentFacts, EnvironmentPool, EnvironmentSpec
from shardproof.environments.protocol import Failure, Opening
from shardproof.environments.registry import resolve
from shardproof.errors import ShardproofError, fail
from shardproof.rl.chat.format import ChatFormat, PlainFormat
from shardproof.rl.conversations.conversation import Conversation, Rules
from shardproof.rl.data import Prompt
from shardproof.rl.sources.rendering import TEMPLATE_COLUMN, Rendering
from shardproof.rl.sources.text_files import Row
from shardproof.rl.templates import chat_template_of, panics_as_errors
from shardproof.rollout.trajectory import Trajectory
from shardproof.user_code import describe_error

SOURCE = "environment:"  # what begins the name of a data source that an environment has
_NO_OPENING = "start() gave a reply"
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
    recipe: Recipe,
    tokenizer: Any,
    has_lists: bool,
    facts: EnvironmentFacts,
    opening: Opening,
    context: int | None,
) -> Rules:
    """What all conversations follow, of which `opening` is an example; `has_lists` says that some prompts are messages.

    Raises R508 if the template rewrites earlier turns and the recipe refuses that, C001 if the model's tool calls cannot
    be read.
    """
    settings = recipe.environment
    assert settings is not None
    tools = facts.tools if opening.tools is None else opening.tools
    has_messages = opening.messages is not None and not isinstance(opening.messages, str)
    chat = _uses_template(recipe, tokenizer, bool(tools), has_messages or has_lists)
    rewrites: Sequence[object] = []
    rendering = Rendering.of(recipe)
    if not chat and (rendering.system is not None or rendering.variables):
        key = "system_prompt" if rendering.system is not None else "chat_template_kwargs"
        message = f"data.{key} is set, but conversations do not go through a chat template."
        raise fail("C005", "data", message, fix=f"set data.chat=true, or remove data.{key}")
    form: ChatFormat | PlainFormat = PlainFormat(tokenizer)
    if chat:
        form = ChatFormat.of(tokenizer, settings.tool_format, rendering.variables)
        # No reply follows a single turn; that its tool calls can be read is asked all the same.
        roles = facts.roles if settings.max_turns > 1 else ()
        rewrites = form.probe(roles, bool(tools)) if roles or tools else []
    if rewrites and settings.on_rewrite == "refuse":
        raise fail("R508", "data", f"{'; '.join(map(str, rewrites))}.")
    limits = [limit for limit in (settings.max_tokens, context) if limit is not None]
    end = tokenizer.eos_token_id or 0

    def decode(tokens: Sequence[int], without_special: bool) -> str:
        with panics_as_errors():
            return str(tokenizer.decode(tokens, skip_special_tokens=without_special))

    return Rules(
        format=form,
        is_templated=chat,
        decode=decode,
        prompt_column=recipe.data.prompt_column,
        roles=facts.roles,
        tools=facts.tools,
        max_turns=settings.max_turns,
        max_tokens=min(limits, default=None),
        max_seconds=settings.max_seconds,
        splits=bool(rewrites) and settings.on_rewrite == "split",
        masks=settings.truncation == "mask",
        filler=(end, end),
        reward_weight=settings.reward_weight,
        rendering=rendering,
        speaks=settings.name != "tools",
    )


def check_variables_of_rows(rules: Rules, prompts: Sequence[Prompt]) -> None:
    """Raise if a row's own variables change whether the template rewrites turns: what is split is decided for all rows."""
    form, seen = rules.format, set()
    if isinstance(form, PlainFormat) or rules.max_turns == 1:
        return
    for prompt in prompts:
        key = repr(prompt.template)
        if prompt.template is None or key in seen:
            continue
        seen.add(key)
        rewrites = form.with_variables(prompt.template).probe(rules.roles, bool(rules.tools))
        if bool(rewrites) != bool(form.probe(rules.roles, bool(rules.tools))):
            message = (
                f"with {TEMPLATE_COLUMN}={dict(prompt.template)} of one row the template does not treat earlier turns as "
                f"it does for the others: {prompt.text[:60]!r}."
            )
            fix = "use the same variables for all rows of an environment, in data.chat_template_kwargs"
            raise fail("C005", "data", message, fix=fix)


def _uses_template(recipe: Recipe, tokenizer: Any, has_tools: bool, has_messages: bool) -> bool:
    """Whether conversations go through the chat template: with tools, with lists of messages, or with `data.chat`."""
    if not chat_template_of(tokenizer, recipe.data.chat_template_kwargs):
        if has_tools:
            message = "the environment has tools, and the tokenizer has no chat template that could show them to the model."
            raise fail(
                "C005", "data", message, fix="use a model whose tokenizer has a chat template with tools"
            )
        return False
    return has_tools or has_messages or recipe.data.chat


def first_opening(pool: EnvironmentPool, rows: Sequence[Row], seed: int) -> tuple[int, Opening]:
    """(which of the first rows, how a conversation about it begins); raises R509 if none of them begins."""
    error = ""
    for number, row in enumerate(rows[:_TRIALS]):
        pool.open(number, row, seed)
        ((_, answer),) = pool.answers()
        pool.release(number)
        if isinstance(answer, Opening):
            return number, answer
        error = error or (answer.error if isinstance(answer, Failure) else _NO_OPENING)
    raise _cannot_begin(f"any of the first {min(len(rows), _TRIALS)} rows", error)


def first_prompt(rules: Rules, prompt: Prompt, opening: Opening, max_new_tokens: int) -> tuple[int, ...]:
    """The tokens that such a conversation begins with; raises R509 if they cannot be made, or leave no room for a turn."""
    try:
        return _begun(rules, prompt, opening, max_new_tokens)
    except Exception as error:  # a template that rejects the messages, or a limit
        raise _cannot_begin("one of the first rows", describe_error(error)) from error


def open_prompts(
    recipe: Recipe, rules: Rules, prompts: Sequence[Prompt], seeds: Sequence[int], max_new_tokens: int
) -> list[tuple[Prompt, str]]:
    """Each prompt with the text and tokens that its conversation begins with, and why it does not, if it does not.

    The environment runs in a worker that ends with it.
    """
    found = []
    with environment_of(recipe) as pool:
        assert pool is not None, "these are rules of an environment"
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            pool.open(number, prompt.row, seed)
            ((_, answer),) = pool.answers()
            pool.release(number)
            if not isinstance(answer, Opening):
                found.append((prompt, answer.error if isinstance(answer, Failure) else _NO_OPENING))
                continue
            most = (prompt.sampling or {}).get("max_new_tokens", max_new_tokens)
            try:
                tokens = _begun(rules, prompt, answer, most)
            except Exception as error:
                found.append((prompt, describe_error(error)))
                continue
            found.append((replace(prompt, text=rules.decode(tokens, False), tokens=tokens), ""))
    return found


def _begun(rules: Rules, prompt: Prompt, opening: Opening, max_new_tokens: int) -> tuple[int, ...]:
    conversation = Conversation(prompt, 0, Trajectory.of_prompt(prompt.tokens), rules)
    with panics_as_errors():
        conversation.begin(opening, max_new_tokens)
    return conversation.current.tokens


def _cannot_begin(rows: str, error: str) -> ShardproofError:
    message = f"the environment cannot begin a conversation about {rows}: {' '.join(error.split())}."
    return fail("R509", "data", message, fix="repair the environment's start, or the rows that it reads")
