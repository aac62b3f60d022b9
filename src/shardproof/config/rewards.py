"""The section about what completions are worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardproof.config.numbers import Bound, Count, Processes, Seconds
from shardproof.config.roles import RESERVED, RewardModel
from shardproof.config.section import Section

_Number = Annotated[float, Bound(ge=-1e9, le=1e9)]
Interval = tuple[_Number, _Number]


class Reward(Section):
    """One reward function and its weight."""

    name: str
    """`exact_match`, `numeric`, `regex`, `regex(pattern)`, `math_verify`, `format`, `length`, `cosine`,
    `repetition`, `code`, `judge`, or your own function as `module:function`. See docs/rewards.md."""
    weight: Annotated[float, Bound(ge=-1e6, le=1e6)] = 1.0
    """Factor in the sum of all rewards. Negative: a penalty. 0: reported in the metrics but not learned from.
    """
    label: str | None = None
    """What its metrics are called: `reward/LABEL`. By default the name. Two entries with the same name need it.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a built-in reward, such as `{ limit = 512, start = 400 }` for `length`, or further keyword
    arguments of your own function."""
    signature: Literal["sample", "batch", "trl", "verl"] = "sample"
    """How your own function is called: `"sample"` as `(prompt, completion, row)` for one completion,
    `"batch"` as `(prompts, completions, rows)` for a list of them, `"trl"` and `"verl"` as TRL
    and verl call theirs.
    """
    batch_size: Count | None = None
    """Most completions of one call with `signature = "batch"` or `"trl"`. By default all that one call of the
    engine made on this rank."""
    concurrency: Annotated[int, Bound(gt=0, le=4096)] | None = None
    """Most calls of an `async def` function at once, per rank. By default 32, for `judge` 16, for `code`
    `reward.num_workers`."""
    only: dict[str, str | int | list[str | int]] = Field(default_factory=dict)
    """Which rows the function is about: columns, and the value that a row must have there, or a list of values, such
    as `{ data_source = ["gsm8k", "math"] }`. About other rows it has nothing to say. By default it is about all rows."""
    clip: Interval | None = None
    """Lowest and highest value that counts in the total, such as `[-5, 5]`. Metrics of the function itself show
    what it returned."""

    @property
    def key(self) -> str:
        """What its values are called."""
        return self.label or self.name

    @model_validator(mode="after")
    def _fits(self) -> Reward:
        if self.label is not None and (not self.label.strip() or any(each in self.label for each in "/@")):
            raise ValueError(f"label={self.label!r} is empty, or has a slash or an @")
        if self.key in RESERVED:
            raise ValueError(f"label: {self.key!r} is the name of another metric; choose another label")
        if self.batch_size is not None and self.signature not in ("batch", "trl"):
            raise ValueError("batch_size is for signature='batch' or 'trl'")
        if empty := [column for column, values in self.only.items() if values == []]:
            raise ValueError(f"only.{empty[0]} is an empty list: no row could fit it")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: the first number must be below the second")
        return self


class Rewards(Section):
    """What completions are worth: a weighted sum of reward functions and reward models."""

    functions: list[Reward] = Field(default_factory=list)
    """The reward functions, such as `[{ name = "numeric" }, { name = "my_rewards:style", weight = 0.1 }]`.
    The first one decides `eval/pass@K`."""
    models: list[RewardModel] = Field(default_factory=list)
    """Reward models, such as `[{ path = "my/reward-model" }]`. Give each a `name` of its own if there are several."""
    timeout_s: Seconds = 10.0
    """Longest time for one call of a reward function, in seconds. A call that takes longer is killed and
    counts as failed."""
    num_workers: Processes = 2
    """Processes per rank that run your reward functions. Raise it if `time/reward` is a large part of
    `time/step`."""
    on_error: Literal["zero", "stop"] = "zero"
    """What a failed reward does: `"zero"` leaves the completion out of the update and counts it, `"stop"`
    ends the run."""
    normalise: Literal["sum", "each"] = "sum"
    """`"sum"` adds up the weighted rewards, and the algorithm compares the totals. `"each"` (GDPO) first divides
    each reward's distance from its group's mean by its group's deviation. With `algorithm.name = "gdpo"`
    that is TRL's `normalize_then_sum`."""
    clip: Interval | None = None
    """Lowest and highest total that is learned from, such as `[-10, 10]`: TRL's `reward_clip_range`. Evaluation
    shows totals without it."""

    @model_validator(mode="after")
    def _rewards_something(self) -> Rewards:
        if not self.functions and not self.models:
            raise ValueError("functions is empty: name a reward function, or a reward model in reward.models")
        keys = [*(each.key for each in self.functions), *(each.name for each in self.models)]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise ValueError(
                f"two rewards are called {twice[0]!r}: give one of them another label, or another name to a model"
            )
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: the first number must be below the second")
        if self.clip is not None and self.normalise == "each":
            raise ValueError("clip is for normalise='sum'; clip single functions instead")
        return self
