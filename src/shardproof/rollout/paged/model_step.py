"""A decoding step through the model's own forward, with attention to a paged cache in place of the model's own.

Families with sliding windows, sinks and soft caps decode this way. On CUDA attention is one kernel, which graphs can
hold; in plain torch it gathers each row's blocks, which needs no kernel and is what kernels are compared with in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from shardproof.model import exact, exact_attention, hf_private
from shardproof.model.families import MOVING_ROPE, rope_types
from shardproof.rollout.paged.blocks import BLOCK
from shardproof.rollout.paged.cache import PagedCache
from shardproof.rollout.paged.slots import Slots

PAGED = "shardproof_paged_cache"


class Attend(Protocol):
    """Stores a new key and value per row and attends to the row's tokens; returns [rows, heads * width]."""

    def __call__(
        self,
        query: torch.Tensor,  # [rows, heads, width]
        key: torch.Tensor,  # [rows, key heads, width]
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],  # of one layer
        tables: torch.Tensor,
        positions: torch.Tensor,
        scaling: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def why_not_paged(model: PreTrainedModel) -> str | None:
    """What about a model forbids to decode it with a paged cache; None if nothing does."""
    config = model.config.get_text_config(decoder=True)
    if windows_of(config) is None:
        return "not all of its layers keep keys and values"
    if rope_types(model.config) & MOVING_ROPE:
        return "its rotary embedding depends on the length of the context"
    if getattr(config, "kv_lora_rank", None):
        return "its keys and its values have different widths"
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers use the keys and values of others"
    if not model._supports_attention_backend:
        return "its attention cannot be replaced"
    return None


def windows_of(config: Any) -> list[int | None] | None:
    """For each layer the number of last tokens that it attends to, or None for all; None for layers of other kinds."""
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (KeyError, TypeError, ValueError):
        return None
    if not layers or not {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return None
    return [getattr(layer, "sliding_window", None) for layer in layers]


class ModelStep:
    """One new token per row: the model's own forward, over a paged cache."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, attend: Attend):
        windows = windows_of(model.config)
        assert windows is not None
        self._model = model
        self._cache = cache
        self._attend = attend
        self._windows = windows
        self._slots: Slots | None = None  # of the step that is running

    def __call__(self, slots: Slots, out: torch.Tensor) -> None:
        """Read each slot's token; logits [rows, vocabulary] go to `out`, keys and values into the slots' blocks."""
        self._slots = slots
        with _attending(self._model, self):
            logits = self._model(
                input_ids=slots.ids, position_ids=slots.positions, use_cache=False, logits_to_keep=1
            ).logits
        out.copy_(logits[:, -1])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [rows, heads, 1, width]
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer, [rows, 1, heads, width]."""
        assert self._slots is not None
        attend = exact_attention.attend_step if exact.active() else self._attend
        found = attend(
            query[:, :, 0],
            key[:, :, 0],
            value[:, :, 0],
            (self._cache.keys[layer], self._cache.values[layer]),
            self._slots.tables,
            self._slots.positions,
            scaling,
            window=self._windows[layer],
            softcap=softcap,
            sinks=sinks,
        )
        return found.view(len(found), 1, query.shape[1], -1)


_running: list[
    ModelStep
] = []  # the step whose model is running: attention functions know of their module alone


@contextmanager
def _attending(model: PreTrainedModel, step: ModelStep) -> Iterator[None]:
    _running.append(step)
    try:
        with hf_private.attention_implementation(model, PAGED):
            yield
    finally:
        _running.pop()


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What a model calls in a step: attention of one new token per row."""
    layer: Any = module.layer_idx
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return _running[-1].attend(layer, query, key, value, scale, softcap, s_aux), None


AttentionInterface.register(PAGED, _attention)


def attend_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Attend` in plain torch: every block of the tables is gathered, and what does not count is masked."""
    rows = len(query)
    at = positions[:, 0]
    block = tables.gather(1, (positions // BLOCK)).squeeze(1).long()
    for states, new in zip(cache, (key, value), strict=True):
        states[block, :, at % BLOCK] = new.to(states.dtype)
    # [rows, blocks, key heads, BLOCK, width] -> [rows, key heads, 1, tokens, width]
    keys, values = (
        states[tables.long()].transpose(1, 2).flatten(2, 3).to(query.dtype).unsqueeze(2) for states in cache
    )
    place = torch.arange(keys.shape[3], device=query.device)
    counts = place <= positions
    if window is not None:
        counts &= place > positions - window
    grouped = query.view(rows, keys.shape[1], -1, 1, query.shape[-1])
    scores = (grouped @ keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    counts = counts[:, None, None, None]
    scores = scores.masked_fill(~counts, float("-inf"))
    if sinks is not None:
        drain = sinks.float().view(1, keys.shape[1], -1, 1, 1).expand(rows, -1, -1, -1, -1)
        weights = torch.cat([scores, drain], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    values = values.masked_fill(~counts.transpose(-1, -2), 0.0)  # what is not written yet may be anything
    return (weights.to(query.dtype) @ values).reshape(rows, -1)
