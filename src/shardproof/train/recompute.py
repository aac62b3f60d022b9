"""Activation checkpointing that spends free memory before it recomputes: `checkpoint_activations="auto"`.

A probe, a micro-batch in which the last block of each kind is kept and every other one recomputed, measures what a block
keeps. From then on each micro-batch recomputes the fewest blocks with which it fits. They are the first ones: what the
later ones keep is gone by the time the backward pass recomputes them. Where nothing is recomputed and memory is left for
the whole model, FSDP2's parameters are gathered once per step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardproof.dist.collectives import exchange
from shardproof.dist.hosts import hosts
from shardproof.model.compiling import can_compile
from shardproof.model.head import chunk_bytes
from shardproof.model.roles import VALUED
from shardproof.model.skeleton import recomputable_blocks, set_recomputed
from shardproof.shard.footprint import MARGIN, gathered_bytes, num_row_shards, unit_bytes, unit_groups
from shardproof.shard.memory import device_id, free_memory
from shardproof.shard.optimizer_state import state_bytes
from shardproof.shard.settings import FSDP1, FSDP2
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name, local_tensor
from shardproof.train.batching import Batch
from shardproof.train.forward import Scoring, vocabulary_size
from shardproof.train.meter import Meter

logger = logging.getLogger(__name__)

# A probe keeps a block of each kind; a model of more kinds than this is recomputed whole.
_MAX_KINDS = 4
# By which factor an estimate may be off before a probe is run, and before a measurement that costs nothing is taken.
_PROBE_BEYOND, _NOTE_BEYOND = 1.5, 1.1


@dataclass(frozen=True)
class Extent:
    """What a micro-batch's memory grows with: linear layers with tokens, attention without a kernel with the squares."""

    tokens: int
    squares: int  # of the sequences' lengths, added up

    def over(self, other: Extent) -> float:
        """At most how many times the other's memory this takes, in whatever proportion the two parts stand."""
        return max(self.tokens / other.tokens, self.squares / other.squares)


@dataclass(frozen=True)
class Measurement:
    """Bytes of each block at one extent: when it is kept, and of the output that is there in any case."""

    extent: Extent
    kept: list[int]
    output: list[int]


@dataclass(frozen=True)
class StepPlan:
    """How many blocks each micro-batch of a step recomputes: the same on every rank."""

    recompute: Recompute
    extents: Sequence[Extent | None]
    counts: Sequence[int]
    stays_gathered: bool  # there is memory for all parameters on every rank, and they may stay

    @contextmanager
    def forward(self, index: int) -> Iterator[None]:
        """Hold the forward pass of a micro-batch; outside of it every block is recomputed."""
        recompute, extent, count = self.recompute, self.extents[index], self.counts[index]
        flags = [index < count for index in range(len(recompute.blocks))]
        if count > len(flags):
            flags = [index not in recompute.samples for index in range(len(flags))]
        can_measure = not any(flags[index] for index in recompute.samples)
        set_recomputed(recompute.blocks, flags)
        try:
            if extent is not None and can_measure and recompute.is_loose(extent, _NOTE_BEYOND):
                with recompute.measuring(extent):
                    yield
            else:
                yield
        finally:
            set_recomputed(recompute.blocks, [True] * len(flags))


