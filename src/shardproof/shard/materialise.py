"""Write every shard from its origin, and note each write in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from shardproof.errors import fail
from shardproof.model.initial import draw, initialise_whole
from shardproof.shard.ledger import Ledger
from shardproof.shard.local import LocalShard
from shardproof.shard.plan import ShardPlan
from shardproof.shard.staging import Staging
from shardproof.weights.box_tensor import BoxTensor, Run
from shardproof.weights.boxes import Box, Piece, cut, flat_range_boxes, orient, put, shape_of
from shardproof.weights.mapping import WholeConversion
from shardproof.weights.reader import Checkpoint, SliceSource

Progress = Callable[[int], None]
_MANY_RUNS = 16


class Read(NamedTuple):
    """One box of a checkpoint tensor and the place in a flat buffer it fills."""

    piece: Piece
    offset: int  # of the block in the whole tensor's flat order
    block: tuple[int, ...]  # shape of the block that the piece is relative to


def list_reads(boxes: BoxTensor, start: int, stop: int) -> Iterator[Read]:
    """The reads that fill elements [start, stop) of a tensor, in order."""
    for offset, box in flat_range_boxes(boxes.shape, start, stop):
        for piece in boxes.slices(box):
            yield Read(piece, offset, shape_of(box))


def list_runs(boxes: BoxTensor, start: int, stop: int) -> list[Run] | None:
    """The same where plain copies of consecutive bytes are enough, as for nearly all tensors; else None."""
    return boxes.runs(start, stop)


def materialise(
    plan: ShardPlan,
    shards: Sequence[LocalShard],
    source: SliceSource | None,
    model: PreTrainedModel,
    staging: Staging,
    progress: Progress,
) -> tuple[Ledger, int]:
    """Write all shards; returns the ledger and the number of checkpoint bytes read."""
    ledger = Ledger()
    bytes_read = 0
    for shard in shards:
        ledger.expect(shard.name, shard.start, shard.stop)
        origin = plan.origins[shard.name]
        if shard.start < shard.stop:
            if isinstance(origin, BoxTensor):
                assert source is not None
                bytes_read += _write_boxes(shard, origin, source, ledger, staging)
            elif isinstance(origin, WholeConversion):
                assert source is not None
                value = origin.convert(source, model)
                _check_shape(shard, value)
                bytes_read += value.numel() * value.element_size()
                _write_values(shard, value.reshape(-1)[shard.start : shard.stop], ledger)
            elif origin.kind == "module":
                value = initialise_whole(origin, plan.seed)
                _write_values(shard, value.reshape(-1)[shard.start : shard.stop], ledger)
            else:
                _write_values(shard, draw(origin, plan.seed, shard.shape, shard.start, shard.stop), ledger)
        ledger.name_writer(shard.name, plan.writers[shard.name])
        progress(shard.nbytes)
    staging.finish()
    return ledger, bytes_read


def _check_shape(shard: LocalShard, value: torch.Tensor) -> None:
    if tuple(value.shape) != shard.shape:
        message = f"{shard.name!r} converts to {tuple(value.shape)}, the model has {shard.shape}."
        raise fail("L106", "materialise", message, tensor=shard.name)


def _write_values(shard: LocalShard, values: torch.Tensor, ledger: Ledger) -> None:
    shard.flat.copy_(values)
    ledger.write(shard.name, shard.start, shard.stop)


def _write_boxes(
    shard: LocalShard, boxes: BoxTensor, source: SliceSource, ledger: Ledger, staging: Staging
) -> int:
    runs = list_runs(boxes, shard.start, shard.stop) if isinstance(source, Checkpoint) else None
    if runs is not None:
        assert isinstance(source, Checkpoint)
        return _write_runs(shard, boxes.dtype, runs, source, ledger, staging)
    bytes_read = 0
    for low, high, buffer in staging.buffers(shard, boxes.dtype):
        for read in list_reads(boxes, low, high):
            at = read.offset - low
            block = buffer[at : at + prod(read.block)].view(read.block)
            value = source.view(read.piece.source, read.piece.source_box)
            bytes_read += put(block, read.piece, value) * value.element_size()
            for a, b in _flat_intervals(read.block, read.piece.box):
                ledger.write(shard.name, read.offset + a, read.offset + b)
    return bytes_read


def _write_runs(
    shard: LocalShard,
    dtype: torch.dtype,
    runs: list[Run],
    source: Checkpoint,
    ledger: Ledger,
    staging: Staging,
) -> int:
    """The same for a tensor that is made of runs, as nearly all are: plain copies of bytes, no boxes.

    Many short runs are first laid side by side in the checkpoint's dtype, so that they are converted in one go.
    """
    size = dtype.itemsize
    for low, high, buffer in staging.buffers(shard, dtype, gather=len(runs) > _MANY_RUNS):
        target = buffer.view(torch.uint8).numpy().data if buffer.dtype == dtype else None
        for start, length, name, source_start in runs:
            a, b = max(low, start), min(high, start + length)
            if a >= b:
                continue
            entry = source.tensors[name]
            at = entry.start + (source_start + a - start) * size
            raw = source.raw(entry.file)[at : at + (b - a) * size]
            if target is not None:
                target[(a - low) * size : (b - low) * size] = raw
            else:
                buffer[a - low : b - low].copy_(torch.frombuffer(raw, dtype=torch.uint8).view(dtype))
            ledger.write(shard.name, a, b)
    return (shard.stop - shard.start) * dtype.itemsize


def _flat_intervals(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """The contiguous ranges of a block's flat order that a box of it covers."""
    inner = len(shape)
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if inner == 0:
        yield 0, prod(shape)
        return
    row = prod(shape[inner:])
    a, b = box[inner - 1]
    outer = [0]
    for dim in range(inner - 1):
        stride = prod(shape[dim + 1 :])
        outer = [base + index * stride for base in outer for index in range(*box[dim])]
    for base in outer:
        yield base + a * row, base + b * row


def check_tied_copies(plan: ShardPlan, shards: Sequence[LocalShard], source: SliceSource) -> None:
    """Raise if the checkpoint holds two different values for a tensor that the config ties."""
    for shard in shards:
        other = plan.tie_checks.get(shard.name)
        if other is None:
            continue
        for read in list_reads(other, shard.start, shard.stop):
            value = orient(source.view(read.piece.source, read.piece.source_box), read.piece.dims)
            at = read.offset - shard.start
            block = shard.flat[at : at + prod(read.block)].view(read.block)
            held = cut(block, read.piece.box)
            if not torch.equal(held, value.to(held.device, held.dtype)):
                message = f"{shard.name!r} and {read.piece.source!r} differ in the checkpoint, and the config ties them."
                raise fail("L112", "materialise", message, tensor=shard.name)
