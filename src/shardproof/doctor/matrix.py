"""The matrix: few layouts in which every pair of settings that the model allows occurs together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from shardproof.doctor.probes import adapters
from shardproof.doctor.request import Layout, Request
from shardproof.errors import ShardproofError
from shardproof.model.families import check_sequence_parallel
from shardproof.model.roles import POLICY, REFERENCE
from shardproof.model.skeleton import build_skeleton
from shardproof.weights.source import find_folder, read_config

Row = dict[str, Any]


def matrix_of(request: Request, source: str) -> list[Layout]:
    """Layouts that cover every allowed pair, then one for each setting or pair that is refused.

    A pair only counts as covered by a layout that can run: one that is refused would hide what else is in it.
    """
    base = request.layouts[0]
    axes: dict[str, list[Any]] = {
        "strategy": ["fsdp2", "fsdp1"],
        "dtype": [layout.dtype for layout in request.layouts],
        "sequence_parallel": [1, 2] if request.ranks % 2 == 0 else [1],
        "cpu_offload": [False, True],
        "lora": [0, base.lora or 8] if request.role == POLICY else [0],
        "packing": [True, False],
        "checkpoint_activations": [False, True] if request.role != REFERENCE else [False],
        "replicate": [1, 2] if request.ranks % 4 == 0 else [1],
    }
    refused = refusals(request, source, axes)
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    allowed = [row for row in every if not any(part.items() <= row.items() for part in refused)]
    rows = cover_pairs(axes, allowed)
    # A refused setting is shown with the defaults of all others.
    plain = {name: values[0] for name, values in axes.items()}
    rows += [{**plain, **part} for part in refused if "packing" not in part]
    return [replace(base, **row) for row in rows]


def refusals(request: Request, source: str, axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Settings, alone or in pairs, that this model or machine does not have."""
    folder = find_folder(source, None)
    if folder is None:
        return []  # the load says so
    try:
        config = read_config(folder, request.trust_remote_code)
    except ShardproofError:
        return []  # the same
    found: list[Row] = []
    # Sequence parallelism has packed sequences only.
    found += [{"sequence_parallel": size, "packing": False} for size in axes["sequence_parallel"] if size > 1]
    if request.device == "cpu" and len(axes["strategy"]) > 1:
        found.append({"strategy": "fsdp1", "cpu_offload": True})
    for size in axes["sequence_parallel"]:
        try:
            check_sequence_parallel(config, size, request.ranks // axes["replicate"][-1])
        except ShardproofError:
            found.append({"sequence_parallel": size})
    for rank in filter(None, axes["lora"]):
        try:
            lora = adapters(rank, config)
            build_skeleton(config, role=request.role, lora=lora, trust_remote_code=request.trust_remote_code)
        except ShardproofError:
            found.append({"lora": rank})
    return found


def cover_pairs(axes: Mapping[str, Sequence[Any]], allowed: Sequence[Row]) -> list[Row]:
    """A few of the allowed rows such that every pair of values that is in any of them is in one of these."""
    missing = {pair for row in allowed for pair in _pairs_in(row, axes)}
    rows: list[Row] = []
    while missing:
        # The one that covers most; of equals the first, so that the order is the same everywhere.
        best = max(allowed, key=lambda row: len(missing & set(_pairs_in(row, axes))))
        missing -= set(_pairs_in(best, axes))
        rows.append(best)
    return rows


def _pairs_in(row: Row, axes: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    return ((a, row[a], b, row[b]) for a, b in combinations(axes, 2))
