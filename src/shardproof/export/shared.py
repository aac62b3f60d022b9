"""Weights to a consumer on the same host: each rank writes its own slices once, and nothing is gathered.

The memory is an anonymous file of rank 0. It has no name in any file system; whoever is told its address under /proc
and runs as the same user can map it, and it is gone when the last process that holds it is, however it ended. Ranks
and consumers map it through `dist/region.py`, which maps nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardproof.digest import digest, digest_tiles
from shardproof.dist.collectives import broadcast, together
from shardproof.dist.deadline import deadline, mesh_groups
from shardproof.dist.region import NotOurs, RegionAddress, create_region, map_region
from shardproof.errors import fail
from shardproof.export.digests import DigestShare
from shardproof.export.gather import Gatherer
from shardproof.export.manifest import ExportReceipt
from shardproof.export.payload import Layout, first_not_finite
from shardproof.export.stream import WeightStream, agree_to_continue, make_tensors
from shardproof.shard.local import LocalShard
from shardproof.shard.memory import host_memory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.weights.boxes import copy_overlap, enclosing_range, put_held
from shardproof.weights.mapping import Cut, ExportEntry

_ALIGNMENT = 64
_DEADLINE_S = 600.0


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
        offsets, size = [], 0
        for meta in self._stream.metadata():
            offsets.append(size)
            size += -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._offsets = offsets
        self._size = max(size, _ALIGNMENT)
        self._places = {
            meta.name: (meta.dtype, offset, torch.Size(meta.shape).numel())
            for meta, offset in zip(self._stream.metadata(), offsets, strict=True)
        }
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the memory, seen as elements of each dtype
        self._descriptor: int | None = None
        self._region, self._memory = self._open()
        self.receipt: ExportReceipt | None = None

    def _open(self) -> tuple[RegionAddress, torch.Tensor]:
        """Make the memory on rank 0 and map it on every rank. Collective: every rank."""
        made = None
        with together("export"):
            if dist.get_rank() == 0:
                available, total = host_memory()
                if total and available < self._size:
                    message = f"the payload needs {self._size} bytes of memory, {available} are available."
                    raise fail(
                        "E408", "export", message, rank=0, fix="export a smaller dtype, or free memory"
                    )
                self._descriptor, region = create_region(self._size)
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
        tensors = tuple(
            (meta.name, str(meta.dtype).removeprefix("torch."), meta.shape, offset)
            for meta, offset in zip(self._stream.metadata(), self._offsets, strict=True)
        )
        return SharedAddress(self._region, tensors, self.policy.version)

    def write(self) -> ExportReceipt:
        """Write this rank's slices to shared memory; when it returns, all ranks have written theirs.

        Collective: every rank.
        """
        started = time.perf_counter()
        payload = self._stream.payload
        with deadline("export", "E406", self.deadline_s, mesh_groups(self.policy.mesh)):
            payload.refresh()
            payload.check()
            layout = payload.layout()
            # Replicas hold the same bytes; the first writes them.
            writes = self.policy.mesh.ndim == 1 or self.policy.mesh.get_local_rank(0) == 0
            bad: str | None = None
            for bucket in self._stream.buckets():
                adapters = self._stream.gather_adapters(
                    [n for entry in bucket for n in entry.sources], layout
                )
                for entry in bucket:
                    bad = self._write_entry(entry, layout, adapters, writes) or bad
            agree_to_continue(bad=bad)  # and every rank has written
            digests = self._digest() if self.digests else {}
        self.receipt = self._stream.make_receipt(digests, time.perf_counter() - started)
        return self.receipt

    def _write_entry(
        self, entry: ExportEntry, layout: Layout, adapters: Mapping[str, torch.Tensor], writes: bool
    ) -> str | None:
        """Write what this rank holds of an entry; returns the name of a tensor that is not finite."""
        payload = self._stream.payload
        if entry.whole is not None:
            whole = self._stream.gather_bucket([entry], layout, Gatherer(0))
            for name, tensor in make_tensors(entry, whole):
                if dist.get_rank() == 0:
                    self._flat(name).view(tensor.shape).copy_(tensor)
            return None
        if not writes:
            return None
        bad = None
        for source in entry.sources:
            held = payload.held(source, adapters)
            bad = first_not_finite({source: held.flat}) or bad
            if entry.cuts is not None:
                self._place_cuts([cut for cut in entry.cuts if cut.source == source], held)
            else:
                self._place_pieces(entry, source, held)
        return bad

    def _place_cuts(self, cuts: Sequence[Cut], held: LocalShard) -> None:
        """Copy the parts of runs that lie in this rank's boxes."""
        for box, values in held.parts():
            start, stop = enclosing_range(box, held.shape)
            for cut in cuts:
                end = cut.start + cut.length
                if cut.start < stop and start < end:
                    copy_overlap(held.shape, self._flat(cut.name), ((cut.start, end),), values, box)

    def _place_pieces(self, entry: ExportEntry, source: str, held: LocalShard) -> None:
        """Copy the parts of checkpoint tensors' pieces that lie in this rank's boxes of a model tensor."""
        for name, account in entry.boxes.items():
            target = self._flat(name).view(account.shape)
            for piece in account.pieces:
                for box, values in held.parts() if piece.source == source else ():
                    put_held(target, piece, box, values)

    def _flat(self, name: str) -> torch.Tensor:
        """A tensor's elements in the shared memory."""
        dtype, offset, count = self._places[name]
        at = offset // dtype.itemsize
        return self._typed_memory(dtype)[at : at + count]

    def _typed_memory(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._typed:
            self._typed[dtype] = self._memory.view(dtype)
        return self._typed[dtype]

    def _digest(self) -> dict[str, int]:
        """Digests of what lies in the memory, each taken by one rank. Collective: every rank."""
        share = DigestShare(dist.get_rank(), dist.get_world_size())
        names = [list(entry.boxes) for entry in self._stream.payload.entries]
        for group in names:
            mine = share.next_entry(len(group))
            share.add(self._digest_some(group[mine.start : mine.stop]))
        return share.merged(names)

    def _digest_some(self, names: Sequence[str]) -> list[int]:
        """Digests of tensors that follow each other in the memory; all at once if they are of one size."""
        places = [self._places[name] for name in names]
        if len({(dtype, count) for dtype, _, count in places}) == 1:
            dtype, offset, count = places[0]
            if count * dtype.itemsize % _ALIGNMENT == 0:
                at = offset // dtype.itemsize
                tiles = self._typed_memory(dtype)[at : at + count * len(names)]
                return digest_tiles(tiles.view(len(names), count))
        return [digest(self._flat(name)) for name in names]

    def close(self) -> None:
        """Free the memory; processes that have mapped it keep it until they unmap it."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._typed.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
