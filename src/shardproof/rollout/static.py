"""Decoding in fixed memory: on CUDA every step is one captured graph, and the host waits for none of them.

Decoding token by token is bound by kernel launches: a step of a small model reads its weights in under a millisecond
and takes some thirty to launch. Here the step (model, draw, bookkeeping) touches tensors that do not move, so it is
captured once and replayed. Prompts are read as usual, into a growing cache that is then copied into the fixed one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from shardproof.model import hf_private
from shardproof.model.compiling import can_compile
from shardproof.rollout import graphs
from shardproof.rollout.decode import Prefilled, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.fused import FusedStep, can_fuse, fused_record
from shardproof.rollout.kept import KeptTurns, States, stack_rows
from shardproof.rollout.progress import Progress, Watch
from shardproof.rollout.proof import CAPACITY, Step, compare_draws, compare_steps
from shardproof.rollout.recording import Recorder
from shardproof.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

FIXED = "shardproof_fixed_cache"
# Cache lengths are rounded up to this, so that prompts of other lengths use the same graph.
_LENGTH_STEP = 128
_CHECK_EVERY = 8  # steps between two checks of whether every row has finished
_ROWS = (16, 32, 64)  # of batches of conversations; larger ones are multiples of the last
_KEPT = 3  # graphs: for training, for evaluation, and for the canary


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token to a cache. Queries that share a key head are folded into one short sequence, so that
    keys and values are read once and never repeated."""
    rows, num_heads, _, width = query.shape
    num_key_heads = key.shape[1]
    folded = query.reshape(rows, num_key_heads, num_heads // num_key_heads, width)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, num_heads, value.shape[-1]), None


AttentionInterface.register(FIXED, grouped_attention)


def fits(model: PreTrainedModel) -> bool:
    """Whether a model can be decoded in fixed memory: a plain cache in every layer, and attention without extras."""
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")):
        return False
    if any("sinks" in name for name, _ in model.named_parameters()) or not model._supports_sdpa:
        return False
    try:
        return all(type(layer) is StaticLayer for layer in StaticCache(config, max_cache_len=1).layers)
    except (KeyError, TypeError, ValueError):
        return False


def fixed_length(num_tokens: int, grows: bool = False) -> int:
    """The cache length for a row of that many tokens; for conversations that grow, a power of two.

    Every length needs its own graph. A conversation that grew by steps would need a new one nearly every turn.
    """
    length = -(-num_tokens // _LENGTH_STEP) * _LENGTH_STEP
    return 1 << (length - 1).bit_length() if grows else length


def kept_lengths(
    rows: Sequence[int], prompt_lengths: Sequence[int], max_new_tokens: int, grows: bool = False
) -> list[tuple[int, int]]:
    """(rows, cache length) of the largest caches that a decoder keeps at a time for batches of these sizes.

    Batches of conversations that grow shrink in rows: they end one by one.
    """
    if grows:
        length = fixed_length(max(prompt_lengths) + max_new_tokens, grows)
        counts = {padded_rows(count >> halved) for count in rows for halved in range(_KEPT)}
        return [(count, length) for count in sorted(counts, reverse=True)[:_KEPT]]
    lengths = {fixed_length(length + max_new_tokens) for length in prompt_lengths}
    sizes = sorted(((count, length) for count in rows for length in lengths), key=prod, reverse=True)
    return sizes[:_KEPT]


class ModelStep:
    """The model's own forward over transformers' cache of fixed size."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int, device: torch.device):
        self._model = model
        self._cache = StaticCache(model.config, max_cache_len=length)
        self._mask = torch.zeros(rows, 1, 1, length, dtype=torch.bool, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)

    def fill(self, started: Prefilled) -> None:
        width = started.length
        for fixed, grown in zip(self._cache.layers, started.layers(), strict=True):
            if not fixed.is_initialized:
                fixed.lazy_initialization(*grown)
            assert fixed.keys is not None and fixed.values is not None
            fixed.keys[:, :, :width].copy_(grown[0])
            fixed.values[:, :, :width].copy_(grown[1])
            fixed.cumulative_length.fill_(width)
        self._mask.zero_()
        self._mask[:, 0, 0, :width].copy_(started.mask)
        self._column.fill_(width)

    def states(self, row: int, num_tokens: int) -> States:
        layers: list[Any] = [(layer.keys, layer.values) for layer in self._cache.layers]
        return stack_rows(layers, row, self._mask[row, 0, 0].nonzero()[:num_tokens, 0])

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._mask.index_fill_(3, self._column, True)
        self._column.add_(1)
        with _attention(self._model):
            return last_logits(self._model, ids, self._mask, positions, self._cache)


class FixedDecoder:
    """Decodes batches with one model. The model's parameters may be written between calls, not moved.

    It takes the fastest way that a comparison has shown to be right, and falls back where one fails: our own kernels in
    graphs, the model's own forward in graphs, that forward without graphs. All draw the same tokens.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, recorder: Recorder | None = None):
        self._model = model
        self._device = device
        self._recorder = recorder
        self._loops: dict[Any, _Loop] = {}
        # Whether steps, and draws, may use our own kernels, and be recorded. Once given up, none of it comes back.
        self._fuses = can_fuse(model, device)
        self._draws = can_compile(device, model.dtype)
        self._records = True
        self._proved: set[tuple[Any, ...]] = set()  # comparisons that were passed: kernels, rows, sampling

    def __call__(
        self, requests: Sequence[Request], sampling: Sampling, version: int, kept: KeptTurns | None = None
    ) -> list[Trajectory]:
        """Answer all requests in one batch. What `kept` has is not read again; it gets the rows that continue."""
        if not requests:
            return []
        grows = any(request.continues for request in requests) or bool(kept)
        padded = _padded(requests) if grows else requests
        started = Prefilled(self._model, padded, self._device, kept, self._recorder)
        seeds = [request.seed for request in padded]
        while True:
            try:
                loop = self._loop(started, seeds, sampling, grows)
                tokens, logprobs = loop.run(started, seeds, len(requests))
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever compilers, launches, captures and replays raise
                if not self._go_plainer(error):
                    raise
        answered = [
            _answer(request, row, scores, sampling, version)
            for request, row, scores in zip(requests, tokens.tolist(), logprobs.tolist(), strict=False)
        ]
        # Nothing has read the last token of each yet.
        lengths = [len(trajectory.tokens) - 1 for trajectory in answered]
        chosen = loop.experts(started, lengths) if self._recorder is not None else None
        if kept is not None:
            for row, (request, trajectory) in enumerate(zip(requests, answered, strict=True)):
                if request.continues:
                    states = loop.states(row, lengths[row])
                    experts = chosen[row] if chosen is not None else None
                    kept.keep(trajectory.tokens[:-1], len(request.tokens), states, experts)
        if self._recorder is None or chosen is None:
            return answered
        return self._recorder.with_records(answered, chosen)

    def release(self) -> None:
        """Free all memory and graphs. Comparisons that were passed are remembered."""
        self._loops.clear()

    def _go_plainer(self, error: Exception) -> bool:
        """Give up the fastest way that is left and free its memory; False if there is no other."""
        self._loops.clear()
        said = f"{type(error).__name__}: {error}"
        if self._fuses or self._draws:
            self._fuses = self._draws = False
            logger.warning("decoding without fused kernels, which failed (%s)", said)
        elif self._records and graphs.can_capture(self._device, 2):
            self._records = False
            logger.warning("decoding without CUDA graphs, which failed (%s)", said)
        else:
            return False
        return True

    def _loop(self, started: Prefilled, seeds: list[int], sampling: Sampling, grows: bool) -> _Loop:
        """The memory and the step for such a batch: one of the last few, or a new one."""
        rows, needed = len(seeds), started.length + sampling.max_new_tokens
        length = fixed_length(needed, grows)
        if grows:
            # One cache for all turns, as long as the longest so far. A shorter one would hold memory for nothing.
            same = [key for key in self._loops if (key[0], key[2]) == (rows, sampling)]
            length = max([length, *(key[1] for key in same)])
            for key in same:
                if key[1] < length:
                    del self._loops[key]
        key = (rows, length, sampling)
        loop = self._loops.pop(key, None)
        if loop is None:
            while len(self._loops) >= _KEPT:
                self._loops.pop(next(iter(self._loops)))
            loop = self._make_loop(started, seeds, length, sampling)
        self._loops[key] = loop
        return loop

    def _make_loop(self, started: Prefilled, seeds: list[int], length: int, sampling: Sampling) -> _Loop:
        """With the fastest step and the fastest draw that were shown to compute what the plain ones compute."""
        rows, temperature = len(seeds), sampling.temperature
        if self._fuses:
            self._fuses = self._prove("fused kernels", (rows,), partial(self._compare_steps, rows))
        if self._draws and _can_draw(sampling):
            compare = partial(
                compare_draws, fused_record, started.logits, started.last_positions, seeds, sampling
            )
            shape = (rows, temperature, len(sampling.stop_ids))
            self._draws = self._prove("kernels that draw", shape, compare)
        step: Step = (
            FusedStep(self._model, rows, length)
            if self._fuses
            else ModelStep(self._model, rows, length, self._device)
        )
        progress = Progress(rows, sampling, self._device)
        record = progress.record
        if self._draws and _can_draw(sampling):
            record = partial(fused_record, progress, temperature)
        # Recording runs two steps first; the cache must have room for them.
        captures = self._records and graphs.can_capture(self._device, rows) and sampling.max_new_tokens > 2
        return _Loop(step, progress, record, captures, self._recorder)

    def _compare_steps(self, rows: int) -> str | None:
        """What is wrong with fused kernels for this number of rows; None if nothing is."""
        fused = FusedStep(self._model, rows, CAPACITY)
        plain = ModelStep(self._model, rows, CAPACITY, self._device)
        has_experts = bool(hf_private.expert_modules(self._model))
        return compare_steps(self._model, self._device, rows, fused, plain, has_experts)

    def _prove(self, kernels: str, how: tuple[Any, ...], compare: Callable[[], str | None]) -> bool:
        """Whether a comparison, made once per kernels and shape, finds nothing wrong; logs what it finds."""
        if (kernels, *how) in self._proved:
            return True
        try:
            problem = compare()
        except Exception as error:  # whatever a kernel's compiler and launcher raise
            problem = f"they failed ({type(error).__name__}: {error})"
        if problem is None:
            self._proved.add((kernels, *how))
            return True
        self._loops.clear()
        logger.warning("decoding without %s: %s", kernels, problem)
        return False


def _padded(requests: Sequence[Request]) -> Sequence[Request]:
    """With requests of one token added, up to as many rows as kernels compute anyway.

    Conversations end one by one. Every number of rows needs its own graph and its own comparison, and would come once.
    """
    filler = Request(Trajectory.of_prompt(requests[0].tokens[:1]), 0)
    return [*requests, *[filler] * (padded_rows(len(requests)) - len(requests))]


def padded_rows(num: int) -> int:
    """The rows of a batch of so many conversations."""
    return next((rows for rows in _ROWS if num <= rows), -(-num // _ROWS[-1]) * _ROWS[-1])


def _can_draw(sampling: Sampling) -> bool:
    """Whether the kernels support this sampling."""
    return sampling.temperature > 0 and sampling.top_p == 1.0


def _answer(
    request: Request, tokens: list[int], logprobs: list[float], sampling: Sampling, version: int
) -> Trajectory:
    """With a row's tokens up to its first stop token."""
    end = next((at + 1 for at, token in enumerate(tokens) if token in sampling.stop_ids), len(tokens))
    finished = tokens[end - 1] in sampling.stop_ids
    return request.answered(tokens[:end], logprobs[:end], finished, version)


class _Loop:
    """The memory of one batch size, cache length and sampling, and the step that works in it."""

    def __init__(
        self,
        step: Step,
        progress: Progress,
        record: Callable[[torch.Tensor], None],
        captures: bool,
        recorder: Recorder | None = None,
    ):
        self._model = step
        self._recorder = recorder
        self._chosen = recorder.room(progress.tokens) if recorder is not None else None
        self._progress = progress
        self._record = record
        self._device = progress.tokens.device
        self._captures = captures
        self._replay: Callable[[], None] | None = None
        self._watch = Watch(progress.done)

    def run(self, started: Prefilled, seeds: list[int], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, log-probs), each [rows, steps], on the host. Only the first `num_rows` rows are waited for."""
        self._begin(started, seeds, num_rows)
        if self._captures and self._replay is None:
            self._replay = graphs.capture(self._advance, self._device, self._progress.step.zero_)
            self._captures = self._replay is not None
            self._begin(started, seeds, num_rows)  # recording has written to the cache
        self._record(started.logits)
        advance = self._replay or self._advance
        steps, taken = len(self._progress.tokens), 1
        for taken in range(1, steps + 1):
            if taken == steps or (taken % _CHECK_EVERY == 1 and self._watch.all_done()):
                break
            advance()
        return self._progress.tokens[:taken].T.cpu(), self._progress.logprobs[:taken].T.cpu()

    def states(self, row: int, num_tokens: int) -> States:
        """Copies of the keys and values of a row's first tokens."""
        return self._model.states(row, num_tokens)

    def experts(self, started: Prefilled, lengths: Sequence[int]) -> list[np.ndarray]:
        """Those of the first tokens of each row, prompt and drawn, as many as `lengths` says."""
        assert self._recorder is not None and self._chosen is not None
        prompts = [started.experts(row) for row in range(len(lengths))]
        # What a step reads was drawn in the step before.
        drawn = self._recorder.on_host(self._chosen[1:, : len(lengths)])
        return [
            np.concatenate([prompt, drawn[: length - len(prompt), row]])
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]

    def _begin(self, started: Prefilled, seeds: list[int], num_rows: int) -> None:
        """Copy the prompts' keys and values into the fixed cache, and start after them."""
        self._model.fill(started)
        self._progress.begin(started.last_positions, seeds)
        self._progress.done[num_rows:].fill_(True)
        self._watch.begin()

    def _advance(self) -> None:
        """One step: the last token in, the next one out."""
        inputs = self._progress.ids, self._progress.positions
        if self._recorder is None or self._chosen is None:
            self._record(self._model(*inputs))
            return
        logits = self._recorder.watch(self._model, *inputs)
        self._chosen.index_copy_(0, self._progress.step, self._recorder.last()[None])
        self._record(logits)


@contextmanager
def _attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with attention to a fixed cache."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = FIXED
    try:
        yield
    finally:
        config._attn_implementation = before
