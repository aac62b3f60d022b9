"""Free a device's memory for a colocated rollout engine, and restore it bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from shardproof.shard.local import LocalShard


@dataclass(frozen=True)
class OffloadReceipt:
    """What moved, or why nothing did."""

    num_bytes: int
    note: str


class HostCopy:
    """Device storages whose bytes are in pinned host memory; the storages themselves are emptied, not replaced.

    Tensors, views and FSDP's bookkeeping keep pointing at the same storages, so none of them has to be updated.
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
        # A tensor without storage cannot be sliced, so the shards' offsets are taken first.
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


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def device_storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages of this rank's part of the tensors that are not in host memory, each once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in seen and storage.device.type != "cpu":
            seen.add(storage._cdata)
            yield storage
