"""Buffers that no checkpoint holds, computed by their own modules and proved to be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardproof.errors import error_for
from shardproof.findings import Finding
from shardproof.model import hf_private

_MAX_BYTES = 8 * 2**30  # real ones have a few MiB


def computed_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(module name, module, buffer name) of every non-persistent buffer."""
    for module_name, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if getattr(module, name, None) is not None:
                yield module_name, module, name


def compute_buffers(model: PreTrainedModel) -> dict[str, str]:
    """Fill every non-persistent buffer of a meta skeleton on the CPU; returns {buffer name: who computed it}.

    Each module's `_init_weights` runs twice over two different poisons. An element that comes out different was not
    written: it is then taken from a module built with real buffers, and refused by name if that leaves it unwritten.
    """
    _check_size(model)
    first = _run_over_poison(model, 0xFF)
    second = _run_over_poison(model, 0x00)
    unwritten = [name for name in first if not _same_bytes(first[name], second[name])]
    writers = {}
    rebuilt = _built_buffers(model) if unwritten else {}
    for module_name, module, leaf in computed_buffers(model):
        name = f"{module_name}.{leaf}".lstrip(".")
        writers[name] = f"{type(module).__name__} through _init_weights"
        value = second[name]
        if name in unwritten:
            value = rebuilt.get(name, value)
            writers[name] = f"{type(module).__name__} through its constructor"
        setattr(module, leaf, value)
    left = [name for name in unwritten if name not in rebuilt or _looks_unwritten(rebuilt[name])]
    if left:
        raise error_for(
            [Finding("S204", "buffers", f"nothing initialises the buffer {n!r}.", tensor=n) for n in left]
        )
    return writers


def _check_size(model: nn.Module) -> None:
    """Raise before more memory is allocated than any real model's buffers need."""
    size = sum(buffer.numel() * buffer.element_size() for buffer in computed_values(model).values())
    if size > _MAX_BYTES:
        message = f"its computed buffers would take {size / 2**30:.0f} GiB; check the sizes in config.json."
        raise error_for([Finding("L114", "buffers", message)])


def _run_over_poison(model: PreTrainedModel, poison: int) -> dict[str, torch.Tensor]:
    """What each module's `_init_weights` makes of buffers whose every byte is `poison`."""
    owners: dict[str, nn.Module] = {}
    for module_name, module, leaf in computed_buffers(model):
        setattr(module, leaf, _poisoned(module.get_buffer(leaf), poison))
        owners[module_name] = module
    with hf_private.quiet_initialisation():
        for module_name, module in owners.items():
            hf_private.run_init_weights(model, module_name, module)
    return computed_values(model)


def _poisoned(like: torch.Tensor, poison: int) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.full(like.shape, bool(poison))
    raw = torch.full((like.numel() * like.element_size(),), poison, dtype=torch.uint8)
    return raw.view(like.dtype).view(like.shape)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _looks_unwritten(tensor: torch.Tensor) -> bool:
    """Whether fill_uninitialized_memory's mark (NaN, or the largest integer) is still there."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())


def _built_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The buffers of the same model built with real buffers and meta parameters: always right, and slow."""
    with _parameters_on_meta(), hf_private.no_init_weights(), _marked_memory():
        fresh = type(model)(model.config)
    return computed_values(fresh)


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Memory that a constructor allocates and does not write holds NaN or the largest integer."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built in this block keep their buffers and drop their parameters' memory as they are registered."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: Any) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def fresh_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the model's non-persistent buffers should hold, computed anew from its config on the CPU."""
    with torch.device("meta"), hf_private.no_init_weights():
        skeleton = type(model)(model.config)
    compute_buffers(skeleton)
    return computed_values(skeleton)


def computed_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: non-persistent buffer}."""
    return {f"{m}.{leaf}".lstrip("."): module.get_buffer(leaf) for m, module, leaf in computed_buffers(model)}
