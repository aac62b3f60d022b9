"""Comparisons that our own kernels must pass before decoding relies on them: with the rows they will get, and as graphs.

A step is compared with the model's own forward over several tokens, after short prompts and after prompts that fill several
blocks of the cache. The tolerance follows from what the context is worth: how far apart the log-probs after two contexts
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from shardproof.bounds import largest, within
from shardproof.model.families import max_positions
from shardproof.rollout.engine import Sampling
from shardproof.rollout.paged.blocks import BLOCK, blocks_for
from shardproof.rollout.paged.memory import Memory
from shardproof.rollout.paged.slots import Slots, upload
from shardproof.rollout.shaping import Threshold

_STEPS = 3
# Lengths of the prompts. Steps after them cross the borders of blocks of 64 cached tokens; after the long ones they read
# three or four blocks. Rows 16, 32 or 64 apart have prompts of different lengths, and each row a short and a long one.
_SHORT = (2, 5, 9, 17, 33, 62, 63)
_LONG = (126, 127, 129, 150, 171, 191, 195)
_ROWS_AT_A_TIME = 64  # whose log-probs are compared
# Distances are between log-probs, weighted by probability. As shares of what the context is worth: how far a step may be
# off on average and in any row, beyond the rounding of 16 bits. Right steps are off by one or two hundredths; with experts
# by more, because rounding may send a row to another expert, though not many rows at once.
_MEAN, _WORST, _MEAN_OF_EXPERTS = 1 / 16, 1 / 8, 1 / 8
_ROUNDING = 2.0**-8
_SUM_ROUNDING = 1e-5  # of a running sum of probabilities
_KEPT_ROUNDING = 1e-2  # of what top_k and top_p keep


@dataclass
class Truth:
    """What the model itself says after some prompts, and after each of the tokens that follow them."""

    lengths: list[int]
    follow: torch.Tensor  # [prompts, steps], the tokens
    logprobs: torch.Tensor  # [prompts, steps, vocabulary], after each of them
    states: list[tuple[torch.Tensor, torch.Tensor]]  # of each prompt, [layers, heads, tokens, width]
    worth: float  # how far log-probs after short and long prompts are apart


def find_truth(model: PreTrainedModel, device: torch.device) -> Truth:
    """The model's own log-probs, from one forward over all prompts at once."""
    vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
    most = (max_positions(model.config) or 2**31) - _STEPS
    lengths = [min(length, most) for pair in zip(_SHORT, _LONG, strict=True) for length in pair]
    width = max(lengths) + _STEPS
    ids = np.zeros((len(lengths), width), np.int64)
    mask = np.zeros_like(ids)
    for number, length in enumerate(lengths):
        at = np.arange(length + _STEPS)
        ids[number, width - len(at) :] = (31 * at * at + 17 * at + 41 * number + 3) % vocabulary
        mask[number, width - len(at) :] = 1
    cache = DynamicCache()
    there = upload(mask, device)
    logits = model(
        input_ids=upload(ids, device),
        attention_mask=there,
        position_ids=(there.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=_STEPS,
    ).logits
    logprobs = torch.log_softmax(logits.float(), -1)
    states = []
    for number, length in enumerate(lengths):
        part = slice(width - length - _STEPS, width - _STEPS)
        layers: list[Any] = [(layer.keys, layer.values) for layer in cache.layers]
        layers = [(keys[number, :, part], values[number, :, part]) for keys, values in layers]
        states.append(
            (torch.stack([keys for keys, _ in layers]), torch.stack([values for _, values in layers]))
        )
    worth = float(distance(logprobs[1::2, 0], logprobs[0::2, 0]).mean())
    return Truth(lengths, upload(ids[:, -_STEPS:].copy(), device), logprobs, states, worth)


def compare_step(
    launch: Callable[[], None], rows: int, memory: Memory, truth: Truth, has_experts: bool
) -> str | None:
    """What is wrong with a step of the first `rows` slots, compared with the model itself; None if nothing is.

    Slots and tables are as they were afterwards. Needs free blocks, of which more make a better comparison.
    """
    before = memory.slots.state.clone(), memory.slots.tables.clone()
    stage = _Stage(memory, truth, rows)
    try:
        distances, lengths = [], []
        for turn in range(max(2, -(-len(stage.prompts) // rows))):
            prompts = stage.begin(turn)
            for number in range(_STEPS):
                stage.set(prompts, number)
                launch()
                distances.append(_distances(memory.logits[:rows], truth.logprobs[:, number], prompts))
                lengths.append(prompts % 2)
        found, is_long = torch.cat(distances), torch.cat(lengths).bool()
        return judge([found[~is_long], found[is_long]], truth.worth, has_experts)
    finally:
        stage.give_back()
        memory.slots.state.copy_(before[0])
        memory.slots.tables.copy_(before[1])


class _Stage:
    """Prompts in blocks of their own; rows that share their full blocks and write to copies of the last."""

    def __init__(self, memory: Memory, truth: Truth, rows: int):
        self._memory = memory
        self._truth = truth
        self._rows = rows
        self._held: list[list[int]] = []
        self.prompts: list[int] = []  # those for which there is room
        free = memory.pool.num_free
        for pair in range(0, len(truth.lengths), 2):  # a short and a long one
            need = sum(blocks_for(length) for length in truth.lengths[pair : pair + 2])
            # The rest is for rows that write to blocks of their own: rows with one prompt could be exchanged unseen.
            if memory.pool.num_free - need < (free // 2 if self.prompts else 4):
                break
            for number in (pair, pair + 1):
                blocks = memory.pool.take(blocks_for(truth.lengths[number])) or []
                memory.cache.put(blocks, 0, truth.states[number])
                self._held.append(blocks)
                self.prompts.append(number)
        if not self.prompts:
            raise RuntimeError("there are too few free blocks to compare steps in")
        device = memory.slots.state.device
        self._lengths = torch.tensor(truth.lengths, device=device)

    def begin(self, turn: int) -> torch.Tensor:
        """Give each row a prompt, by number; which one depends on the turn."""
        shift = turn * (self._rows if self._rows < len(self.prompts) else 7)
        # Rows for which there are no blocks share those of others, which read and write the same.
        apart = min(self._rows, self._memory.pool.num_free // 2)
        if 2 < apart < self._rows:
            apart -= 1 - apart % 2  # odd: rows 16, 32 or 64 apart differ
        chosen = [(row % apart + shift) % len(self.prompts) for row in range(self._rows)]
        own = [self._memory.pool.take(2) or [] for _ in range(apart)]
        tables = np.zeros(self._memory.slots.tables.shape, np.int32)
        sources, targets = [], []
        for row, at in enumerate(chosen):
            full, rest = divmod(self._truth.lengths[self.prompts[at]], BLOCK)
            tables[row, :full] = self._held[at][:full]
            tables[row, full : full + 2] = own[row % apart]
            if rest and row < apart:
                sources.append(self._held[at][full])
                targets.append(own[row][0])
        self._memory.cache.copy_blocks(sources, targets)
        self._memory.slots.tables.copy_(upload(tables, self._lengths.device))
        for taken in own:
            self._memory.pool.give_back(taken)  # the next turn takes them again
        return upload(np.array([self.prompts[at] for at in chosen]), self._lengths.device)

    def set(self, prompts: torch.Tensor, number: int) -> None:
        """What the rows read in a step."""
        slots = self._memory.slots
        slots.state[0, : self._rows] = self._truth.follow[prompts, number]
        slots.state[1, : self._rows] = self._lengths[prompts] + number
        slots.state[2] = len(slots.done) - 1
        slots.state[3] = 0

    def give_back(self) -> None:
        for blocks in self._held:
            self._memory.pool.give_back(blocks)


def _distances(logits: torch.Tensor, truth: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Of each row's log-probs from those of its prompt."""
    found = [
        distance(truth[chosen], torch.log_softmax(part.float(), -1))
        for part, chosen in zip(logits.split(_ROWS_AT_A_TIME), prompts.split(_ROWS_AT_A_TIME), strict=True)
    ]
    return torch.cat(found)


def distance(truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """How far apart log-probs [rows, vocabulary] are in each row, weighted by probability."""
    return (truth.exp() * (found - truth).abs()).sum(-1)


def judge(distances: Sequence[torch.Tensor], worth: float, has_experts: bool) -> str | None:
    """What is wrong with distances of rows, in groups of rows, given what the context is worth; None if nothing is."""
    distances = [each for each in distances if len(each)]
    mean = largest(float(each.mean()) for each in distances)
    worst = largest(float(each.max()) for each in distances)
    if not within(mean, largest(((_MEAN_OF_EXPERTS if has_experts else _MEAN) * worth, _ROUNDING))):
        return (
            f"their log-probs differ by {mean:.3g} on average; without the context they change by {worth:.3g}"
        )
    if not has_experts and not within(worst, largest((_WORST * worth, 4 * _ROUNDING))):
        return f"their log-probs differ by {worst:.3g} in one row; without the context they change by {worth:.3g}"
    return None


def compare_draws(
    record: Callable[[Slots, float, torch.Tensor], None],
    logits: torch.Tensor,
    sampling: Sampling,
    num_stops: int,
    plain: Callable[[Slots, Sampling, torch.Tensor], None],
) -> str | None:
    """What is wrong with kernels that draw: tokens or log-probs that the rows' numbers do not select; None if nothing is.

    `num_stops` is the room for stop ids.
    """
    rows, device = len(logits), logits.device
    uniform = torch.rand(rows + 1, _STEPS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def begin(stops: Sequence[int]) -> Slots:
        slots = Slots.make(rows, 1, _STEPS, num_stops, device)
        slots.outputs.copy_(torch.arange(rows).flip(0))
        slots.uniform.copy_(uniform)
        slots.limits.copy_(
            (torch.arange(rows + 1) % 4 + 1).clamp(max=_STEPS)
        )  # a row in four ends by its limit early
        if stops:
            slots.stops[: len(stops)] = torch.tensor(stops, device=device)
        return slots

    first = begin(())
    plain(first, sampling, logits)
    stops = first.tokens[:rows, 0].tolist()[: max(num_stops - 1, 1)]  # such as are drawn
    expected, found = begin(stops), begin(stops)
    logits = logits.clone()
    for _ in range(_STEPS):
        before = replace(found, steps=found.steps.clone(), done=found.done.clone())
        # The truth goes where the kernels went: rounding may decide a draw, and the two go apart after it.
        for name in ("state", "done", "tokens", "logprobs"):
            getattr(expected, name).copy_(getattr(found, name))
        plain(expected, sampling, logits)
        record(found, sampling.temperature, logits)
        problem = _wrong_draw(before, found, expected, sampling, logits)
        if problem is not None:
            return problem
        logits.copy_(logits.roll(1, 0))
    return None


def _wrong_draw(
    before: Slots, found: Slots, plain: Slots, sampling: Sampling, logits: torch.Tensor
) -> str | None:
    going = ~before.done[before.outputs]
    at = before.steps.clamp(max=found.most_new - 1)
    token, said = found.tokens[found.outputs, at], found.logprobs[found.outputs, at]
    every = torch.log_softmax(logits.double() / sampling.temperature, -1)
    logprob = every.gather(1, token[:, None]).squeeze(1)
    end = every.exp_().cumsum(-1).gather(1, token[:, None]).squeeze(1)
    uniform = found.uniform[found.outputs, at]
    is_there = (uniform < end + _SUM_ROUNDING) & (uniform >= end - logprob.exp() - _SUM_ROUNDING)
    is_there &= (logprob - said).abs() < 1e-2
    if not bool((is_there | ~going).all()):
        return "they sample different tokens"
    same = found.tokens[found.outputs, at] == plain.tokens[plain.outputs, at]
    # Where the same token was drawn, everything else must be the same; a few may differ by rounding.
    counts = (found.state == plain.state).all(0) & (found.done[found.outputs] == plain.done[plain.outputs])
    return None if bool((counts | (~same & going)).all()) else "they miscount rows or steps"


def compare_threshold(found: Threshold, logits: torch.Tensor, plain: Threshold) -> str | None:
    """What is wrong with a kernel that finds the lowest logit which top_k and top_p keep; None if nothing is."""
    scores, device = logits.float(), logits.device
    at = torch.arange(len(scores), device=device)
    for temperature in (1.0, 0.6):
        top_k = torch.tensor([2**30, 20, 50, 2**30], device=device)[at % 4]
        top_p = torch.tensor([0.9, 2.0, 0.8, 2.0], device=device)[at % 4]
        given = (scores, top_k, top_p, temperature)
        kept, wanted = (
            torch.softmax(scores / temperature, -1).masked_fill(scores < lowest, 0.0).sum(-1)
            for lowest in (found(*given), plain(*given))
        )
        # Rounding may keep one token at the border, or leave it out.
        if not bool(((kept - wanted).abs() < _KEPT_ROUNDING * wanted).all()):
            return "they keep other tokens"
    return None
