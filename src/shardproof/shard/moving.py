"""A model that moves towards another, shard by shard: the reference of a run towards its policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardproof.dist.collectives import together
from shardproof.dist.mesh import replicate_size
from shardproof.errors import fail
from shardproof.shard.local import LocalShard
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import reshard


def check_movable(target: ShardedModel, source: ShardedModel) -> None:
    """Raise unless this rank holds the same parts of the same tensors of both models."""
    for _ in _pairs(target, source):
        pass


def move_towards(target: ShardedModel, source: ShardedModel, mix: float) -> int:
    """target = mix * source + (1 - mix) * target, in place; returns the number of elements of the whole model.

    Every element must be written exactly once, and be finite: S201, S205. No rank sends or holds more than its shards.

    Collective: every rank. Memory: two shards of one tensor in float32.
    """
    with together("reference") as message:
        for model in (target, source):
            model.check_resident("reference")
        target.before_change()
        reshard(target.module)  # what is gathered now would be read again
        written = 0
        for ours, theirs in _pairs(target, source):
            _mix(ours, theirs, mix)
            written += ours.flat.numel()
        message.mine = written
    wanted = sum(info.numel for info in target.inventory.parameters)
    copies = replicate_size(target.mesh)
    if sum(message.rows) != wanted * copies:
        found = (
            f"{sum(message.rows)} elements were written, the model has {wanted} on each of {copies} copies"
        )
        raise fail("S201", "reference", f"{found}.")
    target.mark_updated(changed=True)
    return wanted


@torch.no_grad()
def _mix(ours: LocalShard, theirs: LocalShard, mix: float) -> None:
    mixed = ours.flat.float() * (1.0 - mix)
    mixed.add_(theirs.flat.to(ours.flat.device, torch.float32), alpha=mix)
    if not bool(torch.isfinite(mixed).all()):
        raise fail("S205", "reference", f"{ours.name!r} would hold NaN or Inf.", tensor=ours.name)
    ours.flat.copy_(mixed)


def _pairs(target: ShardedModel, source: ShardedModel) -> Iterator[tuple[LocalShard, LocalShard]]:
    others = {shard.name: shard for shard in source.local_shards()}
    for ours in target.local_shards():
        theirs = others.pop(ours.name, None)
        if theirs is None or (theirs.shape, theirs.boxes) != (ours.shape, ours.boxes):
            held = "none" if theirs is None else f"{theirs.boxes} of {theirs.shape}"
            message = (
                f"{ours.name!r}: this rank holds {ours.boxes} of {ours.shape} of the {target.role} and {held} of the "
                f"{source.role}: they are not the same model, or not sharded alike."
            )
            raise fail("S214", "reference", message, tensor=ours.name, fix=_FIX)
        yield ours, theirs
    if others:
        name = next(iter(others))
        message = f"{name!r} is in the {source.role} and not in the {target.role}."
        raise fail("S214", "reference", message, tensor=name, fix=_FIX)


_FIX = "use the policy's model and strategy for the reference, or remove algorithm.reference_sync_every"
