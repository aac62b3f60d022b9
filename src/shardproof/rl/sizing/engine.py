"""Bytes of an engine on one rank: its replica of the policy, its caches, and what decoding works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from shardproof.config.schema import Recipe
from shardproof.rl.sizing.activations import cache_bytes, prompts_bytes, token_bytes
from shardproof.rl.sizing.model import Shape
from shardproof.rollout.engine import Sampling
from shardproof.rollout.kept import GIB
from shardproof.rollout.static import fits, kept_lengths


@dataclass(frozen=True)
class EngineBytes:
    """What an engine holds. `cache` stays between batches only where decoding uses fixed memory, on a GPU."""

    replica: int = 0
    cache: int = 0
    cache_stays: bool = False
    decoding: int = 0  # beside replica and cache, while completions are made

    @property
    def kept(self) -> int:
        return self.replica + (self.cache if self.cache_stays else 0)


def replica_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The whole policy without adapters, in one dtype, with its buffers."""
    elements = sum(info.numel for info in shape.inventory.parameters if not info.is_adapter)
    return elements * dtype.itemsize + shape.buffer_bytes


def completion_counts(recipe: Recipe, ranks: int) -> list[int]:
    """How many completions a rank makes in a step, and in an evaluation if there is one."""
    takers = max(ranks // recipe.model.sequence_parallel, 1)
    counts = [ceil(recipe.train.prompts_per_step / takers) * recipe.rollout.group_size]
    if recipe.output.eval_every:
        counts.append(ceil(recipe.output.eval_prompts / takers) * recipe.output.eval_samples)
    return counts


def batch_rows(recipe: Recipe, ranks: int) -> list[int]:
    """The different numbers of completions that a rank decodes at a time: full batches, and what is left."""
    counts, size = completion_counts(recipe, ranks), recipe.rollout.batch_size
    return sorted(
        {rows for count in counts for rows in (min(count, size), count % size) if rows}, reverse=True
    )


def engine_bytes(
    recipe: Recipe, shape: Shape, ranks: int, prompt_lengths: Sequence[int], on_gpu: bool
) -> EngineBytes:
    """What the embedded engine holds on a rank, or the sharded one, which has no replica."""
    model, compute = shape.skeleton.model, getattr(torch, recipe.model.compute_dtype)
    rollout, longest = recipe.rollout, max(prompt_lengths)
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p)
    rows = batch_rows(recipe, ranks)
    talks = recipe.environment is not None
    # From the second turn on no two conversations read the same.
    prompts = rows[0] if talks else ceil(rows[0] / rollout.group_size)
    reading = prompts_bytes(model, compute, prompts, longest)
    is_embedded = rollout.engine == "embedded"
    if is_embedded and talks:
        conversations = max(completion_counts(recipe, ranks))
        kept = conversations * cache_bytes(model, compute, longest + rollout.max_new_tokens)
        reading += min(kept, int(rollout.cache_gib * GIB))
    replica = replica_bytes(shape, compute) if is_embedded else 0
    if is_embedded and on_gpu and fits(model):
        lengths = kept_lengths(rows, prompt_lengths, rollout.max_new_tokens, talks)
        cache = sum(count * cache_bytes(model, compute, length) for count, length in lengths)
        # Each row's logits, as the model returns them and, without kernels that draw, in float32 four times.
        fused = compute.itemsize == 2 and rollout.top_p == 1.0
        drawing = sum(count * shape.vocabulary for count, _ in lengths) * (
            compute.itemsize + (0 if fused else 16)
        )
        return EngineBytes(replica, cache, True, reading + drawing)
    length = longest + rollout.max_new_tokens
    cache = rows[0] * cache_bytes(model, compute, length)
    drawing = token_bytes(model, compute, rows[0], length, sampling)
    return EngineBytes(replica, cache, False, max(reading - cache, drawing - cache, 0))
