"""The demo recipe with vLLM in place of the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.config.load import from_json, load_recipe, to_json
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
STEPS = 16
SETTINGS = [
    f"train.steps={STEPS}",
    "optimizer.schedule=constant",
    "output.eval_every=0",
    "output.save_every=0",
    "output.save_model=false",
    "output.tensorboard=false",
]


def run_recipe(recipe: str) -> dict[str, float]:
    from shardproof.rl.loop import train

    return train(from_json(recipe))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    recipe = load_recipe(RECIPES / name, [*SETTINGS, f"output.folder={folder}", *overrides])
    run_ranks(2, run_recipe, to_json(recipe), timeout=400)
    return steps_of(folder)


def late_reward(steps: list[dict[str, Any]]) -> float:
    return sum(step["reward/mean"] for step in steps[-5:]) / 5


def test_the_two_demo_recipes_differ_in_their_engine_alone():
    plain, served = (load_recipe(RECIPES / name).model_dump() for name in ("tiny.toml", "tiny-vllm.toml"))
    assert served["rollout"].pop("engine") == "vllm" and plain["rollout"].pop("engine") == "embedded"
    assert served["output"].pop("folder") != plain["output"].pop("folder")
    assert served == plain


@pytest.mark.slow
def test_vllm_reaches_the_reward_of_the_embedded_engine(tmp_path):
    embedded = train("tiny.toml", tmp_path / "embedded")
    served = train("tiny-vllm.toml", tmp_path / "served")
    assert len(served) == len(embedded) == STEPS
    assert late_reward(embedded) > embedded[0]["reward/mean"] + 0.2
    assert late_reward(served) == pytest.approx(late_reward(embedded), abs=0.1)
    assert max(step["canary/gap"] for step in served) < 1e-4
    assert max(step["mismatch/max"] for step in served) < 1e-4
    assert [step["version"] for step in served] == list(range(1, STEPS + 1))
