"""LoRA adapters on the skeleton, through peft; variants we cannot shard or export are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardproof.errors import fail

ADAPTER = "default"
# Adapters that peft initialises from random numbers or constants; the others need the base weights' values.
_PLAIN_INITS = (True, False, "gaussian")


def check_lora(config: Any) -> None:
    """Raise for a LoRA variant that is not plain low-rank adaptation of layers."""
    if getattr(config, "peft_type", None) is None or str(config.peft_type.value) != "LORA":
        raise fail("L113", "lora", f"lora={type(config).__name__} is not a peft.LoraConfig.")
    refused = {
        "use_dora=True": getattr(config, "use_dora", False),
        f"target_parameters={config.__dict__.get('target_parameters')}": config.__dict__.get(
            "target_parameters"
        ),
        f"modules_to_save={config.modules_to_save}": config.modules_to_save,
        f"bias={config.bias!r}": config.bias != "none",
        f"init_lora_weights={config.init_lora_weights!r}": config.init_lora_weights not in _PLAIN_INITS,
        "layer_replication": getattr(config, "layer_replication", None),
        "trainable_token_indices": config.__dict__.get("trainable_token_indices"),
        "lora_bias=True": getattr(config, "lora_bias", False),
    }
    for name, value in refused.items():
        if value:
            raise fail("L113", "lora", f"{name} is not supported.", tensor=None)


def inject_lora(model: PreTrainedModel, config: Any) -> None:
    """Add adapters in place; the base is frozen, names of base parameters gain `.base_layer`."""
    import peft  # an optional dependency, needed only when a run uses LoRA

    check_lora(config)
    try:
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise fail("L113", "lora", f"peft could not add adapters: {error}") from error


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
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    return ".lora_" in name
