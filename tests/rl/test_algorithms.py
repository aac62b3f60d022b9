"""Algorithms by their own formulas: the KL's gradient, group baselines, how updates share a batch and what they report."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from shardproof.config.algorithms import SPECS, AlgorithmSpec
from shardproof.config.load import load_recipe
from shardproof.config.schema import Algorithm, Rollout
from shardproof.errors import ConfigError
from shardproof.rl.advantages import group_centred, group_normalised, leave_one_out
from shardproof.rl.algorithms.grouped import GroupAlgorithm
from shardproof.rl.algorithms.presets import PolicyGradient
from shardproof.rl.algorithms.registry import ALGORITHMS, check_algorithm, find_algorithm, make_algorithm
from shardproof.rl.experience import Experience
from shardproof.rl.updates import combine, mini_batches
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from shardproof.train.batching import Batch
from shardproof.train.loss import Scored, policy_gradient
from shardproof.train.trainer import StepResult
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import TINY

EMPTY = torch.empty(0)


def loss_for(top_p=1.0, **settings):
    return make_algorithm(Algorithm(**settings), Rollout(top_p=top_p)).loss


def test_the_longest_turn_decides_on_the_overlong_penalty():
    algorithm = make_algorithm(Algorithm(name="dapo", overlong_from=4), Rollout(max_new_tokens=8))
    turns = [Segment(tuple(range(n)), "policy", (0.0,) * n, 0, trained=True) for n in (3, 6, 4)]
    asked = Segment((1,) * 20, "environment")
    for segments, penalty in ((turns[:1], 0.0), ((turns[0], asked, turns[2]), 0.0), (turns, -0.5)):
        assert algorithm.penalty(Trajectory(tuple(segments))) == penalty


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
    loss = loss_for(name=name, kl_coef=1.0, kl_estimator=estimator, kl_ratio_correction=corrected)
    found, exact = expected_kl_gradient(loss)
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-6) == is_exact


def test_k1_in_the_loss_would_teach_nothing():
    found, exact = expected_kl_gradient(loss_for(kl_coef=1.0, kl_estimator="k1"))
    assert float(found.abs().max()) < 1e-6 < float(exact.abs().max())


def test_the_ready_made_loss_offers_the_correction_too():
    found, exact = expected_kl_gradient(policy_gradient(kl_coef=1.0, kl_ratio_correction=True), "old_logps")
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-6)
    found, exact = expected_kl_gradient(policy_gradient(kl_coef=1.0), "old_logps")
    assert not torch.allclose(found, exact, rtol=1e-2)


KL_ON = "algorithm.kl_coef=0.1"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([KL_ON, "algorithm.kl_estimator=k1"], "expected gradient of zero"),
        (
            [KL_ON, "algorithm.kl_ratio_correction=true", "algorithm.kl_estimator=k2"],
            "kl_ratio_correction is for",
        ),
        (
            [KL_ON, "algorithm.kl_ratio_correction=true", "algorithm.kl_in=reward"],
            "kl_ratio_correction is for",
        ),
    ],
)
def test_kl_settings_that_cannot_be_meant_are_refused_by_name(overrides, said):
    with pytest.raises((ConfigError, ValidationError)) as caught:
        load_recipe(TINY, overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [KL_ON, "algorithm.kl_estimator=k1", "algorithm.kl_in=reward"],
        [KL_ON, "algorithm.kl_ratio_correction=true"],
        ["algorithm.kl_coef=0", "algorithm.kl_estimator=k1"],
    ],
)
def test_kl_settings_that_make_sense_are_taken(overrides):
    load_recipe(TINY, overrides)


# What is scored before the updates.


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        ({}, set()),
        ({"correction": "mis"}, set()),
        ({"updates_per_batch": 2}, {"old_logps"}),
        ({"updates_per_batch": 2, "trust_region": "behaviour"}, set()),
        ({"kl_coef": 0.1, "kl_in": "reward", "trust_region": "behaviour"}, {"old_logps", "ref_logps"}),
    ],
)
def test_old_log_probs_are_scored_only_where_they_are_needed(settings, scored):
    assert make_algorithm(Algorithm(**settings), Rollout()).columns == scored


@pytest.mark.parametrize(
    ("settings", "rollout", "region"),
    [
        ({}, {}, "proximal"),
        ({}, {"ahead": 1}, "behaviour"),
        ({}, {"ahead": 1, "top_p": 0.9}, "proximal"),
        ({"correction": "tis"}, {"ahead": 1}, "proximal"),
        ({"correction": "none"}, {"ahead": 1}, "proximal"),
        ({"tis_cap": 3.0}, {"ahead": 1}, "proximal"),
        ({}, {"ahead": 1, "fp8": "weights"}, "proximal"),
        ({"trust_region": "proximal"}, {"ahead": 1}, "proximal"),
        ({"trust_region": "behaviour"}, {}, "behaviour"),
    ],
)
def test_the_ratio_is_measured_from_the_policy_that_drew_the_tokens_if_sampling_runs_ahead(
    settings, rollout, region
):
    assert make_algorithm(Algorithm(**settings), Rollout(**rollout)).trust_region == region


# Metrics.


def test_a_nucleus_is_not_called_a_mismatch():
    columns = {name: torch.tensor([-1.0, -2.0]) for name in ("advantages", "rollout_logps")}
    scored = Scored(torch.tensor([-1.5, -2.25]), EMPTY, EMPTY)
    _, plain = loss_for().function(scored, columns)
    loss = loss_for(top_p=0.9)
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


def test_least_values_and_sums_of_several_updates_are_those_of_all():
    made = [result(30, 0.5, 3.0), result(10, -0.5, 1.0)]
    reductions = {"clip_fraction": "min", "ratio/max": "max"}
    assert combine(made, reductions, FIELDS)["clip_fraction"] == -0.5
    assert combine(made, REDUCTIONS | {"clip_fraction": "sum"}, FIELDS)["clip_fraction"] == 0.0
    made.append(result(1, math.nan, 1.0))
    assert math.isnan(combine(made, reductions, FIELDS)["clip_fraction"])


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


# Advantages, against the formulas of docs/algorithms.md in plain Python. (reward, failed) of two groups, one per rank.

WORTH = [[(1.0, False), (0.0, False), (0.5, False), (9.0, True)], [(0.25, False), (0.75, False)]]
GREEDY = [0.5, 0.125]  # what each group's greedy completion is worth
GAMMA, LAMBDA, KL = 0.9, 0.8, 0.1
RULES = {"gamma": GAMMA, "gae_lambda": LAMBDA, "kl_coef": KL, "kl_in": "reward", "kl_estimator": "k1"}


def given(group):
    """A group's trajectories, and log-probs and values of their tokens. A tool's answer stands between two turns."""
    trajectories, columns = [], {"mask": [], "old_logps": [], "ref_logps": [], "values": []}
    for sample, (total, failed) in enumerate(WORTH[group]):
        turns = [(2, "prompt"), (2 + sample, "policy"), (1, "environment"), (2, "policy"), (1, "environment")]
        segments = tuple(Segment(tuple(range(n)), author) for n, author in turns)
        reward = Reward(total, failed=failed, penalty=-0.125 * sample, greedy=GREEDY[group])
        trajectories.append(Trajectory(segments, group, sample, reward=reward))
        mask = [float(author == "policy") for n, author in turns for _ in range(n)][1:]
        columns["mask"].append(mask)
        for shift, name in enumerate(("old_logps", "ref_logps", "values")):
            columns[name].append([math.sin(7 * group + 3 * sample + k + shift) / 2 for k in range(len(mask))])
    return trajectories, columns


def advantages_of_rank(name):
    trajectories, columns = given(dist.get_rank())
    batch = Batch([t.tokens for t in trajectories], **columns)
    made = make_algorithm(Algorithm(name=name, **RULES), Rollout()).advantages(batch, trajectories)
    return [
        [row.tolist() for row in made.columns[key]]
        for key in ("mask", "advantages", "returns")
        if key in made.columns
    ]


def token_rewards(group, sample):
    """Of a trajectory's trained tokens, in their order, with the critic's values."""
    _, columns = given(group)
    trained = [k for k, counted in enumerate(columns["mask"][sample]) if counted]
    rows = {name: [column[sample][k] for k in trained] for name, column in columns.items()}
    rewards = [-KL * (old - ref) for old, ref in zip(rows["old_logps"], rows["ref_logps"], strict=True)]
    rewards[-1] += WORTH[group][sample][0] - 0.125 * sample
    return rewards, rows["values"]


# (what a completion is compared with, what is divided by, what is added to that); of tokens: (deviation over all, eps).
COMPARED = {
    "grpo": ("mean", statistics.pstdev, 1e-4),
    "dr_grpo": ("mean", None, 0.0),
    "rloo": ("others", None, 0.0),
    **dict.fromkeys(("luspo", "sapo", "vespo"), ("mean", statistics.stdev, 1e-4)),
    **dict.fromkeys(("gmpo", "clip_cov", "kl_cov"), ("mean", statistics.stdev, 1e-6)),
    "dppo": ("mean", None, 0.0),
}
OVER_TOKENS = {
    "reinforce_pp": (statistics.pstdev, 1e-8),
    "ppo": (statistics.pstdev, 1e-8),
    "reinforce_pp_baseline": (statistics.stdev, 1e-8),
    "remax": None,
}


def compared(name, totals, k, every):
    """The advantage of a group's k-th completion; `every` are the totals of all groups."""
    if name == "gdpo":
        return (totals[k] - statistics.fmean(every)) / (statistics.stdev(every) + 1e-4)
    if name == "reinforce_pp_baseline":
        return totals[k] - statistics.fmean(totals)
    baseline, deviation, eps = COMPARED.get(name, COMPARED["grpo"])
    others = totals[:k] + totals[k + 1 :] if baseline == "others" else totals
    return (totals[k] - statistics.fmean(others)) / ((deviation(totals) if deviation else 1.0) + eps)


