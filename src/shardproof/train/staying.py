"""Whether parameters stay gathered through a step, where neither the user nor a plan for activations has said so.

FSDP2 gathers every unit twice per micro-batch. Where the device has memory for the whole model beside what earlier steps
have used, once per step is enough: it saves traffic between ranks, and on one rank copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardproof.shard.footprint import MARGIN, num_row_shards, unit_bytes, unit_groups
from shardproof.shard.memory import device_id
from shardproof.shard.settings import FSDP2
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch


class Staying:
    """Decides for one model, from the memory that its steps have used so far."""

    def __init__(self, policy: ShardedModel):
        groups = unit_groups(policy.inventory, policy.plan.units)
        cut = num_row_shards(policy.strategy, policy.settings.shard_size)
        self._whole = sum(unit_bytes(group, policy.settings.compute_dtype, cut) for group in groups)
        self._device = policy.device
        self._asked = _is_open(policy)
        self._largest = 0  # tokens of the largest micro-batch of earlier steps
        self._size = 0  # of this step's
        self._stays = False

    def facts(self, batch: Batch, micro_batch_tokens: int) -> dict[str, Any] | None:
        """What the other ranks must know of this one's memory; None: parameters are to be given up."""
        lengths = batch.lengths
        self._size = max(min(sum(lengths), micro_batch_tokens), *lengths, 0) if lengths else 0
        known, self._largest = self._largest, max(self._largest, self._size)
        # A larger micro-batch than any before needs memory that nobody has seen yet.
        if not self._asked or not known or self._size > known:
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_allocated(self._device)
        rise = torch.cuda.max_memory_allocated(self._device) - held
        return {
            "device": device_id(self._device),
            "free": free,
            "total": total,
            # Beyond what the allocator holds already and does not use.
            "needed": rise
            + (0 if self._stays else self._whole)
            - (torch.cuda.memory_reserved(self._device) - held),
        }

    def decide(self, rows: Sequence[Mapping[str, Any] | None]) -> bool:
        """Whether there is room on every rank; `rows` are the facts of all."""
        self._stays = all(row is not None and _has_room(row, rows) for row in rows)
        return self._stays


def _is_open(policy: ShardedModel) -> bool:
    settings = policy.settings
    decided = settings.reshard_after_forward is not None or settings.recomputes_as_needed
    return (
        policy.device.type == "cuda" and policy.strategy == FSDP2 and not decided and not settings.cpu_offload
    )


def _has_room(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any] | None]) -> bool:
    sharers = sum(other is not None and other["device"] == row["device"] for other in rows)
    return row["needed"] * sharers <= row["free"] - MARGIN * row["total"]
