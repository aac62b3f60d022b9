"""Safetensors files, written tensor by tensor: which tensors a file holds, its header, and the index of several files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardproof.weights.reader import DTYPES, INDEX_NAME, SINGLE_NAME

# In the header of every file that a save writes: only such weights are replaced or removed.
WRITER = {"writer": "shardproof"}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorMeta:
    """A tensor before it is sent or written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def described(self) -> str:
        return f"{self.name}\0{self.dtype}\0{self.shape}\0"

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


FilePlan = Mapping[str, Sequence[TensorMeta]]  # {file name: its tensors, in the order of their bytes}


def plan_files(metas: Sequence[TensorMeta], limit: int) -> FilePlan:
    """File names with their tensors, in the given order, each file up to `limit` bytes."""
    groups: list[list[TensorMeta]] = [[]]
    size = 0
    for meta in metas:
        if groups[-1] and size + meta.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(meta)
        size += meta.nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def write_index(folder: Path, files: FilePlan) -> None:
    """Write the index that says which file holds which tensor."""
    total = sum(meta.nbytes for group in files.values() for meta in group)
    weight_map = {meta.name: file for file, group in files.items() for meta in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))


class FileWriter:
    """The files of a plan, each created when its first tensor comes. What goes wrong is kept in `problem`."""

    def __init__(self, folder: Path, files: FilePlan):
        self.problem: Exception | None = None
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for file, metas in files.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt", **WRITER}}
            offset = 0
            for meta in metas:
                end = offset + meta.nbytes
                place = {"shape": list(meta.shape), "data_offsets": [offset, end]}
                header[meta.name] = {"dtype": _CODES[meta.dtype], **place}
                self._places[meta.name] = (file, offset)
                offset = end
            raw = json.dumps(header).encode()
            self._headers[file] = raw + b" " * (-len(raw) % 8)
            self._sizes[file] = 8 + len(self._headers[file]) + offset

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor in its place; one of another rank's files is passed over, and so is all that follows a problem.

        It does not raise: a rank that cannot write still has to take part in the gathers of the stream.
        """
        if name not in self._places or self.problem is not None:
            return
        file, offset = self._places[name]
        try:
            if file not in self._open:
                self._open[file] = (self._folder / file).open("xb")
                self._open[file].write(struct.pack("<Q", len(self._headers[file])) + self._headers[file])
            handle = self._open[file]
            handle.seek(8 + len(self._headers[file]) + offset)
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            handle.write(raw.numpy().data)
        except Exception as error:  # of the disk, or of memory
            self.problem = error

    def finish(self) -> dict[str, int]:
        """Close the files, which are then on disk, unless there is a problem; returns their sizes."""
        for handle in self._open.values():
            try:
                handle.flush()
                os.fsync(handle.fileno())
            except OSError as error:
                self.problem = self.problem or error
        self.close()
        return self._sizes

    def close(self) -> None:
        for handle in self._open.values():
            try:
                handle.close()
            except OSError as error:
                self.problem = self.problem or error
