"""Decoding in fixed memory: on CUDA every step is one captured graph, and the host waits for none of them.

Decoding token by token is bound by kernel launches: a step of a small model reads its weights in under a millisecond
and takes some thirty to launch. Here the step (model, draw, bookkeeping) touches tensors that stay where they are, so
it is captured once and replayed. Prompts are read as ever, into a growing cache that is then copied into the fixed one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from shardproof.model.compiling import can_compile
from shardproof.rollout.decode import Prefilled, last_logits
from shardproof.rollout.engine import Completion, Request, Sampling
from shardproof.rollout.fused import FusedStep, can_fuse, fused_record
from shardproof.rollout.progress import Progress, draws_rightly

logger = logging.getLogger(__name__)

FIXED = "shardproof_fixed_cache"
# Cache lengths are rounded up to this, so that prompts of other lengths use the same graph.
_LENGTH_STEP = 128
_CHECK_EVERY = 8  # steps between two looks at whether every row has finished
_KEPT = 3  # graphs: for training, for evaluation, and for the canary
_COMPARED = 4  # rows on which kernels are compared with plain code
# Of their log-probs, by how likely the tokens are; 16 bits may send a token to another expert.
_MAX_DISTANCE = 0.25


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token to a cache: queries that share a key head stand side by side as one short sequence,
    so that keys and values are read once and never repeated."""
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


class Step(Protocol):
    """A model that takes one new token a row, in memory that stays where it is."""

    def fill(self, started: Prefilled) -> None:
        """Begin after the prompts."""
        ...

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] after tokens [rows, 1] at positions [rows, 1]."""
        ...


class ModelStep:
    """The model as it is written, over transformers' cache of fixed size."""

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

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._mask.index_fill_(3, self._column, True)
        self._column.add_(1)
        with _attention(self._model):
            return last_logits(self._model, ids, self._mask, positions, self._cache)


