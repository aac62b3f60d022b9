"""Every parameter and buffer of a skeleton once, with all of its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from shardproof.model.lora import base_name, is_adapter


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or persistent buffer."""

    name: str  # canonical: the first of its names in module order
    names: tuple[str, ...]  # canonical and tied names
    base_names: tuple[str, ...]  # the same, as the model without adapters calls them
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    is_buffer: bool = False
    packed: tuple[int, int] | None = None  # the shape of the weight whose bytes in 4 bits it holds

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape that it has for the model and in its checkpoints."""
        return self.packed or self.shape

    @property
    def is_adapter(self) -> bool:
        return is_adapter(self.name)

    @property
    def is_bias(self) -> bool:
        """Whether it is a bias, or a stack of experts' biases, which has the two dimensions of a matrix."""
        return self.name.endswith("bias")

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_weights(self) -> int:
        """The number of elements that it has for the model."""
        return prod(self.weight_shape)


@dataclass(frozen=True)
class Inventory:
    """What a model holds: parameters, buffers that belong to its checkpoint, buffers that it computes."""

    parameters: tuple[TensorInfo, ...]
    persistent_buffers: tuple[TensorInfo, ...]
    computed_buffers: tuple[str, ...]

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """Everything that a checkpoint or an initialisation has to provide."""
        return self.parameters + self.persistent_buffers


def take_inventory(model: nn.Module) -> Inventory:
    """The inventory of a model, tied tensors counted once."""
    packed = {
        f"{name}.weight": module.packed_shape
        for name, module in model.named_modules()
        if hasattr(module, "packed_shape")
    }
    parameters = _group(model.named_parameters(remove_duplicate=False), False, packed)
    computed: set[str] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        computed.update(f"{module_name}.{leaf}".lstrip(".") for leaf in module._non_persistent_buffers_set)
    buffers = list(model.named_buffers(remove_duplicate=False))
    persistent = _group(((n, b) for n, b in buffers if n not in computed), True, {})
    return Inventory(parameters, persistent, tuple(n for n, _ in buffers if n in computed))


def _group(named: object, is_buffer: bool, packed: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    by_tensor: dict[torch.Tensor, list[str]] = {}
    for name, tensor in named:  # type: ignore[attr-defined]
        by_tensor.setdefault(tensor, []).append(name)
    return tuple(
        TensorInfo(
            name=names[0],
            names=tuple(names),
            base_names=tuple(base_name(n) for n in names),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            trainable=tensor.requires_grad,
            is_buffer=is_buffer,
            packed=packed.get(names[0]),
        )
        for tensor, names in by_tensor.items()
    )
