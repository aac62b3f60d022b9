"""Every algorithm of the registry, and each of its variants, for a few steps of the real loop on two ranks."""

from __future__ import annotations

import json
import math

import pytest

from shardproof.config.algorithms import SPECS
from shardproof.rl.algorithms.registry import ALGORITHMS
from tests.ranks import run_ranks
from tests.rl.preset_runs import NUM_STEPS, preset_recipe, presets, run_all
from tests.rl.runs import comparable, trajectory

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "embedded": (),
    "sharded": ("rollout.engine=sharded",),
    "embedded, LoRA": ("model.lora={r=4,alpha=8}",),
    "sharded, LoRA": ("rollout.engine=sharded", "model.lora={r=4,alpha=8}"),
}
OF_VARIANTS = ("embedded", "sharded, LoRA")
NUM_PARTS = 4  # of a layout's runs, which several processes share


def test_every_algorithm_is_in_the_table():
    assert {name for name, _ in presets()} == set(ALGORITHMS) == set(SPECS)


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_preset_trains(tmp_path, layout, part):
    # Variants differ in their formulas alone: both engines, and all weights or adapters, but not every pair of these.
    chosen = [(name, preset) for name, preset in presets() if not preset or layout in OF_VARIANTS]
    chosen, overrides = chosen[part::NUM_PARTS], LAYOUTS[layout]
    recipes = [preset_recipe(name, preset, tmp_path, *overrides) for name, preset in chosen]
    for (name, preset), *ranks in zip(chosen, *run_ranks(2, run_all, recipes, timeout=900), strict=True):
        first, second = (comparable(json.loads(each)) for each in ranks)
        case = f"{name} {preset} {layout}"
        assert first == second, case
        steps = trajectory(tmp_path / "-".join(filter(None, (name, preset))))
        assert len(steps) == NUM_STEPS, case
        assert all(math.isfinite(value) for step in steps for value in step.values()), case
        updated = [step for step in steps if step["updates"]]
        assert updated and any(step["grad_norm"] > 0 for step in updated), case
        assert all(step["skipped"] == 0 for step in steps), case
        if SPECS[name].samples:
            assert max(step.get("mismatch/max", 0.0) for step in updated) < 1e-3, case
