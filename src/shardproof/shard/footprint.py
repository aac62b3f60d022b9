"""What FSDP and the head hold beside a rank's shards and activations while a micro-batch runs, from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.model.inventory import Inventory, TensorInfo

# The share of a device's memory to leave free, for fragmentation and for what is not counted.
MARGIN = 0.1
# The head holds six tensors of the size of its logits at its peak.
_NUM_LOGITS = 6
_REDUCE_BYTES = 4


def unit_groups(inventory: Inventory, units: Sequence[str]) -> list[list[TensorInfo]]:
    """Parameters by FSDP unit, the root's last."""
    named: dict[str, list[TensorInfo]] = {unit: [] for unit in units}
    root: list[TensorInfo] = []
    for info in inventory.parameters:
        home = next((unit for unit in units if info.name.startswith(f"{unit}.")), None)
        (named[home] if home is not None else root).append(info)
    return [*named.values(), root]


def unit_bytes(group: Sequence[TensorInfo], dtype: torch.dtype | None = None) -> int:
    """Bytes of a whole unit, in its own dtypes or in another."""
    return sum(info.numel * (dtype or info.dtype).itemsize for info in group)


def gathered_bytes(
    groups: Sequence[Sequence[TensorInfo]], compute: torch.dtype, logits: int, trains: bool, shards: int
) -> int:
    """Bytes of the gathered root, plus the larger of the head's working memory and two blocks with one block's gradients.

    `logits` is the size in bytes of one chunk of logits.
    """
    *blocks, root = groups
    root_bytes = unit_bytes(root, compute)
    block_bytes = max((unit_bytes(group, compute) for group in blocks), default=0)
    if not trains:
        return root_bytes + max(2 * block_bytes, 3 * logits)
    trained_root = sum(info.numel for info in root if info.trainable)
    head = max((info.numel for info in root if info.trainable and len(info.shape) > 1), default=0)
    block_grads = max((sum(i.numel for i in group if i.trainable) for group in blocks), default=0)
    at_the_head = head * (4 + (compute.itemsize if compute.itemsize < 4 else 0)) + _NUM_LOGITS * logits
    # A gathered block is a flat buffer and the parameters copied out of it; a reduced one waits for the next.
    in_the_blocks = head * compute.itemsize + 4 * block_bytes
    in_the_blocks += block_grads * (compute.itemsize + 2 * _REDUCE_BYTES)
    at_the_root = trained_root * (compute.itemsize + _REDUCE_BYTES) if shards > 1 else 0
    return root_bytes + max(at_the_head, in_the_blocks, at_the_root)
