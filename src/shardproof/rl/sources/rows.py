"""Rows that a run can use: each has its columns, and what its rewards need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardproof.errors import did_you_mean
from shardproof.rl.rewards.functions import row_problem
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rl.sources.readers import read_rows
from shardproof.rl.sources.rendering import TEMPLATE_COLUMN
from shardproof.rl.sources.text_files import Place, Row, unusable

_NESTED = (dict, list, tuple)
_MAX_DEPTH = 100  # of lists and objects in a row: far below where Python gives up on copying or sending them
ANSWER_COLUMN = "answer"  # where rewards find a row's answer
SOURCE_COLUMN = "data_source"  # where rewards find the name of a row's source


class Rows(list[Row]):
    """Rows, where each came from, in words, and how many were left out for which reason."""

    def __init__(self, found: Iterable[Place]):
        super().__init__()
        self.places: list[str] = []
        self.dropped: Counter[str] = Counter()
        for place, row in found:
            self.append(row)
            self.places.append(place)


@dataclass(frozen=True)
class Columns:
    """What a row has to have: columns by name, and what its rewards need to score completions."""

    prompt: str = "prompt"
    answer: str | None = "answer"
    rewards: Sequence[RewardSpec | str] = ()
    needs_prompt: bool = True  # False: an environment may bring it
    needs_answer: bool = True  # False: a row may lack the column of answers
    drops_unanswered: bool = False
    prompt_under: str | None = None  # the column in which the run looks for prompts, if that is another one
    source: str = ""  # the name of the rows' source, which they get
    takes_conversations: bool = (
        False  # a column of them may stand in the place of prompts, if the recipe names it
    )


def read_columns(source: str, columns: Columns, given: Iterable[Place] | None = None) -> Rows:
    """Every row of `source`, as `read_rows` reads it; `given` are the rows of an environment, which has them instead.

    A row's answer stands under "answer" whatever its column is called, because that is where rewards look for it. Rows
    that the rewards can never score are refused, or left out if the columns say so.
    """
    dropped: Counter[str] = Counter()
    rows = Rows(_usable(read_rows(source) if given is None else given, columns, dropped))
    rows.dropped = dropped
    if not rows:
        left_out = f" but {sum(dropped.values())} without an answer" if dropped else ""
        raise unusable(f"{source} holds no rows{left_out}.")
    return rows


def _usable(found: Iterable[Place], columns: Columns, dropped: Counter[str]) -> Iterator[Place]:
    for place, row in found:
        _check(place, row, columns)
        prompt = row.get(columns.prompt)  # as it was read: the answer may take the place of its column
        problem = _answer_problem(place, row, columns)
        if problem is None:
            if columns.prompt_under is not None and prompt is not None:
                row[columns.prompt_under] = prompt
            yield place, row
        elif columns.drops_unanswered:
            dropped["without an answer"] += 1
        else:
            raise unusable(*problem)


def _check(place: str, row: Row, columns: Columns) -> None:
    if _is_deeper(row, _MAX_DEPTH):
        raise unusable(f"{place} is nested deeper than {_MAX_DEPTH}.")
    prompt = columns.prompt
    if columns.needs_prompt or prompt in row:
        if columns.takes_conversations:
            _require_no_conversation(place, row, prompt)
        require_column(place, row, prompt, "data.prompt_column")
        require_prompt(f"{place}: column {prompt!r}", row[prompt])
    if not isinstance(row.get(TEMPLATE_COLUMN, {}), dict | None):
        found = type(row[TEMPLATE_COLUMN]).__name__
        raise unusable(f"{place}: column {TEMPLATE_COLUMN!r} holds {found}; expected an object.")
    if columns.source and row.get(SOURCE_COLUMN) is None:
        row[SOURCE_COLUMN] = columns.source


def _require_no_conversation(place: str, row: Row, prompt: str) -> None:
    """Raise if a row has no prompt and a column with a whole conversation, which nobody named."""
    found = [name for name, value in row.items() if _is_conversation(value)] if prompt not in row else []
    if found:
        message = f"{place} has no column {prompt!r} (data.prompt_column), and column {found[0]!r} holds a list of messages."
        fix = f'set data.messages_column = {found[0]!r} and data.train_on = "assistant" or "all"'
        raise unusable(message, fix)


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "content" in value[0]


def _answer_problem(place: str, row: Row, columns: Columns) -> tuple[str, str] | None:
    """(what keeps completions of the row from being scored, what to do about it); None if they can be."""
    answer = columns.answer
    if answer is not None and (columns.needs_answer or answer in row):
        if answer not in row:
            message, fix = _no_column(place, row, answer, "data.answer_column")
            return message, f"{fix}, or to none if no reward reads an answer"
        row[ANSWER_COLUMN] = row[answer]
        if columns.drops_unanswered and (row[answer] is None or not str(row[answer]).strip()):
            return f"{place} has no answer.", "give it one, or remove the row"
    for name in columns.rewards:
        problem = row_problem(name, row)
        if problem is not None:
            return (
                f"{place}: {problem}.",
                "repair or remove this row, or name its column in data.answer_column",
            )
    return None


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


def require_column(place: str, row: Row, column: str, key: str) -> None:
    """Raise with the columns that a row has if it lacks one."""
    if column not in row:
        raise unusable(*_no_column(place, row, column, key))


def _no_column(place: str, row: Row, column: str, key: str) -> tuple[str, str]:
    names = ", ".join(map(repr, row)) or "none"
    message = f"{place} has no column {column!r} ({key}); it has {names}.{did_you_mean(column, row)}"
    return message, f"set {key} to one of the columns listed"


def require_prompt(place: str, prompt: object) -> None:
    """Raise unless `prompt` is a string or a conversation that a chat template can render.

    A message that calls tools may say nothing besides.
    """
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
        only_calls = message.get("tool_calls") and message.get("content") is None
        for key in ("role",) if only_calls else ("role", "content"):
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
