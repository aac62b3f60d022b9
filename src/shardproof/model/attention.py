"""Attention over packed sequences, plugged in through transformers' AttentionInterface.

One function serves every family that calls attention through that interface: flash attention over all sequences at
once on CUDA, SDPA sequence by sequence elsewhere, and plain arithmetic for arguments that neither supports (sinks,
soft caps). Any other argument is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shardproof.errors import fail
from shardproof.model import cudnn_attention
from shardproof.model.packing import Packing

PACKED = "shardproof_packed"
# Keywords that models hand to every attention function and that do not change what packed causal attention computes.
_WITHOUT_EFFECT = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "head_mask", "layer_idx", "layer_head_mask",
}  # fmt: skip


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    attend: Callable[..., torch.Tensor] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence: [1, heads, tokens, dim] to [1, tokens, heads, dim].

    `attend` computes what `attend_packed` does, in another way.

    Collective: the sequence-parallel group, when the packing has one.
    """
    if packing is None:
        raise fail(
            "T303",
            "attention",
            f"{type(module).__name__} does not pass keyword arguments on to its attention.",
        )
    _refuse_unknown(module, attention_mask, is_causal, dropout, others)
    exchange = packing.exchange
    if exchange is not None:
        key, value = (_repeat_heads(x, lcm(x.shape[1], exchange.size)) for x in (key, value))
        query, key, value = (exchange.split_heads(x) for x in (query, key, value))
        if s_aux is not None:
            s_aux = s_aux.chunk(exchange.size)[exchange.rank]
    # The ways of `attend_packed` stand here once more: in a function that is called from here, dynamo goes wrong where it
    # has to interrupt a compiled graph.
    if attend is not None:
        out = attend(query, key, value, packing, scaling, sliding_window, softcap, s_aux)
    elif s_aux is not None or softcap is not None:
        out = _by_sequence(_plain, query, key, value, packing, scaling, sliding_window, softcap, s_aux)
    elif _flash_fits(query, value):
        out = _flash(query, key, value, packing, scaling, sliding_window)
    else:
        out = _by_sequence(_sdpa, query, key, value, packing, scaling, sliding_window)
    if exchange is not None:
        out = exchange.split_tokens(out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention inside each packed sequence by the fastest kernel that knows its arguments; [1, heads, tokens, dim]."""
    if sinks is not None or softcap is not None:
        return _by_sequence(_plain, query, key, value, packing, scaling, window, softcap, sinks)
    if _flash_fits(query, value):
        return _flash(query, key, value, packing, scaling, window)
    return _by_sequence(_sdpa, query, key, value, packing, scaling, window)


def _refuse_unknown(
    module: nn.Module,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    dropout: float,
    others: dict[str, Any],
) -> None:
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if dropout:
        unknown.append(f"dropout={dropout}")
    if unknown:
        message = (
            f"{type(module).__name__} asks for {', '.join(unknown)}, which packed attention does not support."
        )
        raise fail("T303", "attention", message)


def _repeat_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    repeats = num_heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


@torch.compiler.disable  # it looks at lengths: compiled, it would be compiled again for every batch
def _by_sequence(
    attend: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, *args: Any
) -> torch.Tensor:
    """`attend` on each sequence alone, those of one length together: nothing is padded, nothing is tokens x tokens."""
    groups = packing.by_length()
    if len(groups) == len(packing.lengths):
        parts = [
            attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], *args) for a, b in packing.spans()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    if packing.ordered:
        return _by_length(attend, query[0], key[0], value[0], groups, *args)[None]
    order, back = packing.order()
    query, key, value = (states[0].index_select(1, order) for states in (query, key, value))
    return _by_length(attend, query, key, value, groups, *args).index_select(1, back)[None]


def _by_length(
    attend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: dict[int, int],
    *args: Any,
) -> torch.Tensor:
    """`attend` on [heads, tokens, size] in which sequences of one length are side by side."""
    parts, at = [], 0
    for length, number in groups.items():
        size = length * number
        batch = (
            states[:, at : at + size].unflatten(1, (number, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        parts.append(attend(*batch, *args).transpose(0, 1).flatten(1, 2))
        at += size
    return torch.cat(parts, dim=1)


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[length, length]: which keys each query may see."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    length = query.shape[2]
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    if window is None or window >= length:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    mask = _visible(length, window, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in plain operations: soft caps bound the scores, sinks take probability without a value."""
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    scores = (query @ key.transpose(2, 3)).float() * (
        scaling if scaling is not None else query.shape[-1] ** -0.5
    )
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(query.shape[2], window, query.device), float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probs = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(scores, dim=-1)
    return probs.to(value.dtype) @ value


def _flash_fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Flash attention over all sequences in one launch: cuDNN's or flash-attn's if installed, else torch's own."""
    window_size = (-1, 0) if window is None else (window - 1, 0)
    # Not states[0]: its gradient would be copied into zeros.
    q, k, v = (states.squeeze(0).transpose(0, 1).contiguous() for states in (query, key, value))
    if packing.uses_cudnn and cudnn_attention.fits(q, v, window):
        borders, longest = packing.filled_borders, packing.rounded_length
        return cudnn_attention.attend(q, k, v, borders, longest, scaling).transpose(0, 1).unsqueeze(0)
    borders, longest = packing.cu_seqlens, packing.max_length
    options: dict[str, Any]
    if _flash_attn is not None:
        options = {"softmax_scale": scaling, "causal": True, "window_size": window_size}
        out = _flash_attn(q, k, v, borders, borders, longest, longest, **options)
    else:
        options = {"scale": scaling, "window_size": window_size, **_GROUPED}
        out = varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    return out.transpose(0, 1).unsqueeze(0)  # type: ignore[union-attr]


try:
    from flash_attn import flash_attn_varlen_func as _flash_attn
except ImportError:
    _flash_attn = None

# The kernel reads grouped keys and values as they are; from torch 2.12 on it wants to be told so.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
