"""Settings that a user allows to change on the way: they take effect, at the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.rl.runs import small_recipe, trajectory
from tests.rl.test_resuming import run_with

pytestmark = pytest.mark.distributed

PPO = ("algorithm.name=ppo", "output.eval_every=0", "output.save_every=1", "output.keep=5")


def groups_of(folder: Path, role: str, step: int) -> list[dict[str, Any]]:
    """The optimizer's groups in a checkpoint, with plain numbers alone."""
    return json.loads((folder / role / f"step-{step:08d}" / "state.json").read_text())["groups"]


def test_an_allowed_change_of_the_optimizer_takes_effect(tmp_path):
    folder = tmp_path / "run"
    run_ranks(1, run_with, small_recipe(folder, *PPO, "train.steps=1", "optimizer.schedule=constant"))
    changed = (
        *("optimizer.schedule=constant", "optimizer.lr=1e-5", "optimizer.weight_decay=0.5"),
        *("optimizer.betas=[0.5, 0.6]", "critic.lr=2e-5"),
    )
    allow = ("optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "critic.lr")
    run_ranks(1, run_with, small_recipe(folder, *PPO, "train.steps=2", *changed), allow)
    assert [step["lr"] for step in trajectory(folder)] == [1e-3, 1e-5]
    policy, critic = (groups_of(folder, role, 2) for role in ("checkpoints", "critic"))
    assert [group["lr"] for group in (*policy, *critic)] == [1e-5, 1e-5, 2e-5, 2e-5]
    assert [group["weight_decay"] for group in (*policy, *critic)] == [0.5, 0.0, 0.5, 0.0]
    assert json.dumps(policy[0]["betas"]).count("0.5") == json.dumps(policy[0]["betas"]).count("0.6") == 1


def test_a_cosine_over_other_steps_is_followed_from_the_first_step_on(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = ("output.eval_every=0", "output.save_every=1", "optimizer.schedule=cosine")
    run_ranks(1, run_with, small_recipe(whole, *settings, "train.steps=4"))
    for steps in (2, 4):
        run_ranks(1, run_with, small_recipe(parts, *settings, f"train.steps={steps}"))
    rates = [[step["lr"] for step in trajectory(folder)] for folder in (whole, parts)]
    assert rates[0][2:] == rates[1][2:]
    assert rates[0][1] != rates[1][1]
