"""Settings that a user allows to change on the way: they take effect, at the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import lines, small_recipe, trajectory
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


PLAIN = ("output.eval_every=0", "output.save_every=1", "output.keep=9", "output.save_model=false")
KL = ("output.eval_every=0", "output.save_every=1", "output.keep=9", "algorithm.kl_coef=0.1")
SYNCED = (*KL, "algorithm.reference_sync_every=2", "optimizer.schedule=constant")


def proofs(folder: Path, kind: str, role: str) -> list[dict[str, Any]]:
    found = [line for line in lines(folder / "events.jsonl") if line["kind"] == "proof"]
    return [line for line in found if (line["proof"], line["role"]) == (kind, role)]


def run_and_change(
    folder: Path, before: tuple[str, ...], after: tuple[str, ...], *allow: str
) -> list[dict[str, float]]:
    """The steps of a run that takes two with some settings, and two more with others."""
    run_ranks(1, run_with, small_recipe(folder, *before, "train.steps=2"))
    run_ranks(1, run_with, small_recipe(folder, *after, "train.steps=4"), allow)
    return trajectory(folder)


def test_a_reference_that_is_to_move_no_more_stays_where_it_was(tmp_path):
    still = (*KL, "optimizer.schedule=constant")
    key = "algorithm.reference_sync_every"
    steps = run_and_change(tmp_path / "run", SYNCED, still, key)
    run_ranks(1, run_with, small_recipe(tmp_path / "whole", *SYNCED, "train.steps=4"))
    assert steps == trajectory(tmp_path / "whole")[:4], (
        "it moves after the steps 2 and 4, and step 3 and 4 read it"
    )
    # Stopped once more, it is still there.
    run_ranks(1, run_with, small_recipe(tmp_path / "run", *still, "train.steps=5"))
    run_ranks(1, run_with, small_recipe(tmp_path / "run", *still, "train.steps=6"))
    loaded = [line["text"] for line in proofs(tmp_path / "run", "resume", "reference")]
    assert loaded == [f"resumed from step {step}" for step in (2, 4, 5)]


def test_a_reference_may_begin_to_move_on_the_way(tmp_path):
    still = (*KL, "optimizer.schedule=constant")
    steps = run_and_change(tmp_path / "run", still, SYNCED, "algorithm.reference_sync_every")
    assert len(steps) == 4
    assert [line["step"] for line in proofs(tmp_path / "run", "reference", "reference")] == [4]


@pytest.mark.parametrize("key", ["kl", "entropy"])
def test_a_coefficient_that_moves_begins_at_the_number_that_is_set_anew(tmp_path, key):
    target = (*KL, f"algorithm.{key}_target=50", "optimizer.schedule=constant")
    before, after = (f"algorithm.{key}_coef=0.1", f"algorithm.{key}_coef=0.7")
    steps = run_and_change(tmp_path / "run", (*target, before), (*target, after), f"algorithm.{key}_coef")
    coefs = [step[f"{key}/coef"] for step in steps]
    assert coefs[0] == 0.1 and coefs[2] == 0.7
    assert coefs[1] not in (0.1, 0.7) and coefs[3] not in (0.7, coefs[1])


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run of two steps, a checkpoint each, with which nothing below can go on."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    run_ranks(1, run_with, small_recipe(folder, *PLAIN, "train.steps=2"))
    return folder


@pytest.mark.parametrize(
    ("change", "allow", "said", "fix"),
    [
        ("optimizer.name=adamw_8bit", "optimizer.name", "keeps it in torch.uint8", "set optimizer.name"),
        ("optimizer.name=muon", "optimizer.name", "has 2 groups, the current one has 3", "set optimizer.name"),
        ("model.lora.r=4", "model.lora", "belongs to another model", "use the model that it was saved of"),
        ("algorithm.name=ppo", "algorithm", "has no critic", "use the old algorithm.name"),
    ],
)  # fmt: skip
def test_what_no_checkpoint_of_the_run_has_is_not_looked_for_in_older_ones(begun, change, allow, said, fix):
    recipe = small_recipe(begun, *PLAIN, change, "train.steps=3")
    (outcome,) = run_ranks_outcomes(1, run_with, recipe, (allow,))
    assert outcome[0] == "error" and said in outcome[2] and f"Fix: {fix}" in outcome[2]
    assert "--from" not in outcome[2]


def test_a_critic_that_is_needed_no_more_is_named(tmp_path):
    run_and_change(tmp_path, PPO, PPO[1:], "algorithm", "critic")
    notes = [line["text"] for line in lines(tmp_path / "events.jsonl") if line["kind"] == "resume"]
    assert notes == [
        "the critic of the checkpoint is not needed with these settings; later checkpoints have none"
    ]
