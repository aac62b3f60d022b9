"""Weights that lie side by side in memory, as one tensor: one matmul then reads all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of the rows of all, which shares their memory; None if they are not next to each other."""
    first, end = tensors[0], tensors[0].storage_offset()
    for each in tensors:
        is_next = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (
            is_next and each.storage_offset() == end and each.is_contiguous() and each.dtype == first.dtype
        ):
            return None
        end += each.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def joined_linear(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """One weight and one bias for linear layers that read the same input; None if they do not lie side by side."""
    weight = side_by_side(weights)
    bias = side_by_side(biases) if biases is not None else None
    return None if weight is None or (bias is None and biases is not None) else (weight, bias)
