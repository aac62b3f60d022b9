"""Built-in rewards that compare a completion with the row's answer."""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from shardproof.bounds import within
from shardproof.rl.rewards.specs import unknown_reward

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?"  # a sign, but not the minus of 7-3
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)

# Floats beyond this lie further apart than 1, so that several whole numbers are one float.
EXACT_FLOATS = 2.0**53
_MATH_S = 2  # for reading the answer, for reading the completion, and for comparing them
_MATH_DECIMALS, _MATH_DIGITS = 6, 3
# Marks of mathematics, and words: none are those of LaTeX itself, such as \begin{pmatrix} and \text{even}, or a plain root.
_MARKS = re.compile(r"(?<!\\)[$#]|\\boxed|(?<!\\)\\[(\[]")
_LATEX = re.compile(r"\\[A-Za-z]+\*?(?:\s*(?:\{[^{}]*\}|\[[^][]*\]))*")
_PLAIN_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_WORD = re.compile(r"(?<![A-Za-z])(?!sqrt(?![A-Za-z]))[A-Za-z]{4,}")


def exact_match(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion is the answer, apart from space around them."""
    return float(completion.strip() == str(answer_of(row)).strip())


def numeric(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the last number of the completion is the answer's, to 1e-6."""
    expected, written = expected_number(row), last_written(completion)
    if written is None or not within(abs(float(written) - expected), 1e-6):
        return 0.0
    exact = _written_answer(row)
    if abs(expected) < EXACT_FLOATS or exact is None:
        return 1.0
    return float(abs(Decimal(written) - exact) <= Decimal("1e-6"))


@dataclass(frozen=True)
class Regex:
    """1 when `pattern`, or else the row's own "pattern", is found in the completion."""

    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled_pattern(self.pattern)

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        found = self._compiled if self.pattern is not None else _pattern(row)
        return float(found.search(completion) is not None)

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return compiled_pattern(self.pattern)

    def check_row(self, row: dict[str, Any]) -> None:
        """ValueError if the row has no pattern where it must have one."""
        if self.pattern is None:
            _pattern(row)


def compiled_pattern(pattern: object) -> re.Pattern[str]:
    """The regular expression; ValueError if it is none."""
    if not isinstance(pattern, str):
        raise ValueError(f"pattern={pattern!r} is not text")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern is not a valid regular expression: {error}") from error


def math_verify(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion's last mathematical answer equals the row's, by the package math-verify: 1/2, 0.5, \\frac12."""
    package = require_math_verify()
    answer = mathematics(row)
    if not (gold := package.parse(answer, parsing_timeout=_MATH_S)):
        raise ValueError(f"math-verify finds no mathematics in the answer {answer[:40]!r}")
    found = package.parse(completion, parsing_timeout=_MATH_S)
    decimals = _MATH_DECIMALS
    with contextlib.suppress(package.errors.TimeoutException):
        decimals = package.utils.timeout(_MATH_S)(_decimals)(gold[0])
    return float(package.verify(gold, found, float_rounding=decimals, timeout_seconds=_MATH_S))


def _decimals(gold: Any) -> int:
    """How many decimals are compared: math-verify's six, or as many as show three digits of the answer's smallest number."""
    # What has no float, or is too much for sympy, may still be equal to what is found.
    with contextlib.suppress(Exception):
        smallest = min((size for size in _sizes(gold) if size > 0), default=1.0)
        return max(_MATH_DECIMALS, _MATH_DIGITS - 1 - math.floor(math.log10(smallest)))
    return _MATH_DECIMALS


def _sizes(gold: Any) -> Iterator[float]:
    """The sizes of the numbers in an expression of sympy, or its own if it is one."""
    if getattr(gold, "is_number", False):
        yield abs(complex(gold))
        return
    for part in gold.flat() if hasattr(gold, "flat") else getattr(gold, "args", ()):
        yield from _sizes(part)


def require_math_verify() -> Any:
    """The package math-verify; C001 if it is not installed."""
    try:
        import math_verify as package
    except ImportError as error:
        raise unknown_reward(
            f"reward 'math_verify' cannot be used: {error}.", fix="pip install 'shardproof[math]'"
        ) from error
    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # a warning for each completion that it cannot read
    return package


def answer_of(row: dict[str, Any]) -> str | float | Decimal:
    """The row's answer: text, or a number, which has one text. Null, true and lists have several, or none."""
    answer = _cell(row, "answer", "text or a number", (str, numbers.Real, Decimal))
    # An integer may be too large for a float, and is finite all the same.
    if not isinstance(answer, (str, int)) and not math.isfinite(answer):
        raise ValueError(f"the row's 'answer' is {answer}; expected text or a number")
    return answer


def expected_number(row: dict[str, Any]) -> float:
    answer = answer_of(row)
    try:
        written = last_written(answer) if isinstance(answer, str) else answer
        expected = None if written is None else float(written)
    except OverflowError:
        expected = math.inf
    shown = repr(str(answer)[:40])
    if expected is None:
        raise ValueError(f"the answer {shown} holds no number")
    if not math.isfinite(expected):
        raise ValueError(f"the answer {shown} is larger than any number that can be compared")
    return expected


def _written_answer(row: dict[str, Any]) -> Decimal | None:
    """All digits of the answer; None where it is a float, which has lost some."""
    answer = answer_of(row)
    if isinstance(answer, str):
        answer = last_written(answer) or ""
    return Decimal(answer) if isinstance(answer, str | int | Decimal) else None


def mathematics(row: dict[str, Any]) -> str:
    """The answer, marked as mathematics unless it is text that holds some: of a bare 3\\pi only the 3 would be read."""
    text = str(answer_of(row)).strip()
    if not text:
        raise ValueError("the row's 'answer' is empty")
    with contextlib.suppress(ArithmeticError):
        number = Decimal(text)
        if number.is_finite() and abs(number.adjusted()) < 100:
            return f"${number:f}$"  # 1e-05 would be read with Euler's number
    if not (_MARKS.search(text) or _WORD.search(_LATEX.sub(" ", text))):
        return f"${text}$"
    # In a sentence the package finds the numbers, and in words alone nothing.
    return f"$\\text{{{text}}}$" if _PLAIN_WORDS.fullmatch(text) else text


def _pattern(row: dict[str, Any]) -> re.Pattern[str]:
    pattern = _cell(row, "pattern", "text", (str,))
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the row's 'pattern' is not a valid regular expression: {error}") from error


def _cell(row: dict[str, Any], column: str, expected: str, types: tuple[type, ...]) -> Any:
    if column not in row:
        raise ValueError(f"the row has no {column!r}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, types):
        found = "null" if value is None else f"of type {type(value).__name__}"
        raise ValueError(f"the row's {column!r} is {found}; expected {expected}")
    return value


def last_written(text: str) -> str | None:
    """The last number of a text with all its digits, as Python writes numbers."""
    # Every number ends in a digit, and only the end of a long completion is worth a search.
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    found = _NUMBER.findall(text, max(0, end - 400), end)
    return str(found[-1]).replace(",", "").replace("\u2212", "-") if found else None
