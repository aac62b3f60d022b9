"""Exact mode's attention and MLP for blocks that are built as most are, with few kernels between the matmuls; on CUDA.

They compute what the modules' own forwards compute, from the same parameters; other blocks run as they are written. The
backward passes are ordinary operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from shardproof.model import hf_private
from shardproof.model.adjacent import joined_linear
from shardproof.model.compiling import fused

_ATTENTIONS = (LlamaAttention, Qwen2Attention, Qwen3Attention)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def use_exact_blocks(model: PreTrainedModel) -> None:
    """Replace the forwards of plain norms, attentions and MLPs, whose linear layers and cores are exact already."""
    for module in model.modules():
        if is_plain_norm(module):
            module.forward = partial(_norm, module)
        elif _is_plain_attention(module):
            module.forward = partial(_attention, module)
        elif _same_code(module, LlamaMLP) and hf_private.is_silu(module.act_fn):
            module.forward = partial(_mlp, module)


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module computes what Llama's norm does."""
    return hasattr(module, "variance_epsilon") and _same_code(module, LlamaRMSNorm)


def _is_plain_attention(module: Any) -> bool:
    if not any(_same_code(module, kind) for kind in _ATTENTIONS):
        return False
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    layers = [getattr(module, name) for name in _PROJECTIONS]
    width: int = module.head_dim
    return (
        all(type(each) is nn.Linear for each in layers)
        and all(is_plain_norm(each) and each.weight.shape[-1:] in ((width,), (0,)) for each in norms)
        and width & (width - 1) == 0
    )


def _same_code(module: nn.Module, kind: type[nn.Module]) -> bool:
    own, plain = (getattr(each.forward, "__code__", None) for each in (type(module), kind))
    return own is not None and (own.co_code, own.co_names) == (plain.co_code, plain.co_names)


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _Norm.apply(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    gated, up = _project(x, [module.gate_proj, module.up_proj])
    return module.down_proj(_Gate.apply(gated, up))


def _attention(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape, width = hidden_states.shape[:-1], module.head_dim
    states = _project(hidden_states, [module.q_proj, module.k_proj, module.v_proj])
    query, key, value = (each.view(*shape, -1, width) for each in states)
    cos, sin = position_embeddings
    query, key = (
        _Rotated.apply(each, _head_norm(module, name), cos, sin, _eps(module, name)).transpose(1, 2)
        for each, name in ((query, "q_norm"), (key, "k_norm"))
    )
    value = value.transpose(1, 2)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    attend = hf_private.attention_function(module)
    window = getattr(module, "sliding_window", None)
    options = {"dropout": 0.0, "scaling": module.scaling, "sliding_window": window}
    out, weights = attend(module, query, key, value, attention_mask, **options, **kwargs)
    return module.o_proj(out.reshape(*shape, -1).contiguous()), weights


def _head_norm(module: Any, name: str) -> torch.Tensor | None:
    return getattr(module, name).weight if hasattr(module, name) else None


def _eps(module: Any, name: str) -> float:
    return getattr(module, name).variance_epsilon if hasattr(module, name) else 0.0


def _project(x: torch.Tensor, layers: list[Any]) -> list[torch.Tensor]:
    """The outputs of linear layers that read the same: by one matmul where their weights lie side by side in memory."""
    weights = [each.weight for each in layers]
    biases = [each.bias for each in layers] if layers[0].bias is not None else None
    joined = None if torch.is_grad_enabled() else joined_linear(weights, biases)
    if joined is None:
        return [each(x) for each in layers]
    return list(linear(x, *joined).split([len(weight) for weight in weights], -1))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from shardproof.model import exact_block_kernels as kernels  # Triton is not everywhere

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernels.norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x, for_weight = fused(_differentiate_norm, x)(grad, x, weight, ctx.eps)
        return grad_x, for_weight.flatten(0, -2).sum(0), None


def _differentiate_norm(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of an RMS norm's input, each row's part of the gradient of its weight)."""
    states = x.float()
    scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    normed, upstream = states * scale, (grad * weight).float()
    found = scale * (upstream - normed * (upstream * normed).mean(-1, keepdim=True))
    return found.to(x.dtype), grad * normed.to(x.dtype)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [rows, tokens, heads, width]
        weight: torch.Tensor | None,
        cos: torch.Tensor,  # [rows or 1, tokens, width]
        sin: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        from shardproof.model import exact_block_kernels as kernels  # as above

        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        cos, sin = (each.expand(*x.shape[:2], -1).reshape(-1, x.shape[-1]) for each in (cos, sin))
        return kernels.rotate(x.flatten(0, 1), weight, cos, sin, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, cos, sin = ctx.saved_tensors
        if weight is None:
            return fused(_differentiate_turn, x)(grad, cos, sin), None, None, None, None
        grad_x, for_weight = fused(_differentiate_rotation, x)(grad, x, weight, cos, sin, ctx.eps)
        return grad_x, for_weight.flatten(0, -2).sum(0), None, None, None


def _differentiate_turn(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient of what a rotary embedding has turned, for [rows, tokens, heads, width]."""
    first, second = (grad * sin.unsqueeze(2)).chunk(2, -1)
    return grad * cos.unsqueeze(2) + torch.cat([second, -first], -1)


def _differentiate_rotation(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _differentiate_norm(_differentiate_turn(grad, cos, sin), x, weight, eps)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        from shardproof.model import exact_block_kernels as kernels  # as above

        ctx.save_for_backward(gated, up)
        return kernels.gate(gated.flatten(0, -2), up.flatten(0, -2)).view(gated.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        gated, up = ctx.saved_tensors
        return fused(_differentiate_gate, gated)(grad, gated, up)


def _differentiate_gate(
    grad: torch.Tensor, gated: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, upstream = gated.float(), grad.float()
    sigmoid = torch.sigmoid(x)
    for_gate = upstream * up.float() * sigmoid * (1.0 + x * (1.0 - sigmoid))
    return for_gate.to(gated.dtype), (upstream * x * sigmoid).to(up.dtype)
