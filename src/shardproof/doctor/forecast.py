"""From a request or a recipe to estimates of memory; only configs and, for lengths, a recipe's own data are read."""

from __future__ import annotations

import torch

from shardproof.bounds import require_number
from shardproof.config.schema import Recipe
from shardproof.doctor.probes import adapters
from shardproof.doctor.request import DTYPES, Request, config_file
from shardproof.errors import ShardproofError, fail
from shardproof.model.families import check_sequence_parallel
from shardproof.rl.checks import check_inputs
from shardproof.rl.sizing.model import Estimate, Sharding, estimate, growth, shape_of
from shardproof.weights.source import CONFIG_NAME, find_folder, read_config

_ASSUMED_PROMPT = 512  # tokens, where neither the recipe nor its data say


def forecast(request: Request, num_tokens: int) -> list[Estimate]:
    """What a rank holds of one model with the requested number of ranks, and with twice as many, up to hundreds."""
    require_number("estimate", "--micro-batch-tokens", num_tokens, at_least=1, at_most=2**30)
    folder, name = None, CONFIG_NAME
    if request.source is not None:
        folder = find_folder(request.source, None)
    elif request.config is not None:
        folder, name = config_file(request.config).parent, config_file(request.config).name
    if folder is None:
        raise fail(
            "L101",
            "estimate",
            f"{request.source!r} is neither a folder nor a model on the hub or in its cache.",
        )
    config = read_config(folder, request.trust_remote_code, name)
    layout = request.layouts[0]
    check_sequence_parallel(config, layout.sequence_parallel, max(request.ranks // layout.replicate, 1))
    lora = adapters(layout.lora, config) if layout.lora else None
    sharding = Sharding(
        strategy=layout.strategy,
        compute_dtype=getattr(torch, DTYPES[layout.dtype]),
        param_dtype=getattr(torch, DTYPES[layout.param_dtype]),
        sequence_parallel=layout.sequence_parallel,
        replicate=layout.replicate,
        checkpoint_activations=layout.checkpoint_activations,
        optimizer=layout.optimizer,
    )
    shape = shape_of(config, request.role, sharding.param_dtype, lora, request.trust_remote_code)
    return [estimate(shape, sharding, ranks, num_tokens) for ranks in growth(request.ranks)]


def prompt_lengths(recipe: Recipe) -> tuple[list[int], str]:
    """(lengths of the prompts in tokens, where they come from): the recipe's own files if they can be read.

    Nothing is downloaded: of a data set in the hub only `data.max_prompt_tokens` is known.
    """
    limit = recipe.data.max_prompt_tokens
    if not any(each.source.startswith("hf:") for each in recipe.data.sources):
        try:
            inputs = check_inputs(recipe)
            lengths = sorted(
                {
                    len(p.tokens)
                    for p in [*inputs.prompts, *(p for some in inputs.held_out.values() for p in some)]
                }
                | {len(inputs.canary)}
            )
            return lengths, f"the longest of {len(inputs.prompts)} prompts in {recipe.data.described}"
        except ShardproofError:  # the machine that estimates need not have the data
            pass
    if limit is not None:
        return [limit], "data.max_prompt_tokens"
    return [_ASSUMED_PROMPT], "assumed; set data.max_prompt_tokens or pass --prompt-tokens"
