"""Experts as grouped matmuls with the least copying, plugged in through transformers' ExpertsInterface.

Each token's hidden state is read once per expert that it is routed to, sorted by expert; the router's weight is applied
in the gate's kernel, and the return to token order is part of the sum over a token's experts. The backward pass keeps the experts'
inner activations and gathers tokens again instead of keeping eight copies of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel

from shardproof.bounds import largest, within
from shardproof.model import hf_private
from shardproof.model.compiling import can_compile, fused

logger = logging.getLogger(__name__)

GROUPED = "shardproof_grouped"
_PROBED = 64  # rows on which kernels are compared
_MAX_ERROR = 0.01  # as a share of the norm


def grouped_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The output of a layer's experts for [tokens, hidden]."""
    weights = (module.gate_up_proj, module.down_proj)
    return _GroupedExperts.apply(hidden_states, *weights, top_k_index, top_k_weights)


hf_private.register_experts(GROUPED, grouped_experts)


def use_grouped_experts(model: PreTrainedModel) -> None:
    """Let the model run its experts through `grouped_experts`, if that is what its experts compute."""
    experts = hf_private.expert_modules(model)
    if experts and all(map(hf_private.is_plain_gated, experts)):
        hf_private.set_experts_implementation(experts, GROUPED)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [tokens, hidden]
        gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
        down: torch.Tensor,  # [experts, hidden, inner]
        chosen: torch.Tensor,  # [tokens, k]
        scores: torch.Tensor,  # [tokens, k]
    ) -> torch.Tensor:
        order, place, ends = sort_by_expert(chosen, len(gate_up))
        tokens = order // chosen.shape[1]
        score = scores.reshape(-1).index_select(0, order)
        gate, _, sum_by_token = _functions(hidden, down.shape[-1])
        inner = grouped_mm(hidden.index_select(0, tokens), gate_up.mT, offs=ends)
        out = grouped_mm(gate(inner, score), down.mT, offs=ends)
        ctx.save_for_backward(hidden, gate_up, down, inner, score, tokens, place, ends)
        return sum_by_token(out, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, gate_up, down, inner, score, tokens, place, ends = ctx.saved_tensors
        _, differentiate_gate, sum_by_token = _functions(hidden, down.shape[-1])
        grad_out = grad.index_select(0, tokens)
        grad_gated = grouped_mm(grad_out, down, offs=ends)
        gated, grad_inner, grad_score = differentiate_gate(grad_gated, inner, score)
        grad_down = grouped_mm(grad_out.t(), gated, offs=ends) if ctx.needs_input_grad[2] else None
        del grad_out, grad_gated, gated
        grad_gate_up = None
        if ctx.needs_input_grad[1]:
            grad_gate_up = grouped_mm(grad_inner.t(), hidden.index_select(0, tokens), offs=ends)
        grad_hidden = None
        if ctx.needs_input_grad[0]:
            grad_hidden = sum_by_token(grouped_mm(grad_inner, gate_up, offs=ends), place)
        grad_scores = grad_score.index_select(0, place.reshape(-1)).view_as(place)
        return grad_hidden, grad_gate_up, grad_down, None, grad_scores


def _functions(hidden: torch.Tensor, inner: int) -> tuple[Callable[..., Any], ...]:
    """(gate, its gradient, sum by token): kernels of our own where they are found right, else compiled."""
    plain = (_gate, _differentiate_gate, _sum_by_token)
    if can_compile(hidden.device, hidden.dtype):
        kind = (hidden.device, hidden.dtype, inner)
        if kind not in _verdicts:
            _verdicts[kind] = _are_right(hidden, inner, plain)
        if _verdicts[kind]:
            return _kernels()
    return tuple(fused(function, hidden) for function in plain)


_verdicts: dict[tuple[Any, ...], bool] = {}  # on the kernels, by the kind of experts


def _kernels() -> tuple[Callable[..., Any], ...]:
    from shardproof.model import expert_kernels  # Triton is not everywhere

    return expert_kernels.gate, expert_kernels.gate_backward, expert_kernels.sum_by_token


def _are_right(hidden: torch.Tensor, inner: int, plain: tuple[Callable[..., Any], ...]) -> bool:
    """Whether the kernels say of random states what plain operations say."""
    draw = torch.Generator(hidden.device).manual_seed(0)
    states, grad, score, rows = (
        torch.randn(size, generator=draw, device=hidden.device).to(hidden.dtype)
        for size in ((_PROBED, 2 * inner), (_PROBED, inner), (_PROBED,), (_PROBED, hidden.shape[-1]))
    )
    place = torch.arange(_PROBED, device=hidden.device).flip(0).view(-1, 2)
    given = ((states, score), (grad, states, score), (rows, place))
    problem = None
    try:
        for function, kernel, args in zip(plain, _kernels(), given, strict=True):
            wanted, found = function(*args), kernel(*args)
            pairs = [(wanted, found)] if isinstance(wanted, torch.Tensor) else zip(wanted, found, strict=True)
            errors = [
                float((one.float() - other.float()).norm() / one.float().norm()) for one, other in pairs
            ]
            if not within(largest(errors), _MAX_ERROR):
                problem = f"{function.__name__} differs by {errors}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel's compiler and launcher raise
        problem = f"they failed ({type(error).__name__}: {error})"
    if problem is not None:
        logger.warning("experts run without our own kernels: %s", problem)
    return problem is None


def sort_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(visits in the order of their experts, each visit's place in that order [tokens, k], each expert's end)."""
    experts, order = torch.sort(chosen.reshape(-1).to(torch.int16), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(num_experts, dtype=torch.int16, device=order.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return order, place.view_as(chosen), ends


def _gate(inner: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * score, rounded once."""
    gate, up = inner.float().chunk(2, dim=-1)
    return (nn.functional.silu(gate) * up * score.float()[:, None]).to(inner.dtype)


def _differentiate_gate(
    grad: torch.Tensor, inner: torch.Tensor, score: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what `_gate` gave, the gradient of its input, the gradient of the scores)."""
    gate, up = inner.float().chunk(2, dim=-1)
    weight, upstream = score.float()[:, None], grad.float()
    sigmoid = torch.sigmoid(gate)
    active = gate * sigmoid
    gated = active * up
    weighted = upstream * weight
    grad_gate = weighted * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_inner = torch.cat([grad_gate, weighted * active], dim=-1)
    grad_score = (upstream * gated).sum(-1)
    return (gated * weight).to(inner.dtype), grad_inner.to(inner.dtype), grad_score.to(score.dtype)


def _sum_by_token(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows, found through `place`, in float32."""
    return rows[place].sum(1, dtype=torch.float32).to(rows.dtype)
