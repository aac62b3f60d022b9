"""A decoding step through kernels of our own, for models built as most are: RMS norms, rotary attention, a gated MLP.

Seven kernels per layer read each weight once. Where a layer has experts in place of the MLP, its own module routes the
tokens, and the experts run through two kernels. The modules show whether a model is built that way; the decoder compares
this step with the model's own before it relies on it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from shardproof.model import hf_private, plain_block
from shardproof.model.compiling import can_compile
from shardproof.model.families import MOVING_ROPE
from shardproof.rollout.paged.blocks import BLOCK
from shardproof.rollout.paged.cache import PagedCache
from shardproof.rollout.paged.model_step import windows_of
from shardproof.rollout.paged.slots import Slots

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
    if any(windows_of(model.config) or [0]):
        return False
    if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= set(dict(base.named_children())):
        return False
    rotated = 2 * len(getattr(base.rotary_emb, "inv_freq", ()))
    return all(_is_plain_block(block) and block.self_attn.head_dim == rotated for block in base.layers)


def _is_plain_block(block: Any) -> bool:
    if not plain_block.has_plain_parts(block):
        return False
    attention, mlp = block.self_attn, block.mlp
    layers = [getattr(attention, name) for name in plain_block.PROJECTIONS]
    has_experts = not plain_block.is_plain_mlp(mlp)
    if not has_experts:
        layers += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(map(_is_tiled, layers))
        and len({each.bias is None for each in (attention.q_proj, attention.k_proj, attention.v_proj)}) == 1
        and attention.head_dim in _HEAD_WIDTHS
        and (not has_experts or _has_plain_experts(mlp))
    )


def _is_tiled(layer: nn.Linear) -> bool:
    return all(size % _TILE == 0 for size in layer.weight.shape)


def _has_plain_experts(mlp: nn.Module) -> bool:
    experts = hf_private.expert_modules(mlp)
    return bool(experts) and all(
        hf_private.is_plain_gated(each)
        and all(size % _TILE == 0 for size in each.get_parameter("down_proj").shape[1:])
        for each in experts
    )


class FusedStep:
    """One new token per row, over a paged cache whose tables have `most_blocks` blocks per row."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, most_blocks: int):
        self._base = cast(Any, model.base_model)
        self._layers = list(self._base.layers)
        self._head: nn.Module = model.get_output_embeddings()
        self._experts = hf_private.expert_modules(self._base)
        self._routes = [bool(hf_private.expert_modules(block.mlp)) for block in self._base.layers]
        self._cache = list(zip(cache.keys, cache.values, strict=True))
        like: torch.Tensor = self._head.get_parameter("weight")
        positions = torch.arange(most_blocks * BLOCK, device=like.device)[None]
        cos, sin = self._base.rotary_emb(like.new_empty(1, 1, 1), positions)
        self._tables = (cos[0].contiguous(), sin[0].contiguous())

    def keep_one_of_each_kind(self) -> None:
        """Leave out layers that launch the same kernels as others: what is computed then is worthless."""
        # After the first layer a norm also adds up what the layer before has left.
        kinds = {routes: number for number, routes in reversed(list(enumerate(self._routes)))}
        chosen = sorted({*kinds.values(), min(1, len(self._routes) - 1)})
        for name in ("_layers", "_routes", "_cache"):
            every = getattr(self, name)
            setattr(self, name, [every[number] for number in chosen])

    def __call__(self, slots: Slots, out: torch.Tensor) -> None:
        """Read each slot's token; logits [rows, vocabulary] go to `out`, keys and values into the slots' blocks."""
        from shardproof.rollout.expert_kernels import (
            FEW_ROWS,
        )  # Triton is there where this runs, not everywhere

        with hf_private.experts_through(self._experts, FEW_ROWS):
            torch.mm(self._advance(slots), self._head.get_parameter("weight").T, out=out)

    def _advance(self, slots: Slots) -> torch.Tensor:
        """The last hidden states, [rows, hidden]."""
        from shardproof.rollout import kernels  # as above
        from shardproof.rollout.paged.attention_kernels import attend

        tables, positions = slots.tables, slots.positions
        states, sums = self._base.embed_tokens(slots.ids[:, 0]), None
        for block, routes, cache in zip(self._layers, self._routes, self._cache, strict=True):
            attention, mlp = block.self_attn, block.mlp
            normed = kernels.add_norm(states, sums, *_norm(block.input_layernorm))
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            biases = [each.bias for each in projections] if attention.q_proj.bias is not None else None
            sums = kernels.project(normed, [each.weight for each in projections], biases)
            norms = (
                (attention.q_norm.weight, *_norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
            )
            attended = attend(sums, self._tables, norms, cache, tables, positions, attention.scaling)
            sums = kernels.project(attended, [attention.o_proj.weight])
            normed = kernels.add_norm(states, sums, *_norm(block.post_attention_layernorm))
            if routes:
                sums = mlp(normed[:, None]).transpose(0, 1)
                continue
            gated = kernels.gate_up(normed, mlp.gate_proj.weight, mlp.up_proj.weight)
            sums = kernels.project(gated, [mlp.down_proj.weight])
        return kernels.add_norm(states, sums, *_norm(self._base.norm))


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight, module.variance_epsilon
