"""From a request to estimates; only the model's config is read."""

from __future__ import annotations

from shardproof.bounds import require_number
from shardproof.doctor.estimate import Estimate, estimate, growth, shape_of
from shardproof.doctor.probes import adapters
from shardproof.doctor.request import Request, config_file
from shardproof.errors import fail
from shardproof.model.families import check_sequence_parallel
from shardproof.weights.source import CONFIG_NAME, find_folder, read_config


def forecast(request: Request, num_tokens: int) -> list[Estimate]:
    """What a rank holds with the asked number of ranks, and with twice as many, up to hundreds."""
    require_number("estimate", "--micro-batch-tokens", num_tokens, at_least=1, at_most=2**30)
    folder, name = None, CONFIG_NAME
    if request.source is not None:
        folder = find_folder(request.source, None)
    elif request.config is not None:
        folder, name = config_file(request.config).parent, config_file(request.config).name
    if folder is None:
        raise fail(
            "L101", "estimate", f"{request.source!r} is neither a folder nor a hub id that can be read."
        )
    config = read_config(folder, request.trust_remote_code, name)
    layout = request.layouts[0]
    check_sequence_parallel(config, layout.sequence_parallel, max(request.ranks // layout.replicate, 1))
    lora = adapters(layout.lora, config) if layout.lora else None
    shape = shape_of(config, layout, request.role, lora)
    return [estimate(shape, layout, ranks, num_tokens) for ranks in growth(request.ranks)]