class Recompute:
    """Decides for one model which blocks are recomputed. `free` tells (free, all) bytes of a device for a process.

    Collective: every rank.
    """

    def __init__(
        self, policy: ShardedModel, free: Callable[[torch.device, int], tuple[int, int]] = free_memory
    ):
        self.blocks = recomputable_blocks(policy.model)
        self.kinds = _kinds(policy, self.blocks)
        if len(set(self.kinds)) > _MAX_KINDS:
            self.blocks, self.kinds = [], []
        self.samples = {len(self.kinds) - 1 - self.kinds[::-1].index(kind) for kind in self.kinds}
        self.measured: list[Measurement] = []
        # Of the last step's micro-batches; more than there are blocks: a probe.
        self.counts: Sequence[int] = ()
        self._free = free
        self._device = policy.device
        self._sharers = _sharers(policy.device)
        self._groups = unit_groups(policy.inventory, policy.plan.units)
        cut = num_row_shards(policy.strategy, policy.settings.shard_size)
        self._whole = sum(unit_bytes(group, policy.settings.compute_dtype, cut) for group in self._groups)
        self._vocabulary = vocabulary_size(policy)
        # FSDP1 has one gradient for all of a unit, frozen parameters included.
        with_gradient = policy.parameters() if policy.strategy == FSDP1 else policy.trainable_parameters()
        self._gradients = _local_bytes(with_gradient)
        self._said: int | None = None

    def plan(
        self,
        policy: ShardedModel,
        micro_batches: Sequence[Batch],
        optimizer: torch.optim.Optimizer,
        scoring: Scoring,
        every_token: bool,
    ) -> StepPlan:
        """Decide for all micro-batches of a step, from the memory that is free before the first.

        Ranks take the largest number of any of them. Under sequence parallelism they have to, as a recompute exchanges
        tokens again; elsewhere it costs nothing, because each waits for the slowest in every block.

        Collective: every rank.
        """
        trimmed = scoring.packed and not every_token
        extents = [_extent(part, trimmed, policy.sequence_parallel) for part in micro_batches]
        free, total = self._free(self._device, self._sharers)
        budget = free - int(MARGIN * total) - self._unallocated(policy, optimizer)
        if policy.settings.reshard_after_forward is False:
            budget -= self._whole
        rooms = [budget - self._beside(policy, extent, scoring) if extent else 0 for extent in extents]
        pairs = list(zip(extents, rooms, strict=True))
        mine = [self.min_recomputed(extent, room) if extent else 0 for extent, room in pairs]
        has_room = all(
            self.min_recomputed(extent, room - self._whole) == 0 for extent, room in pairs if extent
        )
        answers = exchange([mine, has_room])
        self.counts = [max(needed) for needed in zip(*(needed for needed, _ in answers), strict=True)]
        self._log(extents, budget)
        can_stay = policy.strategy == FSDP2 and policy.settings.reshard_after_forward is None
        return StepPlan(self, extents, self.counts, can_stay and all(room for _, room in answers))

    def min_recomputed(self, extent: Extent, budget: int) -> int:
        """The smallest number of blocks to recompute so that a micro-batch fits, or one more than all for a probe."""
        if not self.measured:
            return len(self.blocks) + 1
        nearest = self._nearest(extent)
        scale = extent.over(nearest.extent)
        # The backward pass of a block makes gradients of what the block kept.
        largest, held, outputs = max(nearest.kept), sum(nearest.kept), 0
        count = 0
        for kept, output in zip(nearest.kept, nearest.output, strict=True):
            if max(held + largest, outputs + 2 * largest if count else 0) * scale <= budget:
                break
            held, outputs, count = held - kept + output, outputs + output, count + 1
        return len(self.blocks) + 1 if count and self.is_loose(extent, _PROBE_BEYOND) else count

    def is_loose(self, extent: Extent, factor: float) -> bool:
        """Whether the measurements there are may be off by more than `factor` at this extent."""
        if not self.measured:
            return True
        nearest = self._nearest(extent).extent
        return extent.over(nearest) > factor * min(1.0, extent.tokens / nearest.tokens)

    def _nearest(self, extent: Extent) -> Measurement:
        """The measurement that bounds this extent's memory best."""
        return min(self.measured, key=lambda row: sum(row.kept) * extent.over(row.extent))

    @contextmanager
    def measuring(self, extent: Extent) -> Iterator[None]:
        """Note what the sample of each kind keeps in the forward pass inside."""
        meters = {self.kinds[index]: Meter(self.blocks[index], self._device) for index in self.samples}
        try:
            yield
        finally:
            for meter in meters.values():
                meter.close()
        kept = [meters[kind].kept for kind in self.kinds]
        self.measured.append(Measurement(extent, kept, [meters[kind].output for kind in self.kinds]))

    def _unallocated(self, policy: ShardedModel, optimizer: torch.optim.Optimizer) -> int:
        """Gradients, which no step starts with, and before the first step what the optimizer will keep."""
        if policy.settings.storage_device.type != self._device.type:
            return 0
        is_first = not optimizer.state and policy.version == 0
        return self._gradients + (state_bytes(optimizer) if is_first else 0)

    def _beside(self, policy: ShardedModel, extent: Extent, scoring: Scoring) -> int:
        """Gathered units, their gradients, and the head's logits."""
        compute, shards = policy.settings.compute_dtype, policy.settings.shard_size
        logits = 4 * extent.tokens * self._vocabulary
        if scoring.chunked:
            logits = chunk_bytes(extent.tokens, self._vocabulary, can_compile(self._device, compute))
        if policy.role in VALUED:
            logits = 0
        return gathered_bytes(self._groups, compute, logits, True, shards, policy.strategy)

    def _log(self, extents: Sequence[Extent | None], budget: int) -> None:
        """Log the step's largest number when it is new, and when it has changed by a quarter of the blocks."""
        most, num_blocks = max(self.counts), len(self.blocks)
        if most > num_blocks or (self._said is not None and 4 * abs(most - self._said) <= num_blocks):
            return
        self._said = most
        tokens = max((extent.tokens for extent in extents if extent), default=0)
        logger.log(
            logging.INFO if dist.get_rank() == 0 else logging.DEBUG,
            "activations: up to %d of %d blocks are recomputed, with up to %d tokens per micro-batch and %.1f GiB for them",
            most,
            num_blocks,
            tokens,
            budget / 2**30,
        )


def _extent(micro_batch: Batch, trimmed: bool, sequence_parallel: int) -> Extent | None:
    """A rank's part of a micro-batch; None of an empty one, which takes next to nothing."""
    lengths = [length - trimmed for length in micro_batch.lengths]
    if not lengths:
        return None
    squares = sum(length * length for length in lengths)
    return Extent(-(-sum(lengths) // sequence_parallel), -(-squares // sequence_parallel))


def _kinds(policy: ShardedModel, blocks: Sequence[nn.Module]) -> list[Hashable]:
    """What kind each block is of: those of one kind have the same parameters and windows, and keep the same."""
    names = {module: clean_name(name) for name, module in policy.model.named_modules()}
    kinds: list[Hashable] = []
    for block in blocks:
        prefix = f"{names[block]}."
        inside = [info for info in policy.inventory.parameters if info.name.startswith(prefix)]
        windows = [getattr(module, "sliding_window", None) for module in block.modules()]
        shapes = [(info.name.removeprefix(prefix), info.shape) for info in inside]
        kinds.append((type(block).__name__, tuple(shapes), tuple(windows)))
    return kinds


def _sharers(device: torch.device) -> int:
    """How many ranks share this rank's device. Collective: every rank."""
    if device.type != "cuda":
        return len(hosts().ranks_of(hosts().mine))
    mine = device_id(device)
    return exchange(mine).count(mine)


def _local_bytes(params: Iterable[nn.Parameter]) -> int:
    return sum(local_tensor(param).nbytes for param in params)
