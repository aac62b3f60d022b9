"""torch DCP over flat ranges, without unpickling anything that could run code.

Both strategies hold flat ranges of tensors, so a tensor is saved as one 1-D tensor of which each rank has a chunk;
DCP's own planners then reshard between any layouts. tests/unit/test_dcp_private.py fails when what is used here moves.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardproof.errors import fail

# Everything DCP's own metadata is made of. A name that is not here is refused before it is looked up.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.storage", "StorageMeta"),
    ("torch", "Size"), ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"), ("collections", "defaultdict"),
}  # fmt: skip


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


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise fail("E409", "resume", f"its metadata asks for {module}.{name}, which no checkpoint needs.")


class SafeReader(FileSystemReader):
    """DCP's reader with a metadata file that can describe tensors and do nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if getattr(metadata, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """The folder's metadata through the restricted unpickler."""
    try:
        raw = (folder / ".metadata").read_bytes()
        metadata = _RestrictedUnpickler(io.BytesIO(raw)).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise fail("E407", "resume", f"{folder.name}: its metadata cannot be read: {error}.") from error
    if not isinstance(metadata, Metadata):
        raise fail("E407", "resume", f"{folder.name}: its metadata is a {type(metadata).__name__}.")
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            raise fail(
                "E409", "resume", f"{folder.name}: {name!r} is a pickled object, not a tensor.", tensor=name
            )
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise fail(
                "E407",
                "resume",
                f"{folder.name}: its metadata names the file {info.relative_path!r} outside it.",
            )
    return metadata


def make_writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
