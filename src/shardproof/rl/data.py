"""Prompts: rows from files or the hub, an order that any run can resume, and their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from shardproof.errors import did_you_mean
from shardproof.rl.reward_functions import row_problem
from shardproof.rl.rows import Place, Row, read_rows, unusable
from shardproof.rl.templates import Overdue, call_each, panics_as_errors, render_chat

T = TypeVar("T")
_TEMPLATE_SECONDS = 10.0  # for one prompt; real templates take a millisecond
_NESTED = (dict, list, tuple)
_MAX_DEPTH = 100  # of lists and objects in a row: far below where Python gives up on copying or sending them


class Rows(list[Row]):
    """Rows, and where each came from, in words."""

    def __init__(self, found: Iterable[Place]):
        super().__init__()
        self.places: list[str] = []
        for place, row in found:
            self.append(row)
            self.places.append(place)


@dataclass(frozen=True)
class Prompt:
    """A row, its prompt as the model sees it, and that prompt's tokens."""

    row: Row
    text: str
    tokens: tuple[int, ...]
    completion: tuple[int, ...] = ()  # the tokens to train on; empty where completions are sampled


def load_rows(
    source: str,
    prompt_column: str,
    answer_column: str | None,
    completion_column: str | None = None,
    rewards: Sequence[str] = (),
    given: Iterable[Place] | None = None,
    needs_prompt: bool = True,
) -> Rows:
    """Every row of `source`: a .jsonl, .json (one object per line) or .parquet file, or `hf:name[:config][:split]`.

    `given` are the rows of an environment, which has them instead. Without `needs_prompt` a row may lack its prompt.

    A row's answer stands under "answer" whatever its column is called, because that is where rewards look for it.
    A completion is wanted, as text that is not empty, if its column is named. Rows that the named rewards can never
    score are refused.
    """
    rows = Rows(
        (place, _checked(place, row, prompt_column, answer_column, completion_column, rewards, needs_prompt))
        for place, row in (read_rows(source) if given is None else given)
    )
    if not rows:
        raise unusable(f"{source} holds no rows.")
    return rows


def _checked(
    place: str,
    row: Row,
    prompt: str,
    answer: str | None,
    completion: str | None,
    rewards: Sequence[str],
    needs_prompt: bool,
) -> Row:
    if _is_deeper(row, _MAX_DEPTH):
        raise unusable(f"{place} is nested deeper than {_MAX_DEPTH}.")
    if needs_prompt or prompt in row:
        _require_column(place, row, prompt, "data.prompt_column")
        _require_prompt(f"{place}: column {prompt!r}", row[prompt])
    if answer is not None:
        _require_column(place, row, answer, "data.answer_column")
        row["answer"] = row[answer]
    if completion is not None:
        _require_column(place, row, completion, "data.completion_column")
        if not isinstance(row[completion], str) or not row[completion]:
            found = type(row[completion]).__name__ if row[completion] else "nothing"
            raise unusable(f"{place}: column {completion!r} holds {found}; expected a string.")
        _require_unicode(f"{place}: column {completion!r} holds", row[completion])
    for name in rewards:
        problem = row_problem(name, row)
        if problem is not None:
            fix = "repair or remove this row, or name its column in data.answer_column"
            raise unusable(f"{place}: {problem}.", fix)
    return row


