"""From a Hugging Face config to a module on the meta device: shapes and ties, no memory."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardproof.errors import ShardproofError, fail
from shardproof.model import hf_private
from shardproof.model.buffers import compute_buffers, computed_values
from shardproof.model.families import num_experts
from shardproof.model.lora import inject_lora
from shardproof.model.replace import replace_parameters
from shardproof.model.roles import (
    CRITIC,
    FROZEN,
    REWARD,
    VALUED,
    attach_value_head,
    build_classifier,
    value_head,
)
from shardproof.model.router import replay_routing

AUTO = "auto"  # recompute what does not fit, decided in training


# A config may ask for other outputs; what calls the model relies on these.
_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


@dataclass(frozen=True)
class Skeleton:
    """A model whose parameters are on meta and whose computed buffers hold their values."""

    model: PreTrainedModel
    role: str
    buffer_writers: dict[str, str]  # {buffer name: who computed it}
    computed_buffers: dict[str, torch.Tensor]  # {buffer name in the model without adapters: its value}
    has_lora: bool


def build_skeleton(
    config: PretrainedConfig,
    *,
    role: str,
    lora: Any = None,
    param_dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
) -> Skeleton:
    """The model of `config` for `role`, with adapters if asked, tied as the config ties it. Memory: buffers only."""
    config = deepcopy(config)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in _OUTPUTS.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    kwargs = hf_private.set_implementations({}, attn_implementation, experts_implementation)
    if trust_remote_code:
        kwargs["trust_remote_code"] = True
    try:
        # float32 is what modules compute their buffers in; parameters get their dtype below, one by one.
        with torch.device("meta"), hf_private.no_init_weights():
            make = build_classifier if role == REWARD else AutoModelForCausalLM.from_config
            model = make(config, dtype=torch.float32, **kwargs)
        if role == CRITIC:
            attach_value_head(model)
        model.tie_weights()
        writers = compute_buffers(model)
    except ShardproofError:
        raise
    except Exception as error:  # a model's code may raise anything on a value that it does not expect
        reason = f"{type(error).__name__}: {error}"[:1000]
        raise fail("L114", "skeleton", f"model_type={config.model_type!r}: {reason}") from error
    # Copies: on the CPU the model keeps these very tensors, and what is written into one must not change the other.
    computed = {name: value.clone() for name, value in computed_values(model).items()}
    if lora is not None:
        head = value_head(model) if role in VALUED else None
        inject_lora(model, lora, head)
        if head is not None:
            model.get_submodule(head).requires_grad_(True)  # it may be new, so it has to learn
        writers = {_with_base_layer(model, name): writer for name, writer in writers.items()}
    set_param_dtype(model, param_dtype)
    if role in FROZEN:
        model.requires_grad_(False)
        model.eval()
    else:
        model.train()
    return Skeleton(model, role, writers, computed, lora is not None)


def checkpoint_blocks(model: PreTrainedModel, every: int | str) -> None:
    """Recompute the activations of every `every`-th block in the backward pass; 0 keeps them all.

    With "auto" every block is recomputed until training knows which need not be. A model with experts replays the
    forward's routing, so that the recompute cannot take another path.
    """
    step = int(model.supports_gradient_checkpointing) if every == AUTO else int(every)
    if step <= 0:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if num_experts(model.config) is not None:
        options["context_fn"] = replay_routing
    model.gradient_checkpointing_enable(options)
    blocks = recomputable_blocks(model)
    set_recomputed(blocks, [index % step == 0 for index in range(len(blocks))])


def recomputable_blocks(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The blocks whose activations can be recomputed, in the order in which they run."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def set_recomputed(blocks: Sequence[GradientCheckpointingLayer], recomputed: Sequence[bool]) -> None:
    """Which of the blocks the next forward pass recomputes; a block reads its flag at every call."""
    for block, flag in zip(blocks, recomputed, strict=True):
        block.gradient_checkpointing = flag


def _with_base_layer(model: nn.Module, name: str) -> str:
    """A buffer's name after adapters were added around its module."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.base_layer.{leaf}" if hasattr(model.get_submodule(parent), "base_layer") else name


def set_param_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every floating parameter `dtype`, keeping ties. Buffers are not touched: theirs is their module's choice."""

    def make(param: torch.Tensor) -> torch.Tensor:
        if not param.is_floating_point() or param.dtype == dtype:
            return param
        return torch.empty(param.shape, dtype=dtype, device="meta")

    replace_parameters(model.modules(), make)
