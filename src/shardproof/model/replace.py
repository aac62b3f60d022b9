"""Other tensors in the place of a module's parameters and buffers; what was tied stays tied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Make = Callable[[torch.Tensor], torch.Tensor]


def replace_parameters(
    modules: Iterable[nn.Module], make: Make, replaced: dict[torch.Tensor, Any] | None = None
) -> None:
    """Put `make(param)` in the place of each parameter of the modules themselves; a parameter it returns stays.

    `replaced` remembers what was made, where one model's modules come in several calls: without it ties come apart.
    """
    replaced = {} if replaced is None else replaced

    def make_parameter(param: torch.Tensor) -> torch.Tensor:
        new = make(param)
        return new if new is param else nn.Parameter(new, requires_grad=param.requires_grad)

    for module in modules:
        _replace(module._parameters, make_parameter, replaced)


def replace_buffers(modules: Iterable[nn.Module], make: Make) -> None:
    """Put `make(buffer)` in the place of each buffer of the modules themselves."""
    replaced: dict[torch.Tensor, Any] = {}
    for module in modules:
        _replace(module._buffers, make, replaced)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers with values to the device and give meta ones memory there, unwritten; no dtype changes."""
    replace_buffers(
        model.modules(), lambda old: torch.empty_like(old, device=device) if old.is_meta else old.to(device)
    )


def _replace(tensors: dict[str, Any], make: Make, replaced: dict[torch.Tensor, Any]) -> None:
    for name, old in tensors.items():
        if old is not None:
            if old not in replaced:
                replaced[old] = make(old)
            tensors[name] = replaced[old]
