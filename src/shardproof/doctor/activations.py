"""How much a forward pass keeps for the backward pass, counted on the meta device: nothing is allocated or computed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from shardproof.model import hf_private
from shardproof.model.families import experts_per_token, num_experts
from shardproof.model.replace import replace_buffers
from shardproof.model.skeleton import set_param_dtype

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
    out = _Attention.apply(query, key, value)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_COUNTING, _counting_attention)


def saved_bytes(model: PreTrainedModel, compute_dtype: torch.dtype, num_tokens: int) -> tuple[int, bool]:
    """(bytes that a forward over that many tokens keeps, whether they were counted).

    A model that cannot run on the meta device, such as one whose routing decides shapes, is estimated from its sizes.
    """
    # Grouped products of experts have a meta kernel for bfloat16 alone.
    for dtype in (compute_dtype, torch.bfloat16):
        try:
            by_dtype = _count(_on_meta(model, dtype), num_tokens)
        except Exception:  # the model's own code runs here, and may do what meta tensors do not support
            continue
        scale = compute_dtype.itemsize // dtype.itemsize
        return sum(size * (scale if kind == dtype else 1) for kind, size in by_dtype.items()), True
    return _from_sizes(model, compute_dtype, num_tokens), False


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
    with (
        hf_private.attention_implementation(meta, _COUNTING),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        meta.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    totals: dict[torch.dtype, int] = {}
    for dtype, size in kept.values():
        totals[dtype] = totals.get(dtype, 0) + size
    return totals


def _on_meta(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
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
