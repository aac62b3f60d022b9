"""Shards of weights that are held in 4 bits: how they are written, and the proof that nothing changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from shardproof.digest import lazy_digests
from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.model.inventory import Inventory
from shardproof.model.nf4 import dequantise, quantise
from shardproof.model.nf4_layout import code_bytes, width
from shardproof.shard.local import LocalShard

_ELEMENTS = 1 << 24  # of a weight that are there in float32 at a time
Shape = tuple[int, int]


def packed_shapes(inventory: Inventory) -> dict[str, Shape]:
    """{name of a weight in 4 bits: the shape that it has for the model}."""
    return {info.name: info.packed for info in inventory.parameters if info.packed is not None}


def as_weight(shard: LocalShard, shape: Shape) -> LocalShard:
    """The rows that a shard in 4 bits holds, as boxes of the weight. Its memory stays what it is."""
    first, last = _rows(shard, shape)
    return replace(shard, shape=shape, boxes=(((first * shape[1], last * shape[1]),),))


def _rows(shard: LocalShard, shape: Shape) -> tuple[int, int]:
    held, row = shard.flat_range, width(shape[1]) // shard.flat.itemsize
    assert held is not None, "FSDP2 shards into ranges"
    return held[0] // row, held[1] // row


def weight_parts(
    shard: LocalShard, shape: Shape, at_once: bool, memory: Callable[[int], torch.Tensor]
) -> Iterator[tuple[int, int, LocalShard]]:
    """(first and last row in the shard, those rows as a shard of the weight in `memory`), a few rows at a time."""
    first, last = _rows(shard, shape)
    step = max(1, last - first if at_once else _ELEMENTS // max(shape[1], 1))
    for low in range(first, last, step):
        high = min(low + step, last)
        part = LocalShard.of_range(
            shard.name, shape, low * shape[1], high * shape[1], memory((high - low) * shape[1])
        )
        yield low - first, high - first, part


def store(shard: LocalShard, shape: Shape, low: int, high: int, values: torch.Tensor) -> None:
    """Quantise some rows into the shard's memory; raises S205 where a value is not finite."""
    packed = quantise(values.view(-1, shape[1]))
    scales = packed[:, code_bytes(shape[1]) :].contiguous().view(torch.float32)
    if not bool(torch.isfinite(scales).all()):
        message = f"{shard.name!r} holds NaN or Inf, which cannot be held in 4 bits."
        raise fail("S205", "materialise", message, rank=dist.get_rank(), tensor=shard.name)
    shard.flat.view(torch.uint8).view(-1, width(shape[1]))[low:high] = packed


def values_of(flat: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """The weight's elements that packed rows hold, flat, as they are computed with."""
    return dequantise(flat.view(torch.uint8).view(-1, width(shape[1])), shape[1], dtype).view(-1)


def take_digests(shards: Mapping[str, LocalShard]) -> dict[str, int]:
    """The digest of each shard; one wait for all of them."""
    held = {name: shard.flat for name, shard in shards.items() if shard.flat.numel()}
    found = lazy_digests(list(held.values())).tolist()
    return dict(zip(held, found, strict=True))


def changed(known: Mapping[str, int], shards: Mapping[str, LocalShard], stage: str) -> list[Finding]:
    """A finding for the first shard that is not what it was when it was loaded."""
    now = take_digests({name: shards[name] for name in known})
    odd = [name for name, digest in known.items() if now[name] != digest]
    if not odd:
        return []
    rank = dist.get_rank()
    message = f"{odd[0]!r}, a weight of the frozen base, is not what was loaded ({len(odd)} of {len(known)} changed)."
    return [Finding("E410", stage, message, rank=rank, tensor=odd[0])]
