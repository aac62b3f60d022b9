"""Batched decoding with a KV cache. What is drawn for a request depends on its seed and position, never on the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel

from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.trajectory import Trajectory

_BLOCK = 128  # entries of the vocabulary whose weights are added up together

# (input_ids, attention_mask, position_ids, cache) -> logits of the last position, [rows, vocabulary]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DynamicCache], torch.Tensor]
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
) -> list[Trajectory]:
    """Answer all requests in one batch; a prompt that several share is read once, and a finished row leaves.

    With `anyone_left` every forward is collective: a rank that is done runs `idle` until the others are too.
    """
    batch = _Running(requests, config, device)
    for step in range(sampling.max_new_tokens):
        left = bool(batch.rows)
        if not (anyone_left(left) if anyone_left is not None else left):
            break
        if not left:
            assert idle is not None
            idle()
            continue
        logits = forward(batch.input_ids, batch.attention_mask, batch.position_ids, batch.cache)
        if step == 0:
            logits = batch.fan_out(logits)
        tokens, logprobs = draw(logits, [requests[row].seed for row in batch.rows], step, sampling)
        batch.advance(tokens, logprobs, sampling)
    return [
        request.answered(batch.tokens[row], batch.logprobs[row], batch.finished[row], version)
        for row, request in enumerate(requests)
    ]


class _Running:
    """The rows that are still being completed: prompts padded on the left, one cache for all.

    There is one row per prompt before `fan_out`, and one per request after it.
    """

    def __init__(self, requests: Sequence[Request], config: Any, device: torch.device):
        self.rows = list(range(len(requests)))
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.finished = [False] * len(requests)
        self.cache = DynamicCache(config=config)
        if not requests:
            return
        prompts = {prompt: row for row, prompt in enumerate(dict.fromkeys(r.tokens for r in requests))}
        self.prompt_of = torch.tensor([prompts[request.tokens] for request in requests], device=device)
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for prompt, row in prompts.items():
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        self.input_ids, self.attention_mask = ids.to(device), mask.to(device)
        self.position_ids = (self.attention_mask.cumsum(1) - 1).clamp(min=0)

    def fan_out(self, logits: torch.Tensor) -> torch.Tensor:
        """Give every request its copy of its prompt's row; returns the logits of each request."""
        if len(logits) < len(self.rows):
            self.cache.batch_select_indices(self.prompt_of)
            self.attention_mask = self.attention_mask[self.prompt_of]
            self.position_ids = self.position_ids[self.prompt_of]
        return logits[self.prompt_of]

    def advance(self, tokens: torch.Tensor, logprobs: torch.Tensor, sampling: Sampling) -> None:
        """Append a token to each row, drop the rows that are done, and set up the next forward."""
        keep = []
        for index, (row, token, logprob) in enumerate(
            zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
            self.finished[row] = token in sampling.stop_ids
            if not self.finished[row] and len(self.tokens[row]) < sampling.max_new_tokens:
                keep.append(index)
        chosen = torch.tensor(keep, dtype=torch.int64, device=tokens.device)
        if len(keep) < len(self.rows):
            self.rows = [self.rows[index] for index in keep]
            self.attention_mask = self.attention_mask[chosen]
            if keep:
                self.cache.batch_select_indices(chosen)
        self.input_ids = tokens[chosen, None]
        self.position_ids = self.position_ids[chosen, -1:] + 1
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(self.input_ids)], dim=1)


class Prefilled:
    """Requests whose prompts have been read: a row for each request, with its keys, values and first logits."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[Request], device: torch.device):
        batch = _Running(requests, model.config, device)
        logits = last_logits(model, batch.input_ids, batch.attention_mask, batch.position_ids, batch.cache)
        self.logits = logits[batch.prompt_of]
        self.length = batch.input_ids.shape[1]
        self.mask = batch.attention_mask[batch.prompt_of].bool()
        self.last_positions = batch.position_ids[batch.prompt_of, -1:]
        self._batch = batch

    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) of each layer, [rows, heads, length, width]."""
        chosen = self._batch.prompt_of
        for layer in self._batch.cache.layers:
            assert layer.keys is not None and layer.values is not None
            yield layer.keys[chosen], layer.values[chosen]


def draw(
    logits: torch.Tensor, seeds: Sequence[int], step: int, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, its log-prob) for each row, from one uniform number per row, which only its seed and the step decide."""
    return choose(logits, torch.from_numpy(uniform_numbers(seeds, step)).to(logits.device), sampling)


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, its log-prob) for each row, by the row's number in [0, 1). Never waits for the device."""
    if sampling.temperature == 0:
        every = torch.log_softmax(logits.float(), dim=-1)
        tokens = every.argmax(dim=-1)
        return tokens, every.gather(1, tokens[:, None]).squeeze(1)
    blocks = _weigh(logits, sampling.temperature)
    if sampling.top_p < 1.0:
        blocks = _nucleus(blocks.flatten(1), sampling.top_p).view_as(blocks)
    return _invert(blocks, uniform, logits.shape[1])


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


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities of the most likely tokens that together reach `top_p`, renormalised."""
    probs = weights / weights.sum(-1, keepdim=True)
    ordered, order = probs.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    kept = probs.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0.0)
    return kept / kept.sum(-1, keepdim=True)


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
