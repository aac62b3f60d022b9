"""Shards on disk: raw bytes in one file per rank, and an index in JSON that says where each box of a tensor lies.

Any layout reads what any other wrote: what it needs is where its boxes and the saved ones overlap. torch DCP does the
same with pickles: in its files, and in the plans that its ranks send each other over connections that nobody
authenticates.
"""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import torch

from shardproof.checkpoints.plain import DTYPES
from shardproof.errors import fail
from shardproof.foreign import open_foreign
from shardproof.shard.local import LocalShard, Part
from shardproof.shard.optimizer_state import blocks_of
from shardproof.weights.boxes import Box, first_miscount, overlaps, size_of

INDEX_NAME = "index.json"
_FILE_PATTERN = re.compile(r"rank-\d+\.bin")
_MAX_DIMS = 64


class Chunk(NamedTuple):
    """A box of a tensor in a file.

    The index has [start, count, file, offset] for a range of the flattened tensor, else [box, file, offset].
    """

    box: Box
    file: str
    offset: int  # bytes from the beginning of the file


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint; its chunks are in order, without gap or overlap."""

    dtype: torch.dtype
    numel: int
    chunks: list[Chunk]
    shape: tuple[int, ...] | None = None  # None: all chunks are ranges of the flattened tensor

    def overlapping(self, box: Box) -> Iterator[Chunk]:
        """The chunks that can hold elements of a box; of ranges, those that do."""
        if self.shape is not None or len(box) > 1:
            yield from self.chunks
            return
        ((start, stop),) = box
        first = bisect_right(self.chunks, start, key=lambda chunk: chunk.box[0][0]) - 1
        for chunk in self.chunks[max(first, 0) :]:
            if chunk.box[0][0] >= stop or start == stop:
                return
            yield chunk


def data_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank}.bin"


def write_ranges(path: Path, ranges: Mapping[str, LocalShard]) -> tuple[dict[str, Any], int, int]:
    """Write a rank's shards end to end; returns its part of the index, the file's size and its CRC-32."""
    part: dict[str, Any] = {}
    offset = crc = 0
    with path.open("xb") as file:
        for name, item in ranges.items():
            if not item.flat.numel() and item.numel:
                continue  # other ranks have it
            part[name] = _described(item, offset)
            raw = _bytes_of(item.flat.detach().cpu().contiguous())
            file.write(raw)
            crc, offset = zlib.crc32(raw, crc), offset + raw.nbytes
        file.flush()
        os.fsync(file.fileno())
    return part, offset, crc


def _described(item: LocalShard, offset: int) -> list[Any]:
    """[dtype, number of elements or shape, chunks without their file] of a shard that lies at `offset` of a file."""
    rows: list[list[Any]] = []
    for box, memory in item.parts():
        if len(box) > 1:
            rows.append([box, offset])
        elif memory.numel():
            rows.append([box[0][0], memory.numel(), offset])
        offset += memory.numel() * memory.element_size()
    is_flat = all(len(box) == 1 for box in item.boxes)
    return [str(item.flat.dtype).removeprefix("torch."), item.numel if is_flat else item.shape, rows]


def merge_index(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The index of all ranks' parts: {name: its dtype, its elements, its chunks, and its shape if they need it}."""
    index: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, (dtype, size, rows) in part.items():
            numel = size if isinstance(size, int) else prod(size)
            entry = index.setdefault(name, {"dtype": dtype, "numel": numel, "chunks": []})
            if not isinstance(size, int):
                entry["shape"] = size
            entry["chunks"] += [[*row[:-1], data_name(rank), row[-1]] for row in rows]
    for entry in index.values():
        entry["chunks"].sort(key=lambda row: row[0] if isinstance(row[0], int) else row[0][0][0])
    return index


def read_ranges(
    folder: Path, ranges: Mapping[str, LocalShard], saved: Mapping[str, SavedTensor], stage: str = "resume"
) -> None:
    """Fill a rank's shards, each straight into its place where that is host memory of the saved dtype."""
    wanted: dict[str, list[tuple[Chunk, str, Part]]] = {}
    for name, item in ranges.items():
        if saved[name].shape not in (None, item.shape):
            message = f"{name!r} has the shape {saved[name].shape} in the checkpoint and {item.shape} here."
            raise fail("E407", stage, message, tensor=name)
        for part in item.parts():
            for chunk in saved[name].overlapping(part.box):
                if any(overlaps(item.shape, part.box, chunk.box)):
                    wanted.setdefault(chunk.file, []).append((chunk, name, part))
    for file_name, found in wanted.items():
        with open_foreign(folder / file_name, stage, code="E407", inside=folder) as file:
            for chunk, name, part in sorted(found, key=lambda row: row[0].offset):
                if not _read_chunk(file, chunk, saved[name].dtype, ranges[name].shape, part):
                    raise fail("E407", stage, f"{file_name} ends before {name!r} is complete.", tensor=name)


