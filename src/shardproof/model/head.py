"""Log-probs of given tokens without logits: the head is applied chunk by chunk, forward and backward.

Logits of [tokens, vocabulary] never exist; a chunk's are recomputed in the backward pass, where the gradient of the
hidden states and of the head's weight are formed before the next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

# Float32 elements of one chunk of logits: 128 MiB; a handful of such chunks exist at a time.
_CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class HeadFacts:
    """What a family does to its logits after the head: `softcap * tanh(scale * logits / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None


def head_facts(config: PretrainedConfig) -> HeadFacts:
    """The facts of a family, from the names that configs use for them."""
    text = config.get_text_config()
    scale = 1.0
    if getattr(text, "logits_scaling", None):  # granite divides
        scale /= float(text.logits_scaling)
    if getattr(text, "logit_scale", None):  # cohere multiplies
        scale *= float(text.logit_scale)
    if getattr(text, "lm_head_multiplier", None):  # falcon_h1 multiplies
        scale *= float(text.lm_head_multiplier)
    return HeadFacts(scale, getattr(text, "final_logit_softcapping", None))


def can_chunk(head: nn.Module | None) -> bool:
    """Whether the head is a plain linear layer: an adapter around it would be left out."""
    return isinstance(head, nn.Linear) and not hasattr(head, "base_layer")


def chunk_bytes(num_tokens: int, vocabulary: int) -> int:
    """How large one chunk of logits is."""
    return min(num_tokens * vocabulary, _CHUNK_ELEMENTS) * 4


def token_logprobs(
    hidden: torch.Tensor,
    head: nn.Linear,
    targets: torch.Tensor,
    *,
    temperature: float,
    facts: HeadFacts,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy) for each row of `hidden`, in float32; entropy is empty unless wanted.

    Memory: a handful of chunks of logits, and in the backward pass the float32 gradient of the head's weight.
    """
    # Under FSDP1 these are plain views of the gathered flat parameter, not nn.Parameters.
    return _ChunkedHead.apply(hidden, head.weight, head.bias, targets, temperature, facts, want_entropy)


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    facts: HeadFacts,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits / temperature, d logits / d head output) of a chunk; the derivative is None where it is constant."""
    z = nn.functional.linear(hidden, weight, bias).float()
    if facts.scale != 1.0:
        z = z * facts.scale
    slope = None
    if facts.softcap is not None:
        t = torch.tanh(z / facts.softcap)
        z, slope = t * facts.softcap, 1.0 - t * t
    return (z if temperature == 1.0 else z / temperature), slope


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        facts: HeadFacts,
        want_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden.shape[0]
        logps = hidden.new_empty(num_tokens, dtype=torch.float32)
        norms = torch.empty_like(logps)
        entropy = torch.empty_like(logps) if want_entropy else logps.new_empty(0)
        for rows in _chunks(num_tokens, weight.shape[0]):
            z, _ = _logits(hidden[rows], weight, bias, temperature, facts)
            norm = torch.logsumexp(z, dim=-1)
            norms[rows] = norm
            logps[rows] = z.gather(1, targets[rows, None]).squeeze(1) - norm
            if want_entropy:
                entropy[rows] = norm - (torch.softmax(z, dim=-1) * z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropy)
        ctx.settings = (temperature, facts, want_entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, grad_logps: torch.Tensor, grad_entropy: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, targets, norms, entropy = ctx.saved_tensors
        temperature, facts, want_entropy = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            z, slope = _logits(hidden[rows], weight, bias, temperature, facts)
            logp = z - norms[rows, None]
            prob = logp.exp()
            grad = -prob * grad_logps[rows, None]
            grad.scatter_add_(1, targets[rows, None], grad_logps[rows, None])
            if want_entropy:
                grad -= prob * (logp + entropy[rows, None]) * grad_entropy[rows, None]
            grad *= facts.scale / temperature
            if slope is not None:
                grad *= slope
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                if grad.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.t(), hidden[rows])  # no product of the weight's size beside it
                else:
                    grad_weight += grad.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        grad_bias = grad_bias.to(bias.dtype) if grad_bias is not None else None
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(at, min(at + step, num_tokens)) for at in range(0, num_tokens, step)]
