"""What a block's forward pass leaves behind for the backward pass, measured while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Meter:
    """Adds up over a block's calls what is kept, its output included, and the output alone, in bytes.

    On CUDA the allocator's counters are read, which include what compiled code and kernels keep outside of autograd. On
    the CPU the storages that autograd saves are counted, without the parameters.
    """

    def __init__(self, block: nn.Module, device: torch.device):
        self.kept = self.output = 0
        self._device = device
        self._allocated = 0
        self._saved: dict[int, int] = {}
        self._counting = ExitStack()
        # Inside of FSDP2's own hooks, so that parameters are gathered at both ends.
        self._handles = [
            block.register_forward_pre_hook(self._before),
            block.register_forward_hook(self._after, prepend=True),
        ]

    def close(self) -> None:
        """Stop measuring."""
        self._counting.close()  # a forward that raised left it open
        for handle in self._handles:
            handle.remove()

    def _before(self, block: nn.Module, args: Any) -> None:
        if self._device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(self._device)
            return
        weights = set(_weights(block))
        self._saved = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self._saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._counting.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        self._counting.close()
        if self._device.type == "cuda":
            kept = torch.cuda.memory_allocated(self._device) - self._allocated
        else:
            kept = sum(self._saved.values())  # the input is among them, in the output's place
        first = output[0] if isinstance(output, tuple) else output
        self.output += first.nbytes
        self.kept += max(kept, first.nbytes)


def _weights(block: nn.Module) -> Iterator[int]:
    """Addresses of a block's parameters as the forward pass sees them: under FSDP1 these are plain attributes."""
    for module in block.modules():
        for value in (*module._parameters.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor):
                yield value.untyped_storage().data_ptr()
