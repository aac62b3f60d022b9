"""Each preset against its formula in float64, written out completion by completion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardproof.rl.algorithms.presets import PolicyGradient
from shardproof.rl.algorithms.registry import ALGORITHMS
from shardproof.train.loss import Scored
from tests.ranks import run_ranks
from tests.rl.parity.cases import algorithm_of, batch_of, draw, ours, prepared, with_probabilities
from tests.rl.parity.formulas import expected, expected_advantages, expected_chosen, may_be_chosen
from tests.rl.parity.steps import advantages_on_rank, chosen_on_rank

BAR = 1e-6
NAMES = [name for name, kind in ALGORITHMS.items() if kind.advantages is PolicyGradient.advantages]
VERL = {"preset": "verl"}
# {case: keys of [algorithm]}: every preset as it is, verl's variants, and switches on their own.
CASES = {name: {"name": name} for name in NAMES} | {
    **{f"{name} of verl": {"name": name, **VERL} for name in NAMES if name not in ("luspo", "gdpo", "vespo")},
    "greedy in grpo": {"name": "grpo", "baseline": "greedy"},
    "returns in grpo": {"name": "grpo", "baseline": "off", "scale": "sample", "gamma": 0.9},
    "others of the batch": {"name": "rloo", "compared_over": "batch"},
    "mean and deviation of the batch": {"name": "grpo", "compared_over": "batch"},
    "others, deviation of the group": {"name": "rloo", "scale": "sample"},
    "others, deviation of the batch": {"name": "rloo", "scale": "population", "scale_over": "batch"},
    "tokens": {"name": "grpo", "scale_over": "tokens"},
    "product in dapo": {"name": "dapo", "ratio": "product"},
    "dual clip in ppo": {"name": "ppo", "dual_clip": 1.3, "clip_low": 0.1},
    "DPPO by KL": {
        "name": "dppo",
        "surrogate": "dppo_kl",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "dual_clip": 1.3,
    },
    "DPPO with narrow bounds": {"name": "dppo", "clip_low": 0.03, "clip_high": 0.05},
    "GMPO over tokens": {"name": "gmpo", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "token_mean"},
    "KL in the reward": {"name": "dapo", "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "KL in the loss": {"name": "dr_grpo", "kl_coef": 0.2, "kl_estimator": "k2"},
}


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_advantages_are_those_of_the_formula(case):
    settings = CASES[case] | ({"cov_ratio": 0.1} if "_cov" in case else {})
    settings |= {"cov_bounds": (0.05, 0.5)} if "clip_cov" in case else {}
    for seed in range(3):
        drawn = with_probabilities(draw(seed, failed=seed == 2))
        algorithm = algorithm_of(**settings)
        s = algorithm.settings
        advantages = expected_advantages(drawn, s)
        chosen = [np.zeros(n) for n in drawn.lengths]
        if s.surrogate == "kl_cov":
            chosen = expected_chosen(drawn, s, advantages, [row.numpy() for row in drawn.old])
        elif s.surrogate == "clip_cov":
            chosen = drawn_by_clip_cov(algorithm, drawn, advantages)
        loss, gradients, found = ours(drawn, **settings)
        for mine, theirs in zip(found, advantages, strict=True):
            assert mine.tolist() == pytest.approx(theirs, abs=BAR)
        leaves = [row.double().requires_grad_() for row in drawn.logps]
        exact = expected(drawn, s, chosen, leaves)
        exact_gradients = torch.autograd.grad(exact, leaves, materialize_grads=True)
        assert loss == pytest.approx(float(exact.detach()), abs=BAR)
        for mine, theirs in zip(gradients, exact_gradients, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=BAR)


def drawn_by_clip_cov(algorithm, drawn, advantages):
    """What Clip-Cov drew, after a look at whether it may have."""
    s, starts = algorithm.settings, [len(prompt) - 1 for prompt in drawn.prompts]
    column = prepared(algorithm, drawn).columns["chosen"]
    chosen = [row[k:].numpy() for k, row in zip(starts, column, strict=True)]
    within = np.concatenate(may_be_chosen(drawn, s, advantages, [row.numpy() for row in drawn.old])) > 0
    taken = np.concatenate(chosen) > 0
    assert not any(row[:k].any() for k, row in zip(starts, column, strict=True))
    number = sum(n for n, reward in zip(drawn.lengths, drawn.rewards, strict=True) if reward is not None)
    assert taken.sum() == min(max(int(s.cov_ratio * number), 1), within.sum()) and not (taken & ~within).any()
    assert within.sum() > taken.sum() > 0
    return chosen


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_over_the_whole_batch_however_it_is_spread(name):
    settings = {"name": name, "cov_ratio": 0.15} | ({"cov_bounds": (1e-6, 9.0)} if name == "clip_cov" else {})
    drawn = draw(5)
    alone = chosen_on_rank(drawn, settings, 1)
    assert 1 < sum(sum(row) for row in alone.values()) == int(0.15 * sum(drawn.lengths))
    for world, share in ((2, 1), (3, 1), (2, 2)):
        spread = {}
        for found in run_ranks(world, chosen_on_rank, drawn, settings, share):
            spread |= {int(key): row for key, row in found.items()}
        assert spread == alone


@pytest.mark.distributed
@pytest.mark.parametrize("share_of_tokens", [0.01, 0.2, 0.5])
def test_the_least_certain_tokens_are_those_of_the_whole_batch_however_it_is_spread(share_of_tokens):
    settings, column = {"name": "grpo", "entropy_share": share_of_tokens}, "uncertain"
    drawn = draw(5, failed=True)
    drawn.entropy[0][0] = -1e-9  # as rounding makes it
    alone = chosen_on_rank(drawn, settings, 1, column)
    counted = [i for i, reward in enumerate(drawn.rewards) if reward is not None]
    entropies = np.concatenate([drawn.entropy[i].double().numpy() for i in counted])
    least = np.quantile(entropies, 1 - share_of_tokens)
    for i, prompt in enumerate(drawn.prompts):
        wanted = (drawn.entropy[i].double() >= least).float() * (i in counted)
        assert alone[i] == [0.0] * (len(prompt) - 1) + wanted.tolist()
    for world, share in ((2, 1), (3, 1), (2, 2)):
        spread = {}
        for found in run_ranks(world, chosen_on_rank, drawn, settings, share, column):
            spread |= {int(key): row for key, row in found.items()}
        assert spread == alone


OVER_BATCH = {
    "tokens": {"name": "reinforce_pp_baseline"},
    "rewards": {"name": "grpo", "preset": "trl", "scale_over": "batch"},
    "means": {"name": "gdpo"},
    "advantages": {"name": "rloo", "scale": "sample", "scale_over": "advantages"},
    "others": {"name": "rloo", "compared_over": "batch"},
}


@pytest.mark.distributed
def test_what_is_taken_over_the_batch_does_not_depend_on_how_it_is_spread():
    drawn = draw(6, failed=True)
    alone = advantages_on_rank(drawn, OVER_BATCH, 1)
    for world, share in ((2, 1), (3, 1), (2, 2), (4, 2)):  # of three ranks, the last has no sequences
        for case, exact in alone.items():
            spread = {}
            for found in run_ranks(world, advantages_on_rank, drawn, {case: OVER_BATCH[case]}, share):
                spread |= found[case]
            assert spread == pytest.approx(exact, abs=BAR), (case, world, share)


def test_the_ratio_of_tokens_of_one_policy_is_one():
    """With one update per batch all surrogates have the gradient of -A logp, at weights of the batch."""
    drawn = draw(4)
    for name in NAMES:
        if name in ("clip_cov", "kl_cov"):
            continue
        algorithm = algorithm_of(name=name)
        batch = prepared(algorithm, drawn, on_policy=True)
        logps = batch_of(drawn, on_policy=True).flat("old_logps").requires_grad_()
        columns = {k: batch.flat(k) for k in batch.columns} | {"sequence": batch.sequence_indices()}
        row, _ = algorithm.loss.function(Scored(logps, torch.empty(0), torch.empty(0)), columns)
        (found,) = torch.autograd.grad((columns["weights"] * row).sum(), logps)
        plain = -columns["weights"] * columns["advantages"]
        if algorithm.settings.ratio != "token":  # one number for all tokens of a completion
            totals = torch.zeros(len(drawn.groups)).index_add(0, columns["sequence"], plain)
            lengths = torch.tensor(drawn.lengths).float()
            plain = (totals / lengths)[columns["sequence"]] * columns["mask"]
        assert math.isclose(float((found - plain).abs().max()), 0.0, abs_tol=BAR), name
