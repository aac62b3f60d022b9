"""Batched decoding with a KV cache. What is drawn for a request depends on its seed and position, never on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from shardproof.model import hf_private
from shardproof.model.exact import token_logprobs
from shardproof.model.exact_attention import COLUMNS, Columns
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.expert_records import new_record
from shardproof.rollout.experts import Experts
from shardproof.rollout.kept import KeptTurns, stack_rows
from shardproof.rollout.reading import Forward, Prompts
from shardproof.rollout.recording import Recorder, joined
from shardproof.rollout.sampling import Ends
from shardproof.rollout.shaping import Kind, Shaping
from shardproof.rollout.trajectory import Trajectory

_BLOCK = 128  # entries of the vocabulary whose weights are added up together

# (work is left on this rank) -> some rank has work left; the step is then run by all
AnyoneLeft = Callable[[bool], bool]


def last_logits(
    model: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """A model's logits of the last position, [rows, vocabulary]; its keys and values are added to the cache."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def exact_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
) -> torch.Tensor:
    """`last_logits` of a model that `make_exact` has prepared, on a CPU."""
    columns = Columns(mask, ids.shape[1])
    with hf_private.attention_implementation(model, COLUMNS):
        return last_logits(partial(model, columns=columns), ids, mask, positions, cache)


def decode(
    forward: Forward,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    config: Any,
    device: torch.device,
    version: int,
    anyone_left: AnyoneLeft | None = None,
    idle: Callable[[], None] | None = None,
    kept: KeptTurns | None = None,
    recorder: Recorder | None = None,
) -> list[Trajectory]:
    """Answer all requests in one batch; a prompt that several share is read once, and a finished row leaves.

    All have the temperature of `sampling`, whatever else they have of their own.
    With `anyone_left` every forward is collective: a rank that is done runs `idle` until the others are too. What
    `kept` has of a prompt is not read again, and it gets the rows of requests that continue. With a `recorder` the
    answers have the experts of their tokens.
    """
    batch = _Running(requests, sampling, kept, recorder)
    for step in count():
        left = bool(batch.rows)
        if not (anyone_left(left) if anyone_left is not None else left):
            break
        if not left:
            assert idle is not None
            idle()
            continue
        if step == 0:
            logits = batch.read(forward, config, device)
        else:
            logits = batch.run(forward)
        logits = batch.shaped(logits, step)
        tokens, logprobs = draw(logits, [requests[row].seed for row in batch.rows], step, sampling)
        batch.advance(tokens, logprobs)
    return [
        request.answered(
            batch.tokens[row],
            batch.logprobs[row],
            batch.ends[row].num is not None,
            version,
            experts=batch.record(row) if recorder is not None else None,
            stop_string=batch.ends[row].stop_string,
        )
        for row, request in enumerate(requests)
    ]


