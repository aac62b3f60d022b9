"""Bytes of one rank, before anything is allocated: what it holds, what a step adds, what a load and an export take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import nn
from transformers import PretrainedConfig

from shardproof.doctor.activations import saved_bytes
from shardproof.doctor.request import DTYPES, Layout
from shardproof.export.stream import BUCKET_BYTES
from shardproof.model.head import chunk_bytes
from shardproof.model.inventory import Inventory, TensorInfo, take_inventory
from shardproof.model.roles import REFERENCE
from shardproof.model.skeleton import Skeleton, build_skeleton
from shardproof.shard.footprint import gathered_bytes, unit_bytes, unit_groups
from shardproof.shard.optimizer_state import tensor_dtypes
from shardproof.shard.plan import find_units
from shardproof.train.optim import Trainable, build_optimizer, hidden_matrices

GATHER_BYTES = BUCKET_BYTES // 2


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank. `gathered` is what FSDP holds of other ranks' shards, and their gradients on the way."""

    ranks: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    export: int
    load_peak: int
    counted: bool  # activations were counted on the meta device, not estimated from sizes

    @property
    def step_peak(self) -> int:
        """The most that is held at a time in a step that is not the first."""
        return self.parameters + self.optimizer + max(self.gradients, self.activations + self.gathered)

    @property
    def peak(self) -> int:
        return max(self.step_peak, self.load_peak, self.parameters + self.optimizer + self.export)


@dataclass(frozen=True)
class Shape:
    """What the estimate needs to know of a model, found out once for all numbers of ranks."""

    skeleton: Skeleton
    inventory: Inventory
    units: tuple[str, ...]


def shape_of(config: PretrainedConfig, layout: Layout, role: str, lora: object = None) -> Shape:
    """The model's tensors and units. Memory: buffers only."""
    dtype = getattr(torch, DTYPES[layout.param_dtype])
    skeleton = build_skeleton(config, role=role, lora=lora, param_dtype=dtype)
    inventory = take_inventory(skeleton.model)
    return Shape(skeleton, inventory, find_units(skeleton.model, inventory))


def estimate(shape: Shape, layout: Layout, ranks: int, num_tokens: int) -> Estimate:
    """What the fullest rank holds when a micro-batch has `num_tokens` tokens per rank (per group, with Ulysses)."""
    shards = max(ranks // layout.replicate, 1)
    compute = getattr(torch, DTYPES[layout.dtype])
    groups = unit_groups(shape.inventory, shape.units)
    held = sum(_shard_bytes(group, layout, shards) for group in groups)
    buffers = sum(t.numel() * t.element_size() for t in shape.skeleton.computed_buffers.values())
    buffers += sum(info.numel * info.dtype.itemsize for info in shape.inventory.persistent_buffers)
    trained = sum(_shard_bytes([i for i in group if i.trainable], layout, shards) for group in groups)
    if shape.skeleton.role == REFERENCE:
        trained = 0
    activations, counted = 0, True
    local_tokens = ceil(num_tokens / layout.sequence_parallel)
    vocabulary = shape.skeleton.model.get_input_embeddings().get_parameter("weight").shape[0]
    logits = chunk_bytes(local_tokens, vocabulary)
    if trained:
        activations, counted = _activations(shape, layout, compute, local_tokens)
    # A tensor's part is made and then copied into its shard; FSDP1 flattens a whole unit before it cuts it.
    writing = max(_shard_bytes([info], layout, shards) for group in groups for info in group)
    if layout.strategy == "fsdp1":
        largest = max(unit_bytes(group) for group in groups)
        writing += largest - largest // shards
    return Estimate(
        ranks=ranks,
        parameters=held + buffers,
        gradients=trained,
        optimizer=_optimizer_bytes(shape, layout, groups, shards) if trained else 0,
        activations=activations,
        gathered=gathered_bytes(groups, compute, logits, bool(trained), shards),
        export=_export_bytes(shape.inventory, compute, layout, shards),
        load_peak=held + buffers + writing,
        counted=counted,
    )


def _optimizer_bytes(
    shape: Shape, layout: Layout, groups: Sequence[Sequence[TensorInfo]], shards: int
) -> int:
    """What the optimizer keeps, as it declares it for parameters of these shapes that have no memory."""
    hidden = hidden_matrices(shape.skeleton.model, shape.inventory)
    infos = [info for group in groups for info in group if info.trainable]
    params = {info.name: nn.Parameter(torch.empty((), dtype=info.dtype).expand(info.shape)) for info in infos}
    trained = [Trainable(params[info.name], info.shape, 0, info.name in hidden) for info in infos]
    dtypes = tensor_dtypes(build_optimizer(layout.optimizer, trained, None, torch.device("cpu")))
    total = 0
    for group in groups:
        kept = {info: dtypes[params[info.name]] for info in group if info.trainable}
        for index in range(max(map(len, kept.values()), default=0)):
            tensors = [replace(info, dtype=row[index]) for info, row in kept.items() if index < len(row)]
            total += _shard_bytes(tensors, layout, shards)
    return total


def _shard_bytes(group: Sequence[TensorInfo], layout: Layout, shards: int) -> int:
    """The first rank's part: rows of each tensor under FSDP2, a range of the flat unit under FSDP1."""
    if layout.strategy == "fsdp1":
        return ceil(sum(info.numel * info.dtype.itemsize for info in group) / shards)
    return sum(
        ceil((info.shape[0] if info.shape else 1) / shards) * prod(info.shape[1:]) * info.dtype.itemsize
        for info in group
    )


def _activations(shape: Shape, layout: Layout, compute: torch.dtype, num_tokens: int) -> tuple[int, bool]:
    model = shape.skeleton.model
    saved, counted = saved_bytes(model, compute, num_tokens)
    if layout.checkpoint_activations and shape.units:
        hidden = int(model.config.get_text_config().hidden_size) * num_tokens * compute.itemsize
        # Each block keeps its input, and one block at a time keeps everything. "auto" needs as much at least.
        saved = len(shape.units) * hidden + ceil(saved / len(shape.units))
    return saved, counted


def _export_bytes(inventory: Inventory, compute: torch.dtype, layout: Layout, shards: int) -> int:
    """What is gathered at a time, as it is sent, received and put in order; a large tensor is not put in order."""
    sizes = [info.numel * compute.itemsize for info in inventory.stored if not info.is_adapter]
    at_a_time = min(GATHER_BYTES, sum(sizes))
    largest = max(sizes, default=0)
    # FSDP1 cuts units, not tensors: one rank may hold all that is gathered.
    sent = 0 if shards == 1 else 1 if layout.strategy == "fsdp1" else 1 / shards
    return ceil(max(at_a_time * (2 + sent), largest * (1 + sent) if largest > GATHER_BYTES else 0))


def growth(ranks: int, limit: int = 512) -> list[int]:
    """Numbers of ranks to show: the asked one, then doubled up to hundreds."""
    found = [ranks]
    while found[-1] * 2 <= max(limit, ranks):
        found.append(found[-1] * 2)
    return found