def returned(name, rewards, values):
    """(advantage before it is normalised, return) of each of a completion's tokens."""
    found, following, following_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        if name == "ppo":
            following = reward + GAMMA * following_value - value + GAMMA * LAMBDA * following
        else:
            following = reward + GAMMA * following
        following_value = value
        found.append((following, following + value))
    return found[::-1]


def expected_advantages(name):
    """{(group, sample): advantages of its trained tokens}, and the returns."""
    counted = [(g, s) for g, worth in enumerate(WORTH) for s, (_, failed) in enumerate(worth) if not failed]
    tokens = {place: token_rewards(*place) for place in counted}
    returns = {}
    if SPECS[name].compares_group:
        totals = [[sum(tokens[g, s][0]) for g, s in counted if g == group] for group in range(len(WORTH))]
        every = [total for group in totals for total in group]
        rows = {(g, s): [compared(name, totals[g], s, every)] * len(tokens[g, s][0]) for g, s in counted}
    else:
        both = {place: returned(name, *tokens[place]) for place in counted}
        baselines = {place: GREEDY[place[0]] if name == "remax" else 0.0 for place in counted}
        rows = {place: [a - baselines[place] for a, _ in row] for place, row in both.items()}
        returns = {place: [value for _, value in row] for place, row in both.items()}
    if OVER_TOKENS.get(name) is not None:
        deviation, eps = OVER_TOKENS[name]
        every = [advantage for row in rows.values() for advantage in row]
        mean, divisor = statistics.fmean(every), deviation(every) + eps
        rows = {place: [(a - mean) / divisor for a in row] for place, row in rows.items()}
    return rows, returns


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [name for name, kind in ALGORITHMS.items() if kind.advantages is PolicyGradient.advantages]
)
def test_advantages_are_those_of_the_formulas(name):
    advantages, returns = expected_advantages(name)
    for group, (masks, *columns) in enumerate(run_ranks(2, advantages_of_rank, name)):
        assert len(columns) == 1 + (name == "ppo")
        for sample, mask in enumerate(masks):
            assert any(mask) != WORTH[group][sample][1], "what failed counts nowhere"
            for column, expected in zip(columns, (advantages, returns), strict=False):
                trained = [value for value, counted in zip(column[sample], mask, strict=True) if counted]
                assert trained == pytest.approx(expected.get((group, sample), []), abs=5e-7)
                assert not any(v for v, counted in zip(column[sample], mask, strict=True) if not counted)


