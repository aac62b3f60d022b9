"""Prompts: rows with their tokens, an order that any run can resume, and the part of each rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shardproof.rl.sources.text_files import Row, unusable

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A row, its prompt as the model sees it, and that prompt's tokens."""

    row: Row
    text: str
    tokens: tuple[int, ...]
    completion: tuple[int, ...] = ()  # the tokens to train on; empty where completions are sampled
    rejected: tuple[int, ...] = ()  # of a pair, of which `completion` is the better one
    trained: tuple[int, ...] = ()  # 1 for each token of both that counts; empty: those of the completion do
    source: str = ""  # the name of the row's source, where there are several
    sampling: Mapping[str, Any] | None = None  # the row's own settings of sampling
    template: Mapping[str, Any] | None = None  # variables for the chat template, if the row has its own
    number: int = 0  # its place in the data
    whole: tuple[
        int, ...
    ] = ()  # all its tokens, where given completions take some of the last ones with them

    @property
    def asked(self) -> tuple[int, ...]:
        """The tokens that completions are sampled after."""
        return self.whole or self.tokens

    @property
    def facts(self) -> dict[str, Any]:
        """What its trajectories are known by; JSON-able, as checkpoints keep it: the answer is text."""
        found: dict[str, Any] = {"row": self.number}
        if self.source:
            found["source"] = self.source
        if self.row.get("answer") is not None:
            found["answer"] = str(self.row["answer"])
        return found


HeldOutPrompts = Mapping[str, Sequence[Prompt]]  # by the name of the set; "" is that of data.evaluation


@dataclass(frozen=True)
class Share:
    """Which part of the prompts a rank takes. Ranks of one sequence-parallel group take the same."""

    rank: int
    num_ranks: int
    sequence_parallel: int = 1

    def of(self, items: Sequence[T]) -> list[T]:
        """This rank's part: items are dealt to the groups one by one."""
        return list(items[self.rank // self.sequence_parallel :: self.num_ranks // self.sequence_parallel])

    def once(self, rows: Sequence[T]) -> list[T]:
        """One of the rows of each group, from a row of every rank."""
        return list(rows[:: self.sequence_parallel])


class PromptStream:
    """Row indices without end: each epoch a permutation of its own, a pure function of the seed and the position.

    Every rank draws from the same stream and keeps its own part of what it drew, so the order does not depend on the
    world size, and a run resumes by setting `position`.
    """

    def __init__(self, num_rows: int, seed: int):
        if num_rows < 1:
            raise unusable("there are no rows to draw prompts from.")
        self.num_rows = num_rows
        self._seed = seed % 2**64
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    @property
    def position(self) -> int:
        """How many indices have been taken."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise unusable(f"a position of {value} prompts is negative.")
        self._position = value

    @property
    def learns(self) -> bool:
        """Whether the order depends on how often prompts were solved."""
        return False

    def learn(self, solved: Mapping[int, tuple[int, int]]) -> None:
        """Take {row: (completions that were solved, completions that were judged)} of all ranks."""

    def metrics(self) -> dict[str, float]:
        """What it knows of the prompts."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep besides the position; JSON-able."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave."""

    def take(self, n: int) -> list[int]:
        """The next `n` row indices; goes on into the next epoch where one ends."""
        taken: list[int] = []
        while len(taken) < n:
            epoch, start = divmod(self._position, self.num_rows)
            part = self._order_of(epoch)[start : start + n - len(taken)]
            taken += part
            self._position += len(part)
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            # The raw stream of a bit generator is stable over numpy's releases; Generator.permutation is not, and a
            # run resumed after an upgrade would see some prompts twice and others never.
            keys = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(self.num_rows)
            self._order = np.argsort(keys, kind="stable").tolist()
            self._epoch = epoch
        return self._order


def rows_digest(prompts: Iterable[Prompt]) -> str:
    """A sha256 over the content of all rows in order; where they were read from is no part of it."""
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps(prompt.row, sort_keys=True, default=_canonical)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _canonical(value: object) -> str:
    """What JSON has no form for, such as dates and decimals of Parquet files, as text that every process agrees on."""
    if hasattr(value, "tobytes"):  # images and arrays, whose repr may hold an address
        return f"{type(value).__name__} {hashlib.sha256(value.tobytes()).hexdigest()}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def sample_seed(run_seed: int, step: int, sample_index: int) -> int:
    """63 bits that depend on nothing else, so that completions are the same on any number of ranks."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
