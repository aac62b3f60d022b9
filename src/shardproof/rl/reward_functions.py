"""The functions that say what one completion is worth: ours, and how the user's are found and called."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import reduce
from typing import Any

from shardproof.errors import ShardproofError, fail, nearest

Sample = tuple[str, str, dict[str, Any]]  # prompt, completion, row
Reward = Callable[[str, str, dict[str, Any]], float]
Outcome = tuple[float, str | None]  # the value, and the error that made it zero

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?"  # a sign, but not the minus of 7-3
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)


def exact_match(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion is the answer, apart from space around them."""
    return float(completion.strip() == str(_answer(row)).strip())


def numeric(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the last number of the completion is the answer's, to 1e-6."""
    answer = _answer(row)
    expected = _last_number(answer) if isinstance(answer, str) else float(answer)
    if expected is None:
        raise ValueError(f"the answer {str(answer)[:40]!r} holds no number")
    found = _last_number(completion)
    return float(found is not None and abs(found - expected) <= 1e-6)


def regex(pattern: str | None = None) -> Reward:
    """A reward of 1 when `pattern`, or else the row's own "pattern", is found in the completion."""
    compiled = None if pattern is None else re.compile(pattern)

    def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
        search = compiled.search if compiled else re.compile(_pattern(row)).search
        return float(search(completion) is not None)

    return reward


BUILT_IN: dict[str, Reward] = {"exact_match": exact_match, "numeric": numeric, "regex": regex()}
# A pattern is the user's, and can take exponential time: regex runs in the workers like the user's own functions.
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
    if not isinstance(answer, str) and not math.isfinite(answer):
        raise ValueError(f"the row's 'answer' is {answer}; expected text or a number")
    return answer


def _pattern(row: dict[str, Any]) -> str:
    pattern: str = _cell(row, "pattern", "text", (str,))
    return pattern


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
    "numeric": _answer,
    "regex": _pattern,
}


def _last_number(text: str) -> float | None:
    # Every number ends in a digit, and only the end of a long completion is worth a search.
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    found = _NUMBER.findall(text, max(0, end - 400), end)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def find_reward(name: str) -> Reward:
    """The function that `name` stands for: built in, `regex(pattern)`, or the user's `module:function`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith("regex(") and name.endswith(")"):
        try:
            return regex(name[len("regex(") : -1])
        except re.error as error:
            raise unknown_reward(f"the pattern of reward {name!r} is wrong: {error}.") from error
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        message = f"reward {name!r} is not one of {', '.join(BUILT_IN)}, regex(pattern), or module:function."
        raise unknown_reward(message, near=nearest(name, BUILT_IN))
    module = _import(name, module_name)
    try:
        function: Any = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = nearest(path, [key for key in vars(module) if not key.startswith("_")])
        raise unknown_reward(f"reward {name!r}: {module_name!r} has no {path!r}.", near=near) from error
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        raise unknown_reward(
            f"reward {name!r} cannot be called as (prompt, completion, row): {error}."
        ) from error
    except ValueError:
        pass  # written in C, without a signature to look at
    return function


def _import(name: str, module_name: str) -> Any:
    # An installed command's path begins at its own folder; users keep their rewards where they start the run.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    process = os.getpid()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        message = f"reward {name!r} cannot be imported: {_describe(error)}"
        raise unknown_reward(message, "repair that module, or put its folder on PYTHONPATH") from error
    finally:
        end_fork_of(process)


def end_fork_of(process: int) -> None:
    """End the process that calls this if it is not `process`: a user's code forked, and its child came back as well."""
    if os.getpid() != process:
        os._exit(0)


def unknown_reward(message: str, fix: str | None = None, near: Sequence[str] = ()) -> ShardproofError:
    """The error for a reward, or a setting of rewards, that cannot be."""
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return fail("C001", "reward", message + hint, fix=fix or "name a built-in reward or a module:function")


def _describe(error: BaseException) -> str:
    """The error in one line, with the user's line that it came from."""
    ours = (__file__, importlib.__file__, "<frozen importlib")
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(ours)]
    where = f" ({os.path.basename(lines[-1].filename)}:{lines[-1].lineno})" if lines else ""
    try:
        text = str(error)[:300]
    except Exception as another:
        text = f"its text cannot be had ({type(another).__name__})"
    return f"{type(error).__name__}: {text}{where}"


def attempt(function: Reward, sample: Sample) -> Outcome:
    """What the function makes of the sample; whatever it raises or returns instead of a number is a zero."""
    process = os.getpid()
    try:
        value = function(*sample)
        if not isinstance(value, numbers.Real):
            return 0.0, f"returned {type(value).__name__}, expected a number"
        number = float(value)
    except (Exception, SystemExit) as error:  # a reward's sys.exit() is that sample's failure, no more
        return 0.0, _describe(error)
    finally:
        end_fork_of(process)
    if not math.isfinite(number):
        return 0.0, f"returned {number}, expected a finite number"
    return number, None
