"""Launching Triton kernels again and again: what a kernel was compiled for is looked up by us, not by Triton.

Triton examines every argument of every launch, which takes longer than many kernels run. Prompts are not read in CUDA
graphs, so the time would be the host's, while decoding waits.
"""

from __future__ import annotations

from typing import Any

import torch

_compiled: dict[Any, Any] = {}
_ALIGNED = 16  # bytes; Triton compiles another kernel for addresses that are not


class _Trust:
    """Whether Triton still takes compiled kernels with all arguments, constants included, in their order."""

    holds = True


def launch(
    kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
    """Launch a kernel; `constants` are its `constexpr` arguments, which come last, in their order."""
    key = _key_of(kernel, args, constants) if _Trust.holds else None
    found = _compiled.get(key) if key is not None else None
    if found is not None:
        try:
            found[(*grid, 1)](*args, *constants.values())
            return
        except TypeError:  # its interface is another one
            _Trust.holds = False
    found = kernel[grid](*args, **constants, **options)
    if key is not None and found is not None:
        _compiled[key] = found


def _key_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """What the compiled kernel depends on; None for addresses that are not aligned."""
    kinds: list[Any] = []
    addresses = 0
    for arg in args:
        if isinstance(arg, torch.Tensor):
            addresses |= arg.data_ptr()
            kinds.append(arg.dtype)
        elif isinstance(arg, int):
            kinds.append((arg % 16 == 0, arg == 1, arg >= 2**31))
    if addresses % _ALIGNED:
        return None
    return id(kernel), args[0].device.index, tuple(kinds), tuple(constants.values())
