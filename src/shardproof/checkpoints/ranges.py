"""Flat ranges of tensors on disk: raw bytes in one file per rank, and an index in JSON that says where each range lies.

Both strategies hold flat ranges, so any layout reads what any other wrote. torch DCP does the same with pickles: in its
files, and in the plans that its ranks send each other over connections that nobody authenticates.
"""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shardproof.checkpoints.plain import DTYPES
from shardproof.errors import fail
from shardproof.foreign import open_foreign

INDEX_NAME = "index.json"
_FILE_PATTERN = re.compile(r"rank-\d+\.bin")


@dataclass(frozen=True)
class FlatRange:
    """What a rank holds of a tensor with `numel` elements: `local`, which begins at element `start`."""

    local: torch.Tensor
    start: int
    numel: int

    def empty(self) -> FlatRange:
        """The same tensor, of which this rank has nothing to write."""
        return FlatRange(self.local[:0], 0, self.numel)


class Chunk(NamedTuple):
    """Consecutive elements of a tensor in a file."""

    start: int
    length: int
    file: str
    offset: int  # bytes from the beginning of the file


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint; its chunks are in order, without gap or overlap."""

    dtype: torch.dtype
    numel: int
    chunks: list[Chunk]


def data_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank}.bin"


def write_ranges(path: Path, ranges: Mapping[str, FlatRange]) -> tuple[dict[str, Any], int, int]:
    """Write a rank's ranges end to end; returns its part of the index, the file's size and its CRC-32."""
    part: dict[str, Any] = {}
    offset = crc = 0
    with path.open("xb") as file:
        for name, item in ranges.items():
            count = item.local.numel()
            if not count and item.numel:
                continue  # other ranks have it
            raw = _bytes_of(item.local.detach().cpu().contiguous())
            dtype = str(item.local.dtype).removeprefix("torch.")
            part[name] = [dtype, item.numel, item.start, count, offset]
            file.write(raw)
            crc, offset = zlib.crc32(raw, crc), offset + raw.nbytes
        file.flush()
        os.fsync(file.fileno())
    return part, offset, crc


def merge_index(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The index of all ranks' parts: {name: its dtype, its elements, its chunks}."""
    index: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, (dtype, numel, start, count, offset) in part.items():
            entry = index.setdefault(name, {"dtype": dtype, "numel": numel, "chunks": []})
            if count:
                entry["chunks"].append([start, count, data_name(rank), offset])
    for entry in index.values():
        entry["chunks"].sort()
    return index


def read_ranges(
    folder: Path, ranges: Mapping[str, FlatRange], saved: Mapping[str, SavedTensor], stage: str = "resume"
) -> None:
    """Fill a rank's ranges, each straight into its place where that is host memory of the saved dtype."""
    parts: dict[str, list[tuple[str, Chunk]]] = {}
    for name, item in ranges.items():
        for chunk in _overlapping(saved[name].chunks, item.start, item.start + item.local.numel()):
            parts.setdefault(chunk.file, []).append((name, chunk))
    for file_name, wanted in parts.items():
        with open_foreign(folder / file_name, stage, code="E407", inside=folder) as file:
            for name, chunk in sorted(wanted, key=lambda pair: pair[1].offset):
                if not _read_chunk(file, chunk, saved[name].dtype, ranges[name]):
                    raise fail("E407", stage, f"{file_name} ends in {name!r}.", tensor=name)


def _overlapping(chunks: Sequence[Chunk], start: int, stop: int) -> Iterator[Chunk]:
    """The chunks that hold some of the elements from `start` to `stop`."""
    first = bisect_right(chunks, start, key=lambda chunk: chunk.start) - 1
    for chunk in chunks[max(first, 0) :]:
        if chunk.start >= stop or start == stop:
            return
        yield chunk


def _read_chunk(file: BinaryIO, chunk: Chunk, dtype: torch.dtype, item: FlatRange) -> bool:
    """Read the elements that a chunk and a range share; False if the file ends before them."""
    low = max(chunk.start, item.start)
    high = min(chunk.start + chunk.length, item.start + item.local.numel())
    target = item.local.detach()[low - item.start : high - item.start]
    is_direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
    values = target if is_direct else torch.empty(high - low, dtype=dtype)
    file.seek(chunk.offset + (low - chunk.start) * dtype.itemsize)
    raw = _bytes_of(values)
    if file.readinto(raw) != raw.nbytes:  # type: ignore[attr-defined]
        return False
    if not is_direct:
        target.copy_(values)
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
        raise unusable("it describes no tensor")
    saved: dict[str, SavedTensor] = {}
    for name, entry in index.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("chunks"), list):
            raise unusable(f"{name!r} is not described", name)
        dtype, numel = DTYPES.get(str(entry.get("dtype"))), entry.get("numel")
        if dtype is None or not _is_count(numel):
            raise unusable(f"{name!r} has dtype {entry.get('dtype')!r} and {numel!r} elements", name)
        chunks, end = [], 0
        for row in entry["chunks"]:
            problem = _chunk_problem(row, dtype, end, sizes)
            if problem is not None:
                raise unusable(f"{name!r} {problem}", name)
            chunks.append(Chunk(*row))
            end += chunks[-1].length
        if end != numel:
            raise unusable(f"{name!r} ends at element {end} of {numel}", name)
        saved[name] = SavedTensor(dtype, numel, chunks)
    return saved


def _chunk_problem(row: Any, dtype: torch.dtype, end: int, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with a chunk that must begin at element `end`."""
    if not isinstance(row, list) or len(row) != 4 or not all(_is_count(row[at]) for at in (0, 1, 3)):
        return f"has the chunk {row!r}"
    start, count, file, offset = row
    if not isinstance(file, str) or not _FILE_PATTERN.fullmatch(file) or file not in sizes:
        return f"lies in {file!r}, which is no file of the checkpoint"
    if start != end:
        return f"has a gap or an overlap at element {end}"
    last = offset + count * dtype.itemsize
    return f"ends at byte {last} of {file}, which has {sizes[file]}" if last > sizes[file] else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
