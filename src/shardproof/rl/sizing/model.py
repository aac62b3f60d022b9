"""Bytes of one model on the fullest rank: what it holds, what a step adds, what loading and exporting take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from shardproof.export.stream import ALONE_BYTES, BUCKET_BYTES
from shardproof.model.head import chunk_bytes
from shardproof.model.inventory import Inventory, TensorInfo, take_inventory
from shardproof.model.nf4 import hold_in_nf4
from shardproof.model.roles import FROZEN, VALUED
from shardproof.model.skeleton import Skeleton, build_skeleton, recomputable_blocks
from shardproof.rl.sizing.activations import forward_bytes, saved_bytes
from shardproof.shard.footprint import gathered_bytes, num_row_shards, unit_bytes, unit_groups
from shardproof.shard.optimizer_state import block_dtypes, num_blocks, tensor_dtypes
from shardproof.shard.plan import find_units
from shardproof.train.optim import Trainable, build_optimizer, hidden_matrices

GATHER_BYTES = BUCKET_BYTES // 2
_DRAWN_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Sharding:
    """How one model is sharded, computed and trained."""

    strategy: str = "fsdp2"
    compute_dtype: torch.dtype = torch.bfloat16
    param_dtype: torch.dtype = torch.float32
    sequence_parallel: int = 1
    replicate: int = 1
    checkpoint_activations: bool | int | str = False  # k: every k-th block; "auto": counted as every block
    reshard_after_forward: bool | None = None
    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = False  # with compiled kernels, the head works on larger chunks of logits


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds of one model between passes, and of its gradients during a step."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank. `gathered` is what FSDP holds of other ranks' shards, their gradients, and the head's logits."""

    ranks: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    scoring: int  # a forward pass without gradients: gathered units, logits and what a block works on
    export: int
    load_peak: int
    counted: bool  # activations were counted on the meta device, not estimated from sizes

    @property
    def step_peak(self) -> int:
        """The most that is held at a time in a step of one micro-batch that is not the first step."""
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
    trained: bool = True  # False: it only scores, like every reference

    @property
    def buffer_bytes(self) -> int:
        computed = sum(t.numel() * t.element_size() for t in self.skeleton.computed_buffers.values())
        return computed + sum(info.numel * info.dtype.itemsize for info in self.inventory.persistent_buffers)

    @property
    def vocabulary(self) -> int:
        embedding = self.skeleton.model.get_input_embeddings()
        return int(getattr(embedding, "base_layer", embedding).get_parameter("weight").shape[0])


