"""Prompts and completions as tokens, as the model sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from shardproof.rl.data import Prompt
from shardproof.rl.sources.rendering import TEMPLATE_COLUMN, Rendering, check_variables, own_variables
from shardproof.rl.sources.rows import Rows
from shardproof.rl.sources.text_files import Row, unusable
from shardproof.rl.templates import Overdue, call_each, chat_template_of, panics_as_errors, render_chat

T = TypeVar("T")
_TEMPLATE_SECONDS = 10.0  # for one prompt; real templates take a millisecond
_PLAIN = Rendering()
_BEFORE = "\n"  # what a text may follow


def encode_prompts(
    rows: list[Row],
    tokenizer: Any,
    prompt_column: str,
    chat: bool,
    max_prompt_tokens: int | None,
    tools: Sequence[dict[str, Any]] = (),
    rendering: Rendering = _PLAIN,
) -> list[Prompt]:
    """Each row's prompt as text and tokens, through the chat template where `chat` is set or the prompt is a list.

    The template shows the model what it may call, the `tools`. A row without a prompt, which an environment has to
    bring, gets no tokens.
    """
    places = rows.places if isinstance(rows, Rows) else [f"row {n}" for n in range(1, len(rows) + 1)]
    if not all(prompt_column in row for row in rows):
        present = Rows((place, row) for place, row in zip(places, rows) if prompt_column in row)
        encoded = iter(
            encode_prompts(present, tokenizer, prompt_column, chat, max_prompt_tokens, tools, rendering)
        )
        return [
            next(encoded)
            if prompt_column in row
            else Prompt(row, "", (), template=_variables(row, rendering))
            for row in rows
        ]
    templated = [chat or not isinstance(row[prompt_column], str) for row in rows]
    check_settings(rows, places, templated, tokenizer, rendering)
    texts = [str(row[prompt_column]) for row in rows]
    through_template = [index for index, flag in enumerate(templated) if flag]
    calls = [
        partial(_render, rows[index], prompt_column, tokenizer, places[index], tools, rendering)
        for index in through_template
    ]
    rendered = call_all(calls, [places[index] for index in through_template])
    for index, text in zip(through_template, rendered):
        texts[index] = text
    tokens: list[tuple[int, ...]] = [()] * len(rows)
    for through in (True, False):
        indices = [index for index, flag in enumerate(templated) if flag is through]
        if indices:
            # A template writes its special tokens itself; adding them again would begin a prompt with two BOS.
            found = tokens_of(tokenizer, [texts[index] for index in indices], add_special_tokens=not through)
            for index, ids in zip(indices, found):
                tokens[index] = ids
    for place, row, ids in zip(places, rows, tokens):
        # A template makes tokens of an empty prompt too, so the prompt itself is looked at.
        if not ids or not str(row[prompt_column]).strip():
            raise unusable(f"{place}: the prompt is empty.")
    require_lengths(places, texts, tokens, max_prompt_tokens)
    return [
        Prompt(row, text, ids, template=_variables(row, rendering))
        for row, text, ids in zip(rows, texts, tokens)
    ]


def _variables(row: Row, rendering: Rendering) -> Mapping[str, Any] | None:
    """The template's variables of a row that has some of its own."""
    return rendering.variables_of(row) if own_variables(row) else None


def check_settings(
    rows: Sequence[Row],
    places: Sequence[str],
    templated: Sequence[bool],
    tokenizer: Any,
    rendering: Rendering,
) -> None:
    """Raise if the system prompt or a variable would change nothing."""
    template = chat_template_of(tokenizer, rendering.variables)
    check_variables(list(rendering.variables), template, "data.chat_template_kwargs")
    fix = "set data.chat=true, or write prompts as messages"
    if rendering.variables and not any(templated):
        message = "data.chat_template_kwargs is set, but no prompt goes through a chat template."
        raise unusable(message, fix)
    known = {(name, template) for name in rendering.variables}
    for place, row, through in zip(places, rows, templated):
        own = own_variables(row)
        if not through and (own or rendering.system is not None):
            what = f"column {TEMPLATE_COLUMN!r}" if own else "data.system_prompt"
            raise unusable(
                f"{place}: the prompt is text that goes to the model unchanged; {what} needs a chat template.",
                fix,
            )
        template = chat_template_of(tokenizer, rendering.variables_of(row)) if own else ""
        if new := {(name, template) for name in own} - known:
            names = sorted(name for name, _ in new)
            check_variables(names, template, f"{place}: column {TEMPLATE_COLUMN!r}")
            known |= new


