"""Drawing each row's next token and noting it, in plain torch; and looking at who has finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardproof.model.exact import token_logprobs
from shardproof.rollout.decode import choose
from shardproof.rollout.engine import Sampling
from shardproof.rollout.paged.slots import Slots, upload

_SPLIT_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def record(slots: Slots, sampling: Sampling, logits: torch.Tensor) -> None:
    """Draw a token for each slot whose request is not done, note it, and set up the next step. Never waits for the
    device."""
    line, going = slots.outputs, ~slots.done[slots.outputs]
    at = slots.steps.clamp(max=slots.most_new - 1)
    tokens, logprobs = choose(logits, slots.uniform[line, at], sampling)
    slots.tokens[line, at] = torch.where(going, tokens, slots.tokens[line, at])
    slots.logprobs[line, at] = torch.where(going, logprobs, slots.logprobs[line, at])
    slots.ids.copy_(torch.where(going, tokens, slots.ids[:, 0])[:, None])
    slots.positions.add_(going[:, None])
    slots.steps.add_(going)
    # Not `torch.isin`: with few rows it sorts, and waits for the device.
    ends = (tokens[:, None] == slots.stops).any(1) | (slots.steps >= slots.limits[line])
    slots.done[line] = ends | ~going


def note_exactly(slots: Slots, sampling: Sampling, logits: torch.Tensor, before: torch.Tensor) -> None:
    """Note the log-probs that an exact trainer computes of what was drawn, after `before` tokens of each slot."""
    line, at = slots.outputs, before.clamp(max=slots.most_new - 1)
    logprobs, _ = token_logprobs(logits, slots.ids[:, 0].contiguous(), sampling.temperature)
    slots.logprobs[line, at] = torch.where(slots.steps > before, logprobs, slots.logprobs[line, at])


def uniform_lines(seeds: Sequence[int], num: int, device: torch.device) -> torch.Tensor:
    """[seeds, num] numbers in [0, 1): `decode.uniform_numbers` of steps 0 to `num`, computed on the device."""
    golden, first, second = (
        number - 2**64 for number in _SPLIT_MIX
    )  # integers are signed here and wrap around
    state = upload(np.array(seeds, np.uint64).view(np.int64), device)[:, None]
    state = state + torch.arange(1, num + 1, device=device) * golden
    state = (state ^ _shifted(state, 30)) * first
    state = (state ^ _shifted(state, 27)) * second
    state = state ^ _shifted(state, 31)
    return _shifted(state, 11).double() * 2.0**-53


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted to the right, as if they had no sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


class Watch:
    """Which requests are done. On CUDA the answer is that of the call before, so that nothing waits for the steps that
    were launched since: a device that runs out of launched steps would idle."""

    def __init__(self, done: torch.Tensor, tokens: torch.Tensor | None = None):
        """With `tokens`, what was drawn is remembered too."""
        self._done, self._tokens = done, tokens
        self._flags: torch.Tensor | None = None
        self._drawn: torch.Tensor | None = None  # memory of the host
        self._lines = tokens  # as they were noted
        if done.is_cuda:
            self._flags = torch.zeros(done.shape, dtype=torch.bool, pin_memory=True)
            self._noted = torch.cuda.Event()
            if tokens is not None:
                self._drawn = torch.zeros(tokens.numel(), dtype=tokens.dtype, pin_memory=True)

    def note(self, width: int = 0) -> None:
        """Remember who is done once everything that was launched is done, and the first `width` tokens of all lines."""
        if self._flags is not None:
            self._flags.copy_(self._done, non_blocking=True)
            if self._drawn is not None and self._tokens is not None:
                # In one piece: rows of another stride would be copied while the host waits.
                some = self._tokens[:, :width].contiguous()
                self._lines = self._drawn[: some.numel()].view(some.shape)
                self._lines.copy_(some, non_blocking=True)
            self._noted.record()

    def noted(self) -> list[bool]:
        """Who was done at the last `note`; on the CPU, who is."""
        if self._flags is None:
            return self._done.tolist()
        self._noted.synchronize()
        return self._flags.tolist()

    def drawn(self, line: int, start: int, stop: int) -> list[int]:
        """Tokens of a line, as they were at the last `note`, for which `noted` has waited."""
        assert self._lines is not None
        return self._lines[line, start:stop].tolist()
