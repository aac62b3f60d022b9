"""Where answers end that are drawn on a device: at stop ids that the device knows, and at what the host finds a look later.

The device knows the stop ids of a call that all of its requests have. Stop strings, and ids of a request alone, are looked for by the
host in what was drawn until the last look. What was drawn behind them is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.paged.progress import Watch
from shardproof.rollout.paged.schedule import Row
from shardproof.rollout.paged.slots import Slots
from shardproof.rollout.sampling import Ends


class Endings:
    """Of the requests of one call."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, slots: Slots):
        settings = [request.settings(sampling) for request in requests]
        shared = set(sampling.stop_ids).intersection(*(each.stop_ids for each in settings))
        self._ends = [Ends(each) for each in settings]
        self._looks = any(each.stop or set(each.stop_ids) - shared for each in settings)
        self._watch = Watch(slots.done, slots.tokens if self._looks else None)
        self._said: dict[int, list[int]] = {}  # by request: what the host has seen of it
        self._lengths: dict[Row, int] = {}  # of rows at the last note
        known = [token for token in sampling.stop_ids if token in shared]
        slots.stops.copy_(torch.tensor(known + [-1] * (len(slots.stops) - len(known))))

    def note(self, rows: Sequence[Row]) -> None:
        """Remember what the rows in slots will have drawn once everything that was launched is done."""
        if self._looks:
            self._lengths = {row: row.launched for row in rows}
        self._watch.note(max(self._lengths.values(), default=0))

    def enter(self, rows: Sequence[Row]) -> None:
        """Take rows that begin, or go on after what they have drawn."""
        if self._looks:
            self._said |= {row.index: list(row.drawn) for row in rows}

    def over(self, rows: Sequence[Row]) -> list[Row]:
        """Those that had ended at the last note, or reach their limit with what was launched since."""
        done = self._watch.noted()
        if not self._looks:
            return [row for row in rows if row.left <= 0 or done[row.line]]
        return [row for row in rows if row.left <= 0 or done[row.line] or self._has_ended(row)]

    def _has_ended(self, row: Row) -> bool:
        length = self._lengths.get(row)
        if length is None:
            return False
        said = self._said[row.index]
        said += self._watch.drawn(row.line, len(said), length)
        return self._ends[row.index].look(said)

    def find(self, row: Row, tokens: Sequence[int]) -> Ends:
        """Where the answer of a row ends within its tokens, of which only those up to there need be its own."""
        ends = self._ends[row.index]
        ends.look(tokens)
        return ends
