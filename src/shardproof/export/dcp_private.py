"""torch DCP over flat ranges, with raw bytes and an index in JSON where DCP keeps pickles.

Both strategies hold flat ranges of tensors, so a tensor is saved as one 1-D tensor of which each rank has a chunk;
DCP's own planners then reshard between any layouts. tests/unit/test_dcp_private.py fails when what is used here moves.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardproof.errors import fail
from shardproof.files import write_atomic
from shardproof.foreign import open_foreign

INDEX_NAME = "index.json"
_FILE_PATTERN = re.compile(r"__\d+_\d+\.distcp")
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class FlatRange:
    """Elements [start, start + n) of a flat tensor, as DCP sees a sharded tensor."""

    def __init__(self, local: torch.Tensor, start: int, numel: int):
        self.local = local
        self.start = start
        self.numel = numel

    def empty(self) -> FlatRange:
        """The same tensor, of which this rank has nothing to write."""
        return FlatRange(self.local[:0], 0, self.numel)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.local.numel()]))

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        if not self.local.numel():
            return []
        data = TensorWriteData(
            self._chunk(), TensorProperties.create_from_tensor(self.local), torch.Size([self.numel])
        )
        index = MetadataIndex(fqn, torch.Size([self.start]))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.numel() else []


class FlatSavePlanner(DefaultSavePlanner):
    """DCP's planner, told how to find a flat range's memory."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].local


class FlatLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, told how to find a flat range's memory."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default would walk the state for tensors to initialise, and replace what it does not know by None.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.mappings = {}

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise fail("E409", "resume", "it holds a pickled object.")

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].local


class FlatWriter(FileSystemWriter):
    """DCP's writer, which leaves raw bytes where DCP's own leaves pickled tensors, and an index of them in JSON."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks one after the other into a file of its own."""
        results = []
        name = f"{plan.storage_data.prefix}0.distcp"
        with (Path(self.path) / name).open("xb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                raw = _bytes_of(tensor.detach().cpu().contiguous())
                place = _StorageInfo(name, file.tell(), raw.nbytes)
                file.write(raw)
                results.append(WriteResult(item.index, raw.nbytes, place))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {written.index: written.storage_data for row in results for written in row}
        write_atomic(Path(self.path) / INDEX_NAME, json.dumps(_index_of(metadata, stored)))


class FlatReader(FileSystemReader):
    """DCP's reader for the raw bytes that an index which has been checked describes."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the elements that this rank asked for, each straight into its place where that is host memory."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open_foreign(Path(self.path) / name, "resume", code="E407", inside=Path(self.path)) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    self._read(file, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: BinaryIO, item: ReadItem, target: torch.Tensor) -> None:
        dtype = self._metadata.state_dict_metadata[item.storage_index.fqn].properties.dtype  # type: ignore[union-attr]
        is_direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
        values = target if is_direct else torch.empty(item.lengths, dtype=dtype)
        place: _StorageInfo = self.storage_data[item.storage_index]
        file.seek(place.offset + item.storage_offsets[0] * dtype.itemsize)
        raw = _bytes_of(values)
        if file.readinto(raw) != raw.nbytes:  # type: ignore[attr-defined]
            raise EOFError(f"{place.relative_path} ends in {item.storage_index.fqn!r}")
        if not is_direct:
            target.copy_(values)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _index_of(metadata: Metadata, stored: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    """{name: its dtype, its elements, and for each chunk [start, elements, file, offset, bytes]}."""
    index: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        assert isinstance(described, TensorStorageMetadata), name
        chunks = []
        for chunk in described.chunks:
            info = stored[MetadataIndex(name, chunk.offsets)]
            place = [info.relative_path, info.offset, info.length]
            chunks.append([chunk.offsets[0], chunk.sizes[0], *place])
        dtype = str(described.properties.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "numel": described.size.numel(), "chunks": sorted(chunks)}
    return index


def metadata_from(index: Any, label: str, sizes: Mapping[str, int]) -> Metadata:
    """DCP's metadata from an index, whose chunks must fill each tensor and lie in files of these sizes."""
    if not isinstance(index, dict) or not index:
        raise _unreadable(label, "it describes no tensor")
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in index.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("chunks"), list):
            raise _unreadable(label, f"{name!r} is not described", name)
        dtype, numel = _DTYPES.get(str(entry.get("dtype"))), entry.get("numel")
        if dtype is None or not _is_count(numel):
            raise _unreadable(
                label, f"{name!r} has dtype {entry.get('dtype')!r} and {numel!r} elements", name
            )
        chunks, end = [], 0
        for row in entry["chunks"]:
            start, count, info = _checked_chunk(row, label, name, sizes)
            if info.length != count * dtype.itemsize:
                raise _unreadable(
                    label, f"{name!r} has {info.length} bytes for {count} elements of {dtype}", name
                )
            if start != end:
                raise _unreadable(label, f"{name!r} has a gap or an overlap at element {end}", name)
            end = start + count
            chunks.append(ChunkStorageMetadata(torch.Size([start]), torch.Size([count])))
            stored[MetadataIndex(name, torch.Size([start]))] = info
        if end != numel:
            raise _unreadable(label, f"{name!r} ends at element {end} of {numel}", name)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size([numel]), chunks)
    return Metadata(tensors, storage_data=stored)


def _checked_chunk(
    row: Any, label: str, name: str, sizes: Mapping[str, int]
) -> tuple[int, int, _StorageInfo]:
    if not isinstance(row, list) or len(row) != 5 or not all(_is_count(row[at]) for at in (0, 1, 3, 4)):
        raise _unreadable(label, f"a chunk of {name!r} is {row!r}", name)
    start, count, file, offset, length = row
    if not isinstance(file, str) or not _FILE_PATTERN.fullmatch(file) or file not in sizes:
        raise _unreadable(label, f"{name!r} lies in {file!r}, which is no file of the checkpoint", name)
    if offset + length > sizes[file]:
        raise _unreadable(
            label, f"{name!r} ends at byte {offset + length} of {file}, which has {sizes[file]}", name
        )
    return start, count, _StorageInfo(file, offset, length)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _unreadable(label: str, what: str, tensor: str | None = None) -> Exception:
    return fail("E407", "resume", f"{label}: {INDEX_NAME} cannot be used: {what}.", tensor=tensor)
