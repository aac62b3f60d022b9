"""`save_pretrained`: a folder that plain transformers and vLLM load."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from shardproof.dist.collectives import exchange, together
from shardproof.dist.shared_folder import check_seen, disk_errors
from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt, TensorMeta
from shardproof.export.stream import WeightStream
from shardproof.foreign import open_foreign
from shardproof.model.lora import ADAPTER
from shardproof.model.roles import CRITIC
from shardproof.shard.sharded_model import ShardedModel
from shardproof.weights.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_NAME,
    CONFIG_NAME,
    STAGE,
    WRITER,
    ModelFolder,
)
from shardproof.weights.reader import DTYPES, INDEX_NAME, SINGLE_NAME

_MAX_FILE_BYTES = 4 * 10**9
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Weights and what describes them are written anew; everything else in the source folder belongs to the model.
_NOT_COPIED = {CONFIG_NAME, ADAPTER_CONFIG}
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}


def save_pretrained(
    policy: ShardedModel,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | str | None = "checkpoint",
    merge_lora: bool = True,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> ExportReceipt:
    """Write the policy as a Hugging Face folder; the files are shared out among the ranks, which write in parallel.

    The default dtype is the source checkpoint's, tensor by tensor. With `merge_lora=False` the folder is a peft
    adapter. Tokenizer and generation files are copied byte for byte from the source. The folder must be one that every
    rank sees. It holds the old model or the new one, whole; weights that no save wrote are not replaced (E408).

    Collective: every rank. Memory: two buckets.
    """
    stream = WeightStream(policy, dtype, merge_lora=merge_lora)
    adapter_only = stream.payload.adapter_only
    files = _plan_files(stream.metadata(), max_file_bytes, adapter_only)
    nonce = exchange(secrets.token_hex(4))[0]
    with _writing(folder):
        place = ModelFolder(Path(folder), adapter_only, nonce)
        companions = [] if adapter_only or policy.folder is None else _companions(policy.folder)
        place.check(policy.folder, {*files, *companions, *_described(files, adapter_only)})
    partial = Path(exchange(str(place.partial))[0])
    try:
        with _writing(folder):
            if dist.get_rank() == 0:
                place.begin()
        written = _write_files(stream, partial, files)
        with _writing(folder):
            if dist.get_rank() == 0:
                check_seen(partial, written, STAGE)
                _write_description(policy, partial, files, companions, adapter_only)
                place.publish({*files, *_described(files, adapter_only)})
    except BaseException:
        if dist.get_rank() == 0:
            place.give_up()
        raise
    assert stream.receipt is not None
    return stream.receipt


@contextlib.contextmanager
def _writing(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A part of the save in which the disk's errors are E408 on every rank. Collective: every rank, at its end."""
    with together(STAGE), disk_errors(STAGE, f"{os.fspath(folder)} cannot be written"):
        yield


def _described(files: dict[str, list[TensorMeta]], adapter_only: bool) -> set[str]:
    """The files that say what is in the weights."""
    if adapter_only:
        return {ADAPTER_CONFIG}
    return {CONFIG_NAME, INDEX_NAME} if len(files) > 1 else {CONFIG_NAME}


def _companions(source: Path) -> list[str]:
    """The source's files that travel along unchanged; one that leads out of its folder is refused."""
    found = []
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if (
            path.suffix in _COPIED_SUFFIXES
            and path.name not in _NOT_COPIED
            and not is_index
            and path.is_file()
        ):
            open_foreign(path, STAGE, inside=source).close()
            found.append(path.name)
    return found


def _write_files(
    stream: WeightStream, partial: Path, files: dict[str, list[TensorMeta]]
) -> list[tuple[int, str, int]]:
    """Write the stream's tensors; returns (rank, file, size) of all that was written. Collective: every rank."""
    mine = [file for index, file in enumerate(files) if index % dist.get_world_size() == dist.get_rank()]
    output = _Files(partial, files, mine)
    try:
        with stream:
            for name, tensor in stream:
                output.write(name, tensor)
    except BaseException:
        output.close()
        raise
    sizes: dict[str, int] = {}
    with together(STAGE):
        sizes = output.finish()
    return [(rank, name, size) for rank, row in enumerate(exchange(sizes)) for name, size in row.items()]