def shape_of(
    config: PretrainedConfig,
    role: str,
    param_dtype: torch.dtype = torch.float32,
    lora: object = None,
    trust_remote_code: bool = False,
    lora_base: str | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> Shape:
    """The model's tensors and units. Memory: buffers only."""
    skeleton = build_skeleton(
        config, role=role, lora=lora, param_dtype=param_dtype, trust_remote_code=trust_remote_code
    )
    inventory = take_inventory(skeleton.model)
    units = find_units(skeleton.model, inventory)
    if lora_base is not None:
        hold_in_nf4(skeleton.model, units, compute_dtype)
        inventory = take_inventory(skeleton.model)
    return Shape(skeleton, inventory, units)


def held_bytes(shape: Shape, layout: Sharding, ranks: int) -> Held:
    """What the fullest rank holds of a model: its shards, their gradients, and the optimizer's state."""
    shards = max(ranks // layout.replicate, 1)
    groups = unit_groups(shape.inventory, shape.units)
    held = sum(_shard_bytes(group, layout, shards) for group in groups) + shape.buffer_bytes
    if shape.skeleton.role in FROZEN or not shape.trained:
        return Held(held, 0, 0)
    trained = sum(_shard_bytes([i for i in group if i.trainable], layout, shards) for group in groups)
    return Held(held, trained, _optimizer_bytes(shape, layout, groups, shards) if trained else 0)


def estimate(shape: Shape, layout: Sharding, ranks: int, num_tokens: int) -> Estimate:
    """What the fullest rank holds when a micro-batch has `num_tokens` tokens per rank (per group, with Ulysses)."""
    shards = max(ranks // layout.replicate, 1)
    groups = unit_groups(shape.inventory, shape.units)
    held = held_bytes(shape, layout, ranks)
    activations, counted = 0, True
    local_tokens = ceil(num_tokens / layout.sequence_parallel)
    if held.gradients:
        activations, counted = _activations(shape, layout, local_tokens)
    return Estimate(
        ranks=ranks,
        **vars(held),
        activations=activations,
        gathered=_gathered(shape, layout, groups, local_tokens, shards, bool(held.gradients)),
        scoring=_scoring(shape, layout, groups, local_tokens, shards),
        export=_export_bytes(shape.inventory, layout, shards),
        load_peak=held.parameters + _writing(groups, layout, shards),
        counted=counted,
    )


def _writing(groups: Sequence[Sequence[TensorInfo]], layout: Sharding, shards: int) -> int:
    """What a load holds beside the shards: the values of one tensor before they are in its shard."""
    part = max(_shard_bytes([info], layout, shards) for group in groups for info in group)
    # Values that are drawn at random are drawn in pieces, each with two copies on the way.
    writing = max(part, 3 * min(part, _DRAWN_BYTES))
    if layout.strategy == "fsdp1":  # a whole unit, as tensors and flattened, before it is cut
        writing = max(writing, 2 * max(unit_bytes(group) for group in groups))
    return writing


def _gathered(
    shape: Shape,
    layout: Sharding,
    groups: Sequence[Sequence[TensorInfo]],
    num_tokens: int,
    shards: int,
    trains: bool,
) -> int:
    compute = layout.compute_dtype
    is_fused = layout.on_gpu and compute.itemsize == 2
    logits = 0 if shape.skeleton.role in VALUED else chunk_bytes(num_tokens, shape.vocabulary, is_fused)
    found = gathered_bytes(groups, compute, logits, trains, shards, layout.strategy)
    if trains and layout.reshard_after_forward is False:
        found += sum(
            unit_bytes(group, compute, num_row_shards(layout.strategy, shards)) for group in groups[:-1]
        )
    return found


def _scoring(
    shape: Shape, layout: Sharding, groups: Sequence[Sequence[TensorInfo]], num_tokens: int, shards: int
) -> int:
    """The larger of the blocks' forward pass, with two blocks gathered, and the head's."""
    model, compute = shape.skeleton.model, layout.compute_dtype
    hidden = int(model.config.get_text_config().hidden_size) * num_tokens * compute.itemsize
    blocks = gathered_bytes(groups, compute, 0, False, shards, layout.strategy)
    blocks += forward_bytes(model, compute, num_tokens)
    return max(blocks, _gathered(shape, layout, groups, num_tokens, shards, False) + hidden)


def _optimizer_bytes(
    shape: Shape, layout: Sharding, groups: Sequence[Sequence[TensorInfo]], shards: int
) -> int:
    """What the optimizer keeps, as it declares it for parameters of these shapes that have no memory."""
    hidden = hidden_matrices(shape.skeleton.model, shape.inventory)
    infos = [info for group in groups for info in group if info.trainable]
    params = {info.name: nn.Parameter(torch.empty((), dtype=info.dtype).expand(info.shape)) for info in infos}
    trained = [Trainable(params[info.name], info.shape, 0, info.name in hidden) for info in infos]
    made = build_optimizer(
        layout.optimizer, trained, None, torch.device("cpu"), **dict(layout.optimizer_options)
    )
    dtypes = tensor_dtypes(made)
    total = 0
    for group in groups:
        kept = {info: dtypes[params[info.name]] for info in group if info.trainable}
        for index in range(max(map(len, kept.values()), default=0)):
            tensors = [replace(info, dtype=row[index]) for info, row in kept.items() if index < len(row)]
            total += _shard_bytes(tensors, layout, shards)
    blocks = block_dtypes(made)
    return total + sum(
        ceil(num_blocks(info.numel) / shards + 1) * dtype.itemsize
        for info in infos
        for dtype in blocks[params[info.name]]
    )


def _shard_bytes(group: Sequence[TensorInfo], layout: Sharding, shards: int) -> int:
    """The first rank's part: rows of each tensor under FSDP2, a range of the flat unit under FSDP1."""
    if layout.strategy == "fsdp1":
        return ceil(sum(info.numel * info.dtype.itemsize for info in group) / shards)
    return sum(
        ceil((info.shape[0] if info.shape else 1) / shards) * prod(info.shape[1:]) * info.dtype.itemsize
        for info in group
    )


def _activations(shape: Shape, layout: Sharding, num_tokens: int) -> tuple[int, bool]:
    """(bytes that the forward pass keeps for the backward pass at its fullest, whether they were counted)."""
    model, compute = shape.skeleton.model, layout.compute_dtype
    saved, counted = saved_bytes(model, compute, num_tokens)
    blocks = len(recomputable_blocks(model))
    every = 1 if layout.checkpoint_activations == "auto" else int(layout.checkpoint_activations)
    if not every or not blocks or not model.supports_gradient_checkpointing:
        return saved, counted
    hidden = int(model.config.get_text_config().hidden_size) * num_tokens * compute.itemsize
    whole = ceil(saved / blocks)
    # A recomputed block keeps its input. While it is recomputed it keeps everything, and the backward pass has gradients
    # of a third of that at a time; by then what later blocks kept is gone.
    recomputed = [index % every == 0 for index in range(blocks)]
    kept = [hidden if flag else whole for flag in recomputed]
    at_the_end = sum(kept)
    last = max(index for index in range(blocks) if recomputed[index])
    return max(at_the_end, sum(kept[: last + 1]) + whole + whole // 3), counted


def _export_bytes(inventory: Inventory, layout: Sharding, shards: int) -> int:
    """What is gathered at a time, as it is sent, received and put in order; a large tensor is not put in order."""
    itemsize = layout.compute_dtype.itemsize
    sizes = [info.num_weights * itemsize for info in inventory.stored if not info.is_adapter]
    at_a_time = min(GATHER_BYTES, sum(sizes))
    adapters = sum(info.numel * info.dtype.itemsize for info in inventory.stored if info.is_adapter)
    merged = ceil(adapters * at_a_time / max(sum(sizes), 1))  # the factors of what is merged at a time
    largest = max(sizes, default=0)
    if layout.on_gpu and shards == 1:  # nothing is sent or received, and buckets are larger
        return merged + max(min(ALONE_BYTES, sum(sizes)), largest)
    # FSDP1 cuts units, not tensors: one rank may hold all that is gathered.
    sent = 0 if shards == 1 else 1 if layout.strategy == "fsdp1" else 1 / shards
    return merged + ceil(max(at_a_time * (2 + sent), largest * (1 + sent) if largest > GATHER_BYTES else 0))


def growth(ranks: int, limit: int = 512) -> list[int]:
    """Numbers of ranks to show: the requested one, then doubled up to hundreds."""
    found = [ranks]
    while found[-1] * 2 <= max(limit, ranks):
        found.append(found[-1] * 2)
    return found
