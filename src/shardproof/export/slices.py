"""This rank's slices of a payload: how they are written to memory that holds the payload, and which they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from shardproof.export.gather import Gatherer
from shardproof.export.payload import Layout, Payload, first_not_finite
from shardproof.export.stream import WeightStream, agree_to_continue, make_tensors
from shardproof.shard.local import LocalShard
from shardproof.weights.boxes import copy_overlap, enclosing_range, put_held, size_of
from shardproof.weights.mapping import Cut, ExportEntry

Target = Callable[[str], torch.Tensor]  # the flat elements of a tensor, by its name
Ranges = dict[str, np.ndarray]  # for each tensor, the ranges [start, stop) of its elements


def write_slices(stream: WeightStream, target: Target) -> None:
    """Write what this rank holds of the payload to its place in `target`.

    Collective: every rank. When it returns, all ranks have written theirs.
    """
    payload = stream.payload
    payload.refresh()
    layout = payload.layout()
    bad: str | None = None
    for bucket in stream.buckets():
        adapters = stream.gather_adapters([n for entry in bucket for n in entry.sources], layout)
        for entry in bucket:
            if entry.whole is not None:
                _write_whole(stream, entry, layout, target)
            elif _is_writer(payload):
                bad = _write_entry(payload, entry, adapters, target) or bad
    agree_to_continue(bad=bad)


def _is_writer(payload: Payload) -> bool:
    """Replicas hold the same bytes; the first writes them."""
    mesh = payload.policy.mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def _write_whole(stream: WeightStream, entry: ExportEntry, layout: Layout, target: Target) -> None:
    """Gather an entry that cannot be converted slice by slice; rank 0 writes it. Collective: every rank."""
    whole = stream.gather_bucket([entry], layout, Gatherer(0))
    for name, tensor in make_tensors(entry, whole):
        if dist.get_rank() == 0:
            target(name).view(tensor.shape).copy_(tensor)


def _write_entry(
    payload: Payload, entry: ExportEntry, adapters: Mapping[str, torch.Tensor], target: Target
) -> str | None:
    """Write what this rank holds of an entry; returns the name of a tensor that is not finite."""
    bad = None
    for source in entry.sources:
        held = payload.held(source, adapters)
        bad = first_not_finite({source: held.flat}) or bad
        _place(entry, source, held, target)
    return bad


def _place(entry: ExportEntry, source: str, held: LocalShard, target: Target) -> None:
    """Copy what a rank holds of a model tensor to its places in the entry's checkpoint tensors."""
    if entry.cuts is not None:
        _place_cuts([cut for cut in entry.cuts if cut.source == source], held, target)
        return
    for name, account in entry.boxes.items():
        tensor = target(name).view(account.shape)
        for piece in account.pieces:
            for box, values in held.parts() if piece.source == source else ():
                put_held(tensor, piece, box, values)


def _place_cuts(cuts: Sequence[Cut], held: LocalShard, target: Target) -> None:
    """Copy the parts of runs that lie in this rank's boxes."""
    for box, values in held.parts():
        start, stop = enclosing_range(box, held.shape)
        for cut in cuts:
            end = cut.start + cut.length
            if cut.start < stop and start < end:
                copy_overlap(held.shape, target(cut.name), ((cut.start, end),), values, box)


def own_ranges(stream: WeightStream) -> Ranges:
    """Which elements of each tensor this rank writes. Over all ranks, every element is there exactly once."""
    payload = stream.payload
    payload.refresh()
    found: Ranges = {}
    for entry in payload.entries:
        if entry.whole is not None:
            if dist.get_rank() == 0:
                found |= {name: _ranges([(0, account.numel())]) for name, account in entry.boxes.items()}
        elif _is_writer(payload):
            held = {source: _held_places(payload, source) for source in entry.sources}
            found |= _cut_ranges(entry, held) or _marked_ranges(entry, held)
    return {name: ranges for name, ranges in found.items() if len(ranges)}


def _held_places(payload: Payload, source: str) -> LocalShard:
    """What this rank holds of a model tensor, with True for every element in place of values."""
    info = payload.infos[source]
    if info.is_buffer:  # every rank holds all of it; the first one of the shard axis writes it
        mesh = payload.policy.mesh
        shard = LocalShard.of_whole(info.name, payload.buffers[info.name])
        shard = shard if mesh.get_local_rank(mesh.ndim - 1) == 0 else shard.empty()
    else:
        shard = payload.shards[info.name]
    num = sum(map(size_of, shard.boxes))
    return replace(shard, flat=torch.ones(1, dtype=torch.bool).expand(num))


def _cut_ranges(entry: ExportEntry, held: Mapping[str, LocalShard]) -> Ranges:
    """The ranges of checkpoint tensors that are runs of model tensors of which this rank holds ranges; else nothing."""
    if entry.cuts is None or any(len(box) != 1 for shard in held.values() for box in shard.boxes):
        return {}
    found: Ranges = {}
    for cut in entry.cuts:
        common = (
            (max(box[0][0], cut.start), min(box[0][1], cut.start + cut.length))
            for box in held[cut.source].boxes
        )
        found[cut.name] = _ranges(sorted((a - cut.start, b - cut.start) for a, b in common if a < b))
    return found


def _marked_ranges(entry: ExportEntry, held: Mapping[str, LocalShard]) -> Ranges:
    """The same for any conversion: marks are placed as values are, and then looked for."""
    marks = {name: torch.zeros(account.numel(), dtype=torch.bool) for name, account in entry.boxes.items()}
    for source, shard in held.items():
        _place(entry, source, shard, marks.__getitem__)
    edges = {
        name: np.flatnonzero(np.diff(mark.numpy().astype(np.int8), prepend=0, append=0))
        for name, mark in marks.items()
    }
    return {name: found.reshape(-1, 2).astype(np.int64) for name, found in edges.items()}


def _ranges(found: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(found, dtype=np.int64).reshape(-1, 2)
