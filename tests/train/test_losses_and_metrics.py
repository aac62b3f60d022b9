"""Losses against their formulas, metrics against their reductions, and the optimizer and schedules of one rank."""

import math

import peft
import pytest
import torch

import shardproof as sp
from shardproof.train.loss import LOSSES, Scored, find_loss, policy_gradient, sft, value
from shardproof.train.metrics import MetricSums, reduce_metrics
from shardproof.train.surrogates import SURROGATES, SurrogateSettings
from tests.models import tiny_config
from tests.ranks import run_ranks, run_ranks_outcomes

EMPTY = torch.empty(0)


def scored(logps=None, entropy=None, values=None):
    rows = (logps, entropy, values)
    return Scored(*(EMPTY if row is None else torch.tensor(row, requires_grad=True) for row in rows))


def columns(**values):
    return {name: torch.tensor(column) for name, column in values.items()}


# Losses.


def test_sft_is_the_negative_log_prob():
    loss, metrics = sft().function(scored([-1.0, -0.25]), {})
    assert loss.tolist() == [1.0, 0.25]
    assert metrics == {}


def clipped_objective(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.2, 0.28), (0.1, 0.5)])
def test_policy_gradient_is_clipped_as_ppo_clips(low, high):
    logps, old = [-1.0, -1.0, -2.0, -2.0, -0.5], [-1.5, -1.5, -1.5, -1.5, -0.55]
    advantages = [2.0, -2.0, 2.0, -2.0, 1.0]
    loss, metrics = policy_gradient(low, high).function(
        scored(logps), columns(advantages=advantages, old_logps=old)
    )
    ratios = [math.exp(a - b) for a, b in zip(logps, old, strict=True)]
    high = low if high is None else high
    expected = [clipped_objective(r, a, low, high) for r, a in zip(ratios, advantages, strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)
    assert metrics["ratio/mean"].tolist() == pytest.approx(ratios, rel=1e-5)
    # A token is clipped when the bound, not the ratio, decides.
    bound = [e > -r * a + 1e-6 for e, r, a in zip(expected, ratios, advantages, strict=True)]
    assert metrics["clip_fraction"].bool().tolist() == bound
    assert bound.count(True) == 2


def test_policy_gradient_has_no_gradient_where_it_is_clipped():
    given = scored([-1.0, -1.0, -2.0, -2.0])
    loss, _ = policy_gradient(0.2).function(
        given, columns(advantages=[1.0, -1.0, 1.0, -1.0], old_logps=[-1.5] * 4)
    )
    (grad,) = torch.autograd.grad(loss.sum(), given.logps)
    ratio = math.exp(0.5)
    assert grad.tolist() == pytest.approx([0.0, ratio, -1 / ratio, 0.0], rel=1e-5)


def test_tokens_that_the_dual_clip_holds_back_count_as_clipped():
    settings = SurrogateSettings(dual_clip=3.0)
    loss, metrics = policy_gradient(surrogate_settings=settings).function(
        scored([math.log(ratio) for ratio in (2.0, 4.0, 4.0, 0.5, 0.5)]),
        columns(advantages=[-1.0, -1.0, 1.0, -1.0, 0.0], old_logps=[0.0] * 5),
    )
    assert loss.tolist() == pytest.approx([2.0, 3.0, -1.2, 0.8, 0.0])
    assert metrics["clip_fraction"].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("surrogate", "settings", "advantage", "wanted"),
    [
        ("clipped", SurrogateSettings(), 1.0, -1.2),
        ("clipped", SurrogateSettings("sequence"), 1.0, -1.2),
        ("clipped", SurrogateSettings("product"), 1.0, -1.2),
        ("clipped", SurrogateSettings("product", dual_clip=3.0), -1.0, 3.0),
        ("clipped", SurrogateSettings(), 0.0, 0.0),
        ("sapo", SurrogateSettings(), 1.0, -4.0),
        ("kl_cov", SurrogateSettings(), 0.0, 0.0),
        ("geo_mean", SurrogateSettings(), 1.0, -math.exp(0.2)),
        ("dppo_tv", SurrogateSettings(), 1.0, 0.0),
        ("dppo_kl", SurrogateSettings(), 1.0, 0.0),
    ],
)
def test_a_ratio_beyond_float32_leaves_no_gradient_where_it_does_not_count(
    surrogate, settings, advantage, wanted
):
    """The product of many tokens' ratios gets there soon."""
    logps = torch.full((4,), -0.1, requires_grad=True)
    columns = {
        "advantages": torch.full((4,), advantage),
        "old_logps": torch.full((4,), -100.0),
        "mask": torch.ones(4),
        "sequence": torch.zeros(4),
        "chosen": torch.zeros(4),
    }
    loss, metrics = policy_gradient(surrogate=surrogate, surrogate_settings=settings).function(
        Scored(logps, EMPTY, EMPTY), columns
    )
    assert loss.tolist() == pytest.approx([wanted] * 4)
    (gradient,) = torch.autograd.grad(loss.sum(), logps)
    assert not gradient.any() and metrics["ratio/max"].isfinite().all()


