"""What a recipe says about a reward function, as its processes read it. Free of torch and pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.errors import ShardproofError, fail

JUDGE_CACHE = "judge"  # the folder in a run's own that has the answers of its judge


@dataclass(frozen=True)
class RewardSpec:
    """A reward by name, and its weight in the total."""

    name: str
    weight: float = 1.0
    label: str = ""  # in metrics and parts; "": the name
    options: Mapping[str, Any] = field(default_factory=dict)
    signature: str = "sample"  # "sample", "batch", "trl" or "verl": how a user's function is called
    batch_size: int | None = None  # most samples of one call; None: all that are there
    concurrency: int | None = None  # most calls of an async function at once; None: its own default
    clip: tuple[float, float] | None = None
    only: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # columns, and what they hold in its rows

    @property
    def key(self) -> str:
        """What its values are called."""
        return self.label or self.name

    @property
    def is_batched(self) -> bool:
        """Whether one call is about several samples."""
        return self.signature in ("batch", "trl")

    def is_about(self, row: Mapping[str, Any]) -> bool:
        """Whether the row is one of those that the function is asked about."""
        return all(row.get(column) in values for column, values in self.only.items())


@dataclass(frozen=True)
class Surroundings:
    """What reward functions may have to know of the run that they are in."""

    timeout_s: float = 10.0
    num_workers: int = 2
    folder: str | None = None  # of the run; None: there is none, and nothing is kept
    num_ranks: int = 1  # that score, and share limits of rates
    prompt_column: str = "prompt"
    chat: bool = False  # text prompts are messages of a user


def unknown_reward(message: str, fix: str | None = None) -> ShardproofError:
    """The error for a reward, or a setting of rewards, that cannot be."""
    return fail("C001", "reward", message, fix=fix or "name a built-in reward or a module:function")
