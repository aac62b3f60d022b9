"""Write every shard from its origin, and note each write in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from shardproof.errors import fail
from shardproof.model.initial import InitSpec, draw, initialise_whole
from shardproof.shard.ledger import Ledger
from shardproof.shard.local import LocalShard, Part
from shardproof.shard.packed import as_weight, store, weight_parts
from shardproof.shard.plan import ShardPlan, is_whole
from shardproof.shard.staging import Staging
from shardproof.weights.box_tensor import BoxTensor, Run
from shardproof.weights.boxes import (
    Box,
    Piece,
    blocks,
    copy_overlap,
    cut,
    enclosing_range,
    orient,
    put,
    shape_of,
    size_of,
)
from shardproof.weights.mapping import WholeConversion
from shardproof.weights.reader import Checkpoint, SliceSource

Progress = Callable[[int], None]
_MANY_RUNS = 16
_DRAWN_ELEMENTS = 1 << 20  # what `draw` makes at a time
_MOST_AT_A_TIME = 8  # such pieces, in threads


class Read(NamedTuple):
    """One box of a checkpoint tensor and the place in a tensor and in its memory that it fills."""

    piece: Piece  # relative to the block
    offset: int  # of the block in the memory
    block: Box  # of the whole tensor, contiguous in the memory

    @property
    def box(self) -> Box:
        """The box of the whole tensor that it fills."""
        return tuple((a + low, b + low) for (a, b), (low, _) in zip(self.piece.box, self.block, strict=True))

    def block_of(self, memory: torch.Tensor, low: int = 0) -> torch.Tensor:
        """The block, in memory from its element `low` on."""
        at = self.offset - low
        return memory[at : at + size_of(self.block)].view(shape_of(self.block))


def list_reads(boxes: BoxTensor, box: Box, low: int = 0, high: int | None = None) -> Iterator[Read]:
    """The reads that fill elements [low, high) of the memory that holds a box, in order."""
    for offset, block in blocks(boxes.shape, box, low, high):
        for piece in boxes.slices(block):
            yield Read(piece, offset, block)


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
        shape = plan.packed.get(shard.name)
        held = shard if shape is None else as_weight(shard, shape)
        ledger.expect(shard.name, held.shape, held.boxes)
        if not shard.flat.numel():
            pass
        elif shape is None:
            bytes_read += _write_shard(plan, shard, source, model, staging, ledger)
        else:
            memory = partial(torch.empty, dtype=torch.float32, device=shard.flat.device)
            at_once = is_whole(plan.origins[shard.name])
            for low, high, part in weight_parts(shard, shape, at_once, memory):
                bytes_read += _write_shard(plan, part, source, model, staging, ledger)
                staging.finish()  # the copies run beside what quantises
                store(shard, shape, low, high, part.flat)
        ledger.name_writer(shard.name, plan.writers[shard.name])
        progress(shard.nbytes)
    staging.finish()
    return ledger, bytes_read


def _write_shard(
    plan: ShardPlan,
    shard: LocalShard,
    source: SliceSource | None,
    model: PreTrainedModel,
    staging: Staging,
    ledger: Ledger,
) -> int:
    """Write one shard; returns the number of checkpoint bytes read."""
    origin = plan.origins[shard.name]
    if isinstance(origin, BoxTensor):
        assert source is not None
        return _write_boxes(shard, origin, source, ledger, staging)
    if isinstance(origin, WholeConversion):
        assert source is not None
        value = origin.convert(source, model)
        _check_shape(shard, value)
        _write_value(shard, value, ledger)
        return value.numel() * value.element_size()
    if origin.kind == "module":
        _write_value(shard, initialise_whole(origin, plan.seed), ledger)
    else:
        _write_drawn(shard, origin, plan.seed, ledger)
    return 0


def _check_shape(shard: LocalShard, value: torch.Tensor) -> None:
    if tuple(value.shape) != shard.shape:
        message = f"{shard.name!r} has the shape {tuple(value.shape)} after conversion, the model expects {shard.shape}."
        raise fail("L106", "materialise", message, tensor=shard.name)


def _write_value(shard: LocalShard, value: torch.Tensor, ledger: Ledger) -> None:
    for box, memory in shard.parts():
        memory.view(shape_of(box)).copy_(cut(value, box))
        ledger.write(shard.name, box)


def _write_drawn(shard: LocalShard, origin: InitSpec, seed: int, ledger: Ledger) -> None:
    """Draw the values piece by piece, several at a time: each piece has a generator of its own."""
    for box, memory in shard.parts():
        start, stop = enclosing_range(box, shard.shape)
        lows = range(start - start % _DRAWN_ELEMENTS, stop, _DRAWN_ELEMENTS)
        write = partial(_write_piece, shard.shape, box, memory, origin, seed, (start, stop))
        num_threads = min(torch.get_num_threads(), len(lows), _MOST_AT_A_TIME)
        if num_threads > 1:
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(write, lows))
        else:
            for low in lows:
                write(low)
        ledger.write(shard.name, box)


@torch.no_grad()
def _write_piece(
    shape: tuple[int, ...],
    box: Box,
    memory: torch.Tensor,
    origin: InitSpec,
    seed: int,
    bounds: tuple[int, int],
    low: int,
) -> None:
    a, b = max(low, bounds[0]), min(low + _DRAWN_ELEMENTS, bounds[1])
    copy_overlap(shape, memory, box, draw(origin, seed, shape, a, b), ((a, b),))


def _write_boxes(
    shard: LocalShard, boxes: BoxTensor, source: SliceSource, ledger: Ledger, staging: Staging
) -> int:
    bytes_read = 0
    for part in shard.parts():
        if isinstance(source, Checkpoint) and len(part.box) == 1:
            runs = list_runs(boxes, *part.box[0])
            if runs is not None:
                bytes_read += _write_runs(shard.name, part, boxes.dtype, runs, source, ledger, staging)
                continue
        for low, high, buffer in staging.buffers(part.memory, boxes.dtype):
            for read in list_reads(boxes, part.box, low, high):
                value = source.view(read.piece.source, read.piece.source_box)
                bytes_read += put(read.block_of(buffer, low), read.piece, value) * value.element_size()
                ledger.write(shard.name, read.box)
    return bytes_read


def _write_runs(
    shard_name: str,
    part: Part,
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
    ((first, last),) = part.box
    for low, high, buffer in staging.buffers(part.memory, dtype, gather=len(runs) > _MANY_RUNS):
        low, high = first + low, first + high
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
            ledger.write(shard_name, ((a, b),))
    return (last - first) * size


def check_tied_copies(plan: ShardPlan, shards: Sequence[LocalShard], source: SliceSource) -> None:
    """Raise if the checkpoint holds two different values for a tensor that the config ties."""
    for shard in shards:
        other = plan.tie_checks.get(shard.name)
        if other is None:
            continue
        for box, memory in shard.parts():
            for read in list_reads(other, box):
                value = orient(source.view(read.piece.source, read.piece.source_box), read.piece.dims)
                held = cut(read.block_of(memory), read.piece.box)
                if not torch.equal(held, value.to(held.device, held.dtype)):
                    message = f"{shard.name!r} and {read.piece.source!r} differ in the checkpoint, and the config ties them."
                    raise fail("L112", "materialise", message, tensor=shard.name)
