"""Give a device's memory to a colocated rollout engine, and take it back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardproof.shard.local import LocalShard

if TYPE_CHECKING:
    from shardproof.shard.sharded_model import ShardedModel


@dataclass(frozen=True)
class OffloadReceipt:
    """What moved, or why nothing did."""

    num_bytes: int
    note: str


class HostCopy:
    """Device storages whose bytes are in pinned host memory; the storages themselves are emptied, not replaced.

    Tensors, views and FSDP's bookkeeping keep pointing at the same storages, so nothing has to be told.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage], shards: Sequence[LocalShard]):
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        for storage in storages:
            if storage.nbytes():
                device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                host = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
                )
                host.copy_(device, non_blocking=True)
                self._copies[storage._cdata] = (storage, host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # A tensor without storage cannot be sliced, so where the shards lie is noted before.
        self.shards = [self._moved(shard) for shard in shards]
        for storage, _ in self._copies.values():
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        return sum(host.numel() for _, host in self._copies.values())

    def _moved(self, shard: LocalShard) -> LocalShard:
        copy = self._copies.get(shard.flat.untyped_storage()._cdata)
        if copy is None:
            return shard
        first = shard.flat.storage_offset() * shard.flat.element_size()
        return replace(shard, flat=copy[1][first : first + shard.nbytes].view(shard.flat.dtype))

    def restore(self) -> None:
        """Fill the storages again."""
        for storage, host in self._copies.values():
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(
                host, non_blocking=True
            )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._copies = {}


def offload(
    policy: ShardedModel, shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer | None = None
) -> OffloadReceipt:
    """Move parameters and optimizer state to pinned host memory; the policy cannot run until `onload`."""
    if policy.offloaded is not None:
        return OffloadReceipt(0, "already offloaded")
    if policy.settings.cpu_offload:
        return OffloadReceipt(
            0, "cpu_offload=True: parameters are in host memory already, and FSDP places them"
        )
    if policy.device.type == "cpu":
        return OffloadReceipt(0, "the policy lives on the CPU: there is no device memory to give back")
    policy.offloaded = HostCopy(_storages(policy, optimizer), shards)
    torch.cuda.empty_cache()
    return OffloadReceipt(policy.offloaded.num_bytes, "moved to pinned host memory")


def onload(policy: ShardedModel) -> OffloadReceipt:
    """Bring everything that `offload` moved back to the device."""
    if policy.offloaded is None:
        return OffloadReceipt(0, "not offloaded")
    num_bytes = policy.offloaded.num_bytes
    policy.offloaded.restore()
    policy.offloaded = None
    return OffloadReceipt(num_bytes, "moved back to the device")


def _storages(
    policy: ShardedModel, optimizer: torch.optim.Optimizer | None
) -> Iterator[torch.UntypedStorage]:
    seen: set[int] = set()
    for tensor in _tensors(policy, optimizer):
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in seen and storage.device.type != "cpu":
            seen.add(storage._cdata)
            yield storage


def _tensors(policy: ShardedModel, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for param in policy.parameters():
        yield param.detach()
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
