"""Exact mode: a model's operations replaced by ones whose result for a token depends on that token's sequence alone.

Ordinary matmuls, reductions and attention add up in an order that depends on how many rows they get. So an engine that
decodes eight rows, one token each, and a trainer that reads thousands of tokens at once get different last bits for the
same token. Inside an exact model's forward, linear layers, reductions, activations and attention are those of
`exact_cpu` and `exact_kernels`: fixed tiles, a fixed order of addition. Gradients are those of the ordinary operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shardproof.model import exact_cpu, hf_private
from shardproof.model.exact_blocks import use_exact_blocks
from shardproof.model.experts import grouped_experts

EXPERTS = "shardproof_exact_experts"
_EAGER_EXPERTS = "eager"  # transformers' own loop over experts: each expert's tokens go through linear layers
_state = threading.local()


def active() -> bool:
    """Whether an exact model's forward is running in this thread."""
    return getattr(_state, "active", False)


@contextmanager
def exactly() -> Iterator[None]:
    """Operations inside the block are exact ones."""
    if active():
        yield
        return
    _state.active = True
    try:
        with _Exact():
            yield
    finally:
        _state.active = False


def make_exact(model: PreTrainedModel, device: torch.device, *roots: nn.Module) -> None:
    """Let the model compute exactly, whoever calls it; `roots` are modules around it whose forward uses its parameters.

    Blocks are exact by themselves too: a recompute in the backward pass calls them alone.
    """
    classes = hf_private.block_classes(model)
    blocks = [m for m in model.modules() if any(each.__name__ in classes for each in type(m).__mro__)]
    for module in dict.fromkeys((*roots, model, model.base_model, *blocks)):
        module.forward = _exact_forward(module.forward)
    if experts := hf_private.expert_modules(model, with_activation=False):
        plain = device.type == "cuda" and all(
            hasattr(each, "act_fn") and hf_private.is_plain_gated(each) for each in experts
        )
        hf_private.set_experts_implementation(experts, EXPERTS if plain else _EAGER_EXPERTS)
    if device.type == "cuda":
        use_exact_blocks(model)


def is_exact(model: nn.Module) -> bool:
    """Whether `make_exact` was called for a model."""
    return hasattr(vars(model).get("forward"), "is_exact")


def _exact_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with exactly():
            return forward(*args, **kwargs)

    run.is_exact = True  # type: ignore[attr-defined]
    return run


def operations(device: torch.device) -> ModuleType:
    """The module with a device's exact operations."""
    if device.type != "cuda":
        return exact_cpu
    from shardproof.model import exact_kernels  # Triton is not everywhere

    return exact_kernels


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each row's token, log of the row's sum of exponentials) in float32, for [rows, vocabulary].

    Engine and trainer both call it, so equal logits give equal log-probs. It has no gradient: see `scored_tokens`.
    """
    return cast(Any, operations(logits.device)).token_logprobs(logits, tokens, temperature)


def scored_tokens(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """The log-probs of `token_logprobs`, with gradients."""
    return _Scored.apply(logits, tokens, temperature)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        logps, norms = token_logprobs(logits, tokens, temperature)
        ctx.save_for_backward(logits, tokens, norms)
        ctx.temperature = temperature
        return logps

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        logits, tokens, norms = ctx.saved_tensors
        probs = torch.exp(logits.float() / ctx.temperature - norms[:, None])
        found = probs.mul_(-grad[:, None]).scatter_add_(1, tokens[:, None], grad[:, None])
        return (found / ctx.temperature).to(logits.dtype), None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        found: torch.Tensor = cast(Any, operations(x.device)).linear(rows, weight, bias)
        return found.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if len(ctx.needs_input_grad) > 2 and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return cast(Any, operations(inputs[0].device)).experts(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, gate_up, down, chosen, scores = ctx.saved_tensors
        wanted = [each.detach().requires_grad_() for each in (hidden, gate_up, down, scores)]
        with torch.enable_grad():
            weights: Any = SimpleNamespace(gate_up_proj=wanted[1], down_proj=wanted[2])
            out = grouped_experts(weights, wanted[0], chosen, wanted[3])
        for_hidden, for_gate_up, for_down, for_scores = torch.autograd.grad(out, wanted, grad)
        return for_hidden, for_gate_up, for_down, None, for_scores


def _exact_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return _Experts.apply(hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights)


hf_private.register_experts(EXPERTS, _exact_experts)


class _RowSums(torch.autograd.Function):
    """Sums of the last dimension over a divisor, on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: float, keepdim: bool) -> torch.Tensor:
        from shardproof.model import exact_kernels

        ctx.facts = (x.shape, divisor, keepdim)
        found = exact_kernels.row_sums(x, divisor, x.dtype)
        return found.unsqueeze(-1) if keepdim else found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        shape, divisor, keepdim = ctx.facts
        return (grad if keepdim else grad.unsqueeze(-1)).expand(shape) / divisor, None, None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _Linear.apply(x, weight, bias)


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    if options or bias.ndim != 1:
        return torch.addmm(bias, x, weight, **options)
    return _Linear.apply(x, weight.t(), bias)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.ndim > 1 and right.ndim > 1 and left.shape[-1] == 1:
        return left * right  # of angles: one product per element, nothing to add up
    if right.ndim == 2 and left.ndim > 1:
        return _Linear.apply(left, right.t())
    return torch.matmul(left, right)


def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    if not _is_last(x, dim) or options:
        return torch.sum(x, dim, keepdim, **options) if dim is not None else torch.sum(x, **options)
    return _RowSums.apply(x, 1.0, keepdim)


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    if not _is_last(x, dim) or options:
        return torch.mean(x, dim, keepdim, **options) if dim is not None else torch.mean(x, **options)
    return _RowSums.apply(x, float(x.shape[-1]), keepdim)


def _is_last(x: torch.Tensor, dim: Any) -> bool:
    """Whether a reduction on CUDA is one of the last dimension."""
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return x.is_cuda and x.is_floating_point() and x.ndim > 1 and tuple(dims) in ((-1,), (x.ndim - 1,))


def _on_cpu(exact: Callable[..., Any], ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """CUDA computes each element the same way wherever it lies."""

    def chosen(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (ordinary if x.is_cuda else exact)(x, *args, **kwargs)

    return chosen


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x) if x.is_cuda or x.dtype == torch.float32 else exact_cpu.rsqrt(x)


_F = nn.functional
_silu, _gelu = _on_cpu(exact_cpu.silu, _F.silu), _on_cpu(exact_cpu.gelu, _F.gelu)
_sigmoid = _on_cpu(exact_cpu.sigmoid, torch.sigmoid)
_REPLACED: dict[Any, Callable[..., Any]] = {
    _F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.sum, torch.Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, torch.Tensor.mean), _mean),
    **dict.fromkeys((torch.rsqrt, torch.Tensor.rsqrt), _rsqrt),
    **dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid, _F.sigmoid), _sigmoid),
    _F.silu: _silu,
    _F.gelu: _gelu,
}


class _Exact(TorchFunctionMode):
    """Inside, operations that depend on the batch are replaced. The replacements themselves run as they are written."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))
