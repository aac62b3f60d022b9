"""Slices for ranks that do not see the files: one reader sends what the others ask for, in bounded buckets.

Reading one's own slices is the default, because then every byte moves once and no rank waits for another. Where only
some host has the files, a rank without them lists the boxes it needs to one rank that has them, on its own host if there
is one. That rank reads the boxes and sends them packed; dtype and shape are checked on arrival. Lists and boxes travel
between these two alone. A server holds one bucket at a time, and sends a bucket to each of its ranks in turn: none of
them waits longer for its next slices than the others need for one bucket each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist

from shardproof.dist.collectives import control_group
from shardproof.dist.hosts import Hosts
from shardproof.errors import fail
from shardproof.shard.local import LocalShard
from shardproof.shard.materialise import list_reads
from shardproof.shard.packed import weight_parts
from shardproof.shard.plan import ShardPlan, is_whole
from shardproof.shard.staging import Staging
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.boxes import Box
from shardproof.weights.mapping import WholeConversion
from shardproof.weights.reader import Checkpoint

_BUCKET_BYTES = 64 * 2**20
_FAILED = -1
_PART = 2**14  # numbers of a list of requests that are looked at together

Request = tuple[str, Box]


def choose_servers(has_files: Sequence[bool], hosts: Hosts) -> dict[int, int]:
    """{rank without files: rank that serves it}: readers of its own host in turn, where it has none all readers in turn."""
    readers = [rank for rank, has in enumerate(has_files) if has]
    servers: dict[int, int] = {}
    load = Counter(dict.fromkeys(readers, 0))
    for rank in (rank for rank, has in enumerate(has_files) if not has):
        near = [reader for reader in readers if hosts.of_rank[reader] == hosts.of_rank[rank]]
        servers[rank] = min(near or readers, key=lambda reader: (load[reader], reader))
        load[servers[rank]] += 1
    return servers


def list_requests(plan: ShardPlan, shards: Sequence[LocalShard]) -> list[Request]:
    """Every box that materialising `shards` will ask for, in its order."""
    requests: list[Request] = []
    for shard in [part for each in shards for part in _written(plan, each)]:
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


def _written(plan: ShardPlan, shard: LocalShard) -> Iterator[LocalShard]:
    """The shard, or what is read of it at a time before it is packed, in memory that is not there."""
    shape = plan.packed.get(shard.name)
    if shape is None:
        yield shard
    elif shard.flat.numel():
        memory = torch.empty(1, device=shard.flat.device).expand
        for _, _, part in weight_parts(shard, shape, is_whole(plan.origins[shard.name]), memory):
            yield part


def served_by(rank: int, servers: dict[int, int]) -> list[int]:
    """The ranks that a rank serves, in their order."""
    return sorted(each for each, server in servers.items() if server == rank)


def send_bytes(content: torch.Tensor, rank: int) -> None:
    """Send a rank a tensor of one dimension, its length first."""
    dist.send(torch.tensor([content.numel()]), rank, group=control_group())
    if content.numel():
        dist.send(content, rank, group=control_group())


def receive_bytes(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank sends with `send_bytes`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank, group=control_group())
    content = torch.empty(int(length), dtype=dtype)
    if content.numel():
        dist.recv(content, rank, group=control_group())
    return content


def _pack(requests: list[Request], checkpoint: Checkpoint) -> torch.Tensor:
    """Requests as numbers: which tensor, how many dimensions of a box, and the box."""
    numbers = {name: number for number, name in enumerate(sorted(checkpoint.tensors))}
    flat = [
        each
        for name, box in requests
        for each in (numbers[name], len(box), *(bound for pair in box for bound in pair))
    ]
    return torch.tensor(flat, dtype=torch.int64)


def _unpack(packed: torch.Tensor, checkpoint: Checkpoint) -> Iterator[Request]:
    """The requests that were packed, a part at a time: as Python's numbers all of them would take ten times the memory."""
    names, at = sorted(checkpoint.tensors), 0
    while at < len(packed):
        part = packed[at : at + _PART].tolist()
        read = 0
        while read + 2 <= len(part) and (end := read + 2 + 2 * part[read + 1]) <= len(part):
            bounds = part[read + 2 : end]
            yield names[part[read]], tuple(zip(bounds[::2], bounds[1::2], strict=True))
            read = end
        assert read, "a request has at most 32 dimensions"
        at += read


def serve(checkpoint: Checkpoint, servers: dict[int, int]) -> None:
    """Send each rank that this one serves what it asks for. A failed read is announced, then raised at the end.

    Memory: one bucket, and a packed list of requests per rank.
    """
    failure: Exception | None = None
    lists = {rank: receive_bytes(rank, torch.int64) for rank in served_by(dist.get_rank(), servers)}
    waiting = {rank: _buckets(_unpack(packed, checkpoint), checkpoint) for rank, packed in lists.items()}
    while waiting:
        for rank, buckets in list(waiting.items()):
            try:
                bucket = next(buckets, None)
                content = None if bucket is None else torch.cat([_raw(checkpoint, each) for each in bucket])
            except Exception as error:
                # It still waits for what it asked for, and so do the others.
                dist.send(torch.tensor([_FAILED]), rank, group=control_group())
                failure, content = failure or error, None
            if content is None:
                del waiting[rank]
            else:
                send_bytes(content, rank)
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


def _buckets(requests: Iterable[Request], checkpoint: Checkpoint) -> Iterator[list[Request]]:
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
        send_bytes(_pack(requests, self._checkpoint), self._server)
        for bucket in _buckets(requests, self._checkpoint):
            sizes = [_nbytes(request, self._checkpoint) for request in bucket]
            announced = torch.zeros(1, dtype=torch.int64)
            dist.recv(announced, self._server, group=group)
            if int(announced) != sum(sizes):
                raise fail("L100", "serve", f"rank {self._server} could not read this rank's slices.")
            payload = torch.empty(sum(sizes), dtype=torch.uint8)
            if payload.numel():
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