class FixedDecoder:
    """Decodes batches with one model. The model's parameters may be written between calls, not moved."""

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self._model = model
        self._device = device
        self._loops: dict[Any, _Loop] = {}
        # Whether steps, and draws, run through kernels of our own; None: they could, and have not yet been compared.
        self._fuses: bool | None = None if can_fuse(model, device) else False
        self._draws: bool | None = None if can_compile(device, model.dtype) else False

    def __call__(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """Complete all requests in one batch."""
        if not requests:
            return []
        started = Prefilled(self._model, requests, self._device)
        needed = started.length + sampling.max_new_tokens
        length = -(-needed // _LENGTH_STEP) * _LENGTH_STEP
        key = (len(requests), length, sampling)
        loop = self._loops.pop(key, None)
        if loop is None:
            while len(self._loops) >= _KEPT:
                self._loops.pop(next(iter(self._loops)))
            loop = self._loop(requests, started, length, sampling)
        self._loops[key] = loop
        tokens, logprobs = loop.run(started, [request.seed for request in requests])
        return [
            _completion(row, scores, sampling, version)
            for row, scores in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _loop(
        self, requests: Sequence[Request], started: Prefilled, length: int, sampling: Sampling
    ) -> _Loop:
        """With the fastest step, and the fastest draw, that compute what the plain ones compute."""
        rows = len(requests)
        if self._fuses is None:
            self._fuses = _can_rely("fused kernels", partial(self._compare_steps, requests[:_COMPARED]))
        if self._draws is None:
            seeds = [request.seed for request in requests[:_COMPARED]]
            self._draws = _can_rely("kernels that draw", partial(self._compare_draws, started, seeds))
        step: Step = (
            FusedStep(self._model, rows, length)
            if self._fuses
            else ModelStep(self._model, rows, length, self._device)
        )
        progress = Progress(rows, sampling, self._device)
        if self._draws and sampling.temperature > 0 and sampling.top_p == 1.0:
            return _Loop(step, progress, partial(fused_record, progress, sampling.temperature))
        return _Loop(step, progress, progress.record)

    def _compare_steps(self, requests: Sequence[Request]) -> str | None:
        """What is wrong with fused kernels: they say something else of the next token than the model."""
        started = Prefilled(self._model, requests, self._device)
        ids, positions = started.logits.argmax(-1, keepdim=True), started.last_positions + 1
        rows, length = len(requests), started.length + 1
        steps = FusedStep(self._model, rows, length), ModelStep(self._model, rows, length, self._device)
        found = []
        for step in steps:
            step.fill(started)
            found.append(torch.log_softmax(step(ids, positions).float(), -1))
        # Likely tokens count: what is hardly ever drawn may be far off.
        distance = float((found[1].exp() * (found[0] - found[1]).abs()).sum(-1).max())
        return None if distance < _MAX_DISTANCE else f"their log-probs differ by {distance:.3g}"

    def _compare_draws(self, started: Prefilled, seeds: list[int]) -> str | None:
        """What is wrong with kernels that draw: other tokens, or log-probs, than the rows' numbers ask for."""
        rows = len(seeds)
        logits, progress = started.logits[:rows], Progress(rows, Sampling(1), self._device)
        progress.begin(started.last_positions[:rows], seeds)
        fused_record(progress, 1.0, logits)
        return None if draws_rightly(progress, logits) else "they draw other tokens"


def _can_rely(kernels: str, compare: Callable[[], str | None]) -> bool:
    """Whether a comparison finds nothing wrong; says what it finds otherwise."""
    try:
        problem = compare()
    except Exception as error:  # whatever a kernel's compiler and launcher raise
        problem = f"they failed ({type(error).__name__}: {error})"
    if problem is not None:
        logger.warning("decoding without %s: %s", kernels, problem)
    return problem is None


def _completion(tokens: list[int], logprobs: list[float], sampling: Sampling, version: int) -> Completion:
    """A row, cut after its first stop token."""
    end = next((at + 1 for at, token in enumerate(tokens) if token in sampling.stop_ids), len(tokens))
    finished = tokens[end - 1] in sampling.stop_ids
    return Completion(tuple(tokens[:end]), tuple(logprobs[:end]), finished, version)


class _Loop:
    """The memory of one batch size, cache length and sampling, and the step that works in it."""

    def __init__(self, step: Step, progress: Progress, record: Callable[[torch.Tensor], None]):
        self._model = step
        self._progress = progress
        self._record = record
        self._device = progress.tokens.device
        self._captures = self._device.type == "cuda" and len(progress.tokens) > 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._watch = _Watch(progress.done)

    def run(self, started: Prefilled, seeds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, log-probs), each [rows, steps], on the host."""
        if self._captures and self._graph is None:
            self._captures = self._capture(started, seeds)
        self._begin(started, seeds)
        self._record(started.logits)
        steps, taken = len(self._progress.tokens), 1
        for taken in range(1, steps + 1):
            if taken == steps or (taken % _CHECK_EVERY == 1 and self._watch.all_done()):
                break
            self._graph.replay() if self._graph is not None else self._advance()
        return self._progress.tokens[:taken].T.cpu(), self._progress.logprobs[:taken].T.cpu()

    def _begin(self, started: Prefilled, seeds: list[int]) -> None:
        """Put the prompts' keys and values into the fixed cache, and begin at its end."""
        self._model.fill(started)
        self._progress.begin(started.last_positions, seeds)
        self._watch.begin()

    def _advance(self) -> None:
        """One step: the last token in, the next one out."""
        self._record(self._model(self._progress.ids, self._progress.positions))

    def _capture(self, started: Prefilled, seeds: list[int]) -> bool:
        """Run a step twice for what happens only once, then record it; what they write is written over by `run`.

        A step for which the host waits, as it does for the token counts of experts that run one by one, cannot be
        recorded.
        """
        self._begin(started, seeds)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._advance()
            self._progress.step.zero_()
            waits = _host_waits(self._advance)
            self._progress.step.zero_()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        if waits:
            logger.warning("decoding without CUDA graphs: the host waits for a step of this model")
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self._graph = graph
        return True


class _Watch:
    """Whether all rows have finished. On CUDA it tells what was so when it was last asked, and does not wait for the steps
    that were launched since: a device that has run out of them idles until the host has launched more."""

    def __init__(self, done: torch.Tensor):
        self._done = done
        self._flag: torch.Tensor | None = None
        if done.is_cuda:
            self._flag = torch.zeros(1, dtype=torch.bool, pin_memory=True)
            self._noted = torch.cuda.Event()

    def begin(self) -> None:
        if self._flag is not None:
            self._noted.synchronize()
            self._flag.zero_()

    def all_done(self) -> bool:
        if self._flag is None:
            return bool(self._done.all())
        self._noted.synchronize()
        found = bool(self._flag)
        self._flag.copy_(self._done.all(), non_blocking=True)
        self._noted.record()
        return found


def _host_waits(step: Callable[[], None]) -> bool:
    """Whether the host waits for the device somewhere in a step, which is then not run to its end."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


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
