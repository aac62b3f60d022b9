"""Slices for ranks that do not see the files: one reader sends what the others ask for, in bounded buckets.

Reading one's own slices is the default, because then every byte moves once and no rank waits for another. Where only
some node has the files, the ranks without them list the boxes they need; a rank that has them, on the same node if
there is one, reads those boxes and sends them packed, checked by dtype and shape on arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import control_group, exchange
from shardproof.errors import fail
from shardproof.shard.local import LocalShard
from shardproof.shard.materialise import list_reads
from shardproof.shard.plan import ShardPlan
from shardproof.shard.staging import Staging
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.boxes import Box
from shardproof.weights.mapping import WholeConversion
from shardproof.weights.reader import Checkpoint

_BUCKET_BYTES = 64 * 2**20
_FAILED = -1

Request = tuple[str, Box]


def choose_servers(presence: Sequence[Sequence[Any]]) -> dict[int, int]:
    """{rank without files: rank that serves it}, from every rank's (host, has files)."""
    readers = [rank for rank, (_, has_files) in enumerate(presence) if has_files]
    servers = {}
    for rank, (host, has_files) in enumerate(presence):
        if not has_files:
            servers[rank] = next((r for r in readers if presence[r][0] == host), readers[0])
    return servers


def list_requests(plan: ShardPlan, shards: Sequence[LocalShard]) -> list[Request]:
    """Every box that materialising `shards` will ask for, in its order."""
    requests: list[Request] = []
    for shard in shards:
        origin = plan.origins[shard.name]
        if isinstance(origin, BoxTensor):
            requests += [
                (read.piece.source, read.piece.source_box)
                for box, memory in shard.parts()
                for low, high in Staging.parts(memory, origin.dtype)
                for read in list_reads(origin, box, low, high)
            ]
        elif shard.flat.numel() and isinstance(origin, WholeConversion):
            requests += [(name, ()) for names in origin.sources.values() for name in names]
    for shard in shards:
        for box in shard.boxes if shard.name in plan.tie_checks else ():
            reads = list_reads(plan.tie_checks[shard.name], box)
            requests += [(read.piece.source, read.piece.source_box) for read in reads]
    return requests


def exchange_requests(mine: list[Request] | None) -> dict[int, list[Request]]:
    """{rank: its requests} for the ranks that need service. Collective: every rank."""
    rows = exchange(mine)
    return {
        rank: [(name, tuple((a, b) for a, b in box)) for name, box in row]
        for rank, row in enumerate(rows)
        if row is not None
    }


def serve(checkpoint: Checkpoint, requests: dict[int, list[Request]], servers: dict[int, int]) -> None:
    """Send each rank that this one serves what it asked for. A failed read is announced, then raised at the end."""
    group = control_group()
    failure: Exception | None = None
    for rank in sorted(r for r in requests if servers[r] == dist.get_rank()):
        try:
            for bucket in _buckets(requests[rank], checkpoint):
                payload = torch.cat([_raw(checkpoint, request) for request in bucket])
                dist.send(torch.tensor([payload.numel()]), rank, group=group)
                dist.send(payload, rank, group=group)
        except Exception as error:
            # The other ranks still wait for what they asked for.
            dist.send(torch.tensor([_FAILED]), rank, group=group)
            failure = failure or error
    if failure is not None:
        raise failure


def _raw(checkpoint: Checkpoint, request: Request) -> torch.Tensor:
    name, box = request
    tensor = checkpoint.view(name, box) if box else checkpoint.whole(name)
    return tensor.contiguous().view(-1).view(torch.uint8)


def _nbytes(request: Request, checkpoint: Checkpoint) -> int:
    name, box = request
    entry = checkpoint.tensors[name]
    return (prod(b - a for a, b in box) if box else prod(entry.shape)) * entry.dtype.itemsize


def _buckets(requests: list[Request], checkpoint: Checkpoint) -> Iterator[list[Request]]:
    bucket: list[Request] = []
    size = 0
    for request in requests:
        nbytes = _nbytes(request, checkpoint)
        if bucket and size + nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(request)
        size += nbytes
    if bucket:
        yield bucket


class ServedSource:
    """A `SliceSource` that receives its slices, in the order they were asked for, one bucket at a time."""

    def __init__(self, checkpoint: Checkpoint, requests: list[Request], server: int):
        self._checkpoint = checkpoint
        self._server = server
        self._slices = self._receive(requests)

    def view(self, name: str, box: Box) -> torch.Tensor:
        return self._next(name, box)

    def whole(self, name: str) -> torch.Tensor:
        return self._next(name, ())

    def _next(self, name: str, box: Box) -> torch.Tensor:
        (sent_name, sent_box), raw = next(self._slices)
        if (sent_name, sent_box) != (name, box):
            raise fail(
                "L100", "serve", f"expected {name!r} {box}, received {sent_name!r} {sent_box}.", tensor=name
            )
        entry = self._checkpoint.tensors[name]
        return raw.view(entry.dtype).view([b - a for a, b in box] if box else entry.shape)

    def _receive(self, requests: list[Request]) -> Iterator[tuple[Request, torch.Tensor]]:
        group = control_group()
        for bucket in _buckets(requests, self._checkpoint):
            sizes = [_nbytes(request, self._checkpoint) for request in bucket]
            announced = torch.zeros(1, dtype=torch.int64)
            dist.recv(announced, self._server, group=group)
            if int(announced) != sum(sizes):
                raise fail("L100", "serve", f"rank {self._server} could not read this rank's slices.")
            payload = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.recv(payload, self._server, group=group)
            at = 0
            for request, size in zip(bucket, sizes, strict=True):
                # A slice is copied out so that any dtype can be viewed on it, aligned or not.
                yield request, payload[at : at + size].clone()
                at += size

    def drain(self) -> None:
        """Take whatever is still under way, so that a failure here does not leave the server waiting."""
        for _ in self._slices:
            pass
