"""How reward functions are called: by sample, by batch, or as TRL does, now or in an event loop; and what they said."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from shardproof.bounds import MAX_REWARD, within
from shardproof.rl.rewards.specs import RewardSpec, Surroundings
from shardproof.user_code import describe_error, end_fork_of

Sample = tuple[str, str, dict[str, Any]]  # prompt, completion, row
Reward = Callable[..., Any]

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # of a row, that TRL does not pass on


class Outcome(NamedTuple):
    """What a reward said about one sample: a value, None for "no signal", or an error, whose value is 0."""

    value: float | None
    error: str | None = None
    facts: dict[str, float] | None = None  # metrics, by name


class Measured(NamedTuple):
    """What a built-in reward may return: its value, and numbers for the metrics."""

    value: float | None
    facts: Mapping[str, Any]


class Function:
    """A reward function with its options, ready to be asked about any number of samples."""

    def __init__(self, call: Reward, spec: RewardSpec | None = None, around: Surroundings | None = None):
        self.spec, self._around = spec or RewardSpec(""), around or Surroundings()
        self._call = call
        self.is_async = is_async(call)

    @property
    def longest_s(self) -> float:
        """How long a call may take before it is ended; built-in functions that limit themselves say so."""
        own = getattr(self._call, "longest_s", None)
        return self._around.timeout_s if own is None else float(own)

    @property
    def concurrency(self) -> int:
        """Most calls at once of an async function."""
        own = getattr(self._call, "concurrency", 32)
        return self.spec.concurrency or (self._around.num_workers if own is None else int(own))

    def now(self, samples: Sequence[Sample]) -> list[Outcome]:
        """What a plain function says; nothing about rows that are not its own."""
        are_mine, facts = self._are_mine(samples), dict[str, Any]()
        mine = list(compress(samples, are_mine))
        found = _attempted(lambda: self._asked(mine, facts)(), len(mine), self.spec, facts) if mine else []
        return _about_all(are_mine, found)

    async def later(self, samples: Sequence[Sample]) -> list[Outcome]:
        """What an async function says, within its time; nothing about rows that are not its own."""
        are_mine = self._are_mine(samples)
        mine = list(compress(samples, are_mine))
        return _about_all(are_mine, await self._later(mine) if mine else [])

    def _are_mine(self, samples: Sequence[Sample]) -> list[bool]:
        """Looked at before the function is asked, which may change the rows."""
        return [self.spec.is_about(row) for _, _, row in samples]

    async def _later(self, samples: Sequence[Sample]) -> list[Outcome]:
        facts: dict[str, Any] = {}
        process = os.getpid()
        limit_s = None if math.isinf(self.longest_s) else self.longest_s
        try:
            # Awaited in this very task: what a task of its own raises to leave would end the whole loop.
            async with asyncio.timeout(limit_s) as limit:
                value = await self._asked(samples, facts)()
            return _read(value, len(samples), self.spec, facts)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            said = f"no answer in {self.longest_s:g} s" if late else describe_error(error)
            return [Outcome(0.0, said)] * len(samples)
        finally:
            end_fork_of(process)

    def _asked(self, samples: Sequence[Sample], facts: dict[str, Any]) -> Callable[[], Any]:
        """The call. TypeError if an option has the name of a column that is passed as well."""
        options = dict(self.spec.options)  # of users' functions: built-in ones were made with theirs
        if not self.spec.is_batched:
            ((prompt, completion, row),) = samples
            if self.spec.signature == "verl":
                return partial(self._call, **verl_arguments(completion, row), **options)
            return partial(self._call, prompt, completion, row, **options)
        prompts, completions, rows = ([sample[k] for sample in samples] for k in range(3))
        if self.spec.signature == "batch":
            return partial(self._call, prompts, completions, rows, **options)
        return partial(self._call, **trl_arguments(samples, self._around, facts), **options)


def _about_all(are_mine: Sequence[bool], mine: Iterable[Outcome]) -> list[Outcome]:
    found = iter(mine)
    return [next(found) if is_mine else Outcome(None) for is_mine in are_mine]


def is_async(call: Reward) -> bool:
    """Whether a function, or an object's `__call__`, is `async def`."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def trl_arguments(samples: Sequence[Sample], around: Surroundings, facts: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that TRL's GRPOTrainer calls a reward function with.

    A prompt of messages has a completion of one message, a prompt of text one of text. Every column of the rows is
    passed on; where a row lacks one, it is None.
    """
    given: dict[str, Any] = {"prompts": [], "completions": [], "completion_ids": []}
    for text, completion, row in samples:
        prompt = row.get(around.prompt_column, text)
        if isinstance(prompt, str) and around.chat:
            prompt = [{"role": "user", "content": prompt}]
        is_chat = not isinstance(prompt, str)
        given["prompts"].append(prompt)
        given["completions"].append([{"role": "assistant", "content": completion}] if is_chat else completion)
        given["completion_ids"].append(row.get("completion_ids", []))
    names = dict.fromkeys(name for _, _, row in samples for name in row if name not in _NOT_COLUMNS)
    columns = {name: [row.get(name) for _, _, row in samples] for name in names}

    def log_metric(name: str, value: Any) -> None:
        facts[str(name)] = value

    return columns | given | {"trainer_state": None, "log_extra": _forget, "log_metric": log_metric}


def verl_arguments(completion: str, row: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that verl calls a `compute_score` with, from verl's columns or else from the answer."""
    model = row.get("reward_model")
    has_truth = isinstance(model, Mapping) and "ground_truth" in model
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": completion,
        "ground_truth": model["ground_truth"] if has_truth else row.get("answer"),  # type: ignore[index]
        "extra_info": row.get("extra_info") or {},
    }


