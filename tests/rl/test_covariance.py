"""How many tokens Clip-Cov and KL-Cov choose where completions are the same, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.config.schema import Algorithm
from shardproof.rl.algorithms.covariance import choose_tokens
from shardproof.train.batching import Batch
from tests.ranks import run_ranks

SAME, OTHER = [1, 2, 3, 4], [1, 2, 5]
CASES: dict[str, dict[str, Any]] = {
    "kl_cov": {"name": "kl_cov"},
    "clip_cov": {"name": "clip_cov", "cov_bounds": (1e-6, 9.0)},
}


def chosen(settings: dict[str, Any], share: int) -> list[list[float]]:
    """What is chosen of this rank's part of six copies of a completion and three of another."""
    sequences = [SAME] * 6 + [OTHER] * 3
    group, num_groups = dist.get_rank() // share, dist.get_world_size() // share
    mine = sequences[group::num_groups]
    better = [len(sequence) == len(SAME) for sequence in mine]
    batch = Batch(
        mine,
        mask=[[0.0, 0.0] + [1.0] * (len(sequence) - 2) for sequence in mine],
        advantages=[
            torch.full((len(each) - 1,), 1.0 if is_better else -2.0) for each, is_better in zip(mine, better)
        ],
        old_logps=[
            torch.tensor([0.0, -0.5, -1.0][: len(each) - 1]) * is_better - 1.5
            for each, is_better in zip(mine, better)
        ],
    )
    return [row.tolist() for row in choose_tokens(batch, Algorithm(**settings), share).columns["chosen"]]


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world", "share"), [(1, 1), (3, 1), (2, 2)])
def test_equal_completions_are_chosen_from_one_by_one(name, world, share):
    for ratio, number in ((1e-4, 1), (0.2, 3), (0.3, 4)):  # of 15 tokens
        found = run_ranks(world, chosen, CASES[name] | {"cov_ratio": ratio}, share)
        assert all(rank == found[0] for rank in found[:share])
        assert sum(sum(map(sum, rank)) for rank in found[::share]) == number
