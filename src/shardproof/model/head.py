"""Log-probs of given tokens without logits: the head is applied chunk by chunk, forward and backward.

Logits of [tokens, vocabulary] need not exist; a chunk's are recomputed in the backward pass, where the gradient of the
hidden states and of the head's weight are formed before the next chunk. On a GPU with memory to spare chunks are kept for
the backward pass, which follows at once: computing them again is a fifth of the head's work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from shardproof.bounds import largest, within
from shardproof.model import exact
from shardproof.model.compiling import can_compile, fused

logger = logging.getLogger(__name__)

# Elements of one chunk of logits: a handful of float32 chunks of 128 MiB exist at a time. Where a chunk's arithmetic is
# one kernel there are two of 1 GiB in 16 bits: enough rows for the matrix units, and few passes over the head's gradient.
_CHUNK_ELEMENTS = 1 << 25
_FUSED_CHUNK_ELEMENTS = 1 << 29
_TILE = 128  # rows that matrix units take at a time
_PROBED = 16  # rows on which kernels are compared
_MAX_ERROR = 0.01  # of log-probs, and of gradients as shares of their norm
_SPARE = 0.1  # share of a GPU's memory that kept chunks leave free

Settings = tuple[float, float, float | None, bool]  # temperature, scale, soft cap, whether entropy is wanted


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


def chunk_bytes(num_tokens: int, vocabulary: int, is_fused: bool = False) -> int:
    """How large one chunk of logits is, of which six exist at the head's peak."""
    if is_fused:  # larger ones, but three of them and in 16 bits: as much as six of one byte
        return min(num_tokens * vocabulary, _FUSED_CHUNK_ELEMENTS)
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
    settings = (temperature, facts.scale, facts.softcap, want_entropy)
    num_kept = _num_kept(hidden, head.weight) if torch.is_grad_enabled() else 0
    return _ChunkedHead.apply(hidden, head.weight, head.bias, targets, settings, num_kept)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: Settings,
        num_kept: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read = _read_exactly if exact.active() else _functions(hidden, weight, settings)[0]
        parts, ctx.kept = [], []
        for rows in _chunks(hidden, weight):
            z = nn.functional.linear(hidden[rows], weight, bias)
            parts.append(read(z, _part(targets, rows), *settings))
            if len(ctx.kept) < num_kept:
                ctx.kept.append(z)
        logps, norms, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropy)
        ctx.settings = settings
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, grad_logps: torch.Tensor, grad_entropy: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, targets, norms, entropy = ctx.saved_tensors
        _, differentiate = _functions(hidden, weight, ctx.settings)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept[::-1], []
        for rows in _chunks(hidden, weight):
            z = kept.pop() if kept else nn.functional.linear(hidden[rows], weight, bias)
            # Without entropies the last two are empty, and so are their parts.
            columns = (_part(c, rows) for c in (targets, norms, grad_logps, entropy, grad_entropy))
            grad = differentiate(z, *columns, *ctx.settings)
            del z
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        grad_bias = grad_bias.to(bias.dtype) if grad_bias is not None else None
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _functions(
    hidden: torch.Tensor, weight: torch.Tensor, settings: Settings
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How a chunk's outputs are read, and differentiated: by kernels of our own where they are found right."""
    if can_compile(hidden.device, hidden.dtype):
        _, scale, softcap, want_entropy = settings
        kind = (hidden.device, hidden.dtype, len(weight), scale != 1.0, softcap is not None, want_entropy)
        if kind not in _verdicts:
            _verdicts[kind] = _are_right(hidden, len(weight), settings)
        if _verdicts[kind]:
            from shardproof.model import head_kernels  # Triton is not everywhere

            return head_kernels.read, head_kernels.differentiate
    return fused(_read_chunk, hidden), fused(_differentiate_chunk, hidden)


_verdicts: dict[tuple[Any, ...], bool] = {}  # on the kernels, by the kind of head


def _are_right(hidden: torch.Tensor, vocabulary: int, settings: Settings) -> bool:
    """Whether the kernels say of random outputs what plain operations say."""
    draw = torch.Generator(hidden.device).manual_seed(0)
    size = (_PROBED, vocabulary)
    z = (3.0 * torch.randn(size, generator=draw, device=hidden.device)).to(hidden.dtype)
    targets = torch.randint(vocabulary, size[:1], generator=draw, device=hidden.device)
    grads = torch.randn(2, _PROBED, generator=draw, device=hidden.device)
    try:
        from shardproof.model import head_kernels

        read, wanted = head_kernels.read(z, targets, *settings), _read_chunk(z, targets, *settings)
        problems = [
            float((one - other).abs().max()) for one, other in zip(read, wanted, strict=True) if len(one)
        ]
        columns = (targets, wanted[1], grads[0], wanted[2], grads[1] if settings[3] else grads[1][:0])
        plain = _differentiate_chunk(z, *columns, *settings).float()
        found = head_kernels.differentiate(z.clone(), *columns, *settings).float()
        problems.append(float((found - plain).norm() / plain.norm()))
        problem = None if within(largest(problems), _MAX_ERROR) else f"they differ by {problems}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel's compiler and launcher raise
        problem = f"they failed ({type(error).__name__}: {error})"
    if problem is not None:
        logger.warning("the head runs without our own kernels: %s", problem)
    return problem is None


def _part(column: torch.Tensor, rows: slice) -> torch.Tensor:
    """A copy: a view would tell compiled code how long the whole is, and be compiled again for another."""
    return column[rows].clone()


def _logits(
    z: torch.Tensor, temperature: float, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits / temperature, d logits / d head output) of a chunk; the derivative is None where it is constant."""
    z = z.float()
    if scale != 1.0:
        z = z * scale
    slope = None
    if softcap is not None:
        t = torch.tanh(z / softcap)
        z, slope = t * softcap, 1.0 - t * t
    return (z if temperature == 1.0 else z / temperature), slope


def _read_chunk(
    z: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log p(target), normaliser, entropy) of each row of head outputs."""
    z, _ = _logits(z, temperature, scale, softcap)
    norm = torch.logsumexp(z, dim=-1)
    logp = z.gather(1, targets[:, None]).squeeze(1) - norm
    if not want_entropy:
        return logp, norm, norm.new_empty(0)
    return logp, norm, norm - ((z - norm[:, None]).exp() * z).sum(-1)


def _read_exactly(
    z: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_read_chunk` with the log-probs that an exact engine gives; of heads without a scale or a soft cap."""
    logps, norms = exact.token_logprobs(z, targets, temperature)
    if not want_entropy:
        return logps, norms, norms.new_empty(0)
    return logps, norms, _read_chunk(z, targets, temperature, scale, softcap, True)[2]


def _differentiate_chunk(
    z: torch.Tensor,
    targets: torch.Tensor,
    norms: torch.Tensor,
    grad_logps: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
    scale: float,
    softcap: float | None,
    want_entropy: bool,
) -> torch.Tensor:
    """The gradient of each row of head outputs, in their dtype."""
    dtype = z.dtype
    z, slope = _logits(z, temperature, scale, softcap)
    logp = z - norms[:, None]
    prob = logp.exp()
    grad = prob * -grad_logps[:, None]
    if z.is_cuda:  # a mask can be part of one kernel, a scatter cannot
        at_target = torch.arange(z.shape[1], device=z.device) == targets[:, None]
        grad = torch.where(at_target, grad + grad_logps[:, None], grad)
    else:
        grad.scatter_add_(1, targets[:, None], grad_logps[:, None])
    if want_entropy:
        grad -= prob * (logp + entropy[:, None]) * grad_entropy[:, None]
    grad *= scale / temperature
    if slope is not None:
        grad *= slope
    return grad.to(dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, added up in the total's dtype without a product of its size beside it where that works."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _num_kept(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    """For how many chunks of the head's outputs there is memory until the backward pass."""
    if hidden.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(hidden.device)
    free += torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    chunk = (
        max(rows.stop - rows.start for rows in _chunks(hidden, weight)) * len(weight) * hidden.element_size()
    )
    # Beside them there are three chunks that are worked on, and the gradient of the weight.
    room = free - int(_SPARE * total) - 3 * chunk - weight.numel() * (4 + weight.element_size())
    return max(0, room // chunk)


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    is_fused = can_compile(hidden.device, hidden.dtype)
    step = max(1, (_FUSED_CHUNK_ELEMENTS if is_fused else _CHUNK_ELEMENTS) // weight.shape[0])
    if step > _TILE:
        step -= step % _TILE
    return [slice(at, min(at + step, len(hidden))) for at in range(0, len(hidden), step)]
