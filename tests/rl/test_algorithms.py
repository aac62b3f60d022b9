"""Algorithms by their own formulas: the KL's gradient, group baselines, how updates share a batch and what they report."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from shardproof.config.load import load_recipe
from shardproof.config.schema import Algorithm
from shardproof.errors import ConfigError
from shardproof.rl.advantages import group_centred, group_normalised, leave_one_out
from shardproof.rl.algorithms import make_loss
from shardproof.rl.data import Prompt
from shardproof.rl.experience import Experience, Group
from shardproof.rl.updates import combine, mini_batches
from shardproof.train.batching import Batch
from shardproof.train.loss import Scored, policy_gradient
from shardproof.train.trainer import StepResult
from tests.rl.runs import TINY

EMPTY = torch.empty(0)


# The KL.


def expected_kl_gradient(loss, column="rollout_logps"):
    """The gradient of the loss's KL, in expectation over every token that can be drawn, and that of the KL itself."""
    torch.manual_seed(0)
    weights = torch.randn(6, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6), 0)
    logps = torch.log_softmax(weights, 0)
    probs = logps.detach().exp()
    columns = {"advantages": torch.zeros(6), "ref_logps": ref, "mask": torch.ones(6)}
    columns |= {column: logps.detach(), "sequence": torch.arange(6)}
    row, _ = loss.function(Scored(logps, EMPTY, EMPTY), columns)
    (found,) = torch.autograd.grad((probs * row).sum(), weights, retain_graph=True)
    (exact,) = torch.autograd.grad((logps.exp() * (logps - ref)).sum(), weights)
    return found, exact


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize(
    ("estimator", "corrected", "is_exact"), [("k2", False, True), ("k3", True, True), ("k3", False, False)]
)
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl(name, estimator, corrected, is_exact):
    settings = Algorithm(name=name, kl_coef=1.0, kl_estimator=estimator, kl_ratio_correction=corrected)
    found, exact = expected_kl_gradient(make_loss(settings))
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-6) == is_exact


def test_k1_in_the_loss_would_teach_nothing():
    found, exact = expected_kl_gradient(make_loss(Algorithm(kl_coef=1.0, kl_estimator="k1")))
    assert float(found.abs().max()) < 1e-6 < float(exact.abs().max())


def test_the_ready_made_loss_offers_the_correction_too():
    found, exact = expected_kl_gradient(policy_gradient(kl_coef=1.0, kl_ratio_correction=True), "old_logps")
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-6)
    found, exact = expected_kl_gradient(policy_gradient(kl_coef=1.0), "old_logps")
    assert not torch.allclose(found, exact, rtol=1e-2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "expected gradient of zero"),
        (["algorithm.kl_ratio_correction=true", "algorithm.kl_estimator=k2"], "kl_ratio_correction is for"),
        (["algorithm.kl_ratio_correction=true", "algorithm.kl_in=reward"], "kl_ratio_correction is for"),
    ],
)
def test_kl_settings_that_cannot_be_meant_are_refused_by_name(overrides, said):
    with pytest.raises((ConfigError, ValidationError)) as caught:
        load_recipe(TINY, overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_in=reward"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_ratio_correction=true"],
        ["algorithm.kl_estimator=k1"],
    ],
)
def test_kl_settings_that_make_sense_are_taken(overrides):
    load_recipe(TINY, overrides)


# Metrics.


def test_a_nucleus_is_not_called_a_mismatch():
    columns = {name: torch.tensor([-1.0, -2.0]) for name in ("advantages", "rollout_logps")}
    scored = Scored(torch.tensor([-1.5, -2.25]), EMPTY, EMPTY)
    _, plain = make_loss(Algorithm()).function(scored, columns)
    loss = make_loss(Algorithm(), top_p=0.9)
    _, nucleus = loss.function(scored, columns)
    assert plain["mismatch/mean"].tolist() == [0.5, 0.25] and "nucleus/mean" not in plain
    assert nucleus["nucleus/mean"].tolist() == [0.5, 0.25]
    assert set(nucleus) == set(loss.metrics) and not any(name.startswith("mismatch") for name in nucleus)


def result(num_tokens, mean, top, loss=1.0, stepped=True):
    metrics = {"clip_fraction": mean, "ratio/max": top}
    return StepResult(stepped, None, None, None, None, loss, 2 * loss, 0.1, num_tokens, metrics, 1)


REDUCTIONS = {"clip_fraction": "mean", "ratio/max": "max"}
FIELDS = {"loss/total": "loss", "grad_norm": "grad_norm"}


def test_a_step_reports_all_of_its_updates():
    found = combine([result(30, 0.1, 3.0, 1.0), result(10, 0.5, 1.0, 2.0)], REDUCTIONS, FIELDS)
    assert found == pytest.approx(
        {"clip_fraction": 0.2, "ratio/max": 3.0, "loss/total": 1.5, "grad_norm": 3.0}, rel=1e-12
    )


def test_one_update_is_reported_bit_for_bit():
    found = combine([result(7, 0.1, 1.3, 0.3)], REDUCTIONS, FIELDS)
    assert found == {"clip_fraction": 0.1, "ratio/max": 1.3, "loss/total": 0.3, "grad_norm": 0.6}