class _Running:
    """The rows that are still being completed, one per request: prompts padded on the left, one cache for all."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        kept: KeptTurns | None,
        recorder: Recorder | None = None,
    ):
        self.rows = list(range(len(requests)))
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        settings = [request.settings(sampling) for request in requests]
        self.ends = [Ends(each) for each in settings]
        self._sampling, self._kind = sampling, Kind.of(settings)
        self._shaping: Shaping | None = None
        self._requests, self._kept, self._recorder = requests, kept, recorder
        self._experts: list[list[np.ndarray]] = [[] for _ in requests]  # of tokens that were drawn and read

    def read(self, forward: Forward, config: Any, device: torch.device) -> torch.Tensor:
        """Read the prompts, and give every request its copy of its prompt's row; returns the logits of each request."""
        prompts = self._prompts = Prompts(self._requests, config, device, self._kept, self._recorder)
        logits = prompts.read(forward)
        self.cache, self.attention_mask, chosen = prompts.cache, prompts.mask, prompts.prompt_of
        self.position_ids = prompts.last_positions[chosen]
        if prompts.columns is not None or chosen.tolist() != list(range(len(logits))):
            for layer in self.cache.layers:
                layer.keys, layer.values = prompts.states(layer, chosen)
            self.attention_mask = self.attention_mask[chosen]
        return logits[chosen]

    def run(self, forward: Forward) -> torch.Tensor:
        """Read the tokens that were drawn last; returns the logits of each row that is left."""
        inputs = (self.input_ids, self.attention_mask, self.position_ids, self.cache)
        if self._recorder is None:
            return forward(*inputs)
        logits = self._recorder.watch(forward, *inputs)
        for row, (chosen,) in zip(self.rows, self._recorder.last_rows(len(self.rows)), strict=True):
            self._experts[row].append(chosen)
        return logits

    def shaped(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The logits that tokens are drawn from."""
        if self._kind is None:
            return logits
        if self._shaping is None:
            self._shaping = Shaping.of(self._requests, self._sampling, logits.shape[1], logits.device)
        lines = torch.tensor(self.rows, device=logits.device)
        steps = torch.full_like(lines, step)
        return self._shaping.apply(logits, lines, steps, self._sampling.temperature, self._kind)

    def record(self, row: int) -> Experts:
        """The experts of a request's answer."""
        assert self._recorder is not None
        chosen = joined(self._prompts.experts(row), self._experts[row])
        return new_record(self._requests[row].trajectory, chosen, self._recorder.shape.layers)

    def advance(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append a token to each row, drop the rows that are done, and set up the next forward."""
        if self._shaping is not None:
            lines = torch.tensor(self.rows, device=tokens.device)
            self._shaping.note(lines, tokens, torch.ones_like(lines))
        keep = []
        for index, (row, token, logprob) in enumerate(
            zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
            limit = self._requests[row].limit(self._sampling)
            if not self.ends[row].look(self.tokens[row]) and len(self.tokens[row]) < limit:
                keep.append(index)
            elif self._kept is not None and self._requests[row].continues:
                self._keep(index, row, self._kept)
        chosen = torch.tensor(keep, dtype=torch.int64, device=tokens.device)
        if len(keep) < len(self.rows):
            self.rows = [self.rows[index] for index in keep]
            self.attention_mask = self.attention_mask[chosen]
            if keep:
                self.cache.batch_select_indices(chosen)
        self.input_ids = tokens[chosen, None]
        self.position_ids = self.position_ids[chosen] + 1
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(self.input_ids)], dim=1)

    def _keep(self, index: int, row: int, kept: KeptTurns) -> None:
        """Keep what the cache has of a row. Nothing has read its last token yet."""
        request, drawn = self._requests[row], self.tokens[row]
        experts = None
        if self._recorder is not None:
            experts = joined(self._prompts.experts(row), self._experts[row])
        there = self.attention_mask[index].bool()
        layers: list[Any] = [(layer.keys, layer.values) for layer in self.cache.layers]
        states = stack_rows(layers, index, there)
        kept.keep((*request.tokens, *drawn[:-1]), len(request.tokens), states, experts)


def draw(
    logits: torch.Tensor, seeds: Sequence[int], step: int, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, its log-prob) for each row, from one uniform number per row, which only its seed and the step decide."""
    return choose(logits, torch.from_numpy(uniform_numbers(seeds, step)).to(logits.device), sampling)


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, its log-prob) for each row, by the row's number in [0, 1). Never waits for the device.

    Minus infinity cannot be drawn: `shaping` has applied all settings but the temperature.
    """
    if sampling.temperature == 0:
        every = torch.log_softmax(logits.float(), dim=-1)
        tokens = every.argmax(dim=-1)
        return tokens, every.gather(1, tokens[:, None]).squeeze(1)
    blocks = _weigh(logits, sampling.temperature)
    tokens, logprobs = _invert(blocks, uniform, logits.shape[1])
    return tokens, token_logprobs(logits, tokens, sampling.temperature)[0] if sampling.exact else logprobs


def _weigh(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights that are proportional to probabilities, in blocks."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    return pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)


def _invert(blocks: torch.Tensor, uniform: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(which of `size` entries makes each row's running sum of weights pass its share of the total, its log-prob).

    The running sum goes over blocks first, and then through the one block in which it passes the share: over a whole
    vocabulary it is a long chain of additions, which would take a good part of a step with few rows.
    """
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[:, -1]
    aim = (uniform * total)[:, None]
    block = torch.searchsorted(ends, aim, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1).double().cumsum(-1)
    offset = torch.searchsorted(inside, aim - before, right=True).clamp(max=_BLOCK - 1)
    entry = (block * _BLOCK + offset).clamp(max=size - 1)
    weight = blocks.flatten(1).gather(1, entry).squeeze(1)
    return entry.squeeze(1), (weight.log() - total.log()).float()


def uniform_numbers(seeds: Sequence[int], step: int | np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each seed that depends on (seed, step) alone: SplitMix64's stream of the seed, at `step`.

    For a column of steps, one row per step.
    """
    steps = (np.atleast_1d(step).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = np.array(seeds, np.uint64) + steps
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
