"""Routing replay through the whole loop: the update chooses the engine's experts, with every engine, and says so if not."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from shardproof.rollout.local import ShardedEngine
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import RECIPES, run_recipe, small_recipe, trajectory

pytestmark = pytest.mark.distributed

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class Forgetful(ShardedEngine):
    """A user's engine that records no experts."""

    def __init__(self, policy, rollout):
        super().__init__(policy, rollout.batch_size)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    sizes = {"num_experts": 16, "num_experts_per_tok": 4}
    make_checkpoint(folder, "qwen3_moe", vocab_size=14, eos_token_id=1, **sizes)
    for name in TOKENIZER:
        shutil.copy(RECIPES / "tiny" / "model" / name, folder)
    return folder


def recipe(folder, model, *overrides):
    reward = 'reward.functions=[{name="tests.rl.user_rewards:varied"}]'
    settings = [
        f"model.path={model}",
        reward,
        "rollout.replay_experts=true",
        "train.steps=3",
        "output.eval_every=0",
    ]
    return small_recipe(folder, *settings, *overrides)


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_every_layout_and_engine_replays_alike(tmp_path, model):
    expected, saved = None, None
    for number, overrides in [
        (1, ["algorithm.updates_per_batch=2"]),
        (2, ["algorithm.updates_per_batch=2", "model.strategy=fsdp1", "model.checkpoint_activations=true"]),
        (2, ["algorithm.updates_per_batch=2", "rollout.engine=sharded", "model.sequence_parallel=2"]),
    ]:
        folder = tmp_path / f"{number}-{'-'.join(overrides)}"
        run_ranks(number, run_recipe, recipe(folder, model, *overrides))
        found, state = trajectory(folder), weights(folder)
        expected, saved = expected or found, saved or state
        for before, now in zip(expected, found, strict=True):
            assert now["reward/mean"] == before["reward/mean"] and now["updates"] == 2.0
            assert now["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-3, abs=1e-5)
        for name, tensor in saved.items():
            torch.testing.assert_close(state[name], tensor, rtol=1.6e-2, atol=1e-4)


def test_experts_of_older_weights_are_replayed_too(tmp_path, model):
    settings = ("rollout.ahead=1", "algorithm.updates_per_batch=2", "algorithm.trust_region=proximal")
    run_ranks(2, run_recipe, recipe(tmp_path, model, *settings))
    steps = trajectory(tmp_path)
    assert [step["lag/max"] for step in steps] == [0.0, 1.0, 1.0]
    assert [step["updates"] for step in steps] == [2.0, 2.0, 2.0]
    assert steps[0]["mismatch/max"] < 1e-4 < steps[1]["mismatch/max"]


def test_an_engine_without_experts_ends_the_run_on_every_rank(tmp_path, model):
    forgets = f"rollout.engine={__name__}:Forgetful"
    for outcome in run_ranks_outcomes(2, run_recipe, recipe(tmp_path, model, forgets)):
        assert "R511" in outcome[2] and "the engine returned no experts" in outcome[2]


def test_a_dense_model_is_refused_before_it_is_loaded(tmp_path):
    dense = small_recipe(tmp_path, "rollout.replay_experts=true")
    ((_, kind, message),) = run_ranks_outcomes(1, run_recipe, dense)
    assert kind == "ConfigError"
    assert "C001" in message and "rollout.replay_experts" in message and "no router" in message
