"""Which function a name in a recipe stands for: a built-in one with its options, or the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from shardproof.errors import did_you_mean
from shardproof.rl.rewards.answers import (
    Regex,
    answer_of,
    exact_match,
    expected_number,
    math_verify,
    mathematics,
    numeric,
    require_math_verify,
)
from shardproof.rl.rewards.calling import Function, Reward
from shardproof.rl.rewards.code import Code
from shardproof.rl.rewards.judge import Judge
from shardproof.rl.rewards.shapes import Cosine, Format, Length, Repetition
from shardproof.rl.rewards.specs import RewardSpec, Surroundings, unknown_reward
from shardproof.user_code import import_named, is_user_name

RowCheck = Callable[[dict[str, Any]], object]  # ValueError for a row whose completions it could never score

# Those without options.
BUILT_IN: dict[str, Reward] = {"exact_match": exact_match, "numeric": numeric, "math_verify": math_verify}
_ROWS: dict[str, RowCheck] = {
    "exact_match": answer_of,
    "numeric": expected_number,
    "math_verify": mathematics,
}
# Those with options, which are the fields of a class.
WITH_OPTIONS: dict[str, type] = {
    "regex": Regex,
    "format": Format,
    "length": Length,
    "cosine": Cosine,
    "repetition": Repetition,
    "code": Code,
    "judge": Judge,
}
NAMES = (*BUILT_IN, *WITH_OPTIONS)
# A pattern is the user's, and can take exponential time, as can what a model writes as mathematics: these run in the
# workers like the user's own functions. math-verify's own time limits need a process's main thread, which they have there.
CANNOT_HANG = ("exact_match", "numeric", "length")

# What TRL passes to a function besides the columns of the data.
_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def find_reward(spec: RewardSpec | str, around: Surroundings | None = None) -> Function:
    """The function that a recipe's entry stands for, ready to be called. C001 if there is none, or not with its options."""
    spec, around = RewardSpec(spec) if isinstance(spec, str) else spec, around or Surroundings()
    if is_user_name(spec.name) and not spec.name.startswith("regex("):
        found = Function(_users_function(spec), spec, around)
    elif spec.signature != "sample" or spec.batch_size is not None:
        key = "batch_size" if spec.signature == "sample" else f"signature={spec.signature!r}"
        raise unknown_reward(f"reward {spec.name!r}: {key} is for your own functions.", "remove the key")
    else:
        found = Function(_built_in(spec, around), replace(spec, options={}), around)
    if spec.concurrency is not None and not found.is_async:
        message = f"reward {spec.name!r}: concurrency is for async functions, and this one is none."
        raise unknown_reward(message, "remove the key, and set reward.num_workers")
    return found


def row_check(spec: RewardSpec | str) -> RowCheck | None:
    """What tells whether a row can be scored; None if nothing is known. Users' functions judge their rows themselves."""
    spec = RewardSpec(spec) if isinstance(spec, str) else spec
    if spec.name in _ROWS:
        return _ROWS[spec.name]
    if spec.name in WITH_OPTIONS:
        return getattr(
            _with_options(spec.name, spec.options, Surroundings(), checks=False), "check_row", None
        )
    return None


def needed_columns(spec: RewardSpec) -> list[str]:
    """The columns without which a function of TRL's signature cannot be called: its parameters that nothing else fills."""
    if spec.signature != "trl":
        return []
    try:
        parameters = inspect.signature(import_named("reward", spec.name)).parameters.values()
    except ValueError:  # written in C
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = {*_OF_TRL, *spec.options}
    return [
        each.name
        for each in parameters
        if each.kind in named and each.default is inspect.Parameter.empty and each.name not in given
    ]


def row_problem(spec: RewardSpec | str, row: dict[str, Any]) -> str | None:
    """What keeps a built-in reward from scoring completions of this row."""
    if isinstance(spec, RewardSpec) and not spec.is_about(row):
        return None
    check = row_check(spec)
    try:
        if check is not None:
            check(row)
    except ValueError as error:
        return f"reward {spec if isinstance(spec, str) else spec.key!r}: {error}"
    return None


def cannot_hang(spec: RewardSpec) -> bool:
    """Whether the function needs no process of its own: it takes microseconds, whatever a completion holds."""
    return spec.name in CANNOT_HANG or (spec.name == "format" and "pattern" not in spec.options)


def _built_in(spec: RewardSpec, around: Surroundings) -> Reward:
    name = spec.name
    if name == "math_verify":
        require_math_verify()  # where it is missing, say so before the first step
    if name in BUILT_IN:
        if spec.options:
            raise unknown_reward(f"reward {name!r} has no options.", "remove reward.functions.options")
        return BUILT_IN[name]
    if name.startswith("regex(") and name.endswith(")"):
        try:
            return Regex(name[len("regex(") : -1])
        except ValueError as error:
            raise unknown_reward(f"reward {name!r}: {error}.") from error
    if name not in WITH_OPTIONS:
        message = f"reward {name!r} is not one of {', '.join(NAMES)}, regex(pattern), or module:function."
        raise unknown_reward(message + did_you_mean(name, NAMES))
    return _with_options(name, spec.options, around, checks=True)


def _with_options(name: str, options: Mapping[str, Any], around: Surroundings, checks: bool) -> Reward:
    kind = WITH_OPTIONS[name]
    known = [field.name for field in fields(kind) if field.init and not field.name.startswith("_")]
    for key in options:
        if key not in known:
            message = f"reward {name!r} has no option {key!r}; it has {', '.join(known)}."
            raise unknown_reward(message + did_you_mean(key, known), "correct the option")
    try:
        made = kind(**options)
    except (TypeError, ValueError) as error:
        raise unknown_reward(f"reward {name!r}: {error}.", "correct its options") from error
    if checks and (prepare := getattr(made, "prepare", None)) is not None:
        prepare(around)  # what it needs on this machine, or C001
    reward: Reward = made
    return reward


def _users_function(spec: RewardSpec) -> Reward:
    function: Reward = import_named("reward", spec.name)
    names: Sequence[str] = ("prompt", "completion", "row")
    if spec.signature == "batch":
        names = ("prompts", "completions", "rows")
    try:
        if spec.signature == "trl":
            names = _OF_TRL
            # The columns of the data are not known here: see `needed_columns`.
            inspect.signature(function).bind_partial(**dict.fromkeys(names), **spec.options)
        elif spec.signature == "verl":
            names = ("data_source", "solution_str", "ground_truth", "extra_info")
            inspect.signature(function).bind(**dict.fromkeys(names), **spec.options)
        else:
            inspect.signature(function).bind(*names, **spec.options)
    except TypeError as error:
        options = f", {', '.join(spec.options)}" if spec.options else ""
        raise unknown_reward(
            f"reward {spec.name!r} cannot be called as ({', '.join(names)}{options}): {error}."
        ) from error
    except ValueError:
        pass  # written in C, without a signature to look at
    return function
