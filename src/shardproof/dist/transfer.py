"""Files that one rank sends another, in parts of bounded size, compared with their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from shardproof.dist.collectives import control_group, exchange, together
from shardproof.dist.shared_folder import disk_errors, on_host
from shardproof.errors import ShardproofError, fail
from shardproof.files import open_atomic

BUCKET_BYTES = 4 * 2**20
_TURNS = 64  # parts of each file between two meetings of all ranks


class Transfer(NamedTuple):
    """A file that rank `source` sends rank `target`."""

    name: str
    size: int
    crc: int  # CRC-32 of its content
    source: int
    target: int

    @property
    def num_parts(self) -> int:
        return -(-self.size // BUCKET_BYTES)


def transfer_files(transfers: Iterable[Transfer], path_of: Callable[[str], Path], stage: str) -> None:
    """Carry out the transfers, the same list on every rank; `path_of` says where a name lies on this rank.

    A file appears whole, after its content was compared with its checksum, or not at all. A rank that cannot read or
    write goes on with the rest, so that nobody waits for it, and all ranks raise its error at the end.

    Collective: every rank. Memory: one bucket.
    """
    rank, listed = dist.get_rank(), list(transfers)
    bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
    work = {}
    for number, each in enumerate(listed):
        if rank in (each.source, each.target):
            handle = _send if rank == each.source else _receive
            work[number] = handle(path_of(each.name), each, bucket, stage)
    problem: ShardproofError | None = None
    # A part of each file in turn, so that all pairs of ranks are busy. All ranks go through one order, so the two of a
    # transfer never wait for each other in a circle.
    for turn in range(max((each.num_parts for each in listed), default=0)):
        for number in [number for number in work if turn < listed[number].num_parts]:
            next(work[number])
        if turn % _TURNS == _TURNS - 1:
            exchange(
                None
            )  # so that a rank with little to do waits for a part of the others' work, not for all of it
    for parts in work.values():
        try:
            next(parts, None)
        except ShardproofError as error:
            problem = problem or error
    with together(stage):
        if problem is not None:
            raise problem


def _send(path: Path, sent: Transfer, bucket: torch.Tensor, stage: str) -> Iterator[None]:
    """Send a part of the file for each item. At the end, raises what went wrong."""
    left = sent.size
    with _Reader(path) as reader:
        while left:
            part = bucket[: min(left, len(bucket))]
            reader.fill(part)
            dist.send(part, sent.target, group=control_group())
            left -= len(part)
            yield
    if reader.problem is not None:
        raise fail("E407", stage, f"{on_host()}{path} cannot be read: {reader.problem}.", rank=sent.source)


class _Reader:
    """A file that is read part by part; after a problem the parts are whatever was there."""

    def __init__(self, path: Path):
        self.problem: str | None = None
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Reader:
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            self.problem = error.strerror or str(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def fill(self, part: torch.Tensor) -> None:
        if self._file is None or self.problem is not None:
            return
        try:
            if self._file.readinto(part.numpy().data) != len(part):  # type: ignore[attr-defined]
                self.problem = "it ends too early"
        except OSError as error:
            self.problem = error.strerror or str(error)


def _receive(path: Path, sent: Transfer, bucket: torch.Tensor, stage: str) -> Iterator[None]:
    """Write a part of the file for each item. At the end, raises what went wrong."""
    left = sent.size

    def next_part() -> memoryview:
        nonlocal left
        part = bucket[: min(left, len(bucket))]
        dist.recv(part, sent.source, group=control_group())
        left -= len(part)
        return part.numpy().data

    what, problem, was_taken = f"{path.parent} cannot be written", None, True
    try:
        with disk_errors(stage, what, sent.size, path.parent), open_atomic(path) as file:
            crc = 0
            while left:
                raw = next_part()
                was_taken = False
                crc = zlib.crc32(raw, crc)
                file.write(raw)
                was_taken = True
                yield
            if crc != sent.crc:
                message = f"{sent.name}, sent by rank {sent.source}, does not match its checksum."
                raise fail("E407", stage, message, rank=sent.target, tensor=sent.name)
    except ShardproofError as error:
        problem = error
    if not was_taken:
        yield  # of the part that could not be written
    while left:  # the sender does not know
        next_part()
        yield
    if problem is not None:
        raise problem
