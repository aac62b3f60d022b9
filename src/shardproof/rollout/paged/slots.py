"""What a decoding step reads and writes beside model and cache, in memory that does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardproof.model.packing import to_device


def upload(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for what it does."""
    return to_device(torch.from_numpy(numbers), device)


@dataclass(frozen=True)
class Slots:
    """One slot per row of a step, and one line of outputs per request that is being answered.

    A step of n rows works on the first n slots. Rows move between slots as others finish; their output line stays. The
    last line belongs to no request and is done: slots without a request point to it, have position 0 and a table of zeros.
    """

    ids: torch.Tensor  # [rows, 1] int64, the token that the next step reads
    positions: torch.Tensor  # [rows, 1] int64, of that token
    tables: (
        torch.Tensor
    )  # [rows, most blocks] int32: blocks of the row's tokens, in order; 0 where it has none yet
    outputs: torch.Tensor  # [rows] int64, the line that the slot writes
    steps: torch.Tensor  # [rows] int64, tokens drawn so far
    state: torch.Tensor  # [4, rows] int64: the memory of ids, positions, outputs and steps
    tokens: torch.Tensor  # [lines, most new tokens] int64
    logprobs: torch.Tensor  # [lines, most new tokens] float32
    uniform: torch.Tensor  # [lines, most new tokens] float64, in [0, 1): what decides each draw
    limits: torch.Tensor  # [lines] int64, tokens to draw at most; never above the width of `tokens`
    done: torch.Tensor  # [lines] bool: a stop token or the limit was reached; such rows no longer change
    stops: torch.Tensor  # [most stop ids] int64, -1 where there are fewer

    @staticmethod
    def make(rows: int, most_blocks: int, most_new: int, most_stops: int, device: torch.device) -> Slots:
        """Slots without requests."""
        lines = rows + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        done = zeros(lines, dtype=torch.bool)
        done[-1] = True
        return Slots(
            **_of_state(_blank(rows, lines, device)),
            tables=zeros(rows, most_blocks, dtype=torch.int32),
            tokens=zeros(lines, most_new),
            logprobs=zeros(lines, most_new, dtype=torch.float32),
            uniform=zeros(lines, most_new, dtype=torch.float64),
            limits=zeros(lines),
            done=done,
            stops=zeros(most_stops).fill_(-1),
        )

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def most_new(self) -> int:
        """Tokens that fit into a line of outputs."""
        return self.tokens.shape[1]

    def part(self, start: int, stop: int, most_blocks: int | None = None) -> Slots:
        """Some of the slots, in the same memory, with all output lines; of their tables the first blocks."""
        return replace(
            self,
            **_of_state(self.state[:, start:stop]),
            tables=self.tables[start:stop, :most_blocks],
        )

    def scratch(self, rows: int) -> Slots:
        """As many slots without requests, in memory of their own, with the same output lines."""
        blank = _blank(rows, len(self.done), self.state.device)
        tables = torch.zeros(rows, self.tables.shape[1], dtype=torch.int32, device=blank.device)
        return replace(self, **_of_state(blank), tables=tables)

    def begin(self, positions: Sequence[int], lines: Sequence[int], steps: Sequence[int]) -> None:
        """Put a request into each slot: the position of the last token it read, its line, tokens it has drawn."""
        given = upload(np.array([positions, lines, steps]), self.state.device)
        self.state[1:].copy_(given, non_blocking=True)

    def clear(self) -> None:
        """Take all requests out."""
        self.state.copy_(_blank(self.rows, len(self.done), self.state.device))
        self.tables.zero_()


def _blank(rows: int, lines: int, device: torch.device) -> torch.Tensor:
    # Each part begins at a multiple of 16 bytes: Triton compiles other kernels for other addresses.
    state = torch.zeros(4, -(-rows // 2) * 2, dtype=torch.int64, device=device)[:, :rows]
    state[2] = lines - 1
    return state


def _of_state(state: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "state": state,
        "ids": state[0][:, None],
        "positions": state[1][:, None],
        "outputs": state[2],
        "steps": state[3],
    }
