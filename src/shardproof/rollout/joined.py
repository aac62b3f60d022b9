"""Weights that multiply the same input, side by side in memory, so that one matmul reads all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# Linear layers of one module that read the same input.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Move the weights (and biases) of such layers next to each other. The parameters stay the same objects."""
    for module in model.modules():
        for names in _TOGETHER:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if (
                all(type(each) is nn.Linear for each in layers)
                and len({each.in_features for each in layers}) == 1
            ):
                _join([each.weight for each in layers])
                if all(each.bias is not None for each in layers):
                    _join([each.bias for each in layers])


def _join(params: Sequence[nn.Parameter]) -> None:
    joined = torch.cat([param.data for param in params])
    for param, part in zip(params, joined.split(list(map(len, params))), strict=True):
        param.data = part
