"""What a forward pass keeps, works on and caches, counted on the meta device: nothing is allocated or computed."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from math import ceil
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from shardproof.model import hf_private
from shardproof.model.families import experts_per_token, num_experts
from shardproof.model.replace import replace_buffers
from shardproof.model.skeleton import set_param_dtype
from shardproof.rl.sizing.live import LiveBytes
from shardproof.rollout.decode import choose, last_logits
from shardproof.rollout.engine import Sampling

T = TypeVar("T")
_COUNTING = "shardproof_counting"


class _Attention(torch.autograd.Function):
    """Attention that keeps what flash attention keeps: queries, keys, values, the output, and one number per query."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("this attention only counts")


def _counting_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # as packed attention does without a flash kernel
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    if torch.is_grad_enabled():
        out = _Attention.apply(query, key, value)
    else:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_COUNTING, _counting_attention)


@lru_cache(maxsize=64)
def saved_bytes(model: PreTrainedModel, compute_dtype: torch.dtype, num_tokens: int) -> tuple[int, bool]:
    """(bytes that a forward over that many tokens keeps, whether they were counted).

    A model that cannot run on the meta device, such as one whose routing decides shapes, is estimated from its sizes.
    """
    found = _on_meta(model, compute_dtype, lambda meta: _count(meta, num_tokens))
    if found is None:
        return _from_sizes(model, compute_dtype, num_tokens), False
    by_dtype, dtype = found
    scale = compute_dtype.itemsize // dtype.itemsize
    return sum(size * (scale if kind == dtype else 1) for kind, size in by_dtype.items()), True


@lru_cache(maxsize=64)
def forward_bytes(model: PreTrainedModel, compute_dtype: torch.dtype, num_tokens: int) -> int:
    """The most that a forward without gradients holds at a time beside parameters, up to the last hidden states."""

    def run(meta: PreTrainedModel) -> int:
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
        positions = torch.arange(num_tokens, device="meta")[None]
        with torch.no_grad(), _live(meta) as live:
            meta.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        return live.peak

    found = _on_meta(model, compute_dtype, run)
    if found is None:
        return ceil(
            _from_sizes(model, compute_dtype, num_tokens) / model.config.get_text_config().num_hidden_layers
        )
    return found[0] * compute_dtype.itemsize // found[1].itemsize


@lru_cache(maxsize=64)
def cache_bytes(model: PreTrainedModel, compute_dtype: torch.dtype, length: int) -> int:
    """Keys and values of one sequence of that length, as the model's own layers cache them."""

    def run(meta: PreTrainedModel) -> int:
        cache = DynamicCache(config=meta.config)
        with torch.no_grad():
            last_logits(meta, *_tokens(1, length), cache)
        return _held(cache)

    found = _on_meta(model, compute_dtype, run)
    if found is None:
        text: Any = model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * text.num_hidden_layers * heads * width * length * compute_dtype.itemsize
    return found[0] * compute_dtype.itemsize // found[1].itemsize


@lru_cache(maxsize=64)
def prompts_bytes(model: PreTrainedModel, compute_dtype: torch.dtype, rows: int, length: int) -> int:
    """The most that reading a batch of prompts holds at a time beside parameters: their cache and the working memory."""

    def run(meta: PreTrainedModel) -> int:
        with torch.no_grad(), _live(meta) as live:
            last_logits(meta, *_tokens(rows, length), DynamicCache(config=meta.config))
        return live.peak

    found = _on_meta(model, compute_dtype, run)
    if found is None:
        return rows * cache_bytes(model, compute_dtype, length) + forward_bytes(
            model, compute_dtype, rows * length
        )
    return found[0] * compute_dtype.itemsize // found[1].itemsize


@lru_cache(maxsize=64)
def token_bytes(
    model: PreTrainedModel, compute_dtype: torch.dtype, rows: int, length: int, sampling: Sampling
) -> int:
    """The most that drawing each row's last token holds at a time beside parameters, with a cache that grows."""

    def run(meta: PreTrainedModel) -> int:
        cache = DynamicCache(config=meta.config)
        with torch.no_grad():
            last_logits(meta, *_tokens(1, length - 1), cache)
            with _live(meta) as live:
                cache.batch_select_indices(torch.zeros(rows, dtype=torch.int64, device="meta"))
                ids, mask, positions = _tokens(rows, 1)
                logits = last_logits(meta, ids, mask, positions, cache)
                choose(logits, torch.zeros(rows, dtype=torch.float64, device="meta"), sampling)
            return live.peak

    found = _on_meta(model, compute_dtype, run)
    if found is None:
        vocabulary = model.config.get_text_config().vocab_size
        return rows * (cache_bytes(model, compute_dtype, length) + 16 * vocabulary)
    return found[0] * compute_dtype.itemsize // found[1].itemsize


def _live(meta: PreTrainedModel) -> LiveBytes:
    return LiveBytes("meta", without=[*meta.parameters(), *meta.buffers()])


def _tokens(rows: int, length: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """(ids, no mask, positions) of a batch on meta."""
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    return ids, None, torch.arange(length, device="meta")[None].expand(rows, -1)


def _held(cache: DynamicCache) -> int:
    layers: Any = cache.layers
    return sum(int(tensor.nbytes) for layer in layers for tensor in (layer.keys, layer.values))


def _on_meta(
    model: PreTrainedModel, compute_dtype: torch.dtype, run: Callable[[PreTrainedModel], T]
) -> tuple[T, torch.dtype] | None:
    """(what `run` returns for a copy of the model on meta, the dtype that the copy computes in); None if it cannot run."""
    # Grouped products of experts have a meta kernel for bfloat16 alone.
    for dtype in (compute_dtype, torch.bfloat16):
        try:
            meta = _copy_on_meta(model, dtype)
            with hf_private.attention_implementation(meta, _COUNTING):
                return run(meta), dtype
        except Exception:  # the model's own code runs here, and may do what meta tensors do not support
            continue
    return None


def _count(meta: PreTrainedModel, num_tokens: int) -> dict[torch.dtype, int]:
    """{dtype: bytes} of what autograd keeps, each storage once, without the parameters."""
    parameters = {param.untyped_storage()._cdata for param in meta.parameters()}
    kept: dict[int, tuple[torch.dtype, int]] = {}
    keep_alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and tensor.dim():
            kept[storage._cdata] = (tensor.dtype, storage.nbytes())
            keep_alive.append(tensor)  # an address that is freed would be counted as another's
        return tensor

    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    positions = torch.arange(num_tokens, device="meta")[None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        meta.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    totals: dict[torch.dtype, int] = {}
    for dtype, size in kept.values():
        totals[dtype] = totals.get(dtype, 0) + size
    return totals


@lru_cache(maxsize=8)
def _copy_on_meta(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy that lies on meta with its buffers, in the dtype that blocks compute in."""
    copy = deepcopy(model)
    set_param_dtype(copy, dtype)
    replace_buffers(copy.modules(), lambda buffer: buffer.to("meta"))
    return copy.train()


def _from_sizes(model: PreTrainedModel, dtype: torch.dtype, num_tokens: int) -> int:
    """What a block of the usual kind keeps: norms, projections, attention, and a gated MLP for each chosen expert."""
    text: Any = model.config.get_text_config()
    hidden = int(text.hidden_size)
    chosen = experts_per_token(text) or 1
    of_experts = getattr(text, "moe_intermediate_size", None) if num_experts(text) else None
    inner = int(of_experts or getattr(text, "intermediate_size", None) or 4 * hidden)
    each = 12 * hidden + 4 * chosen * inner
    return int(text.num_hidden_layers) * each * num_tokens * dtype.itemsize
