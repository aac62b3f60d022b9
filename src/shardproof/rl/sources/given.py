"""Given completions as tokens: what supervised fine-tuning imitates, and what preference losses compare.

A completion begins where the tokens of the prompt alone and of prompt and completion part, as in TRL.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardproof.config.schema import Recipe
from shardproof.rl.algorithms.registry import find_algorithm
from shardproof.rl.data import Prompt
from shardproof.rl.sources.assistant_masks import Masked, masked_conversation, warn_of_endless
from shardproof.rl.sources.encoding import (
    call_all,
    check_settings,
    closed,
    encode_completions,
    encode_prompts,
    tokens_of,
)
from shardproof.rl.sources.rendering import Rendering, own_tools
from shardproof.rl.sources.rows import Rows, require_column, require_prompt
from shardproof.rl.sources.text_files import Row, unusable
from shardproof.rl.templates import chat_template_of, render_chat

logger = logging.getLogger(__name__)
Message = Mapping[str, Any]
_LABELS = {"true": True, "1": True, "false": False, "0": False}  # as cells of a table say it
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_MAX_MARGIN = 1e38  # a float32 holds it; compared and not converted: integers may exceed any float
MARGIN = "margin"  # the column with how much higher a better text's score should be, where rows have one


@dataclass(frozen=True)
class Conversation:
    """A row's prompt and what may follow it: text, or messages for a chat template."""

    prompt: str | list[Message]
    following: tuple[str | list[Message], ...]

    @property
    def is_templated(self) -> bool:
        return not isinstance(self.prompt, str)


def encode_given(recipe: Recipe, rows: Rows, tokenizer: Any, prompt_column: str) -> list[Prompt]:
    """Each row's prompt and completions as tokens, in the order of the rows; raises for rows that have none."""
    prompts = _encode(recipe, rows, tokenizer, prompt_column)
    if recipe.data.train_on == "assistant":
        masked = [((*prompt.tokens, *prompt.completion), prompt.trained) for prompt in prompts]
        warn_of_endless(masked, tokenizer)
    return prompts


def _encode(recipe: Recipe, rows: Rows, tokenizer: Any, prompt_column: str) -> list[Prompt]:
    kind, data = given_kind(recipe), recipe.data
    if kind == "completions" and data.messages_column is not None:
        return _encode_whole(recipe, rows, tokenizer)
    columns = {
        "completions": {"data.completion_column": data.completion_column},
        "labelled": {"data.completion_column": data.completion_column},
        "pairs": {"data.chosen_column": data.chosen_column, "data.rejected_column": data.rejected_column},
    }[kind]
    scores = find_algorithm(recipe.algorithm.name).spec.role == "reward"
    for place, row in zip(rows.places, rows, strict=True):
        for key, column in columns.items():
            _require_completion(place, row, column, key)
        if kind == "labelled":
            label_of(place, row, data.label_column)
        if scores:
            margin_of(place, row)
    if kind == "completions":
        return _encode_completions(recipe, rows, tokenizer, prompt_column)
    return _encode_all(recipe, rows, tokenizer, prompt_column, list(columns.values()))


def given_kind(recipe: Recipe) -> str:
    """What a row of the recipe's algorithm holds; "" where completions are sampled."""
    spec = find_algorithm(recipe.algorithm.name).spec
    return "" if spec.samples else spec.given or "completions"


def label_of(place: str, row: Row, column: str) -> bool:
    """Whether a row's completion is desirable; raises if it does not say so."""
    require_column(place, row, column, "data.label_column")
    value = row[column]
    label = _LABELS.get(value.strip().lower()) if isinstance(value, str) else value
    if label not in (True, False) or isinstance(label, float):
        raise unusable(f"{place}: column {column!r} holds {value!r}; expected true or false.")
    return bool(label)


def margin_of(place: str, row: Row) -> float:
    """How much higher the score of a pair's better text should be; 0 if the row does not say. Reward models read it."""
    margin = row.get(MARGIN)
    if isinstance(margin, str):  # a cell of a table
        margin = float(margin) if _NUMBER.fullmatch(margin.strip()) else margin.strip() or None
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < _MAX_MARGIN:
        message = f"{place}: column {MARGIN!r} holds {str(margin)[:40]!r}; expected a number."
        raise unusable(message, "write a number, or leave the column out")
    return float(margin)


