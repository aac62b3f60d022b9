"""Parameters and buffers are replaced once each, and what was tied stays tied."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.model.replace import place_buffers, replace_parameters


def tied_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
        model["a"].register_buffer("scale", torch.ones(2))
    model["b"].weight = model["a"].weight
    model["b"].register_buffer("scale", model["a"].scale)
    model["b"].bias.requires_grad_(False)
    return model


def test_tied_parameters_are_made_once() -> None:
    model, made = tied_model(), []

    def make(param: torch.Tensor) -> torch.Tensor:
        made.append(param)
        return torch.zeros(param.shape)

    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():  # one at a time, as FSDP1 asks for them
        replace_parameters([module], make, replaced)
    assert len(made) == 2
    assert model["a"].weight is model["b"].weight
    assert model["a"].weight.requires_grad and not model["b"].bias.requires_grad


def test_what_make_returns_unchanged_stays() -> None:
    model = tied_model()
    before = dict(model.named_parameters())
    replace_parameters(model.modules(), lambda param: param)
    assert all(param is before[name] for name, param in model.named_parameters())


def test_tied_buffers_get_one_memory() -> None:
    model = tied_model()
    place_buffers(model, torch.device("cpu"))
    assert model["a"].scale is model["b"].scale and not model["a"].scale.is_meta
