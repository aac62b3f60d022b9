"""Steps: ranks that would disagree, metrics that depend on the split, routers that are not there."""

import math

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from tests.museum.pieces import piece
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.train.test_step_faults import everything, load, my_batch, nan_loss_on, spoil_gradient

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

MLP = "model.layers.1.mlp"


def step_until_it_raises(family, spoil, loss, options):
    """Three steps in a row that cannot be taken: (results, what they changed, the fault)."""
    policy = load(family, **options)
    optimizer = sp.make_optimizer(policy, lr=1e-2, weight_decay=0.1)
    schedule = sp.make_schedule(optimizer, "cosine", warmup_steps=2, total_steps=10)
    assert sp.train_step(policy, my_batch(), optimizer, schedule).stepped
    if spoil is not None:
        spoil(policy)
    before = everything(policy, optimizer, schedule)
    results, fault = [], None
    for _ in range(3):
        try:
            results.append(sp.train_step(policy, my_batch(), optimizer, schedule, loss=loss or "sft"))
        except sp.TrainFault as error:
            fault = error.findings
    return results, before == everything(policy, optimizer, schedule), fault


def nan_gradient_on_rank_1(policy):
    spoil_gradient(policy, [1], MLP, math.nan)


def assert_skipped_together(replies, reason, rank, tensor):
    """Every rank skipped, said the same, changed nothing, and raised T302 with rank and tensor at the third time."""
    assert str(replies) == str(replies[:1] * len(replies))
    results, unchanged, fault = replies[0]
    assert [(r.stepped, r.reason, r.rank, r.tensor, r.version) for r in results] == [
        (False, reason, rank, tensor, 1)
    ] * 2
    assert unchanged
    assert [(f.code, f.rank, f.tensor) for f in fault] == [("T302", rank, tensor)]


@piece("skyrl-1370-skip")
@piece("skyrl-1370-zeroed")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_skyrl_1370_ranks_skip_together_and_nothing_moves(strategy):
    options = {"strategy": strategy}
    replies = run_ranks(2, step_until_it_raises, "llama", nan_gradient_on_rank_1, None, options)
    assert_skipped_together(replies, "a gradient is not finite", 1, MLP)


def step_with_nan_loss(options):
    return step_until_it_raises("llama", None, nan_loss_on(0), options)


@piece("torchtitan-4226")
def test_torchtitan_4226_a_loss_that_is_not_finite_stops_before_the_optimizer():
    replies = run_ranks(2, step_with_nan_loss, {})
    results, unchanged, fault = replies[0]
    assert unchanged and not any(result.stepped for result in results)
    assert {(r.reason, r.rank) for r in results} == {("the loss is not finite", 0)}
    assert [(f.code, f.rank) for f in fault] == [("T302", 0)]
    assert fault[0].tensor == results[0].tensor and fault[0].tensor.startswith("loss/")


EXPERTS = "model.layers.1.mlp.experts"


def nan_gradient_of_the_experts(policy):
    spoil_gradient(policy, [1], EXPERTS, math.nan)


@piece("skyrl-1370-experts")
def test_skyrl_1370_experts_under_recomputation():
    options = {"checkpoint_activations": True}
    clean = run_ranks(2, train_experts, options)
    plain = run_ranks(2, train_experts, {})
    # The route is replayed: recomputation changes neither loss nor gradient, whatever experts got no token.
    assert clean[0] == pytest.approx(plain[0], rel=1e-6) and clean[0] == clean[1]
    replies = run_ranks(2, step_until_it_raises, "qwen3_moe", nan_gradient_of_the_experts, None, options)
    assert_skipped_together(replies, "a gradient is not finite", 1, EXPERTS)


def train_experts(options):
    policy = load("qwen3_moe", **options)
    # Every token to the same two experts: six of eight get none.
    for name, param in policy.named_parameters():
        if name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                param.zero_()
    result = sp.train_step(policy, my_batch(), sp.make_optimizer(policy, lr=1e-2))
    return result.loss, result.grad_norm


def metrics_that_rank_1_does_not_have(scored, columns):
    metrics = {"entropy": scored.logps.detach()}
    return -scored.logps, metrics if dist.get_rank() == 0 else {}


def step_with_a_rank_that_reports_nothing():
    policy = load()
    loss = sp.Loss("sft", metrics_that_rank_1_does_not_have, metrics={"entropy": "mean"})
    sp.train_step(policy, my_batch(), sp.make_optimizer(policy), loss=loss)


@piece("skyrl-1370-metrics")
@piece("skyrl-1822")
def test_skyrl_1822_a_rank_that_reports_nothing_is_named():
    for kind, error, message in run_ranks_outcomes(2, step_with_a_rank_that_reports_nothing, timeout=60):
        assert (kind, error) == ("error", "TrainFault")
        assert message.startswith("T306") and "rank 1" in message and "'entropy'" in message


def mean_over_an_uneven_batch(micro_batch_tokens):
    """Rank 0 has many tokens, rank 1 few: the mean of the metric, and what a mean of means would be."""
    policy = load()
    mine = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 4, 5]] if dist.get_rank() == 0 else [[20, 21]]
    loss = sp.Loss("sft", lambda s, c: (-s.logps, {"logp": s.logps.detach()}), metrics={"logp": "mean"})
    expected = torch.cat(sp.logprobs(policy, mine)).float().cpu()
    sums = [None, None]
    dist.all_gather_object(sums, (float(expected.sum()), expected.numel(), float(expected.mean())))
    batch = sp.Batch(mine)
    result = sp.train_step(
        policy, batch, sp.make_optimizer(policy), loss=loss, micro_batch_tokens=micro_batch_tokens
    )
    truth = sum(s[0] for s in sums) / sum(s[1] for s in sums)
    return result.metrics["logp"], truth, sum(s[2] for s in sums) / 2


@piece("skyrl-1822")
@pytest.mark.parametrize("micro_batch_tokens", [3, 64])
def test_skyrl_1822_metrics_are_means_over_the_global_batch(micro_batch_tokens):
    for found, truth, mean_of_means in run_ranks(2, mean_over_an_uneven_batch, micro_batch_tokens):
        assert found == pytest.approx(truth, rel=1e-4)
        assert abs(mean_of_means - truth) > 1e-2


def ask_a_dense_model_for_its_router(family):
    policy = load(family)
    result = sp.train_step(policy, my_batch(), sp.make_optimizer(policy), router_coef=0.01)
    return result.stepped


@piece("skyrl-1370-router")
def test_skyrl_1370_router_logits():
    for kind, error, message in run_ranks_outcomes(2, ask_a_dense_model_for_its_router, "llama"):
        assert (kind, error) == ("error", "ConfigError")
        assert message.startswith("C001") and "'llama' has no router" in message
    # Both spellings of the number of experts are known: num_experts, and num_local_experts.
    assert run_ranks(2, ask_a_dense_model_for_its_router, "qwen3_moe") == [True, True]
    assert run_ranks(2, ask_a_dense_model_for_its_router, "mixtral") == [True, True]