def test_updates_that_were_skipped_do_not_count_unless_all_were():
    bad = result(10, math.nan, math.nan, math.inf, stepped=False)
    assert combine([result(5, 0.1, 2.0), bad], REDUCTIONS, FIELDS)["clip_fraction"] == 0.1
    found = combine([bad, bad], REDUCTIONS, FIELDS)
    assert math.isnan(found["ratio/max"]) and found["loss/total"] == math.inf


# Groups in which some rewards failed.

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 7.0], [1.0, 0.0, 1.0, 0.0], [5.0, 5.0, 0.0, 1.0]])
COUNTED = torch.tensor([[True, True, True, False], [True] * 4, [False, False, False, True]])


@pytest.mark.parametrize("function", [group_normalised, group_centred, leave_one_out])
def test_failed_completions_are_in_no_baseline(function):
    found = function(REWARDS, COUNTED)
    torch.testing.assert_close(found[0, :3], function(REWARDS[:1, :3])[0])
    torch.testing.assert_close(found[1], function(REWARDS[1:2])[0])
    assert not found[~COUNTED].any()
    assert found[2, 3] == 0.0, "alone in its group, it has nothing to be compared with"


def test_without_failures_nothing_changes_in_a_baseline():
    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(3))
    every = torch.ones(5, 6, dtype=torch.bool)
    for function in (group_normalised, group_centred, leave_one_out):
        assert torch.equal(function(rewards, every), function(rewards))


# Several updates from one batch.


def experience_of(order, rank, size, group_size=2):
    """A rank's part, dealt as `collect` deals prompts; a sequence says which prompt it belongs to."""
    groups = [Group(i, Prompt({}, "", (1, 2)), [], []) for i in order if i % size == rank]
    batch = Batch([[group.index, g] for group in groups for g in range(group_size)])
    return Experience(groups, batch, order=order)


def prompts_of(part):
    return [sequence[0] for sequence in part.sequences[::2]]


def test_every_rank_has_its_share_of_every_update():
    for size in (1, 2, 4):
        ranks = [mini_batches(experience_of(list(range(48)), r, size), 2, 2) for r in range(size)]
        assert {len(part) for parts in ranks for part in parts} == {48 // size}


@pytest.mark.parametrize("order", [[0, 2, 3, 4, 8, 10], [1, 5], [7]])
@pytest.mark.parametrize("num", [2, 3])
def test_updates_take_equal_runs_of_prompts_at_any_number_of_ranks(order, num):
    expected = None
    for size in (1, 2, 3):
        ranks = [mini_batches(experience_of(order, r, size), num, 2) for r in range(size)]
        found = [sorted(i for parts in ranks for i in prompts_of(parts[k])) for k in range(num)]
        expected = expected or found
        assert found == expected
    assert [i for part in expected for i in part] == order
    sizes = [len(part) for part in expected]
    assert max(sizes) - min(sizes) <= 1


# What docs/algorithms.md says of other libraries.


def loss_of(name, ratios, advantage):
    """(loss, which tokens the clip changed) of one completion whose tokens have these ratios."""
    logps = torch.tensor(ratios).log()
    columns = {"advantages": torch.full_like(logps, advantage), "mask": torch.ones_like(logps)}
    columns |= dict.fromkeys(("old_logps", "rollout_logps", "sequence"), torch.zeros_like(logps))
    row, metrics = make_loss(Algorithm(name=name, tis_cap=None)).function(
        Scored(logps, EMPTY, EMPTY), columns
    )
    return row.tolist(), metrics["clip_fraction"].tolist()


@pytest.mark.parametrize(("size", "times"), [(2, 1.41), (4, 1.155), (8, 1.07)])
def test_a_groups_deviation_is_that_of_the_population(size, times):
    rewards = torch.tensor([[1.0] + [0.0] * (size - 1)])
    of_the_sample = (rewards - rewards.mean()) / rewards.std(unbiased=True)
    assert (group_normalised(rewards) / of_the_sample)[0].tolist() == pytest.approx([times] * size, abs=5e-3)


def test_there_is_no_dual_clip():
    assert loss_of("grpo", [10.0], -1.0) == (pytest.approx([10.0]), [0.0])


def test_cispo_bounds_its_weight_from_above_alone():
    row, clipped = loss_of("cispo", [0.01, 2.0], 1.0)
    assert row == pytest.approx([-0.01 * math.log(0.01), -1.28 * math.log(2.0)], rel=1e-5)
    assert clipped == [0.0, 1.0]


def test_gspos_clip_range_is_that_of_the_others():
    assert loss_of("gspo", [1.1, 1.1], 1.0)[1] == [0.0, 0.0]
    assert loss_of("gspo", [1.3, 1.3], 1.0)[1] == [1.0, 1.0]


def test_rloo_clips_token_by_token():
    assert loss_of("rloo", [2.0, 0.5], 1.0) == (pytest.approx([-1.2, -0.5]), [1.0, 0.0])
