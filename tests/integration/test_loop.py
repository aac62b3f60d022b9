"""The RL loop on real ranks: every algorithm, both engines, resume, and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.errors import ConfigError
from tests.ranks import run_ranks

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SMALL = ["train.steps=2", "train.prompts_per_step=6", "rollout.group_size=4", "output.tensorboard=false"]
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"]


def small_recipe(folder: Path, *overrides: str) -> str:
    settings = [
        *SMALL,
        "output.eval_every=2",
        "output.eval_prompts=4",
        "output.save_every=0",
        f"output.folder={folder}",
    ]
    return to_json(load_recipe(RECIPES / "tiny.toml", [*settings, *overrides]))


def run_recipe(recipe: str) -> dict[str, float]:
    from shardproof.rl.loop import train

    return train(from_json(recipe))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_parses(recipe):
    assert load_recipe(recipe).train.steps > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_runs_on_two_ranks(tmp_path, algorithm):
    overrides = [f"algorithm.name={algorithm}", "algorithm.kl_coef=0.01", "algorithm.entropy_coef=0.001"]
    first, second = run_ranks(2, run_recipe, small_recipe(tmp_path, *overrides))
    assert {k: v for k, v in first.items() if "time" not in k and k != "tokens_per_s"} == {
        k: v for k, v in second.items() if "time" not in k and k != "tokens_per_s"
    }
    assert first["updates"] == 1.0
    assert first["skipped"] == 0.0
    assert first["canary/gap"] < 1e-4
    assert first["mismatch/max"] < 1e-4
    assert 0.0 <= first["eval/reward"] <= 1.0
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    for name in ("config.json", "samples.jsonl", "events.jsonl", "report.html", "model/model.safetensors"):
        assert (tmp_path / name).exists(), name


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith("time/") and k != "tokens_per_s"}


def test_rank_count_strategy_and_engine_give_one_trajectory(tmp_path):
    expected = None
    for number, overrides in [
        (1, []),
        (2, ["model.strategy=fsdp1"]),
        (2, ["rollout.engine=sharded"]),
        (3, ["train.micro_batch_tokens=64"]),
        (4, ["model.sequence_parallel=2"]),
    ]:
        folder = tmp_path / f"{number}{len(overrides)}{'-'.join(overrides)}"
        results = run_ranks(number, run_recipe, small_recipe(folder, *overrides))
        found = comparable(results[0])
        expected = expected or found
        assert found["reward/mean"] == expected["reward/mean"]
        for name in (
            "loss/policy",
            "loss/total",
            "grad_norm",
            "reward/mean",
            "eval/reward",
            "completion/length",
        ):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), (number, overrides, name)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (expected, _) = run_ranks(2, run_recipe, small_recipe(whole, "train.steps=4", "output.save_every=2"))
    run_ranks(2, run_recipe, small_recipe(parts, "train.steps=2", "output.save_every=2"))
    (resumed, _) = run_ranks(2, run_recipe, small_recipe(parts, "train.steps=4", "output.save_every=2"))
    assert comparable(resumed) == comparable(expected)
    before = [comparable(line["metrics"]) for line in lines(whole / "metrics.jsonl")]
    after = [comparable(line["metrics"]) for line in lines(parts / "metrics.jsonl")]
    assert after == before


def test_a_run_folder_of_another_recipe_is_refused(tmp_path):
    run_ranks(1, run_recipe, small_recipe(tmp_path, "train.steps=1"))
    with pytest.raises(Exception, match=r"C006 .*optimizer\.lr"):
        run_ranks(1, run_recipe, small_recipe(tmp_path, "train.steps=1", "optimizer.lr=0.5"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stps=3", "did you mean 'train.steps'"),
        ("train.steps=many", "train.steps"),
        ("rollout.group_size=1", "needs at least 2"),
        ("critic.lr=0.1", "grpo has no critic"),
        ("algorithm.updates_per_batch=5", "not divisible"),
        ("no_equals_sign", "key=value"),
    ],
)
def test_a_bad_setting_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(RECIPES / "tiny.toml", [override])