def advantages_without_values():
    trajectories, columns = given(dist.get_rank())
    if dist.get_rank() == 1:
        columns.pop("values")
    batch = Batch([t.tokens for t in trajectories], **columns)
    make_algorithm(Algorithm(name="ppo"), Rollout()).advantages(batch, trajectories)


class OfAnotherShape(PolicyGradient):
    spec = SPECS["grpo"]

    def compare(self, rewards_PG, counted_PG):
        return rewards_PG[:, :1]


def advantages_of_another_shape():
    trajectories, columns = given(dist.get_rank())
    if dist.get_rank() == 0:
        trajectories, columns = [], {key: [] for key in columns}
    batch = Batch([t.tokens for t in trajectories], **columns)
    OfAnotherShape(Algorithm(), Rollout()).advantages(batch, trajectories)


@pytest.mark.distributed
def test_what_fails_on_one_rank_is_raised_on_all():
    for kind, _, message, *_ in run_ranks_outcomes(2, advantages_without_values):
        assert kind == "error" and "rank 1: KeyError: 'values'" in message
    for kind, _, message, *_ in run_ranks_outcomes(2, advantages_of_another_shape, timeout=60):
        assert kind == "error" and "OfAnotherShape.compare returned" in message


# What algorithms declare.


def test_every_spec_has_its_algorithm():
    assert {name: kind.spec for name, kind in ALGORITHMS.items()} == SPECS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, set()),
        ({"updates_per_batch": 2}, {"old_logps"}),
        ({"kl_coef": 0.1}, {"ref_logps"}),
        ({"kl_coef": 0.1, "kl_in": "reward"}, {"ref_logps", "old_logps"}),
        ({"name": "ppo"}, {"values"}),
        ({"name": "sft"}, set()),
    ],
)
def test_an_algorithm_names_the_scores_it_needs(settings, expected):
    assert make_algorithm(Algorithm(**settings), Rollout()).columns == expected


