"""Short runs of every algorithm: their recipes, and the rows of those that learn from given completions."""

from __future__ import annotations

import json
from pathlib import Path

from shardproof.config.algorithms import SPECS
from shardproof.config.load import from_json, load_recipe, to_json
from tests.rl.runs import RECIPES, TINY, lines, write_rows

NUM_STEPS = 5
SHORT = (
    f"train.steps={NUM_STEPS}",
    "train.prompts_per_step=4",
    "output.trackers=[]",
    "output.eval_every=0",
    "output.save_every=0",
    "output.save_model=false",
)
SAMPLED = ("rollout.group_size=4",)
# Recipes of algorithms that need another one than the demo's. A name that is in no place here samples and is rewarded.
OTHER_RECIPES = {
    "dpo": RECIPES / "tiny-dpo.toml",
    "reward_model": RECIPES / "tiny-reward-model.toml",
    "distillation": RECIPES / "tiny-distillation.toml",
}


def presets() -> list[tuple[str, str]]:
    """(name, preset) of every algorithm and of its variants."""
    found = [(name, "") for name in SPECS]
    for preset in ("trl", "verl"):
        found += [(name, preset) for name, spec in SPECS.items() if getattr(spec, preset) is not None]
    return found


def _rows(name: str, folder: Path) -> list[str]:
    """The overrides for a few rows with what the algorithm learns from."""
    rows = lines(RECIPES / "tiny" / "pairs.jsonl")[:40]
    if name == "sft":
        rows = [{**row, "completion": row["chosen"]} for row in rows]
    elif name == "kto":
        kinds = {"chosen": True, "rejected": False}
        rows = [
            {**row, "completion": row[kind], "label": label} for row in rows for kind, label in kinds.items()
        ]
    return [f"data.train={write_rows(folder / f'{name}.jsonl', rows)}", "data.evaluation=none"]


def preset_recipe(name: str, preset: str, folder: Path, *overrides: str) -> str:
    """A run of a few steps of a few samples, as the ranks get it."""
    run = folder / "-".join(filter(None, (name, preset)))
    given = [f"algorithm.name={name}", *([f"algorithm.preset={preset}"] if preset else [])]
    if SPECS[name].samples:
        given += SAMPLED
    if name == "gdpo":
        given.append("reward.normalise=each")
    settings = [*SHORT, *given, *_rows(name, folder), f"output.folder={run}", *overrides]
    return to_json(load_recipe(OTHER_RECIPES.get(name, TINY), settings))


def run_all(recipes: list[str]) -> list[str]:
    """One rank's runs, one after the other, with what each ended with."""
    from shardproof.rl.loop import train

    found = []
    for text in recipes:
        recipe = from_json(text)
        try:
            found.append(json.dumps(train(recipe)))
        except Exception as error:
            error.add_note(f"in {recipe.output.folder}")
            raise
    return found
