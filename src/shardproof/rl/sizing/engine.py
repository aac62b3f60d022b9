"""Bytes of an engine on one rank: its replica of the policy, its caches, and what decoding works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.rollout import Rollout
from shardproof.config.schema import Recipe
from shardproof.model.families import max_positions
from shardproof.rl.sizing.activations import cache_bytes, prompts_bytes, token_bytes
from shardproof.rl.sizing.model import Shape
from shardproof.rl.sources.reading import is_sampled
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


@dataclass(frozen=True)
class _Wave:
    """Completions that a rank makes: in a step, or in an evaluation."""

    num: int
    each: int  # of a prompt
    max_new_tokens: int  # of one, or of a turn
    is_shaped: bool  # drawn from something else than all that the model says

    def rows(self, batch_size: int) -> int:
        """How many are decoded at a time."""
        return min(self.num, batch_size)


def _waves(recipe: Recipe, ranks: int) -> list[_Wave]:
    """What a rank samples: a step's completions, and those of evaluations."""
    takers, rollout = max(ranks // recipe.model.sequence_parallel, 1), recipe.rollout
    num, shaped = ceil(recipe.train.prompts_per_step / takers) * rollout.group_size, not rollout.is_whole
    found = [_Wave(num, rollout.group_size, rollout.max_new_tokens, shaped)]
    for each in held_out_sets(recipe) if is_sampled(recipe, is_training=False) else ():
        if each.every:
            num = ceil(each.prompts / takers) * each.samples
            own = Sampling(**each.drawing).truncates
            found.append(_Wave(num, each.samples, each.max_new_tokens, shaped or own))
    return list(dict.fromkeys(found))


def most_rows(recipe: Recipe, ranks: int) -> int:
    """The most completions that a rank decodes at a time."""
    return max(wave.rows(recipe.rollout.batch_size) for wave in _waves(recipe, ranks))


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
    is_embedded = rollout.engine == "embedded"
    replica = replica_bytes(shape, compute) if is_embedded else 0
    if is_embedded and on_gpu and rollout.fp8 != "off":
        replica += sum(weight.numel() for weight in block_weights(model))  # kept in 8 bits beside the others
    is_paged = is_embedded and on_gpu and why_not_paged(model) is None
    left = free - replica if free is not None else None
    found = [
        _paged_wave(recipe, shape, wave, longest, left)
        if is_paged
        else _growing_wave(recipe, shape, wave, longest)
        for wave in _waves(recipe, ranks)
    ]
    if is_paged:  # it keeps what any of them needs
        return EngineBytes(replica, max(cache for cache, _ in found), True, max(rest for _, rest in found))
    cache, rest = max(found, key=sum)
    return EngineBytes(replica, cache, False, rest)


def _paged_wave(recipe: Recipe, shape: Shape, wave: _Wave, longest: int, left: int | None) -> tuple[int, int]:
    """(bytes of the paged cache, of all that decoding works on beside it)."""
    model, compute = shape.skeleton.model, getattr(torch, recipe.model.compute_dtype)
    rollout, rows = recipe.rollout, wave.rows(recipe.rollout.batch_size)
    length = _longest(recipe, shape, wave, longest)
    cache = _paged_bytes(CacheShape.of(model.config).block_bytes(compute), rows, length, rollout, left)
    tokens = min(CHUNK_TOKENS, _prompts(recipe, wave) * longest)
    reading = prompts_bytes(model, compute, 1, tokens) - cache_bytes(model, compute, tokens)
    # Each row's logits and, without kernels that draw, in float32 four times.
    fused = compute.itemsize == 2
    drawing = padded_rows(rows, rollout.batch_size) * shape.vocabulary
    drawing *= 2 * compute.itemsize + (0 if fused else 16) + _SHAPED * wave.is_shaped
    return cache, _kept_turns(recipe, shape, wave, longest) + reading + drawing


def _growing_wave(recipe: Recipe, shape: Shape, wave: _Wave, longest: int) -> tuple[int, int]:
    """(bytes of a cache that grows with its rows, of all that decoding works on beside it)."""
    model, compute = shape.skeleton.model, getattr(torch, recipe.model.compute_dtype)
    rollout, rows = recipe.rollout, wave.rows(recipe.rollout.batch_size)
    length = _longest(recipe, shape, wave, longest)
    sampling = Sampling(wave.max_new_tokens, rollout.temperature)
    reading = prompts_bytes(model, compute, _prompts(recipe, wave), longest)
    reading += _kept_turns(recipe, shape, wave, longest)
    cache = rows * cache_bytes(model, compute, length)
    drawing = token_bytes(model, compute, rows, length, sampling)
    drawing += rows * shape.vocabulary * _SHAPED * wave.is_shaped
    return cache, max(reading - cache, drawing - cache, 0)


def _prompts(recipe: Recipe, wave: _Wave) -> int:
    """The different prompts that are read at a time: from the second turn on no two conversations read the same."""
    rows = wave.rows(recipe.rollout.batch_size)
    return rows if recipe.environment is not None else ceil(rows / wave.each)


def _kept_turns(recipe: Recipe, shape: Shape, wave: _Wave, longest: int) -> int:
    """Bytes of what the embedded engine keeps of conversations between their turns."""
    if recipe.rollout.engine != "embedded" or recipe.environment is None:
        return 0
    compute, length = getattr(torch, recipe.model.compute_dtype), _longest(recipe, shape, wave, longest)
    kept = wave.num * cache_bytes(shape.skeleton.model, compute, length)
    return min(kept, int(recipe.rollout.cache_gib * GIB))


def _longest(recipe: Recipe, shape: Shape, wave: _Wave, longest: int) -> int:
    """Tokens of the longest sequence, where so many at most are read before a turn of a step."""
    talk, turn = recipe.environment, wave.max_new_tokens
    if talk is None:
        return longest + turn
    if talk.max_tokens is None:
        longest += (talk.max_turns - 1) * (turn - recipe.rollout.max_new_tokens)
    limits = (talk.max_tokens, max_positions(shape.skeleton.model.config))
    return min((longest + turn, *(limit for limit in limits if limit is not None)))


def _paged_bytes(block: int, rows: int, length: int, rollout: Rollout, left: int | None) -> int:
    """Of a paged cache, with blocks of so many bytes."""
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * GIB)
    found = (max(rows * blocks_for(length), LEAST_BLOCKS) + 1) * block
    if left is None:
        return found
    return min(found, max(left // 2, (blocks_for(length) + 1) * block))