@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl"])
def test_a_token_that_became_certain_has_moved_too_far(surrogate):
    """Rounding may lift the log-prob of a certain token above 0."""
    logps = torch.tensor([0.0, 1e-7], requires_grad=True)
    rows = columns(advantages=[1.0, 1.0], old_logps=[-0.7, -0.7], mask=[1.0, 1.0], sequence=[0.0, 0.0])
    loss, metrics = policy_gradient(surrogate=surrogate).function(Scored(logps, EMPTY, EMPTY), rows)
    assert loss.tolist() == [0.0, 0.0] and metrics["clip_fraction"].tolist() == [1.0, 1.0]


BOUNDED = [name for name in SURROGATES if name not in ("sapo", "vespo", "clip_cov", "kl_cov")]


@pytest.mark.parametrize("surrogate", BOUNDED)
def test_a_token_without_an_advantage_counts_as_clipped_by_none(surrogate):
    """Its loss is 0 however far its ratio went; with a KL in the loss such tokens are part of an update."""
    old = [-0.01 if k % 2 else -3.0 for k in range(4)]
    rows = columns(advantages=[0.0, 0.0, 1.0, -1.0], old_logps=old, mask=[1.0] * 4, sequence=[0, 1, 2, 3])
    given = scored([-3.0 if k % 2 else -0.01 for k in range(4)])
    loss, metrics = policy_gradient(0.1, 0.1, surrogate=surrogate).function(given, rows)
    assert loss[:2].tolist() == [0.0, 0.0] and metrics["clip_fraction"].tolist()[:2] == [0.0, 0.0]
    assert metrics["clip_fraction"][2] == 1.0


def test_policy_gradient_adds_the_kl_and_takes_the_entropy():
    loss = policy_gradient(kl_coef=0.5, entropy_coef=0.25)
    given = scored([-1.0, -2.0], entropy=[0.5, 1.5])
    row, metrics = loss.function(
        given, columns(advantages=[0.0, 0.0], old_logps=[-1.0, -2.0], ref_logps=[-1.5, -1.0])
    )
    kl = [math.exp(d) - d - 1 for d in (-0.5, 1.0)]
    expected = [0.5 * k - 0.25 * h for k, h in zip(kl, (0.5, 1.5), strict=True)]
    assert row.tolist() == pytest.approx(expected, rel=1e-5)
    assert metrics["kl/mean"].tolist() == pytest.approx(kl, rel=1e-5)
    assert metrics["entropy/mean"].tolist() == [0.5, 1.5]
    assert loss.want_entropy
    assert loss.columns == ("advantages", "old_logps", "ref_logps")
    # The k3 estimate pulls towards the reference: d KL / d logp = 1 - exp(ref - logp).
    (grad,) = torch.autograd.grad(row.sum(), given.logps)
    assert grad.tolist() == pytest.approx([0.5 * (1 - math.exp(d)) for d in (-0.5, 1.0)], rel=1e-5)


def test_policy_gradient_without_coefficients_needs_neither_reference_nor_entropy():
    loss = policy_gradient()
    assert loss.columns == ("advantages", "old_logps")
    assert not loss.want_entropy
    assert set(loss.metrics) == {"ratio/mean", "ratio/max", "clip_fraction"}


