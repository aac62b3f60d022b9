"""Advantages where rounding could be taken for a difference: groups and batches of equal or of nearly equal rewards."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.config.schema import Algorithm, Rollout
from shardproof.rl.advantages import group_centred, group_normalised, leave_one_out
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from shardproof.train.batching import Batch
from tests.ranks import run_ranks

VALUES = (0.1, 0.3, 9.9, 33.3, 1000.1, -12345.6)
SIZES = (2, 3, 5, 6, 7, 8, 12, 16)
FAR = 4096.0  # an offset of rewards that differ by 1 / 1024 and are exact in float32
OVER_BATCH: dict[str, dict[str, Any]] = {
    "tokens": {"scale_over": "tokens", "scale_eps": 1e-8},
    "returns": {"baseline": "off", "scale_eps": 1e-8},
    "rewards": {"compared_over": "batch", "scale_eps": 1e-6},
    "advantages": {"scale_over": "advantages", "scale_eps": 1e-6},
    "others": {"baseline": "leave_one_out", "compared_over": "batch", "scale": "off"},
}


@pytest.mark.parametrize("size", SIZES)
def test_equal_rewards_of_a_group_have_no_advantage_at_all(size):
    rewards = torch.tensor(VALUES)[:, None].expand(-1, size)
    counted = torch.arange(size).expand(len(VALUES), size) != 1
    for mask in (None, counted):
        for sample in (False, True):
            assert not group_normalised(rewards, mask, 1e-8, sample=sample).any()
        assert not group_centred(rewards, mask).any()
        assert not leave_one_out(rewards, mask).any()


def test_rewards_far_from_zero_are_told_apart_exactly():
    rewards = [[0.0, 1.0, 3.0], [2.0, 2.0, 7.0]]
    far = torch.tensor(rewards) / 1024 + FAR
    for sample in (False, True):
        near = group_normalised(torch.tensor(rewards) / 1024, None, 1e-8, sample=sample)
        torch.testing.assert_close(group_normalised(far, None, 1e-8, sample=sample), near, rtol=0, atol=1e-6)


def advantages_of(settings: dict[str, Any], groups: list[list[float]]) -> list[float]:
    """Of the one token of every completion of this rank's groups."""
    trajectories = [
        Trajectory(
            (Segment((1, 2), "prompt"), Segment((3,), "policy")), number, sample, reward=Reward(reward)
        )
        for number, rewards in enumerate(groups)
        if number % dist.get_world_size() == dist.get_rank()
        for sample, reward in enumerate(rewards)
    ]
    batch = Batch([t.tokens for t in trajectories], mask=[[0.0, 1.0]] * len(trajectories))
    made = make_algorithm(Algorithm(**settings), Rollout()).advantages(batch, trajectories)
    return [float(row[-1]) for row in made.columns["advantages"]]


@pytest.mark.distributed
@pytest.mark.parametrize("case", OVER_BATCH)
def test_equal_rewards_of_a_batch_have_no_advantage_at_all(case):
    for value in VALUES:
        for found in run_ranks(2, advantages_of, OVER_BATCH[case], [[value] * 7] * 5):
            assert not any(found), value


@pytest.mark.distributed
def test_a_batchs_deviation_does_not_drown_in_its_mean():
    rewards = [[0.0, 1.0, 3.0], [2.0, 2.0, 7.0], [5.0, 5.0, 5.0]]
    far = [[FAR + value / 1024 for value in group] for group in rewards]
    every = [value / 1024 for group in rewards for value in group]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every)
    wanted = [(value / 1024 - mean) / deviation for value in (*rewards[0], *rewards[2])]
    for case in ("returns", "rewards"):
        settings = OVER_BATCH[case] | {"scale_eps": 1e-12}
        found = run_ranks(2, advantages_of, settings, far)[0]
        assert found == pytest.approx(wanted, abs=1e-6), case
