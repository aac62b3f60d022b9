"""Built-in rewards for the form of a completion: its tags, its length, its repetitions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from shardproof.rl.rewards.answers import (
    answer_of,
    compiled_pattern,
    exact_match,
    expected_number,
    math_verify,
    mathematics,
    numeric,
    require_math_verify,
)
from shardproof.rl.rewards.options import number, one_of
from shardproof.rl.rewards.specs import Surroundings

_CORRECT = {
    "exact_match": (exact_match, answer_of),
    "numeric": (numeric, expected_number),
    "math_verify": (math_verify, mathematics),
}
_TAG = re.compile(r"[A-Za-z_][\w.-]*")


def length_of(completion: str, row: dict[str, Any], unit: str) -> int:
    """How long a completion is in tokens, words or characters."""
    if unit == "characters":
        return len(completion)
    return len(completion.split()) if unit == "words" else len(tokens_of(row))


def tokens_of(row: dict[str, Any]) -> Sequence[int]:
    """The ids that the policy wrote."""
    if "completion_ids" not in row:
        raise ValueError("the row has no 'completion_ids'")
    tokens: Sequence[int] = row["completion_ids"]
    return tokens


_UNITS = ("tokens", "words", "characters")


@dataclass(frozen=True)
class Format:
    """Whether a completion has the tags that it should have.

    "strict": 1 if it is nothing but `<tag>...</tag>` for each tag in order, else 0. "soft": 1 if these stand in it in
    this order, whatever is around them. "count": the share of the opening and closing tags that occur exactly once.
    With `pattern`: 1 if the whole completion matches it.
    """

    tags: Sequence[str] = ("think", "answer")
    mode: str = "strict"
    opened: bool = False  # the prompt ends with the first opening tag
    pattern: str | None = None

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("strict", "soft", "count"))
        if self.pattern is not None:
            compiled_pattern(self.pattern)
        is_list = isinstance(self.tags, Sequence) and not isinstance(self.tags, str)
        if (
            not is_list
            or not self.tags
            or not all(isinstance(t, str) and _TAG.fullmatch(t) for t in self.tags)
        ):
            raise ValueError(f"tags={self.tags!r} is not a list of names of tags")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags={list(self.tags)} names a tag twice")
        if not isinstance(self.opened, bool):
            raise ValueError(f"opened={self.opened!r} is neither true nor false")
        if self.pattern is not None and self.mode != "strict":
            raise ValueError(
                f"mode={self.mode!r} is for tags: the pattern alone says what a completion is like"
            )
        if self.pattern is not None and tuple(self.tags) != Format.tags and not self.opened:
            raise ValueError(f"tags={list(self.tags)} and a pattern: the pattern alone would be read")

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        text = f"<{self.tags[0]}>{completion}" if self.opened else completion
        if self.pattern is not None:
            return float(self._compiled.fullmatch(text) is not None)
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if self.mode == "count":
            return sum(text.count(mark) == 1 for mark in marks) / len(marks)
        if self.mode == "strict" and any(text.count(mark) != 1 for mark in marks):
            return 0.0
        pieces, rest = [], text
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                return 0.0
            pieces.append(piece)
        between = [*pieces[::2], rest]
        return float(self.mode == "soft" or not any(piece.strip() for piece in between))

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(str(self.pattern), re.DOTALL)


@dataclass(frozen=True)
class Length:
    """What a completion's length is worth.

    With `limit` and `start`: 0 up to `start`, then linearly down to -1 at `limit`, and -1 beyond. With `target`: 1 at
    the target, linearly down to 0 where the length is `width` away from it.
    """

    limit: int | None = None
    start: int | None = None
    target: int | None = None
    width: int | None = None  # None: the target itself
    unit: str = "tokens"

    def __post_init__(self) -> None:
        one_of("unit", self.unit, _UNITS)
        for key in ("limit", "target", "width"):
            if getattr(self, key) is not None:
                number(key, getattr(self, key), 1, 2**30, whole=True)
        if (self.limit is None) == (self.target is None):
            raise ValueError("give either limit, with start, or target")
        if (self.start is None) != (self.limit is None):
            raise ValueError("limit and start belong together")
        if self.width is not None and self.target is None:
            raise ValueError("width belongs to target")
        if self.limit is not None:
            number("start", self.start, 0, self.limit, whole=True)

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        length = length_of(completion, row, self.unit)
        if self.limit is not None and self.start is not None:
            if length <= self.start:
                return 0.0
            return -1.0 if length >= self.limit else -(length - self.start) / (self.limit - self.start)
        assert self.target is not None
        return max(0.0, 1.0 - abs(length - self.target) / (self.width or self.target))


@dataclass(frozen=True)
class Cosine:
    """A right answer is worth less the longer it is, a wrong one costs less; along half a cosine, up to `max_length`."""

    max_length: int = 0
    correct: str = "math_verify"
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    unit: str = "tokens"
    bounds: ClassVar[tuple[str, ...]] = (
        *("min_value_wrong", "max_value_wrong"),
        *("min_value_correct", "max_value_correct"),
    )

    def __post_init__(self) -> None:
        if not self.max_length:
            raise ValueError("max_length is missing: the length at which the schedule ends")
        number("max_length", self.max_length, 1, 2**30, whole=True)
        one_of("correct", self.correct, tuple(_CORRECT))
        one_of("unit", self.unit, _UNITS)
        for key in self.bounds:
            number(key, getattr(self, key), -1e6, 1e6)

    def prepare(self, around: Surroundings) -> None:
        """C001 if what decides about answers is not installed."""
        if self.correct == "math_verify":
            require_math_verify()

    def check_row(self, row: dict[str, Any]) -> None:
        """ValueError if the row's answer cannot be compared with."""
        _CORRECT[self.correct][1](row)

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        is_correct = _CORRECT[self.correct][0](prompt, completion, row) >= 1.0
        # Longer ones stay at the end: beyond it the cosine would rise again.
        progress = min(1.0, length_of(completion, row, self.unit) / self.max_length)
        at_zero = self.max_value_correct if is_correct else self.min_value_wrong
        at_end = self.min_value_correct if is_correct else self.max_value_wrong
        return at_end + 0.5 * (at_zero - at_end) * (1.0 + math.cos(progress * math.pi))


@dataclass(frozen=True)
class Repetition:
    """A penalty for n-grams that occur more than once: `max_penalty` times (1 - different n-grams / all n-grams)."""

    ngram_size: int = 3
    max_penalty: float = -1.0
    unit: str = field(default="tokens")

    def __post_init__(self) -> None:
        number("ngram_size", self.ngram_size, 1, 1024, whole=True)
        number("max_penalty", self.max_penalty, -1e6, 0)
        one_of("unit", self.unit, ("tokens", "words"))

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        parts = completion.lower().split() if self.unit == "words" else tokens_of(row)
        num = len(parts) - self.ngram_size + 1
        if num < 1:
            return 0.0
        different = {tuple(parts[k : k + self.ngram_size]) for k in range(num)}
        return self.max_penalty * (1.0 - len(different) / num) if len(different) < num else 0.0
