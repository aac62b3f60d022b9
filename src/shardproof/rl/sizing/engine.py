"""Bytes of an engine on one rank: its replica of the policy, its caches, and what decoding works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.rollout import Rollout
from shardproof.config.schema import Recipe
from shardproof.rl.sizing.activations import cache_bytes, prompts_bytes, token_bytes
from shardproof.rl.sizing.model import Shape
from shardproof.rollout.engine import Sampling
from shardproof.rollout.fp8 import block_weights
from shardproof.rollout.kept import GIB
from shardproof.rollout.paged.blocks import blocks_for
from shardproof.rollout.paged.cache import CacheShape
from shardproof.rollout.paged.memory import LEAST_BLOCKS, padded_rows
from shardproof.rollout.paged.model_step import why_not_paged
from shardproof.rollout.paged.reading import CHUNK_TOKENS

# Bytes for an entry of the vocabulary where logits are not drawn from as they are: scores in float32 three times, their order,
# and how often each token was there.
_SHAPED = 28


@dataclass(frozen=True)
class EngineBytes:
    """What an engine holds. `cache` stays between calls only where it is paged, on a GPU."""

    replica: int = 0
    cache: int = 0
    cache_stays: bool = False
    decoding: int = 0  # beside replica and cache, while completions are made

    @property
    def kept(self) -> int:
        return self.replica + (self.cache if self.cache_stays else 0)


def replica_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The whole policy without adapters, in one dtype, with its buffers."""
    elements = sum(info.num_weights for info in shape.inventory.parameters if not info.is_adapter)
    return elements * dtype.itemsize + shape.buffer_bytes


def completion_counts(recipe: Recipe, ranks: int) -> list[int]:
    """How many completions a rank makes in a step, and in an evaluation if there is one."""
    takers = max(ranks // recipe.model.sequence_parallel, 1)
    counts = [ceil(recipe.train.prompts_per_step / takers) * recipe.rollout.group_size]
    for each in held_out_sets(recipe):
        if each.every:
            counts.append(ceil(each.prompts / takers) * each.samples)
    return counts


def batch_rows(recipe: Recipe, ranks: int) -> list[int]:
    """The different numbers of completions that a rank decodes at a time: full batches, and what is left."""
    counts, size = completion_counts(recipe, ranks), recipe.rollout.batch_size
    return sorted(
        {rows for count in counts for rows in (min(count, size), count % size) if rows}, reverse=True
    )


def engine_bytes(
    recipe: Recipe,
    shape: Shape,
    ranks: int,
    prompt_lengths: Sequence[int],
    on_gpu: bool,
    free: int | None = None,
) -> EngineBytes:
    """What the embedded engine holds on a rank, or the sharded one, which has no replica.

    `free` bytes of the GPU are left beside the models; it bounds a paged cache whose size is not set.
    """
    model, compute = shape.skeleton.model, getattr(torch, recipe.model.compute_dtype)
    rollout, longest = recipe.rollout, max(prompt_lengths)
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature)
    shaping = 0 if rollout.is_whole else _SHAPED  # of each entry of the vocabulary
    rows = batch_rows(recipe, ranks)
    talks = recipe.environment is not None
    # From the second turn on no two conversations read the same.
    prompts = rows[0] if talks else ceil(rows[0] / rollout.group_size)
    is_embedded = rollout.engine == "embedded"
    turns = 0  # kept between them
    if is_embedded and talks:
        conversations = max(completion_counts(recipe, ranks))
        kept = conversations * cache_bytes(model, compute, longest + rollout.max_new_tokens)
        turns = min(kept, int(rollout.cache_gib * GIB))
    replica = replica_bytes(shape, compute) if is_embedded else 0
    if is_embedded and on_gpu and rollout.fp8 != "off":
        replica += sum(weight.numel() for weight in block_weights(model))  # kept in 8 bits beside the others
    length = longest + rollout.max_new_tokens
    if is_embedded and on_gpu and why_not_paged(model) is None:
        left = free - replica if free is not None else None
        cache = _paged_bytes(CacheShape.of(model.config).block_bytes(compute), rows[0], length, rollout, left)
        tokens = min(CHUNK_TOKENS, prompts * longest)
        reading = prompts_bytes(model, compute, 1, tokens) - cache_bytes(model, compute, tokens)
        # Each row's logits and, without kernels that draw, in float32 four times.
        fused = compute.itemsize == 2
        drawing = padded_rows(rows[0], rollout.batch_size) * shape.vocabulary
        drawing *= 2 * compute.itemsize + (0 if fused else 16) + shaping
        return EngineBytes(replica, cache, True, turns + reading + drawing)
    reading = prompts_bytes(model, compute, prompts, longest) + turns
    cache = rows[0] * cache_bytes(model, compute, length)
    drawing = token_bytes(model, compute, rows[0], length, sampling) + rows[0] * shape.vocabulary * shaping
    return EngineBytes(replica, cache, False, max(reading - cache, drawing - cache, 0))


def _paged_bytes(block: int, rows: int, length: int, rollout: Rollout, left: int | None) -> int:
    """Of a paged cache, with blocks of so many bytes."""
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * GIB)
    found = (max(rows * blocks_for(length), LEAST_BLOCKS) + 1) * block
    if left is None:
        return found
    return min(found, max(left // 2, (blocks_for(length) + 1) * block))