def _require_completion(place: str, row: Row, column: str, key: str) -> None:
    require_column(place, row, column, key)
    if not isinstance(row[column], str | list) or not row[column]:
        found = type(row[column]).__name__ if row[column] else "nothing"
        raise unusable(f"{place}: column {column!r} holds {found}; expected a string.")
    require_prompt(f"{place}: column {column!r}", row[column])


def _encode_completions(recipe: Recipe, rows: Rows, tokenizer: Any, prompt_column: str) -> list[Prompt]:
    """Completions for supervised fine-tuning: what becomes of a row does not depend on what other rows hold."""
    column, chat, rendering = recipe.data.completion_column, recipe.data.chat, Rendering.of(recipe)
    is_text = [isinstance(row[column], str) for row in rows]
    places = list(zip(rows.places, rows, strict=True))
    talks, texts = (
        Rows(each for each, flag in zip(places, is_text, strict=True) if flag is which)
        for which in (False, True)
    )
    if talks and not chat and all(isinstance(row[prompt_column], str) for row in texts):
        rendering = replace(rendering, variables={})  # they are for the others
    encoded = [
        iter(_encode_all(recipe, talks, tokenizer, prompt_column, [column]) if talks else ()),
        iter(_encode_texts(recipe, texts, tokenizer, prompt_column, rendering) if texts else ()),
    ]
    return [next(encoded[flag]) for flag in is_text]


def _encode_texts(
    recipe: Recipe, rows: Rows, tokenizer: Any, prompt_column: str, rendering: Rendering
) -> list[Prompt]:
    """Completions that are text: their tokens follow those that the prompt has by itself."""
    data = recipe.data
    if data.train_on == "assistant":
        message = f"{rows.places[0]}: data.train_on='assistant' needs messages; column {data.completion_column!r} holds text."
        raise unusable(message, "set data.train_on to 'completion' or 'all'")
    prompts = encode_prompts(rows, tokenizer, prompt_column, data.chat, None, (), rendering)
    templated = [data.chat or not isinstance(row[prompt_column], str) for row in rows]
    prompts = encode_completions(prompts, tokenizer, data.completion_column, templated)
    if data.train_on == "all":
        prompts = [replace(p, trained=(1,) * (len(p.tokens) + len(p.completion))) for p in prompts]
    return prompts


def _conversation(
    place: str, row: Row, prompt_column: str, columns: Sequence[str], chat: bool, scores: bool
) -> Conversation:
    following, is_pair = [row[column] for column in columns], len(columns) > 1
    if prompt_column in row:
        prompt = row[prompt_column]
    elif is_pair:
        prompt, following = common_prompt(place, *following)
    else:
        require_column(place, row, prompt_column, "data.prompt_column")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        if scores and prompt_column not in row and not (chat and isinstance(prompt, str)):
            # A score is of the whole text.
            return Conversation(prompt[:0], tuple(row[column] for column in columns))
        raise unusable(f"{place}: the prompt is empty.")
    texts = [isinstance(each, str) for each in (prompt, *following)]
    if chat and all(texts):
        prompt = [{"role": "user", "content": prompt}]
        following = [[{"role": "assistant", "content": each}] for each in following]
    elif len(set(texts)) > 1:
        message = f"{place}: the prompt is {_kind(prompt)}, and a completion is {_kind(following[0])}."
        fix = "write both as text or both as messages"
        if is_pair:
            fix += "; where both completions hold the whole conversation, name a data.prompt_column that no row has"
        raise unusable(message, fix)
    return Conversation(prompt, tuple(following))


def _kind(value: object) -> str:
    return "text" if isinstance(value, str) else "a list of messages"


def common_prompt(place: str, chosen: Any, rejected: Any) -> tuple[Any, list[Any]]:
    """(what two completions begin with, both without it), by messages or by characters."""
    if type(chosen) is not type(rejected):
        message = f"{place}: one completion is {_kind(chosen)}, the other {_kind(rejected)}."
        raise unusable(message, "write both as text or both as messages")
    shorter = min(len(chosen), len(rejected))
    # Of two of which one is the beginning of the other, the last part is left to be compared.
    end = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter - 1)
    if (
        isinstance(chosen, str)
        and 0 < end < shorter
        and chosen[end] != rejected[end]
        and chosen[end - 1] == " "
    ):
        end -= 1  # a space belongs to the word that follows it
    return chosen[:end], [chosen[end:], rejected[end:]]


