"""The functions that say what one completion is worth: ours, and how the user's are found and called."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import numbers
import os
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from shardproof.bounds import MAX_REWARD, within
from shardproof.errors import ShardproofError, did_you_mean, fail
from shardproof.user_code import describe_error, end_fork_of, import_named, is_user_name

Sample = tuple[str, str, dict[str, Any]]  # prompt, completion, row
Reward = Callable[[str, str, dict[str, Any]], float]
Outcome = tuple[float, str | None]  # the value, and the error that made it zero

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?"  # a sign, but not the minus of 7-3
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)

_MATH_S = 2  # for reading the answer, for reading the completion, and for comparing them
_SENTENCE = re.compile(r"[$#]|\\boxed|\\[(\[]|(?<![\\A-Za-z])[A-Za-z]{4,}")  # marks of mathematics, or words


def exact_match(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion is the answer, apart from space around them."""
    return float(completion.strip() == str(_answer(row)).strip())


def numeric(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the last number of the completion is the answer's, to 1e-6."""
    expected = _expected_number(row)
    found = _last_number(completion)
    return float(found is not None and within(abs(found - expected), 1e-6))


def regex(pattern: str | None = None) -> Reward:
    """A reward of 1 when `pattern`, or else the row's own "pattern", is found in the completion."""
    compiled = None if pattern is None else re.compile(pattern)

    def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        search = compiled.search if compiled else _pattern(row).search
        return float(search(completion) is not None)

    return reward


def math_verify(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion's last mathematical answer equals the row's, by the package math-verify: 1/2, 0.5, \\frac12."""
    package = _math_verify_package()
    answer = _mathematics(row)
    if not (gold := package.parse(answer, parsing_timeout=_MATH_S)):
        raise ValueError(f"math-verify finds no mathematics in the answer {answer[:40]!r}")
    found = package.parse(completion, parsing_timeout=_MATH_S)
    return float(package.verify(gold, found, timeout_seconds=_MATH_S))


def _math_verify_package() -> Any:
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


BUILT_IN: dict[str, Reward] = {
    "exact_match": exact_match,
    "numeric": numeric,
    "regex": regex(),
    "math_verify": math_verify,
}
# A pattern is the user's, and can take exponential time, as can what a model writes as mathematics: these run in the
# workers like the user's own functions. math-verify's own time limits need a process's main thread, which they have there.
CANNOT_HANG = ("exact_match", "numeric")


def row_problem(name: str, row: dict[str, Any]) -> str | None:
    """What keeps a built-in reward from scoring completions of this row; users' functions judge their rows themselves."""
    read = _NEEDS.get(name)
    try:
        if read is not None:
            read(row)
    except ValueError as error:
        return f"reward {name!r}: {error}"
    return None


def _answer(row: dict[str, Any]) -> str | float | Decimal:
    """The row's answer: text, or a number, which has one text. Null, true and lists have several, or none."""
    answer = _cell(row, "answer", "text or a number", (str, numbers.Real, Decimal))
    # An integer may be too large for a float, and is finite all the same.
    if not isinstance(answer, (str, int)) and not math.isfinite(answer):
        raise ValueError(f"the row's 'answer' is {answer}; expected text or a number")
    return answer


def _expected_number(row: dict[str, Any]) -> float:
    answer = _answer(row)
    try:
        expected = _last_number(answer) if isinstance(answer, str) else float(answer)
    except OverflowError:
        expected = math.inf
    shown = repr(str(answer)[:40])
    if expected is None:
        raise ValueError(f"the answer {shown} holds no number")
    if not math.isfinite(expected):
        raise ValueError(f"the answer {shown} is larger than any number that can be compared")
    return expected


def _mathematics(row: dict[str, Any]) -> str:
    """The answer, marked as mathematics unless it is text that holds some: of a bare 3\\pi only the 3 would be read."""
    text = str(_answer(row)).strip()
    if not text:
        raise ValueError("the row's 'answer' is empty")
    with contextlib.suppress(ArithmeticError):
        number = Decimal(text)
        if number.is_finite() and abs(number.adjusted()) < 100:
            return f"${number:f}$"  # 1e-05 would be read with Euler's number
    return text if _SENTENCE.search(text) else f"${text}$"


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


_NEEDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "exact_match": _answer,
    "numeric": _expected_number,
    "regex": _pattern,
    "math_verify": _mathematics,
}


def _last_number(text: str) -> float | None:
    # Every number ends in a digit, and only the end of a long completion is worth a search.
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    found = _NUMBER.findall(text, max(0, end - 400), end)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def find_reward(name: str) -> Reward:
    """The function that `name` stands for: built in, `regex(pattern)`, or the user's `module:function`."""
    if name == "math_verify":
        _math_verify_package()  # where it is missing, say so before the first step
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith("regex(") and name.endswith(")"):
        try:
            return regex(name[len("regex(") : -1])
        except re.error as error:
            raise unknown_reward(
                f"the pattern of reward {name!r} is not a valid regular expression: {error}."
            ) from error
    if not is_user_name(name):
        message = f"reward {name!r} is not one of {', '.join(BUILT_IN)}, regex(pattern), or module:function."
        raise unknown_reward(message + did_you_mean(name, BUILT_IN))
    function = import_named("reward", name)
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise unknown_reward(
            f"reward {name!r} cannot be called as (prompt, completion, row): {error}."
        ) from error
    except ValueError:
        pass  # written in C, without a signature to look at
    return function


def unknown_reward(message: str, fix: str | None = None) -> ShardproofError:
    """The error for a reward, or a setting of rewards, that cannot be."""
    return fail("C001", "reward", message, fix=fix or "name a built-in reward or a module:function")


def attempt(function: Reward, sample: Sample) -> Outcome:
    """What the function makes of the sample; whatever it raises or returns instead of a number is a zero."""
    process = os.getpid()
    try:
        value = function(*sample)
        if not isinstance(value, numbers.Real):
            return 0.0, f"returned {_type_name(value)}, expected a number"
        number = float(value)
    except KeyboardInterrupt:  # the user's, who ends the run
        raise
    except BaseException as error:  # sys.exit() and a cancelled task are that sample's failure, no more
        return 0.0, describe_error(error)
    finally:
        end_fork_of(process)
    if not math.isfinite(number):
        return 0.0, f"returned {number}, expected a finite number"
    if not within(abs(number), MAX_REWARD):
        return 0.0, f"returned {number:g}, expected a number up to {MAX_REWARD:g}"
    return number, None


def _type_name(value: object) -> str:
    """With its module: numpy.bool is not the bool that is a number."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
