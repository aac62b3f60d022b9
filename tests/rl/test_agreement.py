"""Ranks that were started with different versions, code, recipes, data or rewards do not train."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers

from shardproof.config.load import load_recipe
from shardproof.rl import agreement, compared_files
from shardproof.rl.compared_files import digests_of
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import RECIPES, TINY, lines, run_recipe, small_recipe, write_rows

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")


def run_one_of(recipes: list[str]) -> dict[str, float]:
    """A rank's run of its own recipe: the last one, for ranks that the list does not reach."""
    return run_recipe(recipes[min(dist.get_rank(), len(recipes) - 1)])


def refused(num_ranks: int, function: Any, *args: Any) -> str:
    """What every rank says."""
    outcomes = run_ranks_outcomes(num_ranks, function, *args)
    assert {outcome[:2] for outcome in outcomes} == {("error", "ConfigError")}, outcomes
    (message,) = {outcome[2] for outcome in outcomes}
    assert message.startswith("C003 settings: ")
    return message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=0.01", "optimizer.lr is 0.01 on rank 1, 0.001 on rank 0."),
        ("rollout.temperature=0.5", "rollout.temperature is 0.5 on rank 1, 1.0 on rank 0."),
        ("train.steps=3", "train.steps is 3 on rank 1, 1 on rank 0."),
        ("train.seed=1", "train.seed is 1 on rank 1, 0 on rank 0."),
        ("model.lora.r=4", "model.lora is missing on rank 1, null on rank 0; model.lora.r is 4 on rank 1"),
        ("reward.functions=[{name='exact_match',weight=2}]", 'reward.functions is [{"name": "exact_match", "weight": 2.0'),
    ],
)  # fmt: skip
def test_another_recipe_on_one_rank_is_refused_with_key_rank_and_values(tmp_path, override, said):
    recipes = [small_recipe(tmp_path, *ONE_STEP), small_recipe(tmp_path, *ONE_STEP, override)]
    message = refused(2, run_one_of, recipes)
    assert "ranks do not have the same recipe" in message and said in message
    assert not tmp_path.exists() or not list(tmp_path.iterdir()), "nothing has begun"


def test_the_rank_that_differs_is_named_also_if_it_is_the_first(tmp_path):
    recipes = [small_recipe(tmp_path, *ONE_STEP, "optimizer.lr=0.01"), small_recipe(tmp_path, *ONE_STEP)]
    assert "optimizer.lr is 0.01 on rank 0, 0.001 on ranks 1, 2." in refused(3, run_one_of, recipes)


def test_other_data_on_one_rank_is_refused(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 7)]
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    for other in (rows[::-1], rows[:-1], [*rows[:-1], {**rows[-1], "answer": "13"}]):
        paths = [write_rows(tmp_path / "one" / "rows.jsonl", rows)]
        paths.append(write_rows(tmp_path / "other" / "rows.jsonl", other))
        recipes = [small_recipe(tmp_path / "run", *ONE_STEP, f"data.train={path}") for path in paths]
        message = refused(2, run_one_of, recipes)
        digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in paths]
        said = f"data.train is sha256 {digests[1]} on rank 1, sha256 {digests[0]} on rank 0."
        assert f"ranks do not have the same data: {said}\nFix: give every host the same data" in message


def run_with_rewards(recipe: str, folders: list[Path]) -> dict[str, float]:
    """A run of a rank that finds its reward module in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folders[dist.get_rank()]), *sys.path])
        patch.delitem(sys.modules, "node_rewards", raising=False)
        try:
            return run_recipe(recipe)
        finally:
            sys.modules.pop("node_rewards", None)


def test_another_reward_of_the_same_name_on_one_rank_is_refused(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, worth in zip(folders, ("completion == row['answer']", "completion != row['answer']")):
        folder.mkdir()
        (folder / "node_rewards.py").write_text(
            f"def f(prompt, completion, row):\n    return float({worth})\n"
        )
    recipe = small_recipe(tmp_path / "run", *ONE_STEP, "reward.functions=[{name='node_rewards:f'}]")
    message = refused(2, run_with_rewards, recipe, folders)
    assert "ranks do not have the same rewards: source of node_rewards:f is " in message


def test_sources_of_users_algorithms_are_part_of_what_ranks_compare():
    name = "tests.rl.test_algorithms:Pairs"
    found = digests_of(compared_files.compared_files(load_recipe(TINY, [f"algorithm.name={name}"])).items())
    source = Path(__file__).with_name("test_algorithms.py").read_bytes()
    assert found[f"extensions/source of the algorithm {name}"] == hashlib.sha256(source).hexdigest()[:12]


def test_sources_of_environments_are_compared_without_importing_them(tmp_path, monkeypatch):
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "games" / "chess.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = 'environment.tools.functions=["games.chess:move", "games.absent:move"]'
    found = digests_of(compared_files.compared_files(load_recipe(TINY, [functions])).items())
    source = hashlib.sha256(b"raise RuntimeError('imported')").hexdigest()[:12]
    assert found["extensions/source of the environment games.chess:move"] == source
    assert found["extensions/source of the environment games.absent:move"] == "no source file"


def run_with_code(recipe: str, package: Path) -> dict[str, float]:
    """A run in which rank 1 has another package."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(compared_files, "PACKAGE", package)
        return run_recipe(recipe)


def test_other_code_on_one_rank_is_refused(tmp_path):
    package = tmp_path / "shardproof"
    shutil.copytree(compared_files.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = small_recipe(tmp_path / "run", *ONE_STEP)
    (package / "rl" / "advantages.py").write_text("negated = True\n")
    assert "ranks do not have the same code: shardproof is " in refused(2, run_with_code, recipe, package)


def run_with_version(recipe: str, version: str) -> dict[str, float]:
    """A run in which rank 1 has another transformers."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            # Not the imported name: transformers puts another module into its place while it is imported.
            patch.setattr(sys.modules["transformers"], "__version__", version)
        return run_recipe(recipe)


def test_another_version_on_one_rank_is_named_as_what_it_is(tmp_path):
    message = refused(2, run_with_version, small_recipe(tmp_path, *ONE_STEP), "5.0.0")
    said = f"ranks do not have the same versions: transformers is 5.0.0 on rank 1, {transformers.__version__} on rank 0."
    assert said in message and "install the same versions on every host" in message


def test_what_is_each_nodes_own_may_differ(tmp_path):
    shutil.copytree(RECIPES / "tiny", tmp_path / "copy")
    recipes = [small_recipe(tmp_path / "run", *ONE_STEP)]
    there = json.loads(recipes[0])
    there["model"]["path"] = str(tmp_path / "copy" / "model")
    for key in ("train", "evaluation"):
        there["data"][key] = str(tmp_path / "copy" / Path(there["data"][key]).name)
    there["train"]["ranks"] = 1
    recipes.append(json.dumps(there))
    first, _ = run_ranks(2, run_one_of, recipes)
    assert first["updates"] == 1.0 and len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


def compare(per_rank: list[dict[str, str]]) -> None:
    agreement.require_agreement(per_rank[dist.get_rank()])


def test_what_differs_on_many_ranks_or_in_many_keys_is_said_shortly():
    run_ranks(3, compare, [{"recipe/a": "1"}] * 3)
    long = {f"recipe/key{n}": "x" * 500 for n in range(20)}
    message = refused(3, compare, [long, long, {"versions/torch": "1"}])
    assert message.index("the same versions: torch is 1 on rank 2, missing on ranks 0, 1") < message.index(
        "key0"
    )
    assert "and 12 more" in message and len(message) < 3000