def _encode_all(
    recipe: Recipe, rows: Rows, tokenizer: Any, prompt_column: str, columns: Sequence[str]
) -> list[Prompt]:
    """Prompts with what stands in the `columns`: their tokens are those of both together."""
    rendering, train_on = Rendering.of(recipe), recipe.data.train_on
    scores = find_algorithm(recipe.algorithm.name).spec.role == "reward"
    conversations = [
        _conversation(place, row, prompt_column, columns, recipe.data.chat, scores)
        for place, row in zip(rows.places, rows, strict=True)
    ]
    check_settings(rows, rows.places, [each.is_templated for each in conversations], tokenizer, rendering)
    found: list[Prompt] = []
    cut = 0
    for place, row, given in zip(rows.places, rows, conversations, strict=True):
        masks: list[Masked] = []
        if given.is_templated:
            text, prompt, fulls, masks = _through_template(
                place, row, given, tokenizer, rendering, train_on == "assistant"
            )
        else:
            text = str(given.prompt)
            texts = [text, *(text + str(each) for each in given.following)]
            prompt, *fulls = tokens_of(tokenizer, texts, add_special_tokens=True)
            fulls = [closed(ids, tokenizer) for ids in fulls]
        length = min(_common(prompt, full) for full in fulls)
        if not scores and ((given.prompt and not length) or any(len(full) == length for full in fulls)):
            what = "prompt" if not length else "completion"
            raise unusable(f"{place}: the {what} has no tokens of its own.")
        cut += length < len(prompt)
        trained: tuple[int, ...] = ()
        if train_on == "all":
            trained = (1,) * len(fulls[0])
        elif masks:
            trained = masks[0].mask
        rejected = fulls[1][length:] if len(fulls) > 1 else ()
        whole = prompt if length < len(prompt) else ()
        found.append(Prompt(row, text, fulls[0][:length], fulls[0][length:], rejected, trained, whole=whole))
    if cut:
        logger.warning(
            "%d of %d rows: the tokens of the prompt are no beginning of those of prompt and completion, and the "
            "completion begins where they part",
            cut,
            len(rows),
        )
    return found


def _through_template(
    place: str, row: Row, given: Conversation, tokenizer: Any, rendering: Rendering, with_mask: bool
) -> tuple[str, tuple[int, ...], list[tuple[int, ...]], list[Masked]]:
    """(the prompt's text, its tokens, those of prompt and completion, the assistant's tokens among them if wanted)."""
    wholes = [_with_system(place, [*given.prompt, *each], rendering) for each in given.following]
    masks: list[Masked] = []
    text = ""
    if given.prompt:
        prompt = _with_system(place, given.prompt, rendering)
        text = render(place, row, prompt, tokenizer, rendering, prompt=True)
    texts = [render(place, row, whole, tokenizer, rendering, prompt=False) for whole in wholes]
    ids, *fulls = tokens_of(tokenizer, [text, *texts], add_special_tokens=False)
    if with_mask:
        tools, variables = own_tools(place, row), rendering.variables_of(row)
        masks = [masked_conversation(place, wholes[0], tokenizer, variables, tools)]
        fulls = [masks[0].tokens]
    return text, ids, fulls, masks


def _with_system(place: str, messages: Any, rendering: Rendering) -> list[Message]:
    try:
        return rendering.messages(messages)
    except ValueError as error:
        raise unusable(f"{place}: {error}.") from error


def render(
    place: str, row: Row, messages: Sequence[Message], tokenizer: Any, rendering: Rendering, *, prompt: bool
) -> str:
    """A conversation as the chat template writes it, in its time; raises in words where it does not."""
    tools, variables = own_tools(place, row), rendering.variables_of(row)
    if not chat_template_of(tokenizer, variables):
        fix = "give prompts and completions as strings, or use a tokenizer with a chat template"
        raise unusable(f"{place}: messages need a chat template, but the tokenizer has none.", fix)
    # What follows a prompt are messages of their own, also after one of the model's.
    call = partial(render_chat, tokenizer, messages, tools, prompt=prompt, closed=True, variables=variables)
    try:
        return call_all([call], [place])[0]
    except Exception as error:
        raise unusable(f"{place}: the chat template rejects the conversation: {error}") from error


