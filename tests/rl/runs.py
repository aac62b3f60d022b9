"""Small runs of the real loop, and what they leave behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rl.sources.rows import Columns, read_columns
from shardproof.rollout.trajectory import Trajectory

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TINY = RECIPES / "tiny.toml"
SMALL = (
    "train.steps=2",
    "train.prompts_per_step=6",
    "rollout.group_size=4",
    "output.trackers=[]",
    "output.eval_every=2",
    "output.eval_prompts=4",
    "output.save_every=0",
)


def small_recipe(folder: Path, *overrides: str) -> str:
    """The tiny recipe with a few steps of a few samples, as the ranks get it."""
    return to_json(load_recipe(TINY, [*SMALL, f"output.folder={folder}", *overrides]))


def run_recipe(recipe: str) -> dict[str, float]:
    """One rank's run; module-level, for `run_ranks`."""
    from shardproof.rl.loop import train

    return train(from_json(recipe))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_rows(
    source: str, prompt: str, answer: str | None, rewards: Sequence[RewardSpec | str] = ()
) -> list[dict[str, Any]]:
    """The rows of a source that have these columns, and what these rewards need."""
    return read_columns(source, Columns(prompt, answer, rewards))


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """What must be the same in every run of the same recipe."""
    clocks = ("tokens_per_s", "environment/seconds")
    return {k: v for k, v in metrics.items() if not k.startswith("time/") and k not in clocks}


def trajectory(folder: Path) -> list[dict[str, float]]:
    """The numbers of every step; step 0 is an evaluation alone, and not among them."""
    return [comparable(line["metrics"]) for line in lines(folder / "metrics.jsonl") if line["step"]]


def numbers(folder: Path) -> tuple[list[dict[str, float]], str]:
    """What a run computed: its metrics, and the bytes of its final weights."""
    weights = (folder / "model" / "model.safetensors").read_bytes()
    return trajectory(folder), hashlib.sha256(weights).hexdigest()


def with_last(made: Trajectory, **changes: Any) -> Trajectory:
    """A trajectory whose last segment is another."""
    return replace(made, segments=(*made.segments[:-1], replace(made.segments[-1], **changes)))