@pytest.mark.parametrize(
    ("settings", "skips"),
    [
        ({}, True),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True),
        ({"kl_coef": 0.1}, False),
        ({"entropy_coef": 0.1}, False),
        ({"router_coef": 0.1}, False),
        ({"name": "ppo"}, False),
        ({"name": "sft"}, False),
    ],
)
def test_sequences_without_advantage_are_skipped_where_nothing_else_moves_a_weight(settings, skips):
    assert make_algorithm(Algorithm(**settings), Rollout()).skips_zero_advantages == skips


class Pairs(ALGORITHMS["grpo"]):
    spec = AlgorithmSpec(compares_group=True)


class Nameless(ALGORITHMS["grpo"]):
    spec = None


def test_an_algorithm_of_the_users_is_checked_as_ours_are():
    recipe = load_recipe(TINY, [f"algorithm.name={__name__}:Pairs", "rollout.group_size=1"])
    with pytest.raises(ConfigError, match="Pairs compares completions of one prompt and needs at least 2"):
        check_algorithm(recipe)
    check_algorithm(load_recipe(TINY, [f"algorithm.name={__name__}:Pairs"]))


class Median(GroupAlgorithm):
    spec = AlgorithmSpec(compares_group=True)

    def compare(self, rewards_PG, counted_PG):
        return rewards_PG - rewards_PG.median(dim=1, keepdim=True).values


class Flat(Median):
    surrogate = staticmethod(lambda logps, old, columns, low, high: (-logps, torch.zeros_like(logps)))


class Calm(PolicyGradient):
    spec = AlgorithmSpec(compares_group=True, weights="constant", switches={"scale": "off", "dual_clip": 5.0})


class Wide(PolicyGradient):
    spec = SPECS["cispo"]


class Misspelt(PolicyGradient):
    spec = AlgorithmSpec(switches={"baselin": "off"})


