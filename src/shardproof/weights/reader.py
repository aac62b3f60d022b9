"""Safetensors files as memory maps: what is in them, and views of any box of any tensor.

The safetensors package reads tensors; it does not tell where their bytes lie, which the digest of headers, the check
for truncated files and the service of slices to other ranks need. The header is a length and a JSON object, so it is
read here, strictly: a file whose header does not account for every one of its bytes is refused.
"""

from __future__ import annotations

import hashlib
import os
import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch

from shardproof.errors import fail
from shardproof.foreign import open_foreign, parse_json, read_json
from shardproof.weights.boxes import Box

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 * 2**20
# The largest public checkpoints have some 200,000 tensors in 200 files. More than this is no model, and would keep
# everything that looks at names busy for minutes.
_MAX_TENSORS, _MAX_FILES = 2**19, 2**14
_MAX_NAME, _MAX_DIMS, _MAX_DIM = 1024, 32, 2**48
_SAMPLE_BYTES = 4096

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """Where one tensor lies."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


class SliceSource(Protocol):
    """Where checkpoint bytes come from: this rank's own files, or another rank that serves them."""

    def view(self, name: str, box: Box) -> torch.Tensor: ...

    def whole(self, name: str) -> torch.Tensor: ...


class Checkpoint:
    """A folder's safetensors files, opened. `tensors` is the index; `view` gives bytes without copying them."""

    def __init__(
        self, folder: Path | None, headers: dict[str, bytes], maps: dict[str, torch.Tensor] | None = None
    ):
        self.folder = folder
        self.headers = headers
        self.tensors: dict[str, TensorEntry] = {}
        for file, header in headers.items():
            found = parse_header(file, header)
            twice = found.keys() & self.tensors.keys()
            if twice:
                name = min(twice)
                message = f"tensor {name!r} is in two files, {self.tensors[name].file} and {file}."
                raise fail("L103", "read", message, tensor=name)
            self.tensors.update(found)
            if len(self.tensors) > _MAX_TENSORS:
                raise fail("L103", "read", f"{file}: the checkpoint has more than {_MAX_TENSORS} tensors.")
        self._maps = maps or {}
        self._views: dict[str, memoryview] = {}

    @property
    def header_digest(self) -> str:
        """One hash of every file's name and header: equal on all ranks that see the same checkpoint."""
        state = hashlib.sha256()
        for file in sorted(self.headers):
            state.update(file.encode() + b"\0" + self.headers[file] + b"\0")
        return state.hexdigest()

    def sample_digest(self) -> str:
        """A hash of a few blocks of every file: tells apart checkpoints that differ in nothing but their values."""
        state = hashlib.sha256()
        for file in sorted(self.headers):
            content = self.raw(file)
            begin, end = 8 + len(self.headers[file]), len(content)
            for at in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                state.update(content[at : at + _SAMPLE_BYTES])
        return state.hexdigest()

    def view(self, name: str, box: Box) -> torch.Tensor:
        """A read-only view of `box` of a tensor, backed by the file."""
        entry = self.tensors[name]
        raw = self.file_bytes(entry.file)[entry.start : entry.stop]
        tensor = _as_dtype(raw, entry.dtype).view(entry.shape)
        for dim, (a, b) in enumerate(box):
            if b - a != entry.shape[dim]:
                tensor = tensor.narrow(dim, a, b - a)
        return tensor

    def raw(self, file: str) -> memoryview:
        """A file's bytes."""
        if file not in self._views:
            self._views[file] = self.file_bytes(file).numpy().data
        return self._views[file]

    def whole(self, name: str) -> torch.Tensor:
        return self.view(name, tuple((0, n) for n in self.tensors[name].shape))

    def file_bytes(self, file: str) -> torch.Tensor:
        """A file's bytes as a tensor."""
        assert file in self._maps, "this rank has the headers only; its slices are served by another rank"
        return self._maps[file]


