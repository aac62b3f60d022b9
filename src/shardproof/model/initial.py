"""Initial values that are the same on every rank, world size and strategy.

A model says how it is initialised by running `_init_weights`. Here it runs once on the meta skeleton under a recorder;
what it asked for (normal, uniform, constant) is then drawn in fixed blocks, each from a generator seeded with the run's
seed, the tensor's name and the block's number. A rank draws just the blocks that its shard touches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shardproof.errors import fail
from shardproof.model import hf_private
from shardproof.model.lora import reset_adapter

_BLOCK = 1 << 20


@dataclass
class InitSpec:
    """How one tensor is initialised, in terms that can be drawn block by block."""

    name: str
    kind: str  # "normal" | "uniform" | "constant" | "module"
    a: float = 0.0  # mean, lower bound or value
    b: float = 0.0  # standard deviation or upper bound
    rows: dict[int, float] = field(default_factory=dict)  # rows set to a constant afterwards
    module_name: str = ""  # whose _init_weights wrote it last
    template: nn.Module | None = None  # that module on meta, before anything was sharded
    owner: PreTrainedModel | None = None  # whose `_init_weights` it is

    def __str__(self) -> str:
        if self.kind == "module":
            return f"_init_weights of {self.module_name or 'the model'}"
        if self.kind == "constant":
            return f"constant({self.a:g})"
        return f"{self.kind}({self.a:g}, {self.b:g})"


class _Recorder(TorchFunctionMode):
    """Notes what in-place initialisation is asked of the watched meta tensors."""

    def __init__(self, watched: Mapping[torch.Tensor, str]):
        super().__init__()
        self.watched = watched
        self.rows: dict[int, tuple[torch.Tensor, str, int]] = {}
        self.specs: dict[str, InitSpec] = {}
        self.module_name = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, torch.Tensor):
            self._note(func, target, args[1:], kwargs)
        out = func(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and args[0] in self.watched and isinstance(args[1], int):
            # Keeping a reference to `out` keeps its id unique.
            self.rows[id(out)] = (out, self.watched[args[0]], args[1])
        return out

    def _note(
        self, func: Callable[..., Any], target: torch.Tensor, rest: tuple[Any, ...], kwargs: dict
    ) -> None:
        if id(target) in self.rows:
            _, name, row = self.rows[id(target)]
            value = _constant_of(func, rest, kwargs)
            spec = self.specs.get(name)
            if value is None or spec is None:
                self._whole(name)
            else:
                spec.rows[row] = value
            return
        if target not in self.watched:
            return
        name = self.watched[target]
        if self.module_name and not name.startswith(f"{self.module_name}."):
            return  # a head that is tied to the embedding must not redraw it: the padding row would be lost
        spec = _simple_spec(name, func, target, rest, kwargs)
        if spec is not None:
            spec.module_name = self.module_name
            self.specs[name] = spec
        elif (
            getattr(func, "__name__", "").endswith("_") and not getattr(func, "__name__", "").startswith("__")
        ) or (func is torch.Tensor.__getitem__ and not isinstance(rest[0], int)):
            self._whole(name)

    def _whole(self, name: str) -> None:
        self.specs[name] = InitSpec(name, "module", module_name=self.module_name)


def _constant_of(func: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict) -> float | None:
    name = getattr(func, "__name__", "")
    if name in ("zero_", "zeros_"):
        return 0.0
    if name == "ones_":
        return 1.0
    if name in ("fill_", "constant_"):
        value = rest[0] if rest else kwargs.get("value", kwargs.get("val"))
        return float(value) if isinstance(value, int | float) else None
    return None


def _simple_spec(
    name: str, func: Callable[..., Any], target: torch.Tensor, rest: tuple[Any, ...], kwargs: dict
) -> InitSpec | None:
    """The call as a spec, if it overwrites the whole tensor with draws from one distribution."""
    constant = _constant_of(func, rest, kwargs)
    if constant is not None:
        return InitSpec(name, "constant", constant)
    called = getattr(func, "__name__", "")
    if called == "normal_":
        mean = rest[0] if rest else kwargs.get("mean", 0.0)
        std = rest[1] if len(rest) > 1 else kwargs.get("std", 1.0)
        return InitSpec(name, "normal", float(mean), float(std))
    if called == "uniform_":
        low = rest[0] if rest else kwargs.get("from", kwargs.get("a", 0.0))
        high = rest[1] if len(rest) > 1 else kwargs.get("to", kwargs.get("b", 1.0))
        return InitSpec(name, "uniform", float(low), float(high))
    if called == "kaiming_uniform_":
        slope = rest[0] if rest else kwargs.get("a", 0.0)
        mode = kwargs.get("mode", "fan_in")
        gain = nn.init.calculate_gain(kwargs.get("nonlinearity", "leaky_relu"), slope)
        bound = gain * (3.0 / nn.init._calculate_correct_fan(target, mode)) ** 0.5
        return InitSpec(name, "uniform", -bound, bound)
    return None


def record_initialisation(model: PreTrainedModel) -> dict[str, InitSpec]:
    """{name: how the model initialises it}, found by running its `_init_weights` on the meta skeleton.

    Adapters are initialised by peft's own reset. A tensor that nothing initialises is absent.
    """
    watched: dict[torch.Tensor, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            watched.setdefault(tensor, name)
    recorder = _Recorder(watched)
    with hf_private.quiet_initialisation(), recorder:
        for module_name, module in _children_first(model):
            recorder.module_name = module_name
            if hasattr(module, "reset_lora_parameters"):
                reset_adapter(model, module)
            else:
                hf_private.run_init_weights(model, module_name, module)
    for spec in recorder.specs.values():
        if spec.kind == "module":
            spec.template = deepcopy(model.get_submodule(spec.module_name))
            spec.owner = hf_private.initialiser_of(model, spec.module_name)
    return recorder.specs


def _children_first(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        found += _children_first(child, f"{prefix}.{name}".lstrip("."))
    return [*found, (prefix, module)]


def draw(spec: InitSpec, seed: int, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of the tensor, flat, in float32 on the CPU. Memory: the result and one block."""
    if spec.kind == "constant":
        out = torch.full((stop - start,), spec.a)
    else:
        out = torch.empty(stop - start)
        numel = torch.Size(shape).numel()
        for block in range(start // _BLOCK, -(-stop // _BLOCK)):
            low, high = block * _BLOCK, min((block + 1) * _BLOCK, numel)
            values = _draw_block(spec, seed, block, high - low)
            a, b = max(low, start), min(high, stop)
            out[a - start : b - start] = values[a - low : b - low]
    row_size = torch.Size(shape[1:]).numel()
    for row, value in spec.rows.items():
        a, b = max(row * row_size, start), min((row + 1) * row_size, stop)
        if a < b:
            out[a - start : b - start] = value
    return out


def _draw_block(spec: InitSpec, seed: int, block: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_seed_of(seed, spec.name, block))
    values = torch.empty(size)
    if spec.kind == "normal":
        return values.normal_(spec.a, spec.b, generator=generator)
    return values.uniform_(spec.a, spec.b, generator=generator)


def _seed_of(seed: int, name: str, block: int) -> int:
    raw = hashlib.sha256(f"{seed}\0{name}\0{block}".encode()).digest()
    return int.from_bytes(raw[:7], "little")


def initialise_whole(spec: InitSpec, seed: int) -> torch.Tensor:
    """The tensor as its module's own `_init_weights` makes it, in float32. Memory: that module, whole."""
    assert spec.template is not None and spec.owner is not None
    module = deepcopy(spec.template).to_empty(device="cpu")
    relative = spec.name.removeprefix(spec.module_name).lstrip(".")
    with hf_private.quiet_initialisation():
        torch.manual_seed(_seed_of(seed, spec.name, 0))
        spec.owner._init_weights(module)
    value = dict([*module.named_parameters(), *module.named_buffers()])[relative].detach()
    if not torch.isfinite(value).all():
        raise fail("L115", "initialise", f"{spec} leaves parts of {spec.name!r} unwritten.", tensor=spec.name)
    return value
