"""Coefficients that follow targets, and a reference that moves: the formulas, and runs that go on with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardproof.config.load import load_recipe
from shardproof.config.schema import Algorithm as Settings
from shardproof.config.schema import Rollout
from shardproof.errors import ConfigError
from shardproof.rl.algorithms.registry import find_algorithm, make_algorithm
from shardproof.rl.controllers import Controllers, next_entropy_weight, next_kl_coef
from tests.ranks import run_ranks
from tests.rl.runs import TINY, lines, numbers, run_recipe, small_recipe, trajectory

MOVING = (
    "algorithm.kl_coef=0.1",
    "algorithm.kl_target=0.001",
    "algorithm.kl_horizon=24",
    "algorithm.entropy_target=50.0",
    "algorithm.entropy_step=0.01",
    "algorithm.reference_sync_every=2",
    "algorithm.reference_mix=0.25",
    "optimizer.lr=0.001",
    "optimizer.schedule=constant",
    "output.eval_every=0",
)


@pytest.mark.parametrize(
    ("kl", "num", "wanted"),
    [
        (0.2, 50, 0.1 * (1 + 0.2 * 0.5)),
        (0.11, 50, 0.1 * (1 + 0.1 * 0.5)),
        (0.0, 100, 0.08),
        (-1.0, 999, 0.08),
    ],
)
def test_the_kl_coefficient_follows_its_formula(kl, num, wanted):
    assert next_kl_coef(0.1, kl, 0.1, 100, num) == pytest.approx(wanted, rel=1e-12)


def test_the_kl_coefficient_holds_the_kl_of_a_simple_system_at_its_target():
    coef = 0.01
    for _ in range(2000):
        coef = next_kl_coef(coef, 0.02 / coef, 0.1, 100, 10)  # the larger the coefficient, the smaller the KL
    assert 0.02 / coef == pytest.approx(0.1, rel=0.01)


def test_the_entropy_weight_moves_by_its_step_and_never_below_zero():
    assert next_entropy_weight(0.02, 0.1, 0.2, 0.005) == 0.025
    assert next_entropy_weight(0.02, 0.3, 0.2, 0.005) == 0.015
    assert next_entropy_weight(0.002, 0.3, 0.2, 0.005) == 0.0


def test_the_bonus_is_added_only_while_the_entropy_is_not_above_its_target():
    algorithm = make_algorithm(Settings(entropy_target=0.2, entropy_step=0.01), Rollout())
    controllers = Controllers(algorithm)
    seen = []
    for entropy in (0.1, 0.1, 0.3, 0.1, float("nan")):
        controllers.see({"entropy/mean": entropy}, 8)
        seen.append(algorithm.entropy_coef)
    assert seen == pytest.approx([0.01, 0.02, 0.0, 0.02, 0.02])
    other = make_algorithm(algorithm.settings, Rollout())
    Controllers(other).restore(json.loads(json.dumps(controllers.state())))
    assert other.entropy_coef == algorithm.entropy_coef
    assert other.loss.want_entropy


def test_the_loss_has_the_coefficients_of_now():
    algorithm = make_algorithm(Settings(kl_coef=0.1, kl_target=1.0), Rollout())
    before = algorithm.loss
    assert algorithm.loss is before
    algorithm.kl_coef = 0.2
    assert algorithm.loss.function.kl_coef == 0.2


def test_a_loss_of_the_users_that_would_not_follow_is_refused():
    class Fixed(find_algorithm("grpo")):
        loss = make_algorithm(Settings(kl_coef=0.1), Rollout()).loss

    Controllers(Fixed(Settings(kl_coef=0.1), Rollout()))
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_target: the loss of 'grpo' does not read self\.kl_coef"
    ):
        Controllers(Fixed(Settings(kl_coef=0.1, kl_target=1.0), Rollout()))


@pytest.mark.distributed
def test_a_run_whose_coefficients_and_reference_move_goes_on_with_the_same_numbers(tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, run_recipe, small_recipe(whole, *MOVING, "train.steps=4"))
    run_ranks(2, run_recipe, small_recipe(parts, *MOVING, "train.steps=3"))
    run_ranks(2, run_recipe, small_recipe(parts, *MOVING, "train.steps=4"))
    assert numbers(whole) == numbers(parts)

    metrics = trajectory(whole)
    kl, entropy = ([step[f"{name}/mean"] for step in metrics] for name in ("kl", "entropy"))
    coefs = [0.1]
    for value in kl[:-1]:
        coefs.append(next_kl_coef(coefs[-1], value, 0.001, 24, 24))
    assert [step["kl/coef"] for step in metrics] == coefs
    assert coefs[1] == pytest.approx(0.08)
    assert [step["entropy/coef"] for step in metrics] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert max(entropy) < 50.0
    moved = [line for line in lines(whole / "events.jsonl") if line.get("proof") == "reference"]
    assert [line["step"] for line in moved] == [2, 4]
    assert all(line["passed"] for line in moved)
    assert moved[0]["details"]["mix"] == 0.25


def moved_model(path: str, strategy: str, replicate: int) -> list[tuple[bool, int]]:
    """Whether each tensor of a model that moved is what the formula says; on every rank, of what it holds."""
    from transformers import AutoConfig

    import shardproof
    from shardproof.dist.mesh import make_mesh
    from shardproof.shard.moving import move_towards
    from shardproof.weights.source import RandomInit

    config = AutoConfig.from_pretrained(path)
    settings = {"strategy": strategy, "mesh": make_mesh(replicate=replicate), "param_dtype": torch.float32}
    source = shardproof.load(RandomInit(config, 1), role="policy", **settings)
    target = shardproof.load(RandomInit(config, 2), role="reference", **settings)
    theirs = {shard.name: shard.flat.clone() for shard in source.local_shards()}
    before = {shard.name: shard.flat.clone() for shard in target.local_shards()}
    num = move_towards(target, source, 0.3)
    wanted = {name: before[name] * 0.7 + 0.3 * theirs[name] for name in before}
    return [(torch.allclose(s.flat, wanted[s.name], atol=1e-7), num) for s in target.local_shards()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "replicate"), [("fsdp2", 3, 1), ("fsdp1", 2, 1), ("fsdp2", 2, 2)]
)
def test_a_reference_moves_element_by_element_without_leaving_its_ranks(strategy, num_ranks, replicate):
    found = run_ranks(num_ranks, moved_model, load_recipe(TINY).model.path, strategy, replicate)
    assert all(same for rank in found for same, _ in rank)
    assert len({num for rank in found for _, num in rank}) == 1


def scores_after_a_move(
    path: str, strategy: str, replicate: int
) -> tuple[list[list[float]], list[list[float]]]:
    """What a model says that was asked, moved and asked again, and what the one says that it moved to."""
    from transformers import AutoConfig

    import shardproof
    from shardproof.dist.mesh import make_mesh
    from shardproof.shard.moving import move_towards
    from shardproof.weights.source import RandomInit

    config = AutoConfig.from_pretrained(path)
    settings = {"strategy": strategy, "mesh": make_mesh(replicate=replicate), "compute_dtype": torch.float32}
    source = shardproof.load(RandomInit(config, 1), role="policy", **settings)
    target = shardproof.load(RandomInit(config, 2), role="reference", **settings)
    sequences = [[3, 4, 5, 6], [7, 8, 9]]
    shardproof.logprobs(target, sequences)
    move_towards(target, source, 1.0)
    found, wanted = ([row.tolist() for row in shardproof.logprobs(m, sequences)] for m in (target, source))
    return found, wanted


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "replicate"),
    [("fsdp2", 3, 1), ("fsdp1", 3, 1), ("fsdp1", 1, 1), ("fsdp1", 2, 2)],
)
def test_a_reference_scores_with_the_weights_that_it_moved_to(strategy, num_ranks, replicate):
    for found, wanted in run_ranks(
        num_ranks, scores_after_a_move, load_recipe(TINY).model.path, strategy, replicate
    ):
        assert found == wanted
