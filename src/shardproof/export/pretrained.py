"""`save_pretrained`: a folder that plain transformers and vLLM load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from shardproof.checkpoint.reader import DTYPES, INDEX_NAME, SINGLE_NAME
from shardproof.dist.collectives import together
from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt, TensorMeta
from shardproof.export.stream import WeightStream
from shardproof.model.lora import ADAPTER
from shardproof.model.roles import CRITIC
from shardproof.shard.sharded_model import ShardedModel

_MAX_FILE_BYTES = 4 * 10**9
_CODES = {dtype: code for code, dtype in DTYPES.items()}
ADAPTER_NAME = "adapter_model.safetensors"
# Weights and what describes them are written anew; everything else in the source folder belongs to the model.
_NOT_COPIED = {"config.json", INDEX_NAME, "adapter_config.json"}
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
    rank sees. Collective: every rank. Memory: two buckets.
    """
    target = Path(folder)
    stream = WeightStream(policy, dtype, merge_lora=merge_lora)
    files = _plan_files(stream.metadata(), max_file_bytes, stream.payload.adapter_only)
    with together("save_pretrained"):
        target.mkdir(parents=True, exist_ok=True)
    mine = [file for index, file in enumerate(files) if index % dist.get_world_size() == dist.get_rank()]
    output = _Files(target, files, mine)
    try:
        with stream:
            for name, tensor in stream:
                output.write(name, tensor)
    except BaseException:
        output.discard()
        raise
    with together("save_pretrained"):
        output.finish()
    with together("save_pretrained"):
        if dist.get_rank() == 0:
            _write_description(policy, target, files, stream.payload.adapter_only)
    assert stream.receipt is not None
    return stream.receipt


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
    """Safetensors files written tensor by tensor, each under a temporary name until it is complete."""

    def __init__(self, folder: Path, files: dict[str, list[TensorMeta]], mine: list[str]):
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._headers: dict[str, bytes] = {}
        self._problem: OSError | None = None
        for file in mine:
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            for meta in files[file]:
                end = offset + meta.nbytes
                places = {"shape": list(meta.shape), "data_offsets": [offset, end]}
                header[meta.name] = {"dtype": _CODES[meta.dtype], **places}
                self._places[meta.name] = (file, offset)
                offset = end
            raw = json.dumps(header).encode()
            self._headers[file] = raw + b" " * (-len(raw) % 8)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor in its place, if it is one of this rank's files.

        A rank that cannot write still takes part in the stream's gathers; `finish` raises what went wrong.
        """
        if name not in self._places or self._problem is not None:
            return
        file, offset = self._places[name]
        try:
            if file not in self._open:
                self._open[file] = self._partial(file).open("wb")
                self._open[file].write(struct.pack("<Q", len(self._headers[file])) + self._headers[file])
            handle = self._open[file]
            handle.seek(8 + len(self._headers[file]) + offset)
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            handle.write(raw.numpy().data)
        except OSError as error:
            self._problem = error

    def finish(self) -> None:
        """Give complete files their names; a file that could not be written whole never gets one."""
        for handle in self._open.values():
            try:
                handle.close()
            except OSError as error:
                self._problem = self._problem or error
        if self._problem is not None:
            self.discard()
            raise fail("E408", "save_pretrained", f"{self._problem}", rank=dist.get_rank())
        for file in self._open:
            os.replace(self._partial(file), self._folder / file)

    def discard(self) -> None:
        """Remove what was begun."""
        for file, handle in self._open.items():
            with contextlib.suppress(OSError):
                handle.close()
            self._partial(file).unlink(missing_ok=True)

    def _partial(self, file: str) -> Path:
        return self._folder / f".{file}.partial"


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
    policy: ShardedModel, folder: Path, files: dict[str, list[TensorMeta]], adapter_only: bool
) -> None:
    """Config, index, and the files that travel along unchanged. Rank 0 only."""
    for path in [*folder.glob("*.safetensors"), folder / INDEX_NAME]:
        if path.name not in files:
            path.unlink(missing_ok=True)  # of an earlier save into this folder
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
    source = Path(policy.folder) if policy.folder is not None else None
    if source is not None and source.resolve() != folder.resolve():
        for path in sorted(source.iterdir()):
            if path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_COPIED and path.is_file():
                shutil.copyfile(path, folder / path.name)
