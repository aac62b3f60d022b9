"""All ranks agree on settings and on the checkpoint before anything is built."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import exchange, together
from shardproof.dist.hosts import describe_difference, hosts
from shardproof.errors import ShardproofError, fail
from shardproof.shard.copies import compare_copies, copy_key
from shardproof.shard.serve import choose_servers, receive_bytes, send_bytes, served_by
from shardproof.version import library_versions
from shardproof.weights.reader import Checkpoint, list_files
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
    _require_same(stage, code, what, rows)


def _require_same(stage: str, code: str, what: str, rows: Sequence[Any]) -> None:
    """Raise with the ranks, hosts and values that differ; `rows` are those of every rank."""
    odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if odd:
        one, other = rows[0], rows[odd[0]]
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            one, other = ({key: row.get(key) for key in keys} for row in (one, other))
        where = hosts()
        shown = f"{where.describe([0])} has {_short(one)}, {where.describe(odd[:1])} has {_short(other)}"
        raise fail(code, stage, f"{what} differ on {where.describe(odd)}: {shown}.", rank=odd[0])


def agree_on_settings(described: dict[str, str]) -> None:
    """Raise C003 on every rank unless all have the same settings, and the same Python and libraries.

    Collective: every rank.
    """
    rows = exchange([library_versions(), described])
    versions = [row[0] for row in rows]
    odd = [name for name in versions[0] if len({row[name] for row in versions}) > 1]
    if odd:
        # Another version explains differences that would follow, such as those of configs.
        said = "; ".join(describe_difference(name, [row[name] for row in versions], hosts()) for name in odd)
        message = f"ranks do not have the same versions: {said}."
        raise fail("C003", "settings", message, fix="install the same versions on every host")
    _require_same("settings", "C003", "settings", [row[1] for row in rows])


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
    return _resolve_checkpoint(source, revision, trust_remote_code)


def _resolve_checkpoint(
    source: str | os.PathLike[str], revision: str | None, trust_remote_code: bool
) -> tuple[ResolvedSource, dict[int, int]]:
    """Collective: every rank."""
    folder: Path | None = None
    with together("source") as told:
        folder = find_folder(source, revision)
        told.mine = folder is not None and _has_weights(folder)
    has_files = told.rows
    with together("source"):  # ranks may name different folders, and must raise the same error
        if not any(has_files):
            if folder is not None:
                resolve_folder(str(source), folder, trust_remote_code)  # says what it lacks
            message = f"no rank can find {str(source)!r}: it is neither a folder nor a model on the hub or in its cache."
            raise fail("L101", "source", message)
    servers = choose_servers(has_files, hosts())
    here: ResolvedSource | None = None
    with together("source"):
        if servers and trust_remote_code:
            raise fail(
                "L108", "source", f"ranks {sorted(servers)} do not have the repository that holds the code."
            )
        if folder is not None and has_files[dist.get_rank()]:
            here = resolve_folder(str(source), folder, trust_remote_code)
    if servers:
        here = _receive_description(str(source), here, servers)
    assert here is not None and here.checkpoint is not None
    with together("source") as told:
        key = copy_key(here.checkpoint) if has_files[dist.get_rank()] else None
        digests = {"headers": here.checkpoint.header_digest[:16], "config": _config_digest(here)[:16]}
        told.mine = [digests, key, secrets.randbits(32)]
    _require_same("source", "L111", "checkpoints", [row[0] for row in told.rows])
    compare_copies(here.checkpoint, [row[1] for row in told.rows], seed=told.rows[0][2])
    return here, servers


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights, complete or not; some hosts may have config and tokenizer alone."""
    try:
        list_files(folder)
    except ShardproofError as error:
        return error.findings[0].code != "L101"
    return True


def _config_digest(resolved: ResolvedSource) -> str:
    settings = resolved.config.to_dict()
    settings.pop("_name_or_path", None)  # where it lies may differ between hosts
    settings.pop("transformers_version", None)  # of the library here, which is compared by itself
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _receive_description(label: str, here: ResolvedSource | None, servers: dict[int, int]) -> ResolvedSource:
    """Config and headers from the rank that serves this one; a rank that has them sends them to those that it serves."""
    rank = dist.get_rank()
    if here is not None:
        clients = served_by(rank, servers)
        if clients:
            assert here.checkpoint is not None
            headers = {file: header.decode() for file, header in here.checkpoint.headers.items()}
            config = json.loads(here.config.to_json_string(use_diff=False))
            text = bytearray(json.dumps({"config": config, "headers": headers}).encode())
            for client in clients:
                send_bytes(torch.frombuffer(text, dtype=torch.uint8), client)
        return here
    sent = json.loads(bytes(receive_bytes(servers[rank], torch.uint8).numpy()))
    checkpoint = Checkpoint(None, {file: header.encode() for file, header in sent["headers"].items()})
    return ResolvedSource(label, None, config_from_dict(sent["config"]), checkpoint, seed=0)
