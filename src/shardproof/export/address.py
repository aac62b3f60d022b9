"""Where a payload lies in shared memory of this host, and how it is read there. Light to import: receivers need no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.dist.region import NotOurs, RegionAddress, map_region
from shardproof.errors import fail


@dataclass(frozen=True)
class SharedAddress:
    """Where a payload lies: everything a consumer needs to map it. JSON-able through `to_json`."""

    region: RegionAddress
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, offset
    version: int

    def to_json(self) -> dict[str, Any]:
        return {**self.region.to_json(), "tensors": self.tensors, "version": self.version}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SharedAddress:
        tensors = tuple((n, d, tuple(shape), offset) for n, d, shape, offset in data["tensors"])
        return cls(RegionAddress.from_json(data), tensors, data["version"])


def read_shared(address: SharedAddress) -> Iterator[tuple[str, torch.Tensor]]:
    """The payload's tensors as views of the shared memory; valid while the writer keeps it or this process maps it.

    What is written to them stays in this process. Raises E404 if the address leads to anything but a writer's memory.
    """
    try:
        memory = map_region(address.region)
    except NotOurs as error:
        fix = "read it on the writer's host, as the same user, and before it is closed"
        raise fail("E404", "read_shared", f"{error}.", fix=fix) from error
    for name, dtype, shape, offset in address.tensors:
        yield name, _view(memory, getattr(torch, dtype), shape, offset)


def _view(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)