class Wrong(PolicyGradient):
    spec = AlgorithmSpec(switches={"scale": "samples"})


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Wide", {}, "AlgorithmSpec.switches has clip_low=1.0, but the recipe has 0.2"),
        ("Misspelt", {}, "'baselin', which is no key of .algorithm.. Did you mean 'baseline'"),
        ("Wrong", {}, "AlgorithmSpec.switches has scale='samples': Input should be"),
        ("Median", {"scale": "sample"}, "algorithm.scale: '.*:Median' computes its advantages itself"),
        ("Flat", {"surrogate": "sapo"}, "algorithm.surrogate='sapo': Flat has a surrogate of its own"),
        ("Flat", {"ratio": "sequence"}, "ratio and dual_clip are for surrogates by name"),
        (
            "Calm",
            {"baseline": "off", "scale": "sample", "scale_over": "group"},
            "scale_over='group' with baseline",
        ),
        ("Calm", {"dual_clip": 1.1}, "dual_clip=1.1 must be above 1 [+] clip_high"),
    ],
)
def test_switches_that_a_users_algorithm_does_not_heed_are_refused(name, settings, said):
    with pytest.raises((ConfigError, ValidationError), match=said):
        make_algorithm(Algorithm(name=f"{__name__}:{name}", **settings), Rollout())


def weights_of_median(aggregation):
    named = Algorithm(name=f"{__name__}:Median", aggregation=aggregation)
    made = make_algorithm(named, Rollout(max_new_tokens=10))
    return made.weigh(Batch([[1, 2, 3], [1, 2, 3]]), 2, 1).flat("weights").tolist()


def weights_on_rank():
    return {str(how): weights_of_median(how) for how in (None, "sequence_sum", "constant")}


@pytest.mark.distributed
def test_a_users_algorithm_has_the_switches_of_its_class_and_of_the_recipe():
    calm = make_algorithm(Algorithm(name=f"{__name__}:Calm", scale="sample"), Rollout()).settings
    for low in (1.0, 0.5):
        wide = make_algorithm(Algorithm(name=f"{__name__}:Wide", clip_low=low), Rollout()).settings
        assert (wide.clip_low, wide.clip_high, wide.surrogate) == (low, 0.28, "cispo")
    assert (calm.aggregation, calm.scale, calm.dual_clip, calm.baseline) == (
        "constant",
        "sample",
        5.0,
        "mean",
    )
    (found,) = run_ranks(1, weights_on_rank)
    for how, weight in (("None", 0.25), ("sequence_sum", 0.5), ("constant", 0.05)):
        assert found[how] == pytest.approx([weight] * 4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{__name__}:Pair", "Did you mean 'Pairs'?"),
        (f"{__name__}:Nameless", "expected a subclass of Algorithm with a `spec`"),
        (f"{__name__}:TINY", "expected a subclass of Algorithm"),
        ("no_such_module:Mine", "algorithm 'no_such_module:Mine' cannot be imported"),
    ],
)
def test_a_name_that_is_no_algorithm_is_refused(name, said):
    with pytest.raises(ConfigError) as caught:
        find_algorithm(name)
    assert said in str(caught.value)


# Several updates from one batch.


def experience_of(order, rank, size, group_size=2):
    """A rank's part, dealt as `collect` deals prompts; a sequence says which prompt it belongs to."""
    mine = [(group, g) for group in order if group % size == rank for g in range(group_size)]
    trajectories = [Trajectory.of_prompt((1, 2), group, g) for group, g in mine]
    return Experience(trajectories, Batch(mine), order=order)


def prompts_of(part):
    return [sequence[0] for sequence in part.sequences[::2]]


def test_every_rank_has_its_share_of_every_update():
    for size in (1, 2, 4):
        ranks = [mini_batches(experience_of(list(range(48)), r, size), 2) for r in range(size)]
        assert {len(part) for parts in ranks for part in parts} == {48 // size}


@pytest.mark.parametrize("order", [[0, 2, 3, 4, 8, 10], [1, 5], [7]])
@pytest.mark.parametrize("num", [2, 3])
def test_updates_take_equal_runs_of_prompts_at_any_number_of_ranks(order, num):
    expected = None
    for size in (1, 2, 3):
        ranks = [mini_batches(experience_of(order, r, size), num) for r in range(size)]
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
    row, metrics = loss_for(name=name, tis_cap=None).function(Scored(logps, EMPTY, EMPTY), columns)
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
