"""Comparisons that our own kernels must pass before decoding relies on them: with the rows they will get, and as graphs.

A step is compared with the model's own over several tokens, after short prompts and after prompts that fill several blocks
of the cache. The tolerance follows from what the context is worth: how far apart the log-probs after two contexts are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from shardproof.bounds import largest, within
from shardproof.rollout import graphs
from shardproof.rollout.decode import Prefilled
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.kept import States
from shardproof.rollout.progress import Progress, draws_rightly
from shardproof.rollout.trajectory import Trajectory

CAPACITY = 256  # of the caches in which steps are compared
_STEPS = 3  # at least
_SAMPLES = 12  # rows times steps, at least
# Lengths of the prompts of a batch. Steps after them cross the borders of blocks of 64 cached tokens; after the long ones
# they read three or four blocks. There are seven, so that rows 16, 32 or 64 apart have prompts of different lengths.
_SHORT = (2, 5, 9, 17, 33, 62, 63)
_LONG = (126, 127, 129, 150, 171, 191, 195)
# Distances are between log-probs, weighted by probability. As shares of what the context is worth: how far a step may be
# off on average and in any row, beyond the rounding of 16 bits. Right steps are off by one or two hundredths; with experts
# by more, because rounding may send a row to another expert, though not many rows at once.
_MEAN, _WORST, _MEAN_OF_EXPERTS = 1 / 16, 1 / 8, 1 / 8
_ROUNDING = 2.0**-8


class Step(Protocol):
    """A model that takes one new token per row, in memory that stays where it is."""

    def fill(self, started: Prefilled) -> None:
        """Start after the prompts."""
        ...

    def states(self, row: int, num_tokens: int) -> States:
        """Copies of the keys and values of a row's first tokens."""
        ...

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] after tokens [rows, 1] at positions [rows, 1]."""
        ...


def compare_steps(
    model: PreTrainedModel, device: torch.device, rows: int, fused: Step, plain: Step, has_experts: bool
) -> str | None:
    """What is wrong with a fused step of this number of rows, compared with the plain one; None if nothing is.

    Both have room for `CAPACITY` tokens. The fused one is recorded after short prompts where decoding would record it.
    """
    vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
    drivers = [_Driver(plain, rows, device, False), _Driver(fused, rows, device, True)]
    expected: list[torch.Tensor] = []  # of the plain step, first token, after short and long prompts
    distances: list[torch.Tensor] = []  # [steps, rows], after short and long prompts
    for lengths in (_SHORT, _LONG):
        started = Prefilled(model, _requests(rows, lengths, vocabulary), device)
        for driver in drivers:
            driver.begin(started)
        row_distances = []
        for number in range(max(_STEPS, -(-_SAMPLES // rows))):
            ids = (torch.arange(rows, device=device)[:, None] * 37 + 1009 * number + 5) % vocabulary
            truth, found = (driver.advance(ids) for driver in drivers)
            row_distances.append(_distance(truth, found))
            if number == 0:
                expected.append(truth)
        distances.append(torch.stack(row_distances))
    worth = float(_distance(expected[1], expected[0]).mean())
    return _judge(distances, worth, has_experts)


def _judge(distances: list[torch.Tensor], worth: float, has_experts: bool) -> str | None:
    """What is wrong with distances [steps, rows] after short and long prompts, given what the context is worth."""
    mean = largest(float(each.mean()) for each in distances)
    worst = largest(float(each.max()) for each in distances)
    if not within(mean, largest(((_MEAN_OF_EXPERTS if has_experts else _MEAN) * worth, _ROUNDING))):
        return (
            f"their log-probs differ by {mean:.3g} on average; without the context they change by {worth:.3g}"
        )
    if not has_experts and not within(worst, largest((_WORST * worth, 4 * _ROUNDING))):
        return f"their log-probs differ by {worst:.3g} in one row; without the context they change by {worth:.3g}"
    return None


def _distance(truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """How far apart log-probs [rows, vocabulary] are in each row, weighted by probability."""
    return (truth.exp() * (found - truth).abs()).sum(-1)


def _requests(rows: int, lengths: tuple[int, ...], vocabulary: int) -> list[Request]:
    prompts = [
        tuple((31 * at * at + 17 * at + 41 * number + 3) % vocabulary for at in range(length))
        for number, length in enumerate(lengths)
    ]
    return [Request(Trajectory.of_prompt(prompts[row % len(prompts)]), row) for row in range(rows)]


class _Driver:
    """A step with its inputs and its output in fixed memory, as a graph needs them."""

    def __init__(self, step: Step, rows: int, device: torch.device, may_capture: bool):
        self._step = step
        self._device = device
        self._captures = may_capture and graphs.can_capture(device, rows)
        self._ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._replay: Callable[[], None] | None = None
        self._logits: torch.Tensor | None = None

    def begin(self, started: Prefilled) -> None:
        """Start after the prompts. The step is recorded after the first ones, and replayed after all."""
        self._step.fill(started)
        self._positions.copy_(started.last_positions)
        if self._captures and self._replay is None:
            self._positions.add_(1)
            self._replay = graphs.capture(self._run, self._device)
            self._captures = self._replay is not None
            self._positions.sub_(1)
            self._step.fill(started)

    def advance(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probs [rows, vocabulary] after these tokens."""
        self._ids.copy_(ids)
        self._positions.add_(1)
        (self._replay or self._run)()
        assert self._logits is not None
        return torch.log_softmax(self._logits.float(), -1)

    def _run(self) -> None:
        self._logits = self._step(self._ids, self._positions)


def compare_draws(
    record: Callable[[Progress, float, torch.Tensor], None],
    logits: torch.Tensor,
    last_positions: torch.Tensor,
    seeds: list[int],
    sampling: Sampling,
) -> str | None:
    """What is wrong with kernels that draw: tokens or log-probs that the rows' numbers do not select; None if nothing is."""
    rows, device = len(seeds), logits.device
    first = Progress(rows, replace(sampling, max_new_tokens=1), device)
    first.begin(last_positions, seeds)
    first.record(logits)
    # As many stop tokens as the sampling has, and such as are drawn.
    stops = tuple([*first.tokens[0].tolist(), *sampling.stop_ids][: len(sampling.stop_ids)])
    progress = Progress(rows, replace(sampling, max_new_tokens=_STEPS, stop_ids=stops), device)
    progress.begin(last_positions, seeds)
    logits = logits.clone()  # memory that does not move, for a graph

    def draw() -> None:
        record(progress, sampling.temperature, logits)

    captures = graphs.can_capture(device, rows)
    replay = (graphs.capture(draw, device, progress.step.zero_) if captures else None) or draw
    progress.begin(last_positions, seeds)
    for number in range(_STEPS):
        replay()
        if not draws_rightly(progress, number, logits):
            return "they sample different tokens"
        logits.copy_(logits.roll(1, 0))
    done = torch.isin(progress.tokens, progress.stops).any(0)
    moved = torch.equal(progress.positions, last_positions + _STEPS) and int(progress.step) == _STEPS
    return None if moved and torch.equal(progress.done, done) else "they miscount rows or steps"
