"""What this project needs of transformers' private interface, in one place.

tests/test_private_interfaces.py fails when one of these moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = [
    "WeightConverter",
    "WeightRenaming",
    "WeightTransform",
    "dot_natural_key",
    "no_init_weights",
    "rename_source_key",
]


def conversion_rules(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """The renamings and converters that turn this family's checkpoint into the model's state."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def reversed_rules(
    model: PreTrainedModel, used: Sequence[WeightTransform] | None
) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """The rules that turn the model's state back into this family's checkpoint."""
    if used is None:
        # Without a load it is unknown whether a prefix was there; transformers leaves such rules out as well.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        used = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    backwards = [rule.reverse_transform() for rule in reversed(used)]
    renamings = [rule for rule in backwards if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in backwards if isinstance(rule, WeightConverter)]


# Operations whose result depends on the tensors' shapes, not on their names.
_NAMELESS_OPERATIONS = {"Chunk", "Concatenate", "MergeModulelist", "SplitModulelist", "Transpose"}


def ignores_names(converter: WeightConverter) -> bool:
    """Whether a rule does the same to all sources of the same shapes, whichever layer they are of."""
    return all(type(operation).__name__ in _NAMELESS_OPERATIONS for operation in converter.operations)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """{name: name it is tied to} for every tie the config asks for."""
    return model.get_expanded_tied_weights_keys(all_submodels=True)


def ignored_patterns(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Patterns of checkpoint names that may be missing, and of names that may be left over."""
    missing = list(model._keys_to_ignore_on_load_missing or [])
    unexpected = list(model._keys_to_ignore_on_load_unexpected or [])
    buffers = [name for name, _ in model.named_buffers()]
    # Buffers that older checkpoints stored and today's modules compute.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.append(r"(^|\.)position_ids$")
    return missing, unexpected


def block_classes(model: PreTrainedModel) -> set[str]:
    """Class names of the modules that are sharded as one unit."""
    names: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            names.update(module._no_split_modules or [])
    return names


def initialiser_of(model: PreTrainedModel, module_name: str) -> PreTrainedModel:
    """The innermost Hugging Face model around a submodule: its `_init_weights` is the one that applies."""
    owner: nn.Module = model
    innermost = model
    for part in module_name.split(".") if module_name else []:
        owner = getattr(owner, part)
        if isinstance(owner, PreTrainedModel):
            innermost = owner
    return innermost


@contextmanager
def quiet_initialisation() -> Iterator[None]:
    """Run `_init_weights` without autograd and without moving the global random state."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


def run_init_weights(model: PreTrainedModel, module_name: str, module: nn.Module) -> None:
    """Let the model's own `_init_weights` fill `module`, whose name in the model is `module_name`."""
    initialiser_of(model, module_name)._init_weights(module)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model attend through the registered function `name` inside the block.

    The block must also hold the backward pass: recomputed activations look the function up again.
    """
    configs = {id(m.config): m.config for m in model.modules() if _has_config(m)}
    previous = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = previous[key]


def _has_config(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def attention_function(module: nn.Module) -> Callable[..., Any]:
    """What an attention module calls with query, key and value."""
    name = module.config._attn_implementation  # type: ignore[union-attr]
    eager = sys.modules[type(module).__module__].eager_attention_forward  # each family has its own
    return ALL_ATTENTION_FUNCTIONS.get(name, eager)


def set_implementations(
    model_kwargs: dict[str, Any], attention: str | None, experts: str | None
) -> dict[str, Any]:
    """`model_kwargs` with the asked attention and experts implementations."""
    if attention is not None:
        model_kwargs["attn_implementation"] = attention
    if experts is not None:
        model_kwargs["experts_implementation"] = experts
    return model_kwargs


def register_experts(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Make `function(module, hidden_states, top_k_index, top_k_weights)` an experts implementation."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)


def expert_modules(model: nn.Module, with_activation: bool = True) -> list[nn.Module]:
    """The modules that hold a layer's experts as fused parameters and ask the interface how to run them.

    With `with_activation`, those that have their activation as a module.
    """
    found = [m for m in model.modules() if hasattr(m, "is_transposed") and _has_experts_config(m)]
    return [module for module in found if hasattr(module, "act_fn") or not with_activation]


def is_plain_gated(experts: nn.Module) -> bool:
    """Whether experts compute down(silu(gate(x)) * up(x)), gate above up in one weight, without biases."""
    return (
        experts.has_gate is True
        and experts.has_bias is False
        and experts.is_transposed is False
        and getattr(experts, "is_concatenated", True) is True
        and type(experts)._apply_gate is _default_apply_gate
        and is_silu(experts.act_fn)
    )


def is_silu(activation: object) -> bool:
    """Whether a module is SiLU, torch's or transformers' own."""
    return isinstance(activation, nn.SiLU | SiLUActivation)


def set_experts_implementation(experts: Sequence[nn.Module], name: str) -> None:
    """Let the experts run through the registered function `name`."""
    for module in experts:
        module.config._experts_implementation_internal = name  # type: ignore[union-attr]


@contextmanager
def experts_through(experts: Sequence[nn.Module], name: str) -> Iterator[None]:
    """The experts, run through the registered function `name`."""
    before: list[Any] = [module.config._experts_implementation for module in experts]  # type: ignore[union-attr]
    set_experts_implementation(experts, name)
    try:
        yield
    finally:
        for module, was in zip(experts, before, strict=True):
            set_experts_implementation([module], was)


def _has_experts_config(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_experts_implementation")
