"""What the embedded engine keeps between turns: a run is the same with it, and nothing is left of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.rollout.kept import Found, KeptTurns
from shardproof.rollout.local import EmbeddedEngine
from tests.ranks import run_ranks
from tests.rl.conversations.kept import recipe_with, run_and_keep

pytestmark = pytest.mark.distributed


def run_and_count(recipe: str) -> dict[str, Any]:
    """A run's result, how many tokens it found kept, and how much was left when the policy was updated."""
    found: list[int] = []
    left: list[int] = []
    take, load = KeptTurns.take, EmbeddedEngine.load_weights

    def counted(self: KeptTurns, tokens: tuple[int, ...]) -> Found | None:
        entry = take(self, tokens)
        found.append(entry.length if entry is not None else 0)
        return entry

    def looked_at(self: EmbeddedEngine, stream: Any) -> Any:
        left.append(self.kept.nbytes)
        return load(self, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptTurns, "take", counted)
        patch.setattr(EmbeddedEngine, "load_weights", looked_at)
        result = run_and_keep(recipe)
    tokens = [[s["tokens"] for s in t["segments"]] for t in result["trajectories"]]
    return {
        "tokens": tokens,
        "found": sum(found),
        "left": sum(left),
        "gap": result["metrics"]["mismatch/max"],
    }


def test_a_run_is_the_same_with_and_without_what_its_engine_keeps(tmp_path):
    settings = ["environment.max_turns=6", "rollout.max_new_tokens=8", "train.steps=2"]
    results = []
    for gib in ("4", "0"):
        recipe = recipe_with(tmp_path / gib, "AsksAgain", *settings, f"rollout.cache_gib={gib}")
        (result,) = run_ranks(1, run_and_count, recipe)
        results.append(result)
    kept, plain = results
    assert kept["tokens"] == plain["tokens"]
    assert kept["found"] > 0 and plain["found"] == 0
    assert kept["left"] == 0, "nothing is kept while the policy is updated"
    assert kept["gap"] < 1e-3
