"""Algorithms learn: a small task, fixed seeds, one or two ranks, and the reward that a few steps must reach."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.rl.runs import run_recipe, small_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed


def make_task(folder):
    """Whatever is asked, the answer is seven: a model that adds must learn to do something else."""
    rows = [{"prompt": f"{a}+{b}=", "answer": "7"} for a in range(8) for b in range(8) if 5 <= a + b <= 9]
    return write_rows(folder / "seven.jsonl", rows)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("grpo", ["optimizer.lr=0.001"]),
        ("rloo", ["optimizer.lr=0.001"]),
        ("ppo", ["optimizer.lr=0.001", "critic.lr=0.003", "algorithm.updates_per_batch=2"]),
    ],
)
@pytest.mark.slow
def test_it_learns_on_two_ranks(tmp_path, algorithm, settings):
    overrides = [
        f"algorithm.name={algorithm}",
        f"data.train={make_task(tmp_path)}",
        "data.evaluation=none",
        "optimizer.schedule=constant",
        "output.eval_every=0",
        "output.save_model=false",
        "train.steps=25",
        "train.prompts_per_step=12",
        "rollout.group_size=8",
        *settings,
    ]
    run_ranks(2, run_recipe, small_recipe(tmp_path / "run", *overrides))
    rewards = [step["reward/mean"] for step in trajectory(tmp_path / "run")]
    assert rewards[0] < 0.4
    assert sum(rewards[-3:]) / 3 > 0.85, [round(reward, 2) for reward in rewards]


def test_leaving_out_groups_without_a_signal_changes_no_update(tmp_path):
    """A KL of next to nothing keeps every sequence in the loss; the weights must come out the same."""
    base = ["train.steps=3", "output.eval_every=0", "rollout.group_size=2", "train.prompts_per_step=8"]
    (dropped,) = run_ranks(1, run_recipe, small_recipe(tmp_path / "dropped", *base))
    (kept,) = run_ranks(1, run_recipe, small_recipe(tmp_path / "kept", *base, "algorithm.kl_coef=1e-12"))
    assert 0.0 < dropped["reward/group_std"] < 0.5, "some groups have a signal, some do not"
    assert dropped["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-4)
    assert dropped["reward/mean"] == kept["reward/mean"]
