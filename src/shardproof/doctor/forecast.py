"""From a request to estimates: the model's config is read, and nothing else of it."""

from __future__ import annotations

from shardproof.checkpoint.source import find_folder, read_config
from shardproof.doctor.estimate import Estimate, estimate, growth, shape_of
from shardproof.doctor.probes import adapters
from shardproof.doctor.request import Request, config_file
from shardproof.errors import fail
from shardproof.model.families import check_sequence_parallel


def forecast(request: Request, num_tokens: int) -> list[Estimate]:
    """What a rank holds with the asked number of ranks, and with twice as many, up to hundreds."""
    folder = config_file(request.config).parent if request.config is not None else None
    if request.source is not None:
        folder = find_folder(request.source, None)
    if folder is None:
        raise fail(
            "L101", "estimate", f"{request.source!r} is neither a folder nor a hub id that can be read."
        )
    config = read_config(folder, request.trust_remote_code)
    layout = request.layouts[0]
    check_sequence_parallel(config, layout.sequence_parallel, max(request.ranks // layout.replicate, 1))
    lora = adapters(layout.lora, str(folder), request.trust_remote_code) if layout.lora else None
    shape = shape_of(config, layout, request.role, lora)
    return [estimate(shape, layout, ranks, num_tokens) for ranks in growth(request.ranks)]
