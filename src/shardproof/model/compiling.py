"""Compiled blocks: each transformer block's elementwise work fused by torch.compile, once for all blocks and lengths.

Plain blocks have kernels of our own for that (`plain_block`), and are compiled only where those fail.

What is compiled is a module's `forward`, not the module: FSDP's hooks and activation checkpointing run around it as
they always do, and no name in the module changes. All blocks of one class share one compilation. Token counts are
symbols in it, so micro-batches of other lengths use it too. Scoring without gradients runs what training runs, and drops
what a backward pass would need block by block: another compilation would double the time that the first step takes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, update_wrapper, wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from shardproof.model import hf_private, plain_block


@cache
def can_compile(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiling pays (on CUDA in 16 bits) and is possible: Triton and a C compiler are installed."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, filter(None, compilers)))


def fused(function: Callable[..., Any], like: torch.Tensor) -> Callable[..., Any]:
    """The function compiled into few kernels where that pays for tensors such as `like`; elsewhere the function itself."""
    return _compiled(function) if can_compile(like.device, like.dtype) else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*args: Any) -> Any:
        with _constant_floats():
            return compiled(*args)

    return call


def _constant_floats() -> AbstractContextManager[None]:
    """Inside, floats are constants of what is compiled. As symbols they make dynamo trace everything a second time."""
    return torch._dynamo.config.patch(specialize_float=True)


def compile_blocks(model: PreTrainedModel) -> None:
    """Let every block run through kernels of our own or compiled; nothing happens before its first call."""
    for block in _blocks(model):
        written = block.forward
        for part in _parts(block):
            part.forward = _Forward(part)
        if plain_block.is_plain(block):
            block.forward = plain_block.PlainForward(block, written, fallback=block.forward)


class _Forward:
    """A part's compiled forward, as training runs it, also where no gradient is wanted."""

    def __init__(self, part: nn.Module):
        update_wrapper(self, part.forward)
        self._part = part
        self._compiled = torch.compile(part.forward, dynamic=True)
        self._can_share = not _is_random(part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        trains = any(param.requires_grad for param in part.parameters())
        if torch.is_grad_enabled() or not self._can_share or not trains:
            with _constant_floats():
                return self._compiled(*args, **kwargs)
        was_training = part.training
        part.train()
        try:
            with torch.enable_grad(), _constant_floats():
                args = tuple(map(_as_in_training, args))
                kwargs = {name: _as_in_training(value) for name, value in kwargs.items()}
                return tree_map_only(torch.Tensor, torch.Tensor.detach, self._compiled(*args, **kwargs))
        finally:
            part.train(was_training)


def _as_in_training(value: Any) -> Any:
    """Hidden states, which have a gradient in training; whatever else a block is given has none."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _is_random(part: nn.Module) -> bool:
    """Whether something in a part is drawn in training and only there: dropout, or noise on what a router sees."""
    for module in part.modules():
        names = ["p"] if "dropout" in type(module).__name__.lower() else []
        names += [name for name in vars(module) if any(word in name for word in ("drop", "jitter", "noise"))]
        if any(isinstance(getattr(module, name, None), float) and getattr(module, name) for name in names):
            return True
    return False


def forget_compiled(model: PreTrainedModel) -> None:
    """Undo `compile_blocks`."""
    for module in model.modules():
        if _has_compiled_forward(module):
            del module.forward


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether some block's forward is compiled."""
    return any(map(_has_compiled_forward, model.modules()))


def _has_compiled_forward(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), _Forward | plain_block.PlainForward)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside the block all forwards run as they are written."""
    with torch.compiler.set_stance("force_eager"), plain_block.as_written():
        yield


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    classes = hf_private.block_classes(model)
    return [module for module in model.modules() if type(module).__name__ in classes]


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    """The block; of a block with experts the parts beside them.

    What routes tokens is left out: a recompute replays its choices, which a compiled router would not know of, and
    experts have kernels of their own.
    """
    if any(routes(child) for child in block.modules()):
        yield from (child for child in block.children() if not any(map(routes, child.modules())))
    else:
        yield block


def routes(module: nn.Module) -> bool:
    """Whether a module chooses experts, or holds them."""
    return hasattr(module, "num_experts") or "router" in type(module).__name__.lower()
