"""How tokens are drawn, and where an answer ends. Free of torch; docs/sampling.md explains the order of all settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.bounds import require_number
from shardproof.errors import ShardproofError, fail
from shardproof.foreign import without_nulls
from shardproof.rollout.stop_strings import StopStrings

# What a row of the data may set for its own requests. One temperature is for all: the trainer scores with it.
OVERRIDES = (
    "max_new_tokens", "min_new_tokens", "stop", "stop_ids", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip
_WHOLE_NUMBERS = ("max_new_tokens", "min_new_tokens", "top_k")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the most likely token, after penalties."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    exact: bool = False  # log-probs are computed as an exact trainer computes them (docs/exact.md)
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0  # before which nothing stops
    stop: StopStrings | None = None
    include_stop: bool = True  # rewards read the stop string as part of the text

    def __post_init__(self) -> None:
        require_number("rollout", "max_new_tokens", self.max_new_tokens, at_least=1)
        require_number("rollout", "temperature", self.temperature, at_least=0)
        require_number("rollout", "top_p", self.top_p, above=0, at_most=1)
        require_number("rollout", "top_k", self.top_k, at_least=0, at_most=2**30)
        require_number("rollout", "min_p", self.min_p, at_least=0, at_most=1)
        require_number("rollout", "repetition_penalty", self.repetition_penalty, at_least=0.01, at_most=100)
        for key in ("presence_penalty", "frequency_penalty"):
            require_number("rollout", key, getattr(self, key), at_least=-2, at_most=2)
        most = self.max_new_tokens
        require_number("rollout", "min_new_tokens", self.min_new_tokens, at_least=0, at_most=most)

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there already get another probability."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def truncates(self) -> bool:
        """Whether only some of the most likely tokens can be drawn."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def is_whole(self) -> bool:
        """Whether tokens are drawn from all that the model says, at the temperature: the trainer's log-probs are of that."""
        return not (self.penalises or self.truncates or self.min_new_tokens)


class Ends:
    """Where an answer ends, looked for in its tokens as they come."""

    def __init__(self, sampling: Sampling):
        self._ids = frozenset(sampling.stop_ids)
        self._stop, self._least = sampling.stop or None, sampling.min_new_tokens
        self._looked = 0
        self.num: int | None = None  # of its tokens, if it has ended
        self.stop_string = ""  # that ended it; "" for a stop token

    def look(self, tokens: Sequence[int]) -> bool:
        """Whether it has ended within its tokens so far, of which no fewer than at the last look may be given."""
        if self.num is None:
            for num in range(self._looked + 1, len(tokens) + 1):
                if tokens[num - 1] in self._ids:
                    self.num = num
                elif self._stop is not None and num > self._least:
                    self.stop_string = self._stop.completed(tokens, num)
                    self.num = num if self.stop_string else None
                if self.num is not None:
                    break
            self._looked = len(tokens)
        return self.num is not None


def overridden(sampling: Sampling, given: Mapping[str, Any] | None) -> Sampling:
    """With what a row sets. Its stop ids are added to those that there are, its stop strings take the place of others."""
    if not given:
        return sampling
    problem = check_overrides(given, OVERRIDES, sampling.max_new_tokens)
    if problem is not None:
        raise fail("C001", "rollout", f"a row's sampling: {problem}.")
    values = without_nulls(given)
    if "stop_ids" in values:
        values["stop_ids"] = tuple(dict.fromkeys([*sampling.stop_ids, *values["stop_ids"]]))
    if "stop" in values:
        assert sampling.stop is not None, "stop strings of rows need a tokenizer"
        strings = values["stop"]
        values["stop"] = sampling.stop.of([strings] if isinstance(strings, str) else strings)
    least = min(sampling.min_new_tokens, values.get("max_new_tokens", sampling.max_new_tokens))
    return replace(sampling, **{"min_new_tokens": least, **values})


def check_overrides(
    given: Any, allowed: Iterable[str], max_new_tokens: int | None = None, vocabulary: int | None = None
) -> str | None:
    """What is wrong with a row's `sampling`, in words; None if nothing is.

    `max_new_tokens` is the run's, and `vocabulary` how many tokens the model has.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return f"it is a {type(given).__name__}, expected an object such as {{'top_k': 20}}"
    given = without_nulls(given)
    for key, value in given.items():
        if key == "temperature":
            return (
                "temperature cannot be set by a row: the trainer scores all tokens with rollout.temperature"
            )
        if key not in OVERRIDES:
            return f"{key!r} is not one of {', '.join(OVERRIDES)}"
        if key not in tuple(allowed):
            return f"{key!r} is not in rollout.row_overrides"
        if problem := _wrong_value(key, value):
            return problem
    largest = max(given.get("stop_ids", ()), default=0)
    if vocabulary is not None and largest >= vocabulary:
        return f"stop_ids: {largest} is no token, the model's vocabulary has {vocabulary} tokens"
    limit = given.get("max_new_tokens")
    if limit is not None and max_new_tokens is not None and limit > max_new_tokens:
        return f"max_new_tokens={limit} is above the {max_new_tokens} that the recipe allows these rows"
    numbers = {key: value for key, value in given.items() if key not in ("stop", "stop_ids")}
    try:
        Sampling(**{"max_new_tokens": max_new_tokens or 2**30, **numbers})
    except ShardproofError as error:
        return error.findings[0].message.rstrip(".")
    return None


def _wrong_value(key: str, value: Any) -> str | None:
    if key == "stop":
        strings = [value] if isinstance(value, str) else value
        fits = isinstance(strings, Sequence) and all(isinstance(each, str) and each for each in strings)
        return None if fits else f"stop={value!r} is not a list of strings that are not empty"
    if key == "stop_ids":
        fits = isinstance(value, list | tuple) and all(_is_id(each) for each in value)
        return None if fits else f"stop_ids={value!r} is not a list of token ids"
    kinds = (int,) if key in _WHOLE_NUMBERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return f"{key}={value!r} is not a {'whole ' if key in _WHOLE_NUMBERS else ''}number"
    return None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