def _as_dtype(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    if raw.storage_offset() % size:
        # Old writers did not align the header; a misaligned tensor has to be copied to be viewed.
        raw = raw.clone()
    return raw.view(dtype)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The folder's checkpoint, every header read and checked against its file's size."""
    headers, maps = {}, {}
    for name in list_files(folder):
        with open_foreign(folder / name, "read", inside=folder) as file:
            headers[name] = read_header(file, name)
            maps[name] = _map(file, name)
    checkpoint = Checkpoint(folder, headers, maps)
    described = {file: 8 + len(header) for file, header in checkpoint.headers.items()}
    for entry in checkpoint.tensors.values():
        described[entry.file] = max(described[entry.file], entry.stop)
    for name, end in described.items():
        size = len(maps[name])
        if end != size:
            raise fail("L103", "read", f"{name}: its header describes {end} bytes, the file has {size}.")
    return checkpoint


def _map(file: BinaryIO, name: str) -> torch.Tensor:
    """A private, never written map of an open file: pages of the page cache, and no copy before the one into the shard.

    It is mapped through its descriptor. A second look at the path could find another file there than the checked one.
    """
    path, size = f"/proc/self/fd/{file.fileno()}", os.fstat(file.fileno()).st_size
    try:
        return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise fail("L103", "read", f"{name} cannot be mapped: {error}.") from error


def list_files(folder: Path) -> list[str]:
    """The safetensors files of a checkpoint, from its index if it has one."""
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return [SINGLE_NAME]
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if found:
            return found
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickled:
            raise fail(
                "L107", "read", f"{folder} holds {pickled[0]} and no safetensors; unpickling can run code."
            )
        raise fail("L101", "read", f"{folder} holds no safetensors file.")
    try:
        weight_map = read_json(index, "read", inside=folder)["weight_map"]
        files = sorted(set(weight_map.values()))
        if not all(isinstance(file, str) for file in files):
            raise ValueError("a file name is not text")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise fail("L103", "read", f"{INDEX_NAME} is not a valid index: {error!r}.") from error
    if not 0 < len(files) <= _MAX_FILES:
        raise fail("L103", "read", f"{INDEX_NAME} names {len(files)} files.")
    for file in files:
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            message = f"{INDEX_NAME} names the file {_short(file)}, which is not inside the folder."
            raise fail("L110", "read", message)
    missing = [file for file in files if not os.path.exists(folder / file)]
    if missing:
        listed = ", ".join(map(_short, missing[:8])) + (" and more" if len(missing) > 8 else "")
        raise fail("L102", "read", f"{INDEX_NAME} names {listed}, which {folder} does not contain.")
    return files


def _short(name: str) -> str:
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}..."


def read_header(file: BinaryIO, name: str) -> bytes:
    """The JSON header of an open safetensors file, as bytes."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise fail("L103", "read", f"{name}: its header claims {length} bytes, the file has {size}.")
    return file.read(length)


def parse_header(file: str, header: bytes) -> dict[str, TensorEntry]:
    """The tensors a header describes, with byte ranges that fit their shapes and do not overlap."""
    base = 8 + len(header)
    described = parse_json(header, file, "read")
    try:
        described.pop("__metadata__", None)
        rows = [
            (name, info["dtype"], tuple(info["shape"]), *info["data_offsets"])
            for name, info in described.items()
        ]
        _check_types(rows)
        if any(header.count(key) != len(rows) for key in (b'"dtype"', b'"shape"', b'"data_offsets"')):
            # Some key may be there twice, and readers would differ in which of the two they take. Looking at every
            # object takes as long as reading the header, so it is done where the counts do not tell that all is well.
            parse_json(header, file, "read", unique_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = repr(error)[:500]
        raise fail("L103", "read", f"{file} is not a safetensors file: {reason}.") from error
    entries = {}
    for name, code, shape, start, stop in rows:
        dtype = DTYPES.get(code)
        if dtype is None:
            raise fail("L103", "read", f"{file}: {name!r} has the unknown dtype {_short(code)}.", tensor=name)
        if stop - start != prod(shape) * dtype.itemsize:
            message = f"{file}: {name!r} claims {stop - start} bytes for {shape} {dtype}."
            raise fail("L103", "read", message, tensor=name)
        entries[name] = TensorEntry(file, dtype, shape, base + start, base + stop)
    previous = base
    for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.start != previous:
            message = f"{file}: {name!r} begins at byte {entry.start}, expected {previous}."
            raise fail("L103", "read", message, tensor=name)
        previous = entry.stop
    return entries


def _check_types(rows: list[tuple[Any, ...]]) -> None:
    """Raise unless dtypes are text, and shapes and offsets are two and more non-negative integers."""
    if {len(row) for row in rows} - {5}:
        raise ValueError("an entry's data_offsets are not two")
    if len(rows) > _MAX_TENSORS:
        raise ValueError(f"it has {len(rows)} tensors; the limit is {_MAX_TENSORS}")
    if max([len(row[0]) for row in rows], default=0) > _MAX_NAME:
        raise ValueError(f"a name is longer than {_MAX_NAME} characters")
    if max([len(row[2]) for row in rows], default=0) > _MAX_DIMS:
        raise ValueError(f"a tensor has more than {_MAX_DIMS} dimensions")
    numbers = [number for _, _, shape, start, stop in rows for number in (*shape, start, stop)]
    if {type(row[1]) for row in rows} - {str} or {*map(type, numbers)} - {int} or min(numbers, default=0) < 0:
        odd = next(
            row
            for row in rows
            if type(row[1]) is not str or any(type(n) is not int or n < 0 for n in (*row[2], *row[3:]))
        )
        raise ValueError(f"{odd[0]!r} is {odd[1:]}")
    if max(numbers, default=0) > _MAX_DIM:
        raise ValueError(f"a size or an offset is above {_MAX_DIM}")
