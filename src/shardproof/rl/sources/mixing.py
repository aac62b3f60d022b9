"""Which choice a position of the stream falls on, by weights: sources of rows, or pools of difficulty.

Positions are dealt in blocks. In each block every choice has its share to within one place, and which places are its is
shuffled, so that no rank gets all prompts of one source. Both depend on the seed and the block's number alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.rl.data import PromptStream
from shardproof.rl.sources.text_files import unusable

BLOCK = 128  # places


class Deal:
    """Choices by weight, a pure function of the seed and the position."""

    def __init__(self, weights: Sequence[float], seed: int, what: int = 0):
        total = float(sum(weights))
        if not total > 0.0 or min(weights) < 0.0:
            raise unusable(f"weights must be above 0 in sum, and none below 0: {list(weights)}.")
        self._ends = np.cumsum(np.array(weights, np.float64) / total)
        self._ends[-1] = 1.0
        self._key = (seed + (what + 1) * 0x9E3779B97F4A7C15) % 2**64
        self._blocks: dict[int, np.ndarray] = {}

    def at(self, position: int) -> int:
        """The choice of a position."""
        number, place = divmod(position, BLOCK)
        if number not in self._blocks:
            self._blocks = {number: self._block(number)}  # one is kept: positions come in order
        return int(self._blocks[number][place])

    def counts(self, position: int) -> list[int]:
        """How often each choice occurs before a position."""
        number, place = divmod(position, BLOCK)
        firsts = np.array([self._first(each) for each in range(number)])
        # Of places (k + first) / BLOCK, so many lie below an end; the same sum as in `_block`.
        below = [int(np.ceil(end * BLOCK - firsts).clip(0, BLOCK).sum()) for end in self._ends]
        whole = np.diff([0, *below])
        part = np.bincount(self._block(number)[:place], minlength=len(self._ends)) if place else 0
        return [int(each) for each in whole + part]

    def _first(self, number: int) -> float:
        """Where the evenly spaced places of a block begin, from 0 to 1."""
        raw = np.random.Philox(key=np.array([self._key, number], np.uint64)).random_raw()
        return float(raw >> 11) / 2**53

    def _block(self, number: int) -> np.ndarray:
        # The raw stream of a bit generator is stable over numpy's releases, as in PromptStream.
        raw = np.random.Philox(key=np.array([self._key, number], np.uint64)).random_raw(1 + BLOCK)
        first = float(int(raw[0]) >> 11) / 2**53
        counts = np.diff([0, *(int(np.ceil(end * BLOCK - first).clip(0, BLOCK)) for end in self._ends)])
        choices = np.repeat(np.arange(len(counts)), counts)
        return choices[np.argsort(raw[1:], kind="stable")]


class MixedStream(PromptStream):
    """Rows of several sources, which lie one after the other, by the sources' weights.

    Each source has epochs of its own: a small one with a large weight is begun anew more often.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        super().__init__(sum(sizes), seed)
        self._deal = Deal(weights, seed)
        self._streams = [PromptStream(size, seed + number) for number, size in enumerate(sizes)]
        self._offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._known = 0  # the position at which the sources' streams stand

    def take(self, n: int) -> list[int]:
        self._catch_up()
        taken = []
        for _ in range(n):
            source = self._deal.at(self._position)
            taken.append(self._offsets[source] + self._streams[source].take(1)[0])
            self._position += 1
        self._known = self._position
        return taken

    def _catch_up(self) -> None:
        if self._known != self._position:
            for stream, count in zip(self._streams, self._deal.counts(self._position), strict=True):
                stream.position = count
