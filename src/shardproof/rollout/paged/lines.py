"""Lines of outputs on the device: given to rows that enter, and brought to the host when rows have finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardproof.rollout.paged.memory import Memory
from shardproof.rollout.paged.progress import uniform_lines
from shardproof.rollout.paged.schedule import Row
from shardproof.rollout.paged.slots import Slots, upload
from shardproof.rollout.recording import Recorder


class Lines:
    """Which lines are free. What a line holds is copied before anything that is launched later writes to it."""

    def __init__(self, memory: Memory, recorder: Recorder | None):
        self._slots = memory.slots
        self._chosen = memory.chosen
        self._recorder = recorder
        self._free = list(range(len(self._slots.done) - 2, -1, -1))

    def begin(self, rows: Sequence[Row], seeds: Sequence[int]) -> None:
        """Give each row a line, with the numbers that decide its draws."""
        slots = self._slots
        for row in rows:
            row.line = self._free.pop()
        device = slots.done.device
        lines = upload(np.array([row.line for row in rows]), device)
        limits = upload(np.array([row.limit for row in rows]), device)
        slots.limits.index_copy_(0, lines, limits)
        slots.done.index_fill_(0, lines, False)
        width = max(row.limit for row in rows)
        slots.uniform[:, :width].index_copy_(0, lines, uniform_lines(seeds, width, device))

    def fetch(self, rows: Sequence[Row]) -> Fetched:
        """Start to bring what rows have drawn to the host, and free their lines."""
        found = Fetched(rows, self._slots, self._chosen, self._recorder)
        for row in rows:
            self._free.append(row.line)
            row.line = -1
        return found


class Fetched:
    """What rows have drawn, on its way to the host."""

    def __init__(
        self, rows: Sequence[Row], slots: Slots, chosen: torch.Tensor | None, recorder: Recorder | None
    ):
        self.rows = rows
        self._recorder = recorder
        lines = upload(np.array([row.line for row in rows]), slots.done.device)
        width = max(min(row.launched, row.limit) for row in rows)
        self._tensors = [
            slots.tokens[:, :width].index_select(0, lines),
            slots.logprobs[:, :width].index_select(0, lines),
        ]
        if chosen is not None:
            # What a step reads was drawn in the step before.
            self._tensors.append(chosen[:, 1:width].index_select(0, lines))
        self._noted = None
        if lines.is_cuda:
            self._tensors = [_pinned_copy(each) for each in self._tensors]
            self._noted = torch.cuda.Event()
            self._noted.record()

    @property
    def is_there(self) -> bool:
        """Whether nothing needs to be waited for."""
        return self._noted is None or self._noted.query()

    def results(self) -> list[tuple[Row, list[int], list[float], np.ndarray | None]]:
        """(row, tokens, log-probs, experts of what was read) of each row, all that its line holds up to its limit.

        What it had drawn before it was put back is part of it. Waits for the device.
        """
        if self._noted is not None:
            self._noted.synchronize()
        tokens, logprobs = self._tensors[0].tolist(), self._tensors[1].tolist()
        experts = self._recorder.on_host(self._tensors[2]) if self._recorder is not None else None
        found = []
        for number, row in enumerate(self.rows):
            begun = len(row.drawn)
            end = min(row.launched, row.limit)
            found.append(
                (
                    row,
                    row.drawn + tokens[number][begun:end],
                    row.logprobs + logprobs[number][begun:end],
                    experts[number][begun : end - 1] if experts is not None else None,
                )
            )
        return found


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