def files_to_read(ranges: Mapping[str, LocalShard], saved: Mapping[str, SavedTensor]) -> set[str]:
    """The files that `read_ranges` opens for a rank's shards of these names, and for optimizer state split as they are."""
    found: set[str] = set()
    beside: dict[str, list[SavedTensor]] = {}
    for name, info in saved.items():
        if name.startswith("optim."):
            parameter, _, _ = name.removeprefix("optim.").rpartition(".")
            beside.setdefault(f"model.{parameter}", []).append(info)
    for name, item in ranges.items():
        for info in [saved[name], *beside.get(name, [])]:
            held = item if info.numel == item.numel else blocks_of(item)
            for part in held.parts():
                found |= {
                    chunk.file
                    for chunk in info.overlapping(part.box)
                    if chunk.file not in found and any(overlaps(held.shape, part.box, chunk.box))
                }
    return found


def _read_chunk(file: BinaryIO, chunk: Chunk, dtype: torch.dtype, shape: tuple[int, ...], part: Part) -> bool:
    """Read the elements that a chunk and a part of a shard share; False if the file ends before them."""
    for mine, theirs in overlaps(shape, part.box, chunk.box):
        target = mine.of(part.memory.detach())
        is_direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
        is_direct = is_direct and theirs.span == target.numel()
        values = target if is_direct else torch.empty(theirs.span, dtype=dtype)
        file.seek(chunk.offset + theirs.offset * dtype.itemsize)
        raw = _bytes_of(values)
        if file.readinto(raw) != raw.nbytes:  # type: ignore[attr-defined]
            return False
        if not is_direct:
            target.copy_(values.as_strided(theirs.shape, theirs.strides))
    return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def check_index(
    index: Any, label: str, sizes: Mapping[str, int], stage: str = "resume", code: str = "E407"
) -> dict[str, SavedTensor]:
    """The tensors of an index, whose chunks must fill each of them and lie in files of these sizes."""

    def unusable(what: str, tensor: str | None = None) -> Exception:
        return fail(code, stage, f"{label}: {INDEX_NAME} cannot be used: {what}.", tensor=tensor)

    if not isinstance(index, dict) or not index:
        raise unusable("it lists no tensors")
    saved: dict[str, SavedTensor] = {}
    for name, entry in index.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("chunks"), list):
            raise unusable(f"{name!r} has no valid entry", name)
        dtype, numel = DTYPES.get(str(entry.get("dtype"))), entry.get("numel")
        if dtype is None or not _is_count(numel):
            raise unusable(f"{name!r} has dtype {entry.get('dtype')!r} and {numel!r} elements", name)
        shape = entry.get("shape")
        if shape is not None and not _is_shape(shape, numel):
            raise unusable(f"{name!r} has the shape {shape!r} and {numel} elements", name)
        chunks = []
        for row in entry["chunks"]:
            chunk = _chunk(row, shape)
            if chunk is None:
                raise unusable(f"{name!r} has the invalid chunk {row!r}", name)
            problem = _chunk_problem(chunk, dtype, sizes)
            if problem is not None:
                raise unusable(f"{name!r} {problem}", name)
            chunks.append(chunk)
        saved[name] = SavedTensor(dtype, numel, chunks, None if shape is None else tuple(shape))
        wrong = first_miscount(shape or [numel], [((0, numel),)], [chunk.box for chunk in chunks])
        if wrong is not None:
            what = "a gap" if wrong.found < wrong.expected else "an overlap"
            at = wrong.position[0] if len(wrong.position) == 1 else list(wrong.position)
            raise unusable(f"{name!r} has {what} at element {at} of {shape or numel}", name)
    return saved


def _chunk(row: Any, shape: list[int] | None) -> Chunk | None:
    """A row of the index as a chunk; None if it is not a valid one."""
    if not isinstance(row, list) or len(row) not in (3, 4):
        return None
    *where, file, offset = row
    if len(where) == 2 and all(map(_is_count, where)):
        box: Any = [[where[0], where[0] + where[1]]]
    else:
        box = where[0]
        if shape is None or not isinstance(box, list) or len(box) != len(shape) or len(where) != 1:
            return None
    for bounds in box:
        if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_count, bounds)):
            return None
    if not isinstance(file, str) or not _is_count(offset) or any(a > b for a, b in box):
        return None
    return Chunk(tuple((a, b) for a, b in box), file, offset)


def _chunk_problem(chunk: Chunk, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with where a chunk lies."""
    if not _FILE_PATTERN.fullmatch(chunk.file) or chunk.file not in sizes:
        return f"is in {chunk.file!r}, which is not a file of the checkpoint"
    last = chunk.offset + size_of(chunk.box) * dtype.itemsize
    return (
        f"ends at byte {last} of {chunk.file}, which has {sizes[chunk.file]}"
        if last > sizes[chunk.file]
        else None
    )


def _is_shape(shape: Any, numel: int) -> bool:
    if not isinstance(shape, list) or not 1 < len(shape) <= _MAX_DIMS or not all(map(_is_count, shape)):
        return False
    return prod(shape) == numel


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
