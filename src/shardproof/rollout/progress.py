"""What a decoding step reads and writes beside the model, in memory that does not move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardproof.rollout.decode import choose, uniform_numbers
from shardproof.rollout.engine import Sampling

_ROUNDING = 1e-5  # of a running sum of probabilities


class Progress:
    """How far each row of a batch has come, with room for all its tokens."""

    def __init__(self, rows: int, sampling: Sampling, device: torch.device):
        self.sampling = sampling
        steps = sampling.max_new_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids, self.positions, self.step = zeros(rows, 1), zeros(rows, 1), zeros(1)
        self.uniform = zeros(steps, rows, dtype=torch.float64)
        self.tokens, self.logprobs = zeros(steps, rows), zeros(steps, rows, dtype=torch.float32)
        self.done = zeros(rows, dtype=torch.bool)
        self.stops = torch.tensor(sampling.stop_ids or (-1,), device=device)

    def begin(self, last_positions: torch.Tensor, seeds: Sequence[int]) -> None:
        """Start after the prompts."""
        numbers = uniform_numbers(seeds, np.arange(len(self.uniform))[:, None])
        self.uniform.copy_(torch.from_numpy(numbers))
        self.positions.copy_(last_positions)
        self.step.zero_()
        self.done.zero_()

    def record(self, logits: torch.Tensor) -> None:
        """Draw a token for each row, note it, and set up the next step. Never waits for the device."""
        uniform = self.uniform.index_select(0, self.step).squeeze(0)
        tokens, logprobs = choose(logits, uniform, self.sampling)
        self.tokens.index_copy_(0, self.step, tokens[None])
        self.logprobs.index_copy_(0, self.step, logprobs[None])
        self.done.logical_or_(torch.isin(tokens, self.stops))
        self.ids.copy_(tokens[:, None])
        self.positions.add_(1)
        self.step.add_(1)


class Watch:
    """Whether all rows have finished. On CUDA the answer is that of the call before, so that nothing waits for the steps
    that were launched since: a device that runs out of launched steps would idle."""

    def __init__(self, done: torch.Tensor):
        self._done = done
        self._flag: torch.Tensor | None = None
        if done.is_cuda:
            self._flag = torch.zeros(1, dtype=torch.bool, pin_memory=True)
            self._noted = torch.cuda.Event()

    def begin(self) -> None:
        """Start anew: no row has finished."""
        if self._flag is not None:
            self._noted.synchronize()
            self._flag.zero_()

    def all_done(self) -> bool:
        """Whether they all had finished when this was asked last; on the CPU, whether they have now."""
        if self._flag is None:
            return bool(self._done.all())
        self._noted.synchronize()
        found = bool(self._flag)
        self._flag.copy_(self._done.all(), non_blocking=True)
        self._noted.record()
        return found


def draws_rightly(progress: Progress, step: int, logits: torch.Tensor) -> bool:
    """Whether a step, the last one, drew the tokens that the rows' uniform numbers select, up to rounding."""
    every = torch.log_softmax(logits.double() / progress.sampling.temperature, -1)
    token, uniform = progress.tokens[step][:, None], progress.uniform[step][:, None]
    logprob = every.gather(1, token)
    end = every.exp().cumsum(-1).gather(1, token)
    is_there = (uniform < end + _ROUNDING) & (uniform >= end - logprob.exp() - _ROUNDING)
    is_there &= (logprob - progress.logprobs[step][:, None]).abs() < 1e-2
    return bool((is_there & (progress.ids == token)).all())
