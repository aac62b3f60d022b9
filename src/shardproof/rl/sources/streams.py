"""The order of a run's prompts, as its recipe wants it: one source, several by weights, or pools of difficulty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.config.schema import Recipe
from shardproof.rl.data import Prompt, PromptStream, rows_digest
from shardproof.rl.sources.mixing import MixedStream
from shardproof.rl.sources.pools import PoolStream

_LOOKED_AT = 64  # rows by which data are recognised that pass rates were measured on


def make_stream(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    sizes: Mapping[str, int],
    rates: Sequence[float | None] = (),
) -> PromptStream:
    """The stream of a run; `sizes` are the numbers of prompts of its sources, which lie one after the other.

    A source of which no row was left takes no part.
    """
    seed, data = recipe.train.seed, recipe.data
    weights = [each.weight for each in data.sources if sizes.get(each.name)]
    mixed = None if None in weights or len(weights) < 2 else [float(weight or 0.0) for weight in weights]
    parts = [num for num in sizes.values() if num] if mixed is not None else [len(prompts)]
    if data.curriculum is not None:
        some = prompts[:: max(1, len(prompts) // _LOOKED_AT)]
        return PoolStream(parts, mixed, data.curriculum, seed, rates, rows_digest(some)[:16])
    return PromptStream(len(prompts), seed) if mixed is None else MixedStream(parts, mixed, seed)