def _is_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects lie in each other more than `limit` times; without recursion, which would end first."""
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for part in level
            for child in (part.values() if isinstance(part, dict) else part)  # type: ignore[attr-defined]
            if isinstance(child, _NESTED)
        ]
        if not level:
            return False
    return True


def _require_column(place: str, row: Row, column: str, key: str) -> None:
    if column not in row:
        columns = ", ".join(map(repr, row)) or "none"
        message = f"{place} has no column {column!r} ({key}); it has {columns}.{did_you_mean(column, row)}"
        raise unusable(message, f"set {key} to one of the columns listed")


def _require_prompt(place: str, prompt: object) -> None:
    """Raise unless `prompt` is a string or a conversation that a chat template can render."""
    if isinstance(prompt, str):
        _require_unicode(f"{place} holds", prompt)
        return
    expected = "expected a string, or a list of {role, content}"
    if not isinstance(prompt, list) or not prompt:
        found = "an empty list" if prompt == [] else type(prompt).__name__
        raise unusable(f"{place} holds {found}; {expected}.")
    for turn, message in enumerate(prompt, 1):
        if not isinstance(message, dict):
            raise unusable(f"{place}: message {turn} is {type(message).__name__}; {expected}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                raise unusable(f"{place}: message {turn} has {found} as its {key!r}; {expected} of strings.")
            _require_unicode(f"{place}: message {turn} has", message[key])


def _require_unicode(where: str, text: str) -> None:
    """Raise if the text holds half of a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise unusable(f"{where} text that is not valid Unicode: {error}.") from error