def test_tokens_that_an_engine_drew_are_weighed_by_its_own_probabilities():
    loss = policy_gradient(
        surrogate="detached", kl_estimator="k2", report_kl=True, rollout_whole=True, tis_cap=2.0
    )
    given = scored([-1.0, -2.0])
    drawn = columns(advantages=[1.0, -2.0], rollout_logps=[-3.0, -1.5], ref_logps=[-1.5, -2.0])
    row, metrics = loss.function(given, drawn)
    # Without old log-probs the policy is its own old policy: r = 1, and the KL is measured alone.
    assert row.tolist() == pytest.approx([2.0, -4.0 * math.exp(-0.5)], rel=1e-6)
    assert metrics["mismatch/max"].tolist() == [2.0, 0.5]
    assert metrics["kl/mean"].tolist() == [0.125, 0.0]
    assert set(metrics) == set(loss.metrics) and loss.columns == ("advantages", "rollout_logps", "ref_logps")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"surrogate": "clippedd"}, "Did you mean 'clipped'?"),
        ({"kl_estimator": "k4"}, "not one of k1, k2, k3"),
        ({"tis_cap": 2.0}, "needs rollout log-probs"),
    ],
)
def test_a_policy_gradient_that_cannot_be(settings, said):
    with pytest.raises(sp.ConfigError) as caught:
        policy_gradient(**settings)
    assert said in str(caught.value)


def test_value_loss_is_half_the_squared_error():
    row, metrics = value().function(scored(values=[1.0, 3.0]), columns(returns=[2.0, 1.0]))
    assert row.tolist() == [0.5, 2.0]
    assert metrics["value/mean"].tolist() == [1.0, 3.0]


def test_clipped_value_loss_takes_the_worse_error():
    row, _ = value(clip=0.5).function(
        scored(values=[2.0, 1.2, -1.0]), columns(returns=[2.0, 2.0, 3.0], values=[0.0, 1.0, 0.0])
    )
    # Near the old value: 0.5, 1.2, -0.5.
    assert row.tolist() == pytest.approx([0.5 * 1.5**2, 0.5 * 0.8**2, 0.5 * 4.0**2], rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_found_by_name(name):
    loss = find_loss(name)
    assert loss.name == name
    assert find_loss(loss) is loss
    assert loss.role == ("critic" if name == "value" else "policy")


@pytest.mark.parametrize(
    ("loss", "word"), [("sftt", "Did you mean 'sft'?"), (3, "loss=3"), (None, "loss=None")]
)
def test_losses_that_do_not_exist(loss, word):
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        find_loss(loss)
    assert word in str(caught.value)


# Metrics.


REDUCTIONS = {"a": "sum", "b": "mean", "c": "max", "d": "min"}


def summed(*micro_batches):
    """One rank's partial results, as they travel."""
    sums = MetricSums(REDUCTIONS)
    for values, counted in micro_batches:
        row = torch.tensor(values)
        sums.add(dict.fromkeys(REDUCTIONS, row), torch.tensor(counted))
    return {name: part.tolist() for name, part in sums.rows().items()}


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "sum"])
def test_a_metric_that_is_nan_on_one_rank_is_nan(reduction, bad):
    rows = [{"a": [math.nan if rank == bad else float(rank), 1.0]} for rank in range(3)]
    assert math.isnan(reduce_metrics(rows, {"a": reduction})["a"])


@pytest.mark.parametrize("clip", [{"clip_low": -0.1}, {"clip_high": -1.0}, {"clip_high": math.nan}], ids=str)
def test_a_clip_that_turns_the_gradient_around_is_refused(clip):
    with pytest.raises(sp.ConfigError, match=next(iter(clip))):
        policy_gradient(**clip)


def test_each_metric_is_reduced_as_it_declares():
    first = summed(([1.0, 5.0, 100.0], [True, True, False]), ([-3.0], [True]))
    second = summed(([2.0, float("nan")], [True, False]))
    assert reduce_metrics([first, second], REDUCTIONS) == {"a": 5.0, "b": 1.25, "c": 5.0, "d": -3.0}


def test_means_are_of_tokens_not_of_ranks():
    first = summed(([1.0] * 9, [True] * 9))
    second = summed(([11.0], [True]))
    assert reduce_metrics([first, second], REDUCTIONS)["b"] == 2.0


def test_a_rank_without_tokens_does_not_move_a_metric():
    nothing = summed(([0.0], [False]))
    negative = summed(([-4.0, -2.0], [True, True]))
    assert reduce_metrics([nothing, negative], REDUCTIONS) == {"a": -6.0, "b": -3.0, "c": -2.0, "d": -4.0}
    assert reduce_metrics([nothing, nothing], REDUCTIONS) == dict.fromkeys(REDUCTIONS, 0.0)


