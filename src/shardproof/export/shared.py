"""Weights to a consumer on the same host: each rank writes its own slices once, and nothing is gathered.

The memory is an anonymous file of rank 0. It has no name in any file system; whoever is told its address under /proc
and runs as the same user can map it, and it is gone when the last process that holds it is, however it ended. Ranks
and consumers map it through `dist/region.py`, which maps nothing else.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from shardproof.dist.collectives import broadcast, together
from shardproof.dist.deadline import deadline, mesh_groups
from shardproof.dist.region import NotOurs, RegionAddress, create_region, map_region
from shardproof.errors import fail
from shardproof.export.address import SharedAddress
from shardproof.export.address import read_shared as read_shared  # beside the class that writes it
from shardproof.export.digests import DigestShare
from shardproof.export.image import Image, ImageLayout
from shardproof.export.manifest import ExportReceipt
from shardproof.export.slices import write_slices
from shardproof.export.stream import WeightStream
from shardproof.shard.memory import host_memory
from shardproof.shard.sharded_model import ShardedModel

_DEADLINE_S = 600.0


class SharedWeights:
    """A policy's weights in shared memory, which each `write` replaces. Close it to free the memory."""

    def __init__(
        self,
        policy: ShardedModel,
        dtype: torch.dtype | str | None = None,
        merge_lora: bool = True,
        digests: bool = True,
        deadline_s: float = _DEADLINE_S,
    ):
        self.policy = policy
        self.digests = digests
        self.deadline_s = deadline_s
        # The stream plans names and buckets, and gathers what cannot be written slice by slice.
        self._stream = WeightStream(
            policy, dtype, merge_lora=merge_lora, digests=digests, deadline_s=deadline_s
        )
        self._layout = ImageLayout(self._stream.metadata())
        self._descriptor: int | None = None
        self._region, memory = self._open()
        self._image = Image(self._layout, memory)
        self.receipt: ExportReceipt | None = None

    def _open(self) -> tuple[RegionAddress, torch.Tensor]:
        """Make the memory on rank 0 and map it on every rank. Collective: every rank."""
        made = None
        with together("export"):
            if dist.get_rank() == 0:
                available, total = host_memory()
                if total and available < self._layout.size:
                    message = (
                        f"the payload needs {self._layout.size} bytes of memory, {available} are available."
                    )
                    raise fail(
                        "E408", "export", message, rank=0, fix="export a smaller dtype, or free memory"
                    )
                self._descriptor, region = create_region(self._layout.size)
                made = region.to_json()
        address = RegionAddress.from_json(broadcast(made))
        with together("export"):
            try:
                return address, map_region(address, writable=True)
            except NotOurs as error:
                message = f"it cannot share memory with rank 0: {error}."
                fix = "run all ranks on one host and as one user, or use WeightStream"
                raise fail("C002", "export", message, rank=dist.get_rank(), fix=fix) from error

    @property
    def path(self) -> str:
        """The memory's address under /proc."""
        return self._region.path

    @property
    def address(self) -> SharedAddress:
        return SharedAddress(self._region, self._layout.table, self.policy.version)

    def write(self) -> ExportReceipt:
        """Write this rank's slices to shared memory; when it returns, all ranks have written theirs.

        Collective: every rank.
        """
        started = time.perf_counter()
        with deadline("export", "E406", self.deadline_s, mesh_groups(self.policy.mesh)):
            write_slices(self._stream, self._image.flat)
            digests = self._digest() if self.digests else {}
        self.receipt = self._stream.make_receipt(digests, time.perf_counter() - started)
        return self.receipt

    def _digest(self) -> dict[str, int]:
        """Digests of what lies in the memory, each taken by one rank. Collective: every rank."""
        share = DigestShare(dist.get_rank(), dist.get_world_size())
        names = [list(entry.boxes) for entry in self._stream.payload.entries]
        for group in names:
            mine = share.next_entry(len(group))
            share.add(self._image.digests(group[mine.start : mine.stop]))
        return share.merged(names)

    def close(self) -> None:
        """Free the memory; processes that have mapped it keep it until they unmap it."""
        self._image.drop()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
