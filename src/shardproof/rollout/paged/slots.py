"""What a decoding step reads and writes beside model and cache, in memory that does not move."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

        slots = Slots(
            ids=zeros(rows, 1),
            positions=zeros(rows, 1),
            tables=zeros(rows, most_blocks, dtype=torch.int32),
            outputs=zeros(rows).fill_(lines - 1),
            steps=zeros(rows),
            tokens=zeros(lines, most_new),
            logprobs=zeros(lines, most_new, dtype=torch.float32),
            uniform=zeros(lines, most_new, dtype=torch.float64),
            limits=zeros(lines),
            done=zeros(lines, dtype=torch.bool),
            stops=zeros(most_stops).fill_(-1),
        )
        slots.done[-1] = True
        return slots

    @property
    def rows(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Slots:
        """Some of the slots, in the same memory, with all output lines."""
        return Slots(
            self.ids[start:stop],
            self.positions[start:stop],
            self.tables[start:stop],
            self.outputs[start:stop],
            self.steps[start:stop],
            self.tokens,
            self.logprobs,
            self.uniform,
            self.limits,
            self.done,
            self.stops,
        )
