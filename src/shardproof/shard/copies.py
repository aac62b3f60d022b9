"""Whether the hosts' copies of a checkpoint hold the same bytes, found out before anything is loaded from them.

Each rank reads its own slices, so two hosts whose files differ would give one model made of both, and no later check
could notice. Ranks that open one and the same file, in one host or through a shared file system, have nothing to
compare. Copies are compared block by block: the ranks that read a copy share its blocks among them, and each takes the
digest of at most `_RANK_BYTES`. What is larger than that is compared in blocks that are drawn anew at every start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Sequence

import torch.distributed as dist

from shardproof.digest import digest
from shardproof.dist.collectives import exchange, together
from shardproof.dist.hosts import Hosts, hosts
from shardproof.errors import fail
from shardproof.weights.reader import Checkpoint

logger = logging.getLogger(__name__)

_BLOCK = 2**20
_RANK_BYTES = 16 * 2**30
_MAX_FILES = 4  # named in a message
_WORDS = 2**64

Block = tuple[int, int]  # number of the file, first byte


def copy_key(checkpoint: Checkpoint) -> str:
    """What ranks have in common that read the same files: inode, size and times of each, which no copy keeps all of."""
    assert checkpoint.folder is not None
    rows = []
    for file in sorted(checkpoint.headers):
        status = os.stat(checkpoint.folder / file)
        rows.append([file, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def compare_copies(checkpoint: Checkpoint, keys: Sequence[str | None], seed: int) -> None:
    """Raise L111 on every rank unless all copies have the same bytes in the blocks that are looked at.

    `keys` are every rank's `copy_key`, None of ranks that have no files; headers are known to be the same. `seed` draws
    the blocks. Collective: every rank, if there are several copies.
    """
    copies: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        if key is not None:
            copies.setdefault(key, []).append(rank)
    if len(copies) < 2:
        return
    blocks, total = _choose_blocks(checkpoint, min(map(len, copies.values())), seed)
    if dist.get_rank() == 0:
        part = "all" if len(blocks) == total else f"{len(blocks) / total:.0%}, drawn anew at each start,"
        size = total * _BLOCK / 2**30
        logger.info("comparing %s of the %d copies of a checkpoint of %.1f GiB ...", part, len(copies), size)
    mine = next((ranks for ranks in copies.values() if dist.get_rank() in ranks), [])
    with together("source") as message:
        if mine:
            at = mine.index(dist.get_rank())
            sums = _sums(checkpoint, blocks[at :: len(mine)])
            message.mine = sum(sums) % _WORDS
    totals = {key: sum(message.rows[rank] for rank in ranks) % _WORDS for key, ranks in copies.items()}
    if len(set(totals.values())) == 1:
        return
    # Something differs; only now is it worth sending what each file came to.
    rows = exchange(sums if mine else None)
    by_file = {
        key: [sum(parts) % _WORDS for parts in zip(*(rows[rank] for rank in ranks), strict=True)]
        for key, ranks in copies.items()
    }
    raise fail("L111", "source", _describe(sorted(checkpoint.headers), by_file, copies, hosts()))


def _choose_blocks(checkpoint: Checkpoint, num_ranks: int, seed: int) -> tuple[list[Block], int]:
    """The blocks that `num_ranks` ranks can look at, the same for every copy, and the number of all."""
    files = sorted(checkpoint.headers)
    sizes = {file: 8 + len(header) for file, header in checkpoint.headers.items()}
    for entry in checkpoint.tensors.values():
        sizes[entry.file] = max(sizes[entry.file], entry.stop)
    blocks = [(n, start) for n, file in enumerate(files) for start in range(0, sizes[file], _BLOCK)]
    room = num_ranks * (_RANK_BYTES // _BLOCK)
    if len(blocks) <= room:
        return blocks, len(blocks)
    return sorted(random.Random(seed).sample(blocks, room)), len(blocks)


def _sums(checkpoint: Checkpoint, blocks: Sequence[Block]) -> list[int]:
    """The digest of some blocks, by file. Those of different blocks add up to that of all."""
    files = sorted(checkpoint.headers)
    sums = [0] * len(files)
    for number, start in blocks:
        content = checkpoint.file_bytes(files[number])[start : start + _BLOCK]
        # The number of the file takes part, so that two files that were swapped are noticed in the sum of all.
        sums[number] = (sums[number] + (2 * number + 1) * digest(content, start // 8)) % _WORDS
    return sums


def _describe(
    files: Sequence[str], by_file: dict[str, list[int]], copies: dict[str, list[int]], where: Hosts
) -> str:
    """`the checkpoints differ: model.safetensors is another on host b (ranks 2, 3)`, against what most ranks have."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for key, found in by_file.items():
        groups.setdefault(tuple(found), []).extend(copies[key])
    # A tie is decided against those without rank 0, whose output the user sees.
    usual, *others = sorted(groups, key=lambda sums: (-len(groups[sums]), min(groups[sums])))
    said = []
    for sums in others:
        odd = [file for file, mine, theirs in zip(files, usual, sums, strict=True) if mine != theirs]
        more = f" and {len(odd) - _MAX_FILES} more" if len(odd) > _MAX_FILES else ""
        said.append(f"{', '.join(odd[:_MAX_FILES])}{more} of {where.place(groups[sums])}")
    return (
        f"checkpoints differ in their bytes: {'; '.join(said)}, compared with {where.place(groups[usual])}."
    )