def encode_completions(
    prompts: list[Prompt], tokenizer: Any, completion_column: str, templated: Sequence[bool]
) -> list[Prompt]:
    """The prompts with the tokens of their completions, each closed by the tokenizer's end of sequence.

    `templated` says which prompts a chat template has written, with all special tokens.
    """
    texts = [str(prompt.row[completion_column]) for prompt in prompts]
    found: list[tuple[int, ...] | None] = [None] * len(prompts)
    for through in (True, False):
        indices = [index for index, flag in enumerate(templated) if flag is through]
        joined = [prompts[index].text + texts[index] for index in indices]
        wholes = tokens_of(tokenizer, joined, add_special_tokens=not through) if indices else []
        for index, whole in zip(indices, wholes, strict=True):
            found[index] = _after(prompts[index].tokens, whole)
    # A token would span the border: the prompt keeps the tokens that the model is later asked with.
    left = [index for index, ids in enumerate(found) if ids is None]
    for index, ids in zip(left, _inside(tokenizer, [texts[index] for index in left]), strict=True):
        found[index] = ids
    return [replace(prompt, completion=closed(ids or (), tokenizer)) for prompt, ids in zip(prompts, found)]


def _inside(tokenizer: Any, texts: list[str]) -> list[tuple[int, ...]]:
    """The tokens of each text as they are inside a longer one: some tokenizers put a space before what begins one."""
    if not texts:
        return []
    (before,), alone = (tokens_of(tokenizer, each, add_special_tokens=False) for each in ([_BEFORE], texts))
    wholes = tokens_of(tokenizer, [_BEFORE + text for text in texts], add_special_tokens=False)
    rests = [_after(before, whole) for whole in wholes]
    return [ids if rest is None else rest for ids, rest in zip(alone, rests, strict=True)]


def _after(beginning: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...] | None:
    """What follows the beginning in the whole; None if the whole begins otherwise."""
    return whole[len(beginning) :] if whole[: len(beginning)] == beginning else None


def closed(ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """The tokens, with the end of sequence as the last one."""
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == (end,) else (*ids, end)


def tokens_of(tokenizer: Any, texts: list[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
    """The tokens of each text; raises in words where the tokenizer fails."""
    try:
        with panics_as_errors():
            found = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        return [tuple(ids) for ids in found]
    except Exception as error:  # a tokenizer is made of untrusted files too
        message = f"the tokenizer fails on the data: {type(error).__name__}: {str(error)[:300]}"
        raise unusable(message, "use the tokenizer files that belong to the model") from error


def call_all(calls: Sequence[partial[T]], places: Sequence[str]) -> list[T]:
    """What the calls of a template return, each in its time; raises with the place of one that takes longer."""
    try:
        return call_each(calls, _TEMPLATE_SECONDS) if calls else []
    except Overdue as error:
        message = f"{places[error.index]}: the chat template did not finish: {error}."
        raise unusable(message, "use a tokenizer whose chat template you trust") from error


def _render(
    row: Row,
    prompt_column: str,
    tokenizer: Any,
    place: str,
    tools: Sequence[dict[str, Any]],
    rendering: Rendering,
) -> str:
    if not chat_template_of(tokenizer, rendering.variables_of(row)):
        raise unusable(
            f"{place}: the prompt needs a chat template, but the tokenizer has none.",
            "set data.chat to false and give prompts as strings, or use a tokenizer with a chat template",
        )
    try:
        messages = rendering.messages(row[prompt_column])
    except ValueError as error:
        raise unusable(f"{place}: {error}.") from error
    try:
        return render_chat(tokenizer, messages, tools, variables=rendering.variables_of(row))
    except Exception as error:
        # Templates refuse conversations in their own words, with jinja's exceptions.
        raise unusable(f"{place}: the chat template rejects the prompt: {error}") from error


def require_lengths(
    places: list[str], texts: list[str], tokens: list[tuple[int, ...]], limit: int | None
) -> None:
    """Raise if some prompt has more tokens than `limit`."""
    longer = [index for index, ids in enumerate(tokens) if limit is not None and len(ids) > limit]
    if longer:
        first = longer[0]
        raise unusable(
            f"{places[first]}: the prompt has {len(tokens[first])} tokens, more than data.max_prompt_tokens={limit}; "
            f"{len(longer)} of {len(tokens)} rows are too long. It begins {texts[first][:60]!r}.",
            "raise data.max_prompt_tokens within the model's context, or leave these rows out",
        )
