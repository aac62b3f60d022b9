"""Two ways to read a chunk of prompts: kernels of our own around cuBLAS's matmuls, and the model's own forward.

Both write keys and values into the blocks of a paged cache and attend to what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import grouped_mm, linear, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from shardproof.model import exact, exact_attention, hf_private
from shardproof.model.compiling import can_compile
from shardproof.model.experts import sort_by_expert
from shardproof.rollout.paged.blocks import BLOCK, blocks_for
from shardproof.rollout.paged.cache import PagedCache
from shardproof.rollout.paged.reading_chunks import Chunk

READING, EXPERTS = "shardproof_reading", "shardproof_reading_experts"
_POSITIONS = 4096  # of the first table of cosines and sines; it doubles where that is not enough
_WIDTHS = (16, 32, 64, 128, 256)  # of heads that the kernels take


class _Paged:
    """A chunk on its way through the model's own forward, as the keyword that attention gets."""

    def __init__(self, chunk: Chunk, cache: PagedCache, by_kernel: bool):
        self.chunk, self.cache, self.by_kernel = chunk, cache, by_kernel


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: _Paged | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of packed tokens to their blocks, into which key and value are written first.

    [1, heads, tokens, width] to [1, tokens, heads, width].
    """
    number = getattr(module, "layer_idx", None)
    if paged is None or number is None:
        # No finding: the engine then decodes without a paged cache.
        raise RuntimeError(
            f"{type(module).__name__} does not pass on what its attention needs to read prompts"
        )
    chunk, keys, values = paged.chunk, paged.cache.keys[number], paged.cache.values[number]
    block, offset = chunk.places // BLOCK, chunk.places % BLOCK
    # Indices around a slice: their dimension, the tokens, comes first.
    keys[block, :, offset] = key[0].transpose(0, 1).to(keys.dtype)
    values[block, :, offset] = value[0].transpose(0, 1).to(values.dtype)
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    extras: dict[str, Any] = {"window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if exact.active():
        rows = [
            (first, stop - first, piece.reading.start)
            for piece, (first, stop) in zip(chunk.pieces, chunk.spans, strict=True)
        ]
        flat = query[0].transpose(0, 1)
        return exact_attention.paged(flat, (keys, values), chunk.tables, rows, scaling, **extras)[None], None
    if paged.by_kernel:
        from shardproof.rollout.paged import reading_kernels  # Triton is not everywhere

        flat = query[0].transpose(0, 1).flatten(1)
        out = reading_kernels.attend(flat, (keys, values), chunk, scaling, **extras)
        return out.view(1, len(out), query.shape[1], -1), None
    parts = []
    for row, (piece, (first, stop)) in enumerate(zip(chunk.pieces, chunk.spans, strict=True)):
        table = chunk.tables[row, : blocks_for(piece.end)]
        held = [each[table].transpose(0, 1).flatten(1, 2)[:, : piece.end] for each in (keys, values)]
        parts.append(attend_plainly(query[0, :, first:stop], held[0], held[1], scaling, **extras))
    return torch.cat(parts, 1).transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(READING, paged_attention)


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last tokens of a sequence to all of it: [heads, new tokens, width] to [heads, tokens, width]."""
    repeats = query.shape[0] // key.shape[0]
    key, value = (each.to(query.dtype).repeat_interleave(repeats, 0) for each in (key, value))
    num, end = query.shape[1], key.shape[1]
    if softcap is None and sinks is None and window is None and num == end:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scaling
        )[0]
    seen = torch.ones(num, end, dtype=torch.bool, device=query.device).tril(end - num)
    if window is not None:
        seen = seen.triu(end - num - window + 1)
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=seen, scale=scaling
        )[0]
    scores = (query @ key.transpose(1, 2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, num, 1)], -1)
    return torch.softmax(scores, -1)[..., :end].to(value.dtype) @ value


