"""Losses, gradients and advantages against TRL's own code, from the same completions, rewards and log-probs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardproof.rl.rewards.calling import Outcome
from shardproof.rl.rewards.parts import clipped, normalised_each, summed
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rollout.trajectory import Reward
from tests.rl.parity.cases import END, draw, ours
from tests.rl.parity.trl_cases import CASES
from tests.rl.parity.trl_side import trls

BAR = 1e-6


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A process group of this process alone: weights and advantages are collective."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_trls(case, seed):
    settings, options = CASES[case]
    drawn = draw(seed)
    loss, gradients, advantages = ours(drawn, **settings)
    their_loss, their_gradients, their_advantages = trls(drawn, **options)
    assert [float(row[0]) for row in advantages] == pytest.approx(their_advantages, abs=BAR)
    cut = [mine for mine, tokens in zip(gradients, drawn.completions, strict=True) if tokens[-1] != END]
    assert any(row.any() for row in cut) != bool(options.get("mask_truncated_completions"))
    assert loss == pytest.approx(their_loss, abs=BAR)
    assert any(row.any() for row in their_gradients)
    for mine, theirs in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=BAR)


@pytest.mark.parametrize(
    "case", ["grpo", "scale_rewards batch", "scale_rewards none", "rloo", "rloo normalised"]
)
def test_advantages_are_trls_where_rewards_failed(case):
    settings, options = CASES[case]
    drawn = draw(3, failed=True)
    _, _, advantages = ours(drawn, **settings)
    _, _, theirs = trls(drawn, **options)
    assert [float(row[0]) for row in advantages] == pytest.approx(theirs, abs=BAR)


def test_clipped_totals_give_trls_rloo_with_a_clip_range():
    drawn = draw(4)
    rewards = [float(value) for value in np.random.default_rng(0).normal(0, 3, len(drawn.rewards))]
    shaped = [clipped(Reward(value), (-1.0, 2.5)).trained for value in rewards]
    _, _, advantages = ours(
        dataclasses.replace(drawn, rewards=shaped), name="rloo", preset="trl", kl_coef=0.0
    )
    _, _, theirs = trls(dataclasses.replace(drawn, rewards=rewards), rloo=True, reward_clip_range=(-1.0, 2.5))
    assert [float(row[0]) for row in advantages] == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("missing", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_reward_normalised_by_itself_is_trls(seed, missing):
    weights = {"a": 1.0, "b": -0.5, "c": 2.0}
    drawn, rng = draw(seed), np.random.default_rng(seed)
    table = rng.choice([0.0, 0.25, 1.0, 3.0], (len(drawn.rewards), 3))
    table[:4, 0] = 0.25  # of one group all are equal
    table[rng.random(table.shape) < missing] = np.nan
    rewards = []
    for row in table:
        outcomes = {
            key: Outcome(None if np.isnan(value) else float(value)) for key, value in zip(weights, row)
        }
        rewards.append(summed([RewardSpec(key, weight) for key, weight in weights.items()], outcomes))
    groups = [rewards[k : k + 4] for k in range(0, len(rewards), 4)]
    shaped = [one for group in groups for one in normalised_each(group, weights)]
    values = [one.trained if one.counts else None for one in shaped]
    _, _, advantages = ours(dataclasses.replace(drawn, rewards=values), name="gdpo")
    _, _, theirs = trls(
        drawn,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=torch.tensor(list(weights.values())),
        reward_funcs=[None] * 3,
        reward_func_names=list(weights),
        _calculate_rewards=lambda *_: torch.tensor(table, dtype=torch.float32),
    )
    assert [float(row[0]) for row in advantages] == pytest.approx(theirs, abs=1e-6)
    assert any(theirs)


@pytest.mark.parametrize("missing", [0.2, 0.6])
def test_what_has_no_signal_is_left_out_of_sums_and_baselines_as_trl_does(missing):
    drawn, rng = draw(1), np.random.default_rng(7)
    table = rng.choice([0.0, 0.25, 1.0], (len(drawn.rewards), 2))
    table[rng.random(table.shape) < missing] = np.nan
    specs = [RewardSpec("a", 2.0), RewardSpec("b", -0.5)]
    rewards = [
        summed(
            specs, {key: Outcome(None if np.isnan(value) else float(value)) for key, value in zip("ab", row)}
        )
        for row in table
    ]
    assert any(one.silent for one in rewards) and any(one.no_signal and one.counts for one in rewards)
    values = [one.trained if one.counts else None for one in rewards]
    _, _, advantages = ours(dataclasses.replace(drawn, rewards=values), name="grpo", preset="trl")
    _, _, theirs = trls(
        drawn,
        reward_weights=torch.tensor([2.0, -0.5]),
        reward_funcs=[None] * 2,
        reward_func_names=["a", "b"],
        _calculate_rewards=lambda *_: torch.tensor(table, dtype=torch.float32),
    )
    assert [float(row[0]) for row in advantages] == pytest.approx(theirs, abs=1e-6)
