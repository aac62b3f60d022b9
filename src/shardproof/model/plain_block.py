"""Plain transformer blocks, trained through kernels of our own in place of what torch.compile would make of them.

A plain block has RMS norms, rotary attention and a gated MLP or experts, as most families do. Its kernels compile in about
two seconds, where torch.compile takes some twenty before the first update. Two functions with gradients stand around
attention; they keep what a backward pass cannot compute again in passing: no normed states, and no gated ones.

The first forward pass without gradients compares a block, forward and backward, with the block as it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from shardproof.bounds import within
from shardproof.model import hf_private
from shardproof.model.attention import packed_attention
from shardproof.model.packing import Packing

logger = logging.getLogger(__name__)

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_WIDTHS = (16, 32, 64, 128, 256)  # of heads
_TOKENS = 256  # in a comparison
# How far outputs and gradients may be off, as shares of their norms. Rounding to 16 bits gives about 0.005; with experts
# it may also send a token to another one.
_LIMIT, _LIMIT_OF_EXPERTS = 0.03, 0.15


def is_plain(block: Any) -> bool:
    """Whether the kernels of training can run a block."""
    return (
        has_plain_parts(block)
        and not getattr(block.self_attn, "attention_dropout", 0.0)
        and not hasattr(block, "residual_multiplier")
        and block.self_attn.head_dim in _WIDTHS
    )


def has_plain_parts(block: Any) -> bool:
    """Whether a block is built of the parts that are known here, its weights as plain linear modules."""
    if set(dict(block.named_children())) != _BLOCK:
        return False
    attention, mlp = block.self_attn, block.mlp
    names = set(dict(attention.named_children()))
    if names not in (PROJECTIONS, PROJECTIONS | _HEAD_NORMS):
        return False
    norms = [block.input_layernorm, block.post_attention_layernorm]
    head_norms = [getattr(attention, name) for name in names & _HEAD_NORMS]
    width = getattr(attention, "head_dim", 0)
    return (
        all(type(getattr(attention, name)) is nn.Linear for name in PROJECTIONS)
        and attention.o_proj.bias is None
        and not list(attention.parameters(recurse=False))  # such as sinks
        and all(hasattr(norm, "variance_epsilon") for norm in norms + head_norms)
        and all(norm.weight.shape == (width,) for norm in head_norms)
        and width > 0
        and (is_plain_mlp(mlp) or bool(hf_private.expert_modules(mlp)))
    )


def is_plain_mlp(mlp: Any) -> bool:
    """Whether an MLP is down(silu(gate(x)) * up(x)) of plain linear modules."""
    if set(dict(mlp.named_children())) != _MLP or not hf_private.is_silu(mlp.act_fn):
        return False
    return all(
        type(each) is nn.Linear and each.bias is None for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )


class _Switch:
    """Whether blocks run as they are written, for a comparison; and which kinds of blocks were compared, how it ended."""

    as_written = False
    verdicts: dict[Any, bool] = {}  # noqa: RUF012


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, plain blocks run as their families wrote them."""
    before, _Switch.as_written = _Switch.as_written, True
    try:
        yield
    finally:
        _Switch.as_written = before


def verdicts() -> dict[Any, bool]:
    """Which kinds of blocks were compared in this process, and whether our kernels were found right for them."""
    return dict(_Switch.verdicts)