def _plan_files(metas: Sequence[TensorMeta], limit: int, adapter_only: bool) -> dict[str, list[TensorMeta]]:
    """File names with their tensors, in stream order, each file up to `limit` bytes."""
    groups: list[list[TensorMeta]] = [[]]
    size = 0
    for meta in metas:
        if groups[-1] and size + meta.nbytes > limit and not adapter_only:
            groups.append([])
            size = 0
        groups[-1].append(meta)
        size += meta.nbytes
    if adapter_only:
        return {ADAPTER_NAME: groups[0]}
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


class _Files:
    """Safetensors files written tensor by tensor."""

    def __init__(self, folder: Path, files: dict[str, list[TensorMeta]], mine: list[str]):
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._problem: Exception | None = None
        for file in mine:
            header: dict[str, Any] = {"__metadata__": {"format": "pt", **WRITER}}
            offset = 0
            for meta in files[file]:
                end = offset + meta.nbytes
                places = {"shape": list(meta.shape), "data_offsets": [offset, end]}
                header[meta.name] = {"dtype": _CODES[meta.dtype], **places}
                self._places[meta.name] = (file, offset)
                offset = end
            raw = json.dumps(header).encode()
            self._headers[file] = raw + b" " * (-len(raw) % 8)
            self._sizes[file] = 8 + len(self._headers[file]) + offset

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor in its place, if it is one of this rank's files.

        A rank that cannot write still takes part in the stream's gathers; `finish` raises what went wrong.
        """
        if name not in self._places or self._problem is not None:
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
            self._problem = error

    def finish(self) -> dict[str, int]:
        """Close the files, which are then on disk; returns their sizes, or raises what went wrong with any."""
        for handle in self._open.values():
            try:
                handle.flush()
                os.fsync(handle.fileno())
            except OSError as error:
                self._problem = self._problem or error
        self.close()
        if self._problem is not None:
            problem = f"{type(self._problem).__name__}: {self._problem}"
            raise fail("E408", STAGE, problem, rank=dist.get_rank())
        return self._sizes

    def close(self) -> None:
        for handle in self._open.values():
            try:
                handle.close()
            except OSError as error:
                self._problem = self._problem or error


def _described_config(policy: ShardedModel, files: dict[str, list[TensorMeta]]) -> PretrainedConfig:
    """The config of what is in the files: its dtype, and for a critic the classifier that has one value."""
    config = deepcopy(policy.model.config)
    dtypes = Counter(meta.dtype for group in files.values() for meta in group if meta.dtype.is_floating_point)
    config.dtype = dtypes.most_common(1)[0][0]
    architecture = type(policy.model).__name__
    if policy.role == CRITIC:
        architecture = architecture.replace("ForCausalLM", "ForSequenceClassification")
        config.num_labels = 1
    config.architectures = [architecture]
    return config


def _write_description(
    policy: ShardedModel,
    folder: Path,
    files: dict[str, list[TensorMeta]],
    companions: Sequence[str],
    adapter_only: bool,
) -> None:
    """Config, index, and the files that travel along unchanged. Rank 0 only."""
    if adapter_only:
        config: Any = deepcopy(policy.model.peft_config[ADAPTER])
        config.base_model_name_or_path = policy.source
        config.inference_mode = True
        config.task_type = config.task_type or ("SEQ_CLS" if policy.role == CRITIC else "CAUSAL_LM")
        config.save_pretrained(folder)
        return
    _described_config(policy, files).save_pretrained(folder)
    if len(files) > 1:
        total = sum(meta.nbytes for group in files.values() for meta in group)
        weight_map = {meta.name: file for file, group in files.items() for meta in group}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    for name in companions:
        assert policy.folder is not None
        source = open_foreign(policy.folder / name, STAGE, inside=policy.folder)
        with source, (folder / name).open("wb") as copy:
            shutil.copyfileobj(source, copy)
