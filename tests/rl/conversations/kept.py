"""Runs with an environment, and what they trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rl.conversations.environments import HERE
from tests.rl.runs import run_recipe, small_recipe

ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")


def recipe_with(folder: Path, name: str, *settings: str) -> str:
    """The small recipe, of one step, with an environment of these tests."""
    return small_recipe(folder, *ONE_STEP, f"environment.name={HERE}:{name}", *settings)


def run_and_keep(recipe: str) -> dict[str, Any]:
    """A run's last metrics, and of its last step the trajectories, the batch's masks and which advantages are zero."""
    from shardproof.rl import loop

    kept: list[Any] = []
    collect = loop.collect

    def keep(*given: Any, **settings: Any) -> Any:
        kept.append(collect(*given, **settings))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", keep)
        metrics = run_recipe(recipe)
    experience = kept[-1]
    return {
        "metrics": metrics,
        "trajectories": [trajectory.to_json() for trajectory in experience.trajectories],
        "tokens": experience.batch.sequences,
        "masks": [mask.tolist() for mask in experience.batch.columns["mask"]],
        "advantages": [row.tolist() for row in experience.batch.columns["advantages"]],
        "errors": experience.errors,
    }


def authors(trajectory: dict[str, Any]) -> tuple[str, ...]:
    return tuple(segment["author"] for segment in trajectory["segments"])


def sequences(trajectory: dict[str, Any]) -> list[dict[str, Any]]:
    return [*trajectory["earlier"], trajectory]
