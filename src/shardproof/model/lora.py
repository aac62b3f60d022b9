"""LoRA adapters on the skeleton, through peft; variants we cannot shard or export are refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardproof.errors import fail

ADAPTER = "default"
_ALL = "all-linear"  # what peft calls every linear layer but the head of a language model
MAX_RANK = 2**16  # more is a typing error, and would allocate more memory than there is
# Adapters that peft initialises from random numbers or constants; the others need the base weights' values.
_PLAIN_INITS = (True, False, "gaussian")
# What may differ from its default. Any other field selects a variant, including fields of future versions of peft.
_PLAIN_FIELDS = {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "task_type", "peft_type",
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip


def check_lora(config: Any) -> None:
    """Raise for a LoRA variant that is not plain low-rank adaptation of layers."""
    if getattr(config, "peft_type", None) is None or str(config.peft_type.value) != "LORA":
        raise fail("L113", "lora", f"lora={type(config).__name__} is not a peft.LoraConfig.")
    default = type(config)()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "init_lora_weights":
            plain = value in _PLAIN_INITS
        else:
            plain = field.name in _PLAIN_FIELDS or value == getattr(default, field.name)
        if not plain:
            raise fail("L113", "lora", f"{field.name}={value!r} is not supported.")
    ranks = {"r": config.r, **{f"rank_pattern[{key!r}]": rank for key, rank in config.rank_pattern.items()}}
    for key, rank in ranks.items():
        if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise fail("L113", "lora", f"{key}={rank!r} is not a number from 1 to {MAX_RANK}.")


def inject_lora(model: PreTrainedModel, config: Any, head: str | None = None) -> None:
    """Add adapters in place; the base is frozen, names of base parameters gain `.base_layer`.

    `head` is a layer that is trained in full: it gets no adapters.
    """
    import peft  # an optional dependency, needed only when a run uses LoRA

    check_lora(config)
    asked, config = config.target_modules, deepcopy(config)  # peft resolves targets in place
    if head is not None and isinstance(asked, str) and asked.lower() == _ALL:
        config.exclude_modules = _and_head(config.exclude_modules, head)
    try:
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        fix = "set the target modules to names of the model's linear layers, such as q_proj and v_proj"
        raise fail("L113", "lora", f"peft could not add adapters: {error}", fix=fix) from error
    if head is not None and isinstance(config.target_modules, set):
        config.target_modules.discard(head)  # peft lists it among all linear layers, though it left it out
    for name, module in model.named_modules():
        # peft also gets here through target_modules="all-linear" on models whose experts are fused parameters.
        if type(module).__name__ == "ParamWrapper":
            # A set has an order of its own on every rank.
            named = asked if isinstance(asked, str) else sorted(asked or ())
            message = f"target_modules={named!r} would adapt the fused parameters of {name!r}, which is not supported."
            fix = "name the linear layers to adapt, such as q_proj and v_proj, and none of experts"
            raise fail("L113", "lora", message, tensor=name, fix=fix)
    if head is not None and hasattr(model.get_submodule(head), "base_layer"):
        message = f"target_modules={asked!r} would adapt the head {head!r}, which is trained in full."
        raise fail("L113", "lora", message, tensor=head, fix="leave the head out of the target modules")


def _and_head(excluded: Any, head: str) -> Any:
    """What peft is to leave out, and the head; a text is a regular expression."""
    if isinstance(excluded, str):
        return f"(?:{excluded})|{re.escape(head)}"
    return [*(excluded or ()), head]


def reset_adapter(model: Any, layer: Any) -> None:
    """Let peft initialise one layer's adapter as its config says."""
    layer.reset_lora_parameters(ADAPTER, model.peft_config[ADAPTER].init_lora_weights)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base weights alone inside the block.

    The switch is set layer by layer: peft's own `enable_adapters` would also change what requires gradients.
    """
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # type: ignore[assignment]


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def is_adapter(name: str) -> bool:
    return ".lora_" in name
