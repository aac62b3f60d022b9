"""The online curriculum: prompts drawn from pools by how often the policy solves them, as the run itself measures it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardproof.config.data import Curriculum
from shardproof.rl.data import PromptStream
from shardproof.rl.sources.mixing import Deal

logger = logging.getLogger(__name__)

POOLS = ("easy", "useful", "hard")
_EASY, _USEFUL, _HARD = range(3)


class PoolStream(PromptStream):
    """Row indices without end, by source and by pool; in each, the prompt that was drawn longest ago comes next.

    A function of the seed, the position and the pass rates that were learned before: the same on any number of ranks,
    and resumed by `restore`. A pool that is empty, or whose prompts were all drawn a short while ago, passes its places on
    to the one with the largest weight that is not.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        settings: Curriculum,
        seed: int,
        rates: Sequence[float | None] = (),
        fingerprint: str = "",
    ):
        super().__init__(sum(sizes), seed)
        self._settings, self._fingerprint = settings, fingerprint
        self._weights = [settings.easy, settings.useful, settings.hard]
        self._pools = Deal(self._weights, seed, 1)
        self._sources = None if weights is None else Deal(weights, seed)
        parts = sizes if weights is not None else [self.num_rows]
        self._source_of = np.repeat(np.arange(len(parts)), parts)
        # Places of the stream in which a part of a source's prompts is drawn that is as large as `rest`.
        shares = [1.0] if weights is None else [weight / sum(weights) for weight in weights]
        self._rests = [settings.rest * size / share for size, share in zip(parts, shares, strict=True)]
        self._given = list(rates)
        self._forget()

    def _forget(self) -> None:
        """Begin with what is known before the first step."""
        given = [np.nan if rate is None else rate for rate in self._given]
        self._rates = np.array(given or [np.nan] * self.num_rows, np.float64)
        # Those that were never drawn come first, in the order of the first epoch.
        self._last = np.empty(self.num_rows, np.int64)
        self._last[self._order_of(0)] = np.arange(-self.num_rows, 0)

    @property
    def learns(self) -> bool:
        return True

    def take(self, n: int) -> list[int]:
        pools, taken = self._pools_of_rows(), []
        queues: dict[tuple[int, int], deque[int]] = {}  # the rows that come next in a source's pool
        empty: set[tuple[int, int]] = set()  # pools without a row: to look for one takes a look at all rows

        def next_in(source: int, pool: int) -> deque[int]:
            key = source, pool
            if not queues.get(key) and key not in empty:
                queues[key] = deque(self._oldest(pools, source, pool, n))
                if not queues[key]:
                    empty.add(key)
            return queues[key]

        for _ in range(n):
            source = 0 if self._sources is None else self._sources.at(self._position)
            wanted = self._pools.at(self._position)
            order = sorted(range(len(POOLS)), key=lambda pool: (pool != wanted, -self._weights[pool]))
            filled = [queue for pool in order if (queue := next_in(source, pool))]
            row = next((q for q in filled if self._is_rested(q[0])), filled[0]).popleft()
            taken.append(row)
            self._last[row] = self._position
            self._position += 1
        return taken

    def _is_rested(self, row: int) -> bool:
        last = int(self._last[row])
        return last < 0 or self._position - last > self._rests[self._source_of[row]]

    def learn(self, solved: Mapping[int, tuple[int, int]]) -> None:
        """Take {row: (completions that were solved, completions that were judged)} of all ranks."""
        for row, (num_solved, num) in sorted(solved.items()):
            if num:
                rate, old = num_solved / num, self._rates[row]
                decay = 0.0 if np.isnan(old) else self._settings.decay
                self._rates[row] = rate if not decay else decay * old + (1.0 - decay) * rate

    def metrics(self) -> dict[str, float]:
        """The part of the prompts that lies in each pool, and that was measured."""
        pools = self._pools_of_rows()
        found = {f"pool/{name}": float((pools == number).mean()) for number, name in enumerate(POOLS)}
        return found | {"pool/measured": float((~np.isnan(self._rates)).mean())}

    def state(self) -> dict[str, Any]:
        known = np.flatnonzero((self._last >= 0) | ~np.isnan(self._rates))
        rows = [
            [int(row), None if np.isnan(self._rates[row]) else float(self._rates[row]), int(self._last[row])]
            for row in known
        ]
        return {"num_rows": self.num_rows, "fingerprint": self._fingerprint, "rows": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._forget()
        if not state:
            return  # of a run that had no pools until now
        if (state.get("num_rows"), state.get("fingerprint")) != (self.num_rows, self._fingerprint):
            logger.warning("the data are others than the pass rates were measured on: they are measured anew")
            return
        for row, rate, last in state["rows"]:
            self._rates[int(row)] = np.nan if rate is None else float(rate)
            self._last[int(row)] = int(last)

    def _pools_of_rows(self) -> np.ndarray:
        pools = np.full(self.num_rows, _USEFUL)
        with np.errstate(invalid="ignore"):
            pools[self._rates > self._settings.easy_above] = _EASY
            pools[self._rates < self._settings.hard_below] = _HARD
        return pools

    def _oldest(self, pools: np.ndarray, source: int, pool: int, n: int) -> list[int]:
        rows = np.flatnonzero((pools == pool) & (self._source_of == source))
        order = np.argsort(self._last[rows], kind="stable")[:n]
        return [int(row) for row in rows[order]]
