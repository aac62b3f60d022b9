"""A decoding step through kernels of our own, for models built as most are: RMS norms, rotary attention, a gated MLP.

Seven kernels per layer read each weight once. Where a layer has experts in place of the MLP, its own module routes the
tokens, and the experts run through two kernels. The modules show whether a model is built that way; the decoder compares
this step with the model's own before it relies on it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from shardproof.model import hf_private
from shardproof.model.compiling import can_compile
from shardproof.model.families import MOVING_ROPE
from shardproof.rollout.decode import Prefilled
from shardproof.rollout.kept import States, stack_rows
from shardproof.rollout.progress import Progress

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_TILE = 128  # what widths must be multiples of
_HEAD_WIDTHS = (32, 64, 128, 256)


def can_fuse(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether the step can run this model at all: its modules are those that it knows, in sizes that it takes."""
    if model.dtype != torch.bfloat16 or not can_compile(device, model.dtype):
        return False
    base: Any = model.base_model
    head = model.get_output_embeddings()
    rope = (getattr(model.config.get_text_config(), "rope_parameters", None) or {}).get(
        "rope_type", "default"
    )
    if rope in MOVING_ROPE or base is model or type(head) is not nn.Linear or head.bias is not None:
        return False
    if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= set(dict(base.named_children())):
        return False
    rotated = 2 * len(getattr(base.rotary_emb, "inv_freq", ()))
    return all(_is_plain_block(block) and block.self_attn.head_dim == rotated for block in base.layers)


def _is_plain_block(block: Any) -> bool:
    if set(dict(block.named_children())) != _BLOCK:
        return False
    attention, mlp = block.self_attn, block.mlp
    names = set(dict(attention.named_children()))
    if names not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return False
    width = getattr(attention, "head_dim", 0)
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [getattr(attention, name) for name in names & _HEAD_NORMS]
    return (
        all(_is_tiled(getattr(attention, name)) for name in _ATTENTION)
        and attention.o_proj.bias is None
        and len({each.bias is None for each in (attention.q_proj, attention.k_proj, attention.v_proj)}) == 1
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and all(getattr(attention, name).weight.shape == (width,) for name in names & _HEAD_NORMS)
        and width in _HEAD_WIDTHS
        and (_is_plain_mlp(mlp) or _has_plain_experts(mlp))
    )


def _is_tiled(module: nn.Module) -> bool:
    return type(module) is nn.Linear and all(size % _TILE == 0 for size in module.weight.shape)


def _is_plain_mlp(mlp: Any) -> bool:
    if set(dict(mlp.named_children())) != _MLP or not hf_private.is_silu(mlp.act_fn):
        return False
    return all(_is_tiled(each) and each.bias is None for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def _has_plain_experts(mlp: nn.Module) -> bool:
    experts = hf_private.expert_modules(mlp)
    return bool(experts) and all(
        hf_private.is_plain_gated(each)
        and all(size % _TILE == 0 for size in each.get_parameter("down_proj").shape[1:])
        for each in experts
    )


class FusedStep:
    """One new token per row, in memory that does not move; keys and values are stored at their token's position."""

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int):
        self._base = cast(Any, model.base_model)
        self._head: nn.Module = model.get_output_embeddings()
        layers: Any = self._base.layers
        self._experts = hf_private.expert_modules(self._base)
        self._routes = [bool(hf_private.expert_modules(block.mlp)) for block in layers]
        attention = layers[0].self_attn
        width, hidden = attention.head_dim, attention.q_proj.in_features
        key_heads = attention.k_proj.out_features // width
        like: torch.Tensor = self._head.get_parameter("weight")

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

        self._cache = [
            (empty(rows, key_heads, capacity, width), empty(rows, key_heads, capacity, width)) for _ in layers
        ]
        positions = torch.arange(capacity, device=like.device)[None]
        cos, sin = self._base.rotary_emb(empty(1, capacity, hidden), positions)
        self._tables = (cos[0].contiguous(), sin[0].contiguous())

    def fill(self, started: Prefilled) -> None:
        """Copy the prompts' keys and values into the cache, each row's first token to position 0."""
        skipped = (~started.mask).sum(1, keepdim=True)
        source = torch.arange(started.length, device=skipped.device) + skipped
        source = source.clamp(max=started.length - 1)[:, None, :, None]
        for cache, grown in zip(self._cache, started.layers(), strict=True):
            for fixed, states in zip(cache, grown, strict=True):
                index = source.expand(-1, states.shape[1], -1, states.shape[3])
                fixed[:, :, : started.length].copy_(states.gather(2, index))

    def states(self, row: int, num_tokens: int) -> States:
        """Copies of the keys and values of a row's first tokens."""
        return stack_rows(self._cache, row, slice(num_tokens))

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] after tokens [rows, 1] at their positions."""
        from shardproof.rollout.expert_kernels import (
            FEW_ROWS,
        )  # Triton is there where this runs, not everywhere

        with hf_private.experts_through(self._experts, FEW_ROWS):
            return self._advance(ids, positions)

    def _advance(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from shardproof.rollout import kernels  # as above

        states, sums = self._base.embed_tokens(ids[:, 0]), None
        for block, routes, cache in zip(self._base.layers, self._routes, self._cache, strict=True):
            attention, mlp = block.self_attn, block.mlp
            normed = kernels.add_norm(states, sums, *_norm(block.input_layernorm))
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            biases = [each.bias for each in projections] if attention.q_proj.bias is not None else None
            sums = kernels.project(normed, [each.weight for each in projections], biases)
            norms = (
                (attention.q_norm.weight, *_norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
            )
            attended = kernels.attend(sums, self._tables, norms, cache, positions, attention.scaling)
            sums = kernels.project(attended, [attention.o_proj.weight])
            normed = kernels.add_norm(states, sums, *_norm(block.post_attention_layernorm))
            if routes:
                sums = mlp(normed[:, None]).transpose(0, 1)
                continue
            gated = kernels.gate_up(normed, mlp.gate_proj.weight, mlp.up_proj.weight)
            sums = kernels.project(gated, [mlp.down_proj.weight])
        normed = kernels.add_norm(states, sums, *_norm(self._base.norm))
        return linear(normed, self._head.get_parameter("weight"))


def fused_record(progress: Progress, temperature: float, logits: torch.Tensor) -> None:
    """As `progress.record`, for a temperature above 0 and all of the vocabulary."""
    from shardproof.rollout import draw_kernels  # as above

    draw_kernels.record(progress, temperature, logits)


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight, module.variance_epsilon
