"""All ranks agree on settings and on the checkpoint before anything is built."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardproof.dist.collectives import exchange, together
from shardproof.errors import fail
from shardproof.shard.serve import choose_servers
from shardproof.weights.reader import Checkpoint
from shardproof.weights.source import (
    RandomInit,
    ResolvedSource,
    config_from_dict,
    find_folder,
    resolve_folder,
    resolve_random,
)


def agree(stage: str, code: str, what: str, value: Any) -> None:
    """Raise on every rank if `value` (JSON-able) is not the same on all of them.

    Collective: every rank.
    """
    rows = exchange(value)
    odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if odd:
        one, other = rows[0], rows[odd[0]]
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            one, other = ({key: row.get(key) for key in keys} for row in (one, other))
        shown = f"rank 0 has {_short(one)}, rank {odd[0]} has {_short(other)}"
        raise fail(code, stage, f"{what} differ on ranks {odd}: {shown}.", rank=odd[0])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def resolve_together(
    source: str | os.PathLike[str] | RandomInit, revision: str | None, trust_remote_code: bool
) -> tuple[ResolvedSource, dict[int, int]]:
    """The source, the same on every rank, and {rank without files: rank that serves it}.

    Collective: every rank.
    """
    with together("source"):
        if not isinstance(source, str | os.PathLike | RandomInit):
            raise fail("C001", "source", f"source={source!r} is not a folder, a hub id or a RandomInit.")
    agree("source", "C003", "kinds of source", "random" if isinstance(source, RandomInit) else "checkpoint")
    if isinstance(source, RandomInit):
        with together("source"):
            resolved = resolve_random(source)
        agree("source", "C003", "random configs or seeds", [_config_digest(resolved), resolved.seed])
        return resolved, {}
    folder: Path | None = None
    with together("source"):
        folder = find_folder(source, revision)
    presence = exchange([socket.gethostname(), folder is not None])
    with together("source"):  # ranks may name different folders, and must raise the same error
        if not any(has_files for _, has_files in presence):
            message = f"no rank can find {str(source)!r}: it is neither a folder nor a model on the hub or in its cache."
            raise fail("L101", "source", message)
    servers = choose_servers(presence)
    here: ResolvedSource | None = None
    with together("source"):
        if servers and trust_remote_code:
            raise fail(
                "L108", "source", f"ranks {sorted(servers)} do not have the repository that holds the code."
            )
        if folder is not None:
            here = resolve_folder(str(source), folder, trust_remote_code)
    sample: str | None = None
    with together("source"):
        if here is not None and here.checkpoint is not None:
            sample = here.checkpoint.sample_digest()
    samples = exchange(sample)
    if servers:
        here = _receive_description(str(source), here, servers)
    assert here is not None and here.checkpoint is not None
    # A rank that is served has no bytes to sample; it compares those of its server.
    seen = samples[servers.get(dist.get_rank(), dist.get_rank())]
    digests = {"headers": here.checkpoint.header_digest, "config": _config_digest(here), "bytes": seen}
    agree("source", "L111", "checkpoints", {key: value and value[:16] for key, value in digests.items()})
    return here, servers


def _config_digest(resolved: ResolvedSource) -> str:
    settings = resolved.config.to_dict()
    settings.pop("_name_or_path", None)  # where it lies may differ between nodes
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _receive_description(label: str, here: ResolvedSource | None, servers: dict[int, int]) -> ResolvedSource:
    """Config and headers from a rank that has them, for the ranks that do not. Collective: every rank."""
    description = None
    if here is not None and dist.get_rank() in servers.values():
        assert here.checkpoint is not None
        headers = {file: header.decode() for file, header in here.checkpoint.headers.items()}
        description = {"config": json.loads(here.config.to_json_string(use_diff=False)), "headers": headers}
    rows = exchange(description)
    if here is not None:
        return here
    sent = rows[servers[dist.get_rank()]]
    checkpoint = Checkpoint(None, {file: header.encode() for file, header in sent["headers"].items()})
    return ResolvedSource(label, None, config_from_dict(sent["config"]), checkpoint, seed=0)