def _of_verl(found: Mapping[str, Any]) -> Measured:
    """A score with what was measured beside it: numbers become metrics, the rest is left out."""
    key = "score" if "score" in found else "reward"
    return Measured(found[key], {str(name): value for name, value in found.items() if name != key})


def _forget(column: str, values: Sequence[Any]) -> None:
    """Columns for a table of completions: `samples.jsonl` has its own."""


def attempt(function: Reward, sample: Sample) -> Outcome:
    """What the function makes of the sample; whatever it raises or returns instead of a number is a zero."""
    return _attempted(partial(function, *sample), 1, RewardSpec(""), {})[0]


def _attempted(call: Callable[[], Any], num: int, spec: RewardSpec, facts: dict[str, Any]) -> list[Outcome]:
    process = os.getpid()
    try:
        value = call()
        if isinstance(value, Awaitable):
            close = getattr(value, "close", None)
            if callable(close):
                close()
            return [Outcome(0.0, f"returned {_type_name(value)}: declare the function with async def")] * num
        return _read(value, num, spec, facts)
    except KeyboardInterrupt:  # the user's, who ends the run
        raise
    except BaseException as error:  # sys.exit() and a cancelled task are that sample's failure, no more
        return [Outcome(0.0, describe_error(error))] * num
    finally:
        end_fork_of(process)


def _read(value: Any, num: int, spec: RewardSpec, facts: Mapping[str, Any]) -> list[Outcome]:
    """Outcomes from what a function returned: one value, or a list with one for each sample."""
    if spec.signature == "verl" and isinstance(value, Mapping):
        if not {"score", "reward"} & value.keys():  # no silence, which is a None
            return [Outcome(0.0, "returned a table without 'score'")]
        value = _of_verl(value)
    if not spec.is_batched:
        return [_outcome(value)]
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        return [Outcome(0.0, f"returned {_type_name(value)}, expected a list of {num} numbers")] * num
    values = list(value)
    if len(values) != num:
        return [Outcome(0.0, f"returned {len(values)} rewards for {num} completions")] * num
    outcomes = [_outcome(each, silent_nan=spec.signature == "trl") for each in values]
    if facts and outcomes:
        outcomes[0] = outcomes[0]._replace(facts=_shown(facts))
    return outcomes


def _outcome(value: Any, silent_nan: bool = False) -> Outcome:
    """What one value says; with `silent_nan`, NaN is no signal, as TRL has it."""
    facts = None
    if isinstance(value, Measured):
        value, facts = value.value, _shown(value.facts)
    if value is None:
        return Outcome(None, None, facts)
    try:
        if (
            getattr(value, "ndim", None) == 0
        ):  # a tensor or an array of one number, as torch.tensor takes them
            value = value.item()
        if not isinstance(value, numbers.Real):
            return Outcome(0.0, f"returned {_type_name(value)}, expected a number")
        number = float(value)
    except Exception as error:  # too large, or a class of the user's own
        return Outcome(0.0, describe_error(error))
    if silent_nan and math.isnan(number):
        return Outcome(None, None, facts)
    if not math.isfinite(number):
        return Outcome(0.0, f"returned {number}, expected a finite number")
    if not within(abs(number), MAX_REWARD):
        return Outcome(0.0, f"returned {number:g}, expected a number up to {MAX_REWARD:g}")
    return Outcome(number, None, facts)


def _shown(facts: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers a metric can show: one that is not finite would hide what was measured of all others."""
    shown = {}
    for name, value in facts.items():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, str | bytes) and within(abs(number := float(value)), MAX_REWARD):
                shown[name] = number
    return shown


def _type_name(value: object) -> str:
    """With its module: a user's class may be called as one of Python's."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
