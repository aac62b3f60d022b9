"""What a run reads besides weights, read once per host: one rank reads and tokenises the data, the others share it.

Hosts need not have the model: config and tokenizer are sent to those that lack them, as weights are when they are loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardproof.checkpoints.folders import sums_of
from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.schema import Recipe
from shardproof.dist.collectives import together
from shardproof.dist.hosts import Hosts, hosts
from shardproof.dist.transfer import Transfer, transfer_files
from shardproof.environments.pool import EnvironmentPool
from shardproof.errors import ShardproofError, error_for
from shardproof.findings import Finding, merge_findings
from shardproof.rl.agreement import content_of, require_same
from shardproof.rl.checks import (
    Basis,
    Data,
    Inputs,
    check_basis,
    make_inputs,
    model_folder,
    open_first,
    read_data,
)
from shardproof.rl.conversations.prepare import environment_of
from shardproof.rl.data import Prompt
from shardproof.rl.shared_prompts import open_prompts, share_prompts
from shardproof.weights.source import find_folder, has_texts, text_files

logger = logging.getLogger(__name__)

_FIRST_ROWS = 3  # of which one must open a conversation


def read_inputs(recipe: Recipe, workers: EnvironmentPool | None) -> Inputs:
    """The run's tokenizer, config and prompts; raises on every rank if any rank cannot use them, or has others.

    `workers` are those of this rank's environment. Collective: every rank.
    """
    where = hosts()
    inputs: Inputs | None = None
    with _model_texts(recipe.model.path, where) as folder, contextlib.ExitStack() as stack:
        with together("data") as told:
            basis = check_basis(recipe, folder if folder is not None else model_folder(recipe.model.path))
            if where.is_leader:
                told.mine, inputs = _read(recipe, basis, workers, where, stack)
        _raise_of_leaders([row["findings"] if row else [] for row in told.rows], where)
        with together("data") as others:
            if not where.is_leader:
                address = told.rows[where.leader_of(where.mine)]["address"]
                data = open_prompts(address) if address is not None else None
                if data is not None:
                    inputs = _share(recipe, basis, workers, data)
                else:
                    others.mine, inputs = _read(recipe, basis, workers, where, stack)
        rows = [
            mine or told.rows[where.leader_of(where.of_rank[rank])] for rank, mine in enumerate(others.rows)
        ]
        _raise_of_leaders([row["findings"] for row in rows], where)
        require_same([row["content"] for row in rows], where)
    assert inputs is not None
    return inputs


def _read(
    recipe: Recipe, basis: Basis, workers: EnvironmentPool | None, where: Hosts, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], Inputs | None]:
    """(what this rank tells the others, the inputs), read by this rank; the stack keeps what it offers to its host."""
    try:
        inputs, data = read_data(recipe, basis, workers)
    except ShardproofError as error:
        return {
            "findings": [finding.to_json() for finding in error.findings],
            "content": {},
            "address": None,
        }, None
    content = {
        f"data/{what}{name}": value
        for name, prompts in {"data.train": data.prompts, **_keyed(recipe, data)}.items()
        for what, value in content_of(prompts).items()
    }
    offered = None
    if where.is_leader and len(where.ranks_of(where.mine)) > 1:
        offered = share_prompts(data)
        if offered is not None:
            stack.callback(os.close, offered[0])
    return {"findings": [], "content": content, "address": offered and offered[1].to_json()}, inputs


def _keyed(recipe: Recipe, data: Data) -> dict[str, Sequence[Prompt]]:
    return {each.key: data.held_out[each.name] for each in held_out_sets(recipe)}


def _share(recipe: Recipe, basis: Basis, workers: EnvironmentPool | None, data: Data) -> Inputs:
    """The inputs of a rank whose data another one has read. Its own environment is tried all the same."""
    with environment_of(recipe, workers) as environment:
        rows = [prompt.row for prompt in data.prompts[:_FIRST_ROWS]]
        opened = open_first(recipe, basis, environment, rows, data.has_messages)
        return make_inputs(recipe, basis, data, opened)


def _raise_of_leaders(rows: Sequence[Sequence[Any]], where: Hosts) -> None:
    """Raise what the ranks found that read the data; with its rank, unless all of them found it."""
    found = {rank: [Finding.from_json(each) for each in row] for rank, row in enumerate(rows) if row}
    if not found:
        return
    readers = [where.leader_of(host) for host in range(where.num)]
    common = set.intersection(*(set(found.get(rank, ())) for rank in readers))
    named = [
        [each if each in common or each.rank is not None else replace(each, rank=rank) for each in theirs]
        for rank, theirs in found.items()
    ]
    raise error_for(merge_findings(named))


@contextlib.contextmanager
def _model_texts(path: str, where: Hosts) -> Iterator[Path | None]:
    """A folder with the model's config and tokenizer inside the block; None where nobody has them.

    Hosts that lack them receive them from one that does, into a folder that is removed at the end of the block.
    Collective: every rank, at its beginning.
    """
    folder: Path | None = None
    with together("source") as told:
        folder = find_folder(path, None)
        told.mine = folder is not None and has_texts(folder)
    if all(told.rows) or not any(told.rows):
        yield folder
        return
    source = told.rows.index(True)
    lacking = [host for host in range(where.num) if not told.rows[where.leader_of(host)]]
    names = ", ".join(where.names[host] for host in lacking)
    logger.info(
        "sending config and tokenizer from host %s to %s ...", where.names[where.of_rank[source]], names
    )
    made: Path | None = None
    try:
        with together("source") as listed:
            if dist.get_rank() == source:
                assert folder is not None
                listed.mine = sums_of(folder, text_files(folder))
            elif where.is_leader and where.mine in lacking:
                made = Path(tempfile.mkdtemp(prefix="shardproof-model-"))
                (made / "additional_chat_templates").mkdir()
                listed.mine = str(made)
        root = folder if dist.get_rank() == source else made
        targets = [where.leader_of(host) for host in lacking]
        transfers = [
            Transfer(name, size, crc, source, to) for to in targets for name, size, crc in listed.rows[source]
        ]
        transfer_files(transfers, lambda name: (root or Path()) / name, "source")
        if not told.rows[dist.get_rank()]:
            sent = listed.rows[where.leader_of(where.mine)]
            folder = Path(sent) if isinstance(sent, str) else folder
        yield folder
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
