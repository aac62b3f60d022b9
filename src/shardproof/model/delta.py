"""What adapters add to base weights, row by row and out of place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardproof.model.lora import ADAPTER


@dataclass(frozen=True)
class Delta:
    """`scale * B A`, or its transpose, for one base weight; `a` and `b` are names of the adapter's parameters."""

    a: str
    b: str
    scale: float
    transposed: bool

    def rows(self, a: torch.Tensor, b: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of the delta, in float32."""
        if self.transposed:
            return self.scale * (a.float().t()[first:last] @ b.float().t())
        return self.scale * (b.float()[first:last] @ a.float())


def find_deltas(model: nn.Module, clean: Any) -> dict[str, Delta]:
    """{name of the base weight: what its adapter adds}. `clean` strips wrappers' prefixes from module names."""
    deltas = {}
    for raw_name, layer in model.named_modules():
        name = clean(raw_name)
        if ADAPTER in getattr(layer, "lora_A", {}):
            transposed = bool(getattr(layer, "fan_in_fan_out", False))
            a, b = f"{name}.lora_A.{ADAPTER}.weight", f"{name}.lora_B.{ADAPTER}.weight"
        elif ADAPTER in getattr(layer, "lora_embedding_A", {}):
            transposed = True
            a, b = f"{name}.lora_embedding_A.{ADAPTER}", f"{name}.lora_embedding_B.{ADAPTER}"
        else:
            continue
        deltas[f"{name}.base_layer.weight"] = Delta(a, b, float(layer.scaling[ADAPTER]), transposed)
    return deltas
