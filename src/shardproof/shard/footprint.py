"""What FSDP and the head hold beside a rank's shards and activations while a micro-batch runs, from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from shardproof.model.inventory import Inventory, TensorInfo
from shardproof.shard.settings import FSDP1

# The share of a device's memory to leave free, for fragmentation and for what is not counted.
MARGIN = 0.1
# The head holds six tensors of the size of its logits at its peak.
_NUM_LOGITS = 6
_REDUCE_DTYPE = torch.float32


def unit_groups(inventory: Inventory, units: Sequence[str]) -> list[list[TensorInfo]]:
    """Parameters by FSDP unit, the root's last."""
    named: dict[str, list[TensorInfo]] = {unit: [] for unit in units}
    root: list[TensorInfo] = []
    for info in inventory.parameters:
        home = next((unit for unit in units if info.name.startswith(f"{unit}.")), None)
        (named[home] if home is not None else root).append(info)
    return [*named.values(), root]


def unit_bytes(group: Sequence[TensorInfo], dtype: torch.dtype | None = None, row_shards: int = 1) -> int:
    """Bytes of a whole unit as it is gathered, in its own dtypes or in another.

    FSDP2 cuts each tensor's rows over `row_shards` ranks and pads them to a multiple of it, so that what it gathers of
    128 experts over 512 ranks is four times as large. Under FSDP1, which pads a whole unit by some elements, it is 1.
    """
    return sum(
        _padded(info, row_shards) * (info.dtype if info.packed or dtype is None else dtype).itemsize
        for info in group
    )


def num_row_shards(strategy: str, shards: int) -> int:
    """Over how many ranks the rows of each tensor are cut."""
    return 1 if strategy == FSDP1 else shards


def _padded(info: TensorInfo, row_shards: int) -> int:
    """Elements of a tensor whose rows are padded to a multiple of `row_shards`."""
    rows = info.shape[0] if info.shape else 1
    return -(-rows // row_shards) * row_shards * prod(info.shape[1:])


def gathered_bytes(
    groups: Sequence[Sequence[TensorInfo]],
    compute: torch.dtype,
    logits: int,
    trains: bool,
    shards: int,
    strategy: str,
) -> int:
    """Bytes of the gathered root, plus the larger of the head's working memory and two blocks with one block's gradients.

    `logits` is the size in bytes of one chunk of logits.
    """
    *blocks, root = groups
    cut = num_row_shards(strategy, shards)
    root_bytes = unit_bytes(root, compute, cut)
    block_bytes = max((unit_bytes(group, compute, cut) for group in blocks), default=0)
    # A weight in 4 bits is there whole while it is computed with.
    packed = (info for group in blocks for info in group if info.packed)
    whole = max((info.num_weights * compute.itemsize for info in packed), default=0)
    if not trains:
        return root_bytes + max(2 * block_bytes + whole, 3 * logits)
    trained_root = [info for info in root if info.trainable]
    head = max((info.numel for info in root if info.trainable and len(info.shape) > 1), default=0)
    trained_blocks = [[info for info in group if info.trainable] for group in blocks]
    at_the_head = head * (4 + (compute.itemsize if compute.itemsize < 4 else 0)) + _NUM_LOGITS * logits
    # A gathered block is a flat buffer and the parameters copied out of it; a reduced one waits for the next.
    in_the_blocks = head * compute.itemsize + 4 * block_bytes + whole
    in_the_blocks += max((_gradient_bytes(group, compute, cut, 2) for group in trained_blocks), default=0)
    at_the_root = _gradient_bytes(trained_root, compute, cut, 1) if shards > 1 else 0
    return root_bytes + max(at_the_head, in_the_blocks, at_the_root)


def _gradient_bytes(
    group: Sequence[TensorInfo], compute: torch.dtype, row_shards: int, num_reduced: int
) -> int:
    """A unit's gradients as they are computed, and the buffers, padded like the unit, that they are reduced in."""
    return unit_bytes(group, compute) + num_reduced * unit_bytes(group, _REDUCE_DTYPE, row_shards)
