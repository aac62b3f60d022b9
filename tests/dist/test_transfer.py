"""Files that ranks send each other: whole, or not there; nobody waits for a rank whose disk fails."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import BinaryIO

import pytest
import torch.distributed as dist

from shardproof.dist import transfer
from shardproof.dist.launch import init_distributed
from shardproof.dist.transfer import Transfer, transfer_files
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = pytest.mark.distributed

SIZES = {"empty": 0, "small": 7, "exact": 2000, "large": 12_345}


def content(name: str) -> bytes:
    return random.Random(name).randbytes(SIZES[name])


def send_all(folder: Path, damage: str = "") -> list[str]:
    """Rank 0 sends rank 1 two files, rank 1 sends rank 2 the others; what this rank then has."""
    init_distributed()
    rank = dist.get_rank()
    mine = folder / str(rank)
    mine.mkdir()
    routes = {"empty": (0, 1), "small": (1, 2), "exact": (1, 2), "large": (0, 1)}
    listed = [Transfer(n, SIZES[n], zlib.crc32(content(n)), *routes[n]) for n in SIZES]
    for each in listed:
        if each.source == rank:
            (mine / each.name).write_bytes(content(each.name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BUCKET_BYTES", 1000)
        patch.setattr(transfer, "_TURNS", 3)
        if damage == "short" and rank == 0:
            os.truncate(mine / "large", 5000)
        elif damage == "other" and rank == 0:
            (mine / "large").write_bytes(bytes(SIZES["large"]))
        elif damage == "full" and rank == 1:
            patch.setattr(transfer, "open_atomic", _open_full)
        lost = "missing" if damage == "no folder" and rank == 1 else ""
        transfer_files(listed, lambda name: mine / (lost if name == "large" else "") / name, "resume")
    for each in listed:
        assert each.target != rank or (mine / each.name).read_bytes() == content(each.name)
    return sorted(path.name for path in mine.iterdir())


def _open_full(_: Path) -> BinaryIO:
    return Path("/dev/full").open("wb", buffering=0)


def test_files_arrive_as_they_are(tmp_path):
    assert run_ranks(3, send_all, tmp_path) == [
        ["empty", "large"],
        ["empty", "exact", "large", "small"],
        ["exact", "small"],
    ]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("short", ("E407", "rank 0", "large cannot be read: it ends too early")),
        ("other", ("E407", "rank 1", "large, sent by rank 0, does not match its checksum")),
        ("no folder", ("E408", "rank 1", "missing cannot be written: No such file")),
        ("full", ("E408", "rank 1", "cannot be written: No space left on device")),
    ],
)
def test_what_goes_wrong_is_every_ranks_error_and_leaves_no_part(tmp_path, damage, words):
    outcomes = run_ranks_outcomes(3, send_all, tmp_path, damage, timeout=60)
    assert_all_raise(outcomes, words[0], *words[1:], kind="ExportFault")
    assert "large" not in {path.name for path in (tmp_path / "1").iterdir()}
    assert (tmp_path / "2" / "small").read_bytes() == content("small")
    assert not list(tmp_path.rglob(".partial-*"))
