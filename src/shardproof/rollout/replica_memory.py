"""Where a replica's parameters lie, so that an engine can give up their memory while the policy trains."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.shard.sleeping import SleepingMemory, can_sleep

_ALIGNMENT = 512  # bytes, as torch's allocator has it


class ReplicaMemory:
    """A model's parameters, which must not change hands any more: they stay the same objects, asleep and awake.

    With `in_place` the parameters are moved, once, to memory that comes back at the same addresses, where there is such:
    then CUDA graphs outlive a sleep. `sleeping` is that memory, for what else should sleep with them; else None.
    """

    def __init__(self, model: nn.Module, device: torch.device, in_place: bool):
        self._model, self._device = model, device
        self.sleeping = SleepingMemory(device) if in_place and can_sleep(device) else None
        if self.sleeping is not None:
            self._region = _move(model, self.sleeping)

    def sleep(self) -> None:
        """Give up the memory."""
        if self.sleeping is not None:
            self.sleeping.sleep()
            return
        for param in self._model.parameters():
            param.untyped_storage().resize_(0)  # the parameters stay, and with them where a stream is written
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory back, filled with NaN."""
        if self.sleeping is not None:
            self.sleeping.wake()
            self._region.fill_(0xFF)  # of any floating-point dtype, NaN
            return
        for param in reversed(list(self._model.parameters())):  # the last one in a storage says its size
            end = int(param.storage_offset() + param.numel()) * param.itemsize
            if param.untyped_storage().nbytes() < end:
                param.untyped_storage().resize_(end)
            param.data.fill_(float("nan"))


def _move(model: nn.Module, memory: SleepingMemory) -> torch.Tensor:
    """Move all parameters into one region, which is returned; those that share a storage share memory there, too."""
    places: dict[int, int] = {}  # of each storage, where it begins
    size = 0
    for param in model.parameters():
        storage = param.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = size
            size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    region = memory.empty((size,), torch.uint8)
    for param in list(model.parameters()):
        start = places[param.untyped_storage().data_ptr()] // param.itemsize + param.storage_offset()
        place = region.view(param.dtype).as_strided(param.shape, param.stride(), int(start))
        place.copy_(param.data)
        param.data = place
    return region