def test_the_split_into_micro_batches_does_not_matter():
    values, counted = [1.0, -2.0, 7.0, 0.5], [True, True, False, True]
    whole = summed((values, counted))
    split = summed(*[([v], [c]) for v, c in zip(values, counted, strict=True)])
    assert reduce_metrics([whole], REDUCTIONS) == reduce_metrics([split], REDUCTIONS)


def test_an_undeclared_metric_is_a_mean():
    sums = MetricSums({})
    sums.add({"new": torch.tensor([1.0, 3.0])}, torch.tensor([True, True]))
    rows = {name: part.tolist() for name, part in sums.rows().items()}
    assert reduce_metrics([rows], sums.reductions) == {"new": 2.0}


def test_ranks_with_other_metrics():
    with pytest.raises(sp.TrainFault, match="T306") as caught:
        reduce_metrics([{"a": [1.0, 1.0]}, {"a": [1.0, 1.0]}, {"a": [1.0, 1.0], "b": [1.0, 1.0]}], {})
    assert caught.value.findings[0].rank == 2
    assert "['b']" in str(caught.value)


def test_unknown_reduction():
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        MetricSums({"a": "avg"})
    assert "'a'" in str(caught.value)
    assert "mean" in str(caught.value)


# The optimizer and schedules.


def optimizer_groups(family, role, strategy, lora):
    config = peft.LoraConfig(target_modules=["q_proj"], r=2) if lora else None
    policy = sp.load(sp.RandomInit(tiny_config(family)), role=role, strategy=strategy, lora=config)
    optimizer = sp.make_optimizer(policy, lr=0.1, weight_decay=0.3)
    names = {param: name for name, param in policy.named_parameters()}
    shapes = {info.name: len(info.shape) for info in policy.inventory.parameters}
    groups = [
        (group["weight_decay"], [(names[param], shapes[names[param]]) for param in group["params"]])
        for group in optimizer.param_groups
    ]
    trainable = {name for name, param in policy.named_parameters() if param.requires_grad}
    return groups, trainable, optimizer.defaults["fused"]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("family", "role", "lora"),
    [
        ("qwen2", "policy", False),
        ("llama_tied", "policy", False),
        ("llama", "policy", True),
        ("llama", "critic", False),
    ],
)
def test_norms_and_biases_do_not_decay(family, role, strategy, lora):
    (groups, trainable, fused) = run_ranks(1, optimizer_groups, family, role, strategy, lora)[0]
    assert fused
    held = [name for _, members in groups for name, _ in members]
    assert len(held) == len(set(held))
    assert set(held) == trainable
    for decay, members in groups:
        for name, ndim in members:
            assert decay == (0.3 if ndim > 1 else 0.0), name
    vectors = [name for name in held if "norm" in name or name.endswith("bias")]
    assert bool(vectors) != lora


def optimizer_of_reference():
    sp.make_optimizer(sp.load(sp.RandomInit(tiny_config("llama")), role="reference"))


def test_a_reference_has_no_optimizer():
    (outcome,) = run_ranks_outcomes(1, optimizer_of_reference)
    assert outcome[1] == "ConfigError"
    assert "reference has no trainable parameter" in outcome[2]


def rates(kind, steps, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = sp.make_schedule(optimizer, kind, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_constant_schedule_after_a_linear_warm_up():
    assert rates("constant", 5, warmup_steps=3) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates("constant", 3) == [2.0, 2.0, 2.0]


def test_cosine_schedule_ends_at_its_ratio_and_stays_there():
    found = rates("cosine", 8, warmup_steps=1, total_steps=5, final_ratio=0.1)
    half = 0.5 * (2.0 + 0.2)
    assert found[:2] == pytest.approx([1.0, 2.0])
    assert found[3] == pytest.approx(half)
    assert found[5:] == pytest.approx([0.2, 0.2, 0.2])
    assert found[1:] == sorted(found[1:], reverse=True)


@pytest.mark.parametrize(
    ("kind", "options", "word"), [("cosin", {}, "'cosine'"), ("cosine", {"warmup_steps": 2}, "total_steps")]
)
def test_schedules_that_cannot_be(kind, options, word):
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        rates(kind, 1, **options)
    assert word in str(caught.value)
