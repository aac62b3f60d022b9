"""`save_pretrained`: a folder that plain transformers and vLLM load."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from shardproof.dist.collectives import broadcast, exchange, together
from shardproof.dist.hosts import hosts
from shardproof.dist.shared_folder import check_seen, disk_errors, on_host
from shardproof.dist.sharing import has_token, remove_token, write_token
from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream
from shardproof.foreign import open_foreign
from shardproof.model.lora import ADAPTER
from shardproof.model.roles import CRITIC, VALUED, value_head
from shardproof.shard.sharded_model import ShardedModel
from shardproof.weights.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_NAME,
    CONFIG_NAME,
    RECEIPT_NAME,
    STAGE,
    ModelFolder,
)
from shardproof.weights.reader import INDEX_NAME
from shardproof.weights.writer import FilePlan, FileWriter, plan_files, write_index

_MAX_FILE_BYTES = 4 * 10**9
# Weights, config and index are written anew; the other files of the source folder are copied.
_NOT_COPIED = {CONFIG_NAME, ADAPTER_CONFIG, RECEIPT_NAME}
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}


def save_pretrained(
    policy: ShardedModel,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | str | None = "checkpoint",
    merge_lora: bool = True,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> ExportReceipt:
    """Write the policy as a Hugging Face folder; the ranks write different files in parallel.

    The default dtype is the source checkpoint's, tensor by tensor. With `merge_lora=False` the folder is a peft
    adapter. Tokenizer and generation files are copied byte for byte from the source. The folder is rank 0's, and the
    ranks that see it, which a token in it proves, write. It always holds one complete model, the old or the new; weights of
    other tools are not replaced (E408).

    Collective: every rank. Memory: two buckets.
    """
    stream = WeightStream(policy, dtype, merge_lora=merge_lora)
    adapter_only = stream.payload.adapter_only
    metas = stream.metadata()
    files = {ADAPTER_NAME: metas} if adapter_only else plan_files(metas, max_file_bytes)
    nonce = broadcast(secrets.token_hex(4))
    with _writing(folder):
        place = ModelFolder(Path(folder), adapter_only, nonce)
        companions = [] if adapter_only or policy.folder is None else _companions(policy.folder)
        place.check(policy.folder, {*files, *companions, *_described(files, adapter_only)})
    partial = Path(broadcast(str(place.partial)))
    try:
        with _writing(folder):
            if dist.get_rank() == 0:
                place.begin()
                write_token(partial, nonce)
        written = _write_files(stream, partial, files, _writers(partial, nonce))
        with _writing(folder):
            if dist.get_rank() == 0:
                remove_token(partial, nonce)
                check_seen(partial, written, STAGE)
                _write_description(policy, partial, files, companions, adapter_only)
                place.publish({*files, *_described(files, adapter_only)})
    except BaseException:
        if dist.get_rank() == 0:
            place.abort()
        raise
    assert stream.receipt is not None
    return stream.receipt


@contextlib.contextmanager
def _writing(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A part of the save in which the disk's errors are E408 on every rank. Collective: every rank, at its end."""
    with together(STAGE), disk_errors(STAGE, f"{os.fspath(folder)} cannot be written"):
        yield


def _described(files: FilePlan, adapter_only: bool) -> set[str]:
    """The files that say what is in the weights."""
    if adapter_only:
        return {ADAPTER_CONFIG}
    return {CONFIG_NAME, INDEX_NAME} if len(files) > 1 else {CONFIG_NAME}


def _companions(source: Path) -> list[str]:
    """The source's files that are copied unchanged; a link that leads out of its folder is refused."""
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


def _writers(partial: Path, token: str) -> list[int]:
    """The ranks that see the folder of rank 0. Collective: every rank, if there are several hosts."""
    if hosts().num == 1:
        return list(range(dist.get_world_size()))
    return [rank for rank, sees in enumerate(exchange(has_token(partial, token))) if sees]


def _write_files(
    stream: WeightStream, partial: Path, files: FilePlan, writers: Sequence[int]
) -> list[tuple[int, str, int]]:
    """Write the stream's tensors; returns (rank, file, size) of all that was written. Collective: every rank."""
    rank = dist.get_rank()
    mine = list(files)[writers.index(rank) :: len(writers)] if rank in writers else []
    output = FileWriter(partial, {file: files[file] for file in mine})
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
        if output.problem is not None:
            problem = f"{on_host()}{partial.parent}: {type(output.problem).__name__}: {output.problem}"
            raise fail("E408", STAGE, problem, rank=rank)
    return [(owner, name, size) for owner, row in enumerate(exchange(sizes)) for name, size in row.items()]


def described_config(policy: ShardedModel) -> PretrainedConfig:
    """A copy of the model's config that names its class: for a critic, the classifier that has one value."""
    config = deepcopy(policy.model.config)
    architecture = type(policy.model).__name__
    if policy.role == CRITIC:
        architecture = architecture.replace("ForCausalLM", "ForSequenceClassification")
        config.num_labels = 1
    config.architectures = [architecture]
    return config


def _config_of_files(policy: ShardedModel, files: FilePlan) -> PretrainedConfig:
    """The config of what is in the files, with their dtype."""
    config = described_config(policy)
    dtypes = Counter(meta.dtype for group in files.values() for meta in group if meta.dtype.is_floating_point)
    config.dtype = dtypes.most_common(1)[0][0]
    return config


def _write_description(
    policy: ShardedModel,
    folder: Path,
    files: FilePlan,
    companions: Sequence[str],
    adapter_only: bool,
) -> None:
    """Config, index, and the files that are copied unchanged. Rank 0 only."""
    if adapter_only:
        config: Any = deepcopy(policy.model.peft_config[ADAPTER])
        config.base_model_name_or_path = policy.source
        config.inference_mode = True
        config.task_type = config.task_type or ("SEQ_CLS" if policy.role in VALUED else "CAUSAL_LM")
        if policy.role in VALUED:
            config.modules_to_save = [value_head(policy.model)]
        config.save_pretrained(folder)
        return
    _config_of_files(policy, files).save_pretrained(folder)
    if len(files) > 1:
        write_index(folder, files)
    for name in companions:
        assert policy.folder is not None
        source = open_foreign(policy.folder / name, STAGE, inside=policy.folder)
        with source, (folder / name).open("wb") as copy:
            shutil.copyfileobj(source, copy)