def _encode_whole(recipe: Recipe, rows: Rows, tokenizer: Any) -> list[Prompt]:
    """Whole conversations: the prompt is what stands before the first token that the assistant wrote."""
    data, rendering, found = recipe.data, Rendering.of(recipe), []
    assert data.messages_column is not None
    check_settings(rows, rows.places, [True] * len(rows), tokenizer, rendering)
    for place, row in zip(rows.places, rows, strict=True):
        require_column(place, row, data.messages_column, "data.messages_column")
        where = f"{place}: column {data.messages_column!r}"
        require_prompt(where, row[data.messages_column])
        if isinstance(row[data.messages_column], str):
            raise unusable(f"{where} holds text; expected a list of messages.")
        messages = _with_system(place, row[data.messages_column], rendering)
        if data.train_on == "all":
            found.append(_all_of(place, row, messages, tokenizer, rendering))
            continue
        tools = own_tools(place, row)
        masked = masked_conversation(place, messages, tokenizer, rendering.variables_of(row), tools)
        start = max(masked.mask.index(1), 1)
        text = str(tokenizer.decode(masked.tokens[:start]))
        tokens, rest = masked.tokens[:start], masked.tokens[start:]
        found.append(Prompt(row, text, tokens, rest, trained=masked.mask))
    return found


def _all_of(
    place: str, row: Row, messages: Sequence[Message], tokenizer: Any, rendering: Rendering
) -> Prompt:
    """A whole conversation of which all tokens count; the prompt is what stands before the assistant's first message."""
    first = next((at for at, each in enumerate(messages) if each.get("role") == "assistant"), 0)
    texts = [render(place, row, messages, tokenizer, rendering, prompt=False)]
    if first:
        texts.append(render(place, row, messages[:first], tokenizer, rendering, prompt=True))
    whole, *asked = tokens_of(tokenizer, texts, add_special_tokens=False)
    if len(whole) < 2:
        raise unusable(f"{place}: the conversation has no tokens to learn.")
    start = min(max(_common(whole, asked[0]), 1), len(whole) - 1) if asked else 1
    text = texts[1] if asked else str(tokenizer.decode(whole[:start]))
    more = asked[0] if asked and start < len(asked[0]) else ()
    return Prompt(row, text, whole[:start], whole[start:], trained=(1,) * len(whole), whole=more)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def limited(recipe: Recipe, prompts: Sequence[Prompt]) -> tuple[list[Prompt], Counter[str]]:
    """(prompts whose completions are no longer than `data.max_length`, how many were left out, by why)."""
    data, kept = recipe.data, []
    dropped: Counter[str] = Counter()
    for prompt in prompts:
        if _are_equal(prompt):
            dropped["with two equal completions"] += 1
            continue
        limit, num = data.max_length, len(prompt.tokens)
        longest = num + max(len(prompt.completion), len(prompt.rejected))
        if limit is None or longest <= limit:
            kept.append(prompt)
            continue
        if data.on_max_length == "refuse":
            message = f"a prompt of {num} tokens with a completion of {longest - num} has more than data.max_length={limit}: {prompt.text[:60]!r}."
            raise unusable(
                message, 'set data.on_max_length to "truncate" or "drop", or raise data.max_length'
            )
        short = _cut(prompt, limit) if data.on_max_length == "truncate" else None
        if short is None:
            dropped[f"longer than data.max_length={limit}"] += 1
        elif _are_equal(short):
            dropped[f"with two completions that are equal up to data.max_length={limit}"] += 1
        else:
            kept.append(short)
    return kept, dropped


def _are_equal(prompt: Prompt) -> bool:
    """Whether it has two completions, between which there is nothing to prefer."""
    return bool(prompt.rejected) and prompt.completion == prompt.rejected


def _cut(prompt: Prompt, limit: int) -> Prompt | None:
    """The prompt without what lies beyond `limit` tokens; None if nothing to learn is left."""
    if prompt.trained:
        return _cut_anywhere(prompt, limit)
    room = limit - len(prompt.tokens)
    if room < 1:
        return None
    return replace(prompt, completion=prompt.completion[:room], rejected=prompt.rejected[:room])


def _cut_anywhere(prompt: Prompt, limit: int) -> Prompt | None:
    """Of a prompt in which tokens are learned, too: what may be left is its beginning."""
    trained = prompt.trained[:limit]
    if not any(trained[1:]):
        return None
    every = (*prompt.tokens, *prompt.completion)[:limit]
    start, whole = len(prompt.tokens), prompt.whole
    if start >= limit:
        start, whole = limit - 1, prompt.asked
    return replace(prompt, tokens=every[:start], completion=every[start:], trained=trained, whole=whole)