@dataclass(frozen=True)
class Share:
    """Which part of the prompts a rank takes. Ranks of one sequence-parallel group take the same."""

    rank: int
    num_ranks: int
    sequence_parallel: int = 1

    def of(self, items: Sequence[T]) -> list[T]:
        """This rank's part: items are dealt to the groups one by one."""
        return list(items[self.rank // self.sequence_parallel :: self.num_ranks // self.sequence_parallel])

    def once(self, rows: Sequence[T]) -> list[T]:
        """One of the rows of each group, from a row of every rank."""
        return list(rows[:: self.sequence_parallel])


class PromptStream:
    """Row indices without end: each epoch a permutation of its own, a pure function of the seed and the position.

    Every rank draws from the same stream and keeps its own part of what it drew, so the order does not depend on the
    world size, and a run resumes by setting `position`.
    """

    def __init__(self, num_rows: int, seed: int):
        if num_rows < 1:
            raise unusable("there are no rows to draw prompts from.")
        self.num_rows = num_rows
        self._seed = seed % 2**64
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    @property
    def position(self) -> int:
        """How many indices have been taken."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise unusable(f"a position of {value} prompts is negative.")
        self._position = value

    def take(self, n: int) -> list[int]:
        """The next `n` row indices; goes on into the next epoch where one ends."""
        taken: list[int] = []
        while len(taken) < n:
            epoch, start = divmod(self._position, self.num_rows)
            part = self._order_of(epoch)[start : start + n - len(taken)]
            taken += part
            self._position += len(part)
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            # The raw stream of a bit generator is stable over numpy's releases; Generator.permutation is not, and a
            # run resumed after an upgrade would see some prompts twice and others never.
            keys = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(self.num_rows)
            self._order = np.argsort(keys, kind="stable").tolist()
            self._epoch = epoch
        return self._order


def encode_prompts(
    rows: list[Row],
    tokenizer: Any,
    prompt_column: str,
    chat: bool,
    max_prompt_tokens: int | None,
    tools: Sequence[dict[str, Any]] = (),
) -> list[Prompt]:
    """Each row's prompt as text and tokens, through the chat template where `chat` is set or the prompt is a list.

    The template shows the model what it may call, the `tools`. A row without a prompt, which an environment has to
    bring, gets no tokens.
    """
    places = rows.places if isinstance(rows, Rows) else [f"row {n}" for n in range(1, len(rows) + 1)]
    if not all(prompt_column in row for row in rows):
        present = Rows((place, row) for place, row in zip(places, rows) if prompt_column in row)
        encoded = iter(encode_prompts(present, tokenizer, prompt_column, chat, max_prompt_tokens, tools))
        return [next(encoded) if prompt_column in row else Prompt(row, "", ()) for row in rows]
    templated = [chat or not isinstance(row[prompt_column], str) for row in rows]
    texts = [str(row[prompt_column]) for row in rows]
    through_template = [index for index, flag in enumerate(templated) if flag]
    prompts = [rows[index][prompt_column] for index in through_template]
    rendered = _render_all(prompts, tokenizer, [places[index] for index in through_template], tools)
    for index, text in zip(through_template, rendered):
        texts[index] = text
    tokens: list[tuple[int, ...]] = [()] * len(rows)
    for through in (True, False):
        indices = [index for index, flag in enumerate(templated) if flag is through]
        if indices:
            # A template writes its special tokens itself; adding them again would begin a prompt with two BOS.
            found = _tokens(tokenizer, [texts[index] for index in indices], add_special_tokens=not through)
            for index, ids in zip(indices, found):
                tokens[index] = ids
    for place, row, ids in zip(places, rows, tokens):
        # A template makes tokens of an empty prompt too, so the prompt itself is looked at.
        if not ids or not str(row[prompt_column]).strip():
            raise unusable(f"{place}: the prompt is empty.")
    _require_lengths(places, texts, tokens, max_prompt_tokens)
    return [Prompt(*parts) for parts in zip(rows, texts, tokens)]


def encode_completions(prompts: list[Prompt], tokenizer: Any, completion_column: str) -> list[Prompt]:
    """The prompts with the tokens of their completions, each closed by the tokenizer's end of sequence."""
    texts = [prompt.row[completion_column] for prompt in prompts]
    # What begins a sequence stands before the prompt already.
    found = _tokens(tokenizer, texts, add_special_tokens=False)
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return [replace(prompt, completion=(*ids, *end)) for prompt, ids in zip(prompts, found)]


def _tokens(tokenizer: Any, texts: list[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
    try:
        with panics_as_errors():
            found = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        return [tuple(ids) for ids in found]
    except Exception as error:  # a tokenizer is made of untrusted files too
        message = f"the tokenizer fails on the data: {type(error).__name__}: {str(error)[:300]}"
        raise unusable(message, "use the tokenizer files that belong to the model") from error


def _render_all(
    prompts: list[str | list[dict[str, Any]]],
    tokenizer: Any,
    places: Sequence[str],
    tools: Sequence[dict[str, Any]],
) -> list[str]:
    calls = [partial(_render, prompt, tokenizer, place, tools) for prompt, place in zip(prompts, places)]
    try:
        return call_each(calls, _TEMPLATE_SECONDS) if calls else []
    except Overdue as error:
        message = f"{places[error.index]}: the chat template did not finish: {error}."
        raise unusable(message, "use a tokenizer whose chat template you trust") from error


def _render(
    prompt: str | list[dict[str, Any]], tokenizer: Any, place: str, tools: Sequence[dict[str, Any]]
) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise unusable(
            f"{place}: the prompt needs a chat template, but the tokenizer has none.",
            "set data.chat to false and give prompts as strings, or use a tokenizer with a chat template",
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return render_chat(tokenizer, messages, tools)
    except Exception as error:
        # Templates refuse conversations in their own words, with jinja's exceptions.
        raise unusable(f"{place}: the chat template rejects the prompt: {error}") from error


def _require_lengths(
    places: list[str], texts: list[str], tokens: list[tuple[int, ...]], limit: int | None
) -> None:
    longer = [index for index, ids in enumerate(tokens) if limit is not None and len(ids) > limit]
    if longer:
        first = longer[0]
        raise unusable(
            f"{places[first]}: the prompt has {len(tokens[first])} tokens, more than data.max_prompt_tokens={limit}; "
            f"{len(longer)} of {len(tokens)} rows are too long. It begins {texts[first][:60]!r}.",
            "raise data.max_prompt_tokens within the model's context, or leave these rows out",
        )


def rows_digest(prompts: Iterable[Prompt]) -> str:
    """A sha256 over the content of all rows in order; where they were read from is no part of it."""
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps(prompt.row, sort_keys=True, default=_canonical)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _canonical(value: object) -> str:
    """What JSON has no form for, such as dates and decimals of Parquet files, as text that every process agrees on."""
    if hasattr(value, "tobytes"):  # images and arrays, whose repr may hold an address
        return f"{type(value).__name__} {hashlib.sha256(value.tobytes()).hexdigest()}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def sample_seed(run_seed: int, step: int, sample_index: int) -> int:
    """63 bits that depend on nothing else, so that completions are the same on any number of ranks."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