class PlainForward:
    """Stands in a block's `forward`: our kernels where they fit and were found right, else `fallback`."""

    def __init__(self, block: nn.Module, written: Callable[..., Any], fallback: Callable[..., Any]):
        update_wrapper(self, written)
        self._block: Any = block
        self._written, self._fallback = written, fallback
        attention: Any = block.self_attn
        self._kind = (type(block), type(block.mlp), attention.head_dim, attention.q_proj.weight.shape)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _Switch.as_written:
            return self._written(hidden_states, *args, **kwargs)
        if args or not self._fits(hidden_states, kwargs):
            return self._fallback(hidden_states, *args, **kwargs)
        verdict = _Switch.verdicts.get(self._kind)
        if verdict is None and not torch.is_grad_enabled():
            verdict = _Switch.verdicts[self._kind] = self._is_right(hidden_states, kwargs)
        if not verdict:
            return self._fallback(hidden_states, **kwargs)
        return run_block(self._block, hidden_states, **kwargs)

    def _fits(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        attention = self._block.self_attn
        return (
            runs_on(hidden)
            and hf_private.attention_function(attention) is packed_attention
            and hidden.shape[0] == 1
            and kwargs.get("past_key_values") is None
            and kwargs.get("attention_mask") is None
            and kwargs.get("position_embeddings") is not None
            and kwargs["position_embeddings"][0].shape[-1] == attention.head_dim
            and attention.q_proj.weight.dtype == hidden.dtype
        )

    def _is_right(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether the kernels say what the block says, about its output and all gradients."""
        try:
            problem = compare(self._block, self._written, hidden, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a kernel's compiler and launcher raise
            problem = f"they failed ({type(error).__name__}: {error})"
        if problem is not None:
            logger.warning("training without our own kernels for blocks: %s", problem)
        return problem is None


def runs_on(hidden: torch.Tensor) -> bool:
    """Whether there are kernels for these states."""
    return hidden.device.type == "cuda" and hidden.dtype in (torch.bfloat16, torch.float16)


def compare(
    block: Any, written: Callable[..., Any], hidden: torch.Tensor, kwargs: dict[str, Any]
) -> str | None:
    """What is wrong with our kernels for a block, given states and keywords of a forward pass; None if nothing is."""
    tokens = min(hidden.shape[1], _TOKENS)
    lengths = [tokens // 3, tokens - tokens // 3] if tokens > 2 else [tokens]
    given = kwargs | {
        "packing": Packing(lengths, hidden.device),
        "position_ids": None,
        "position_embeddings": tuple(each[:, :tokens] for each in kwargs["position_embeddings"]),
    }
    experts = {id(param) for module in hf_private.expert_modules(block) for param in module.parameters()}
    params = [
        (name, param)
        for name, param in block.named_parameters()
        if param.requires_grad and id(param) not in experts
    ]
    start = hidden[:, :tokens].detach()
    upstream = torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).to(start)
    found = []
    # As written: parts of it may be compiled, but not for this.
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        for forward in (written, lambda states, **given: run_block(block, states, **given)):
            states = start.clone().requires_grad_()
            out = forward(states, **given)
            out = out[0] if isinstance(out, tuple) else out
            wanted = [states, *(param for _, param in params)]
            grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
            found.append([out.detach() - start, *grads])
    limit = _LIMIT_OF_EXPERTS if experts else _LIMIT
    names = [
        "the output",
        "the gradient of hidden states",
        *(f"the gradient of {name}" for name, _ in params),
    ]
    for name, truth, guess in zip(names, *found, strict=True):
        if truth is None or guess is None:
            if truth is not guess:
                return f"{name} is missing"
            continue
        error = float((guess.float() - truth.float()).norm() / truth.float().norm())
        if not within(error, limit) and float(truth.float().norm()) > 0:
            return f"{name} differs by {error:.3g} of its size"
    return None


def run_block(
    block: Any, hidden_states: torch.Tensor, *, position_embeddings: Any, **kwargs: Any
) -> torch.Tensor:
    """A plain block's output for packed states [1, tokens, hidden]."""
    attention, mlp = block.self_attn, block.mlp
    cos, sin = (each[0].contiguous() for each in position_embeddings)
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    residual, *states = _Inward.apply(
        hidden_states.flatten(0, 1), block.input_layernorm.weight, *(each.weight for each in projections),
        *(each.bias for each in projections), *((each.weight for each in norms) if norms else (None, None)), cos, sin,
        block.input_layernorm.variance_epsilon, norms[0].variance_epsilon if norms else 0.0,
    )  # fmt: skip
    query, key, value = (each.view(1, len(each), -1, attention.head_dim).transpose(1, 2) for each in states)
    for name in ("attention_mask", "past_key_values"):
        kwargs.pop(name, None)
    attended, _ = packed_attention(
        attention, query, key, value, None, scaling=attention.scaling,
        sliding_window=getattr(attention, "sliding_window", None), **kwargs,
    )  # fmt: skip
    attended = attended.reshape(len(residual), -1)
    after = block.post_attention_layernorm
    if is_plain_mlp(mlp):
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        out = _Outward.apply(
            residual, attended, attention.o_proj.weight, after.weight, *weights, after.variance_epsilon
        )
        return out[None]
    residual, normed = _Between.apply(
        residual, attended, attention.o_proj.weight, after.weight, after.variance_epsilon
    )
    out = mlp(normed[None])
    return residual[None] + (out[0] if isinstance(out, tuple) else out)


class _Inward(torch.autograd.Function):
    """hidden -> (hidden, queries, keys, values): norm, projections, norms of heads, rotation.

    The hidden states come out again for the residual: their gradient is added in the norm's own kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, norm: torch.Tensor,
        wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, bq: Any, bk: Any, bv: Any,
        q_norm: Any, k_norm: Any, cos: torch.Tensor, sin: torch.Tensor, eps: float, head_eps: float,
    ) -> Any:  # fmt: skip
        from shardproof.model import block_kernels as kernels  # Triton is not everywhere

        normed = kernels.norm(hidden, norm, eps)
        query, key, value = linear(normed, wq, bq), linear(normed, wk, bk), linear(normed, wv, bv)
        weights = (q_norm, k_norm) if q_norm is not None else None
        rotated = kernels.rotate(query, key, (cos, sin), weights, head_eps)
        kept = (query, key) if weights is not None else (None, None)
        ctx.save_for_backward(hidden, norm, wq, wk, wv, *kept, q_norm, k_norm, cos, sin)
        ctx.eps, ctx.head_eps, ctx.has_bias = eps, head_eps, bq is not None
        return hidden.view_as(hidden), *rotated, value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        from shardproof.model import block_kernels as kernels

        hidden, norm, wq, wk, wv, query, key, q_norm, k_norm, cos, sin = ctx.saved_tensors
        residual, *states = (grad.contiguous() for grad in grads)
        weights = (q_norm, k_norm) if q_norm is not None else None
        raw = (query, key) if weights is not None else (states[0], states[1])
        of_query, of_key, grad_q_norm, grad_k_norm = kernels.rotate_backward(
            raw[0], raw[1], (cos, sin), weights, ctx.head_eps, (states[0], states[1])
        )
        projected = (of_query, of_key, states[2])
        grad = projected[0] @ wq
        grad.addmm_(projected[1], wk).addmm_(projected[2], wv)
        grad_hidden, grad_norm, normed = kernels.norm_backward(hidden, norm, ctx.eps, grad, residual)
        of_weights = [
            each.t() @ normed if ctx.needs_input_grad[2 + at] else None for at, each in enumerate(projected)
        ]
        of_biases: list[Any] = [None] * 3
        if ctx.has_bias:
            of_biases = [each.sum(0, dtype=torch.float32).to(each.dtype) for each in projected]
        return grad_hidden, grad_norm, *of_weights, *of_biases, grad_q_norm, grad_k_norm, *[None] * 4


class _Outward(torch.autograd.Function):
    """(hidden, attended) -> hidden: output projection, residual, norm, gated MLP, residual."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, attended: torch.Tensor, wo: torch.Tensor, norm: torch.Tensor,
        w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, eps: float,
    ) -> Any:  # fmt: skip
        from shardproof.model import block_kernels as kernels

        hidden = torch.addmm(residual, attended, wo.t())
        normed = kernels.norm(hidden, norm, eps)
        gate, up = linear(normed, w_gate), linear(normed, w_up)
        ctx.save_for_backward(attended, hidden, gate, up, wo, norm, w_gate, w_up, w_down)
        ctx.eps = eps
        return torch.addmm(hidden, kernels.gate(gate, up), w_down.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        from shardproof.model import block_kernels as kernels

        attended, hidden, gate, up, wo, norm, w_gate, w_up, w_down = ctx.saved_tensors
        wants = ctx.needs_input_grad
        grad = grads[0].contiguous()
        grad_gate, grad_up, gated = kernels.gate_backward(gate, up, grad @ w_down)
        grad_down = grad.t() @ gated if wants[6] else None
        del gated
        grad_normed = (grad_gate @ w_gate).addmm_(grad_up, w_up)
        grad_hidden, grad_norm, normed = kernels.norm_backward(hidden, norm, ctx.eps, grad_normed, grad)
        of_gate = grad_gate.t() @ normed if wants[4] else None
        of_up = grad_up.t() @ normed if wants[5] else None
        of_out = grad_hidden.t() @ attended if wants[2] else None
        return grad_hidden, grad_hidden @ wo, of_out, grad_norm, of_gate, of_up, grad_down, None


class _Between(torch.autograd.Function):
    """(hidden, attended) -> (hidden, normed): output projection, residual and norm, where experts follow."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: torch.Tensor,
        attended: torch.Tensor,
        wo: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> Any:
        from shardproof.model import block_kernels as kernels

        hidden = torch.addmm(residual, attended, wo.t())
        ctx.save_for_backward(attended, hidden, wo, norm)
        ctx.eps = eps
        return hidden, kernels.norm(hidden, norm, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        from shardproof.model import block_kernels as kernels

        attended, hidden, wo, norm = ctx.saved_tensors
        residual, grad = (each.contiguous() for each in grads)
        grad, grad_norm, _ = kernels.norm_backward(hidden, norm, ctx.eps, grad, residual, recompute=False)
        of_out = grad.t() @ attended if ctx.needs_input_grad[2] else None
        return grad, grad @ wo, of_out, grad_norm, None