def read_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The output of a layer's experts for [tokens, hidden]: as `model.experts`, with kernels that need no compiling."""
    from shardproof.rollout.paged import reading_kernels as kernels  # Triton is not everywhere

    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    order, places, ends = sort_by_expert(top_k_index, len(gate_up))
    visitors = hidden_states.index_select(0, order // top_k_index.shape[1])
    inner = grouped_mm(visitors, gate_up.mT, offs=ends)
    gated = kernels.gate_visits(inner, top_k_weights.reshape(-1).index_select(0, order))
    return kernels.add_visits(grouped_mm(gated, down.mT, offs=ends), places)


hf_private.register_experts(EXPERTS, read_experts)


class OwnForward:
    """The model's own forward, with attention in plain torch or through our kernel."""

    def __init__(self, model: PreTrainedModel, by_kernel: bool):
        self._model, self._by_kernel = model, by_kernel

    @staticmethod
    def fits(model: PreTrainedModel, cache: PagedCache) -> bool:
        """Whether our kernel takes this model's heads."""
        keys, values = cache.keys[0], cache.values[0]
        return (
            can_compile(keys.device, model.dtype)
            and keys.dtype == model.dtype
            and keys.shape == values.shape
            and keys.shape[-1] in _WIDTHS
        )

    def __call__(self, chunk: Chunk, cache: PagedCache) -> torch.Tensor:
        """Logits after the tokens `chunk.last`, [their number, vocabulary]."""
        with hf_private.attention_implementation(self._model, READING):
            output = self._model(
                input_ids=chunk.ids[None].long(),
                position_ids=chunk.positions[None].long(),
                use_cache=False,
                logits_to_keep=chunk.last if len(chunk.last) else 1,
                paged=_Paged(chunk, cache, self._by_kernel),
            )
        return output.logits[0, : len(chunk.last)]


class FusedForward:
    """Our kernels between cuBLAS's matmuls, for models that `can_fuse` takes; `hopper`: with attention for Hopper GPUs."""

    def __init__(self, model: PreTrainedModel, hopper: bool):
        self._hopper = hopper
        self._base = cast(Any, model.base_model)
        self._head: nn.Module = model.get_output_embeddings()
        self._experts = hf_private.expert_modules(self._base)
        self._routes = [bool(hf_private.expert_modules(block.mlp)) for block in self._base.layers]
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def has_hopper(cache: PagedCache) -> bool:
        """Whether there is attention for Hopper GPUs for this cache; what it is written in may change with Triton."""
        try:
            from shardproof.rollout.paged import hopper_attention
        except (ImportError, AttributeError):
            return False
        return hopper_attention.fits(cache.keys[0])

    def __call__(self, chunk: Chunk, cache: PagedCache) -> torch.Tensor:
        """Logits after the tokens `chunk.last`, [their number, vocabulary]."""
        with hf_private.experts_through(self._experts, EXPERTS):
            return self._read(chunk, cache)

    def _read(self, chunk: Chunk, cache: PagedCache) -> torch.Tensor:
        from shardproof.rollout.paged import reading_kernels as kernels  # Triton is not everywhere

        attend: Callable[..., torch.Tensor] = kernels.attend
        if self._hopper:
            from shardproof.rollout.paged import hopper_attention

            attend = hopper_attention.attend
        rotary = self._rotary_up_to(chunk.max_position)
        states, new = self._base.embed_tokens(chunk.ids), None
        last = len(self._routes) - 1
        for number, (block, routes) in enumerate(zip(self._base.layers, self._routes, strict=True)):
            attention, mlp = block.self_attn, block.mlp
            normed = kernels.add_norm(states, new, *_norm(block.input_layernorm))
            projected = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
            norms = None
            if hasattr(attention, "q_norm"):
                norms = kernels.Norms(attention.q_norm.weight, *_norm(attention.k_norm))
            held = cache.keys[number], cache.values[number]
            query = kernels.rotate_store(projected, rotary, norms, held, chunk)
            attended = attend(query, held, chunk, attention.scaling)
            if number == last and not routes:  # of whose output the last tokens alone are wanted
                states, attended = states.index_select(0, chunk.last), attended.index_select(0, chunk.last)
            _add_product(states, attended, attention.o_proj)
            normed = kernels.add_norm(states, None, *_norm(block.post_attention_layernorm))
            if routes:
                new = mlp(normed[None])[0]
            else:
                gated = kernels.gate(mlp.gate_proj(normed), mlp.up_proj(normed))
                _add_product(states, gated, mlp.down_proj)
                new = None
        if new is not None:
            states, new = states.index_select(0, chunk.last), new.index_select(0, chunk.last)
        return linear(
            kernels.add_norm(states, new, *_norm(self._base.norm)), self._head.get_parameter("weight")
        )

    def _rotary_up_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by position, [positions, width]."""
        if self._rotary is None or len(self._rotary[0]) <= position:
            num = max(_POSITIONS, 1 << position.bit_length())
            like = self._head.get_parameter("weight")
            positions = torch.arange(num, device=like.device)[None]
            cos, sin = self._base.rotary_emb(like.new_empty(1, 1, 1), positions)
            self._rotary = cos[0].contiguous(), sin[0].contiguous()
        return self._rotary


def _add_product(states: torch.Tensor, x: torch.Tensor, module: Any) -> None:
    """Add a linear module's output to the states, in place: the matmul does it while it writes."""
    torch.addmm(states, x, module.weight.t(), out=states)


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight, module.variance_epsilon
