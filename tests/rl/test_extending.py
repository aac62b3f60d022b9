"""docs/extending.md shows the files of docs/examples, and each of them runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.rl.runs import RECIPES, lines, run_recipe, small_recipe

pytestmark = pytest.mark.distributed

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"
FAST = ("train.steps=2", "output.eval_every=0", "output.save_model=false")


def test_the_page_shows_every_example_as_it_is():
    page = (DOCS / "extending.md").read_text()
    shown = re.findall(r"`docs/examples/(\w+\.py)`:\n\n```python\n(.*?)```\n", page, re.DOTALL)
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert dict(shown) == files
    assert len(shown) == len(files) == 7
    assert max(text.count("\n") for text in files.values()) <= 40


def run_with_examples(recipe: str, csv: str | None = None) -> dict[str, float]:
    """A run of a user whose modules lie in docs/examples."""
    from shardproof.config.load import from_json
    from shardproof.rl.loop import train

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        if csv is None:
            return run_recipe(recipe)
        from csv_logger import CsvLogger

        return train(from_json(recipe), loggers=[CsvLogger(csv)])


def test_an_algorithm_a_reward_an_optimizer_and_a_logger(tmp_path):
    settings = [
        "algorithm.name=soft_median:SoftMedian",
        "algorithm.options={scale=2.0}",
        "reward.functions=[{name='concise:concise'}]",
        "optimizer.name=lion:Lion",
        "optimizer.options={cautious=true}",
    ]
    recipe = small_recipe(tmp_path / "run", *FAST, *settings)
    (metrics,) = run_ranks(1, run_with_examples, recipe, str(tmp_path / "csv"))
    assert metrics["updates"] == 1.0 and 0.0 < metrics["reward/mean"] < 1.0
    assert metrics["clip_fraction"] == 0.0 and metrics["loss/policy"] != 0.0
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    written = (tmp_path / "csv" / "grad_norm.csv").read_text().splitlines()
    assert written == [f"{line['step']},{line['metrics']['grad_norm']}" for line in steps]


def test_an_engine(tmp_path):
    recipe = small_recipe(tmp_path, *FAST, "rollout.engine=plain_engine:PlainEngine")
    (metrics,) = run_ranks(1, run_with_examples, recipe)
    assert metrics["updates"] == 1.0 and metrics["mismatch/max"] < 1e-4 > metrics["canary/gap"]


def test_an_environment(tmp_path):
    settings = [
        "environment.name=second_try:SecondTry",
        "environment.max_turns=2",
        "output.samples_per_step=24",
    ]
    run_ranks(1, run_with_examples, small_recipe(tmp_path, *FAST, *settings))
    asked_again = 0
    for sample in lines(tmp_path / "samples.jsonl"):
        answer = str(sum(int(number) for number in sample["prompt"].rstrip("=").split("+")))
        first, *rest = sample["completion"].split(sample["prompt"])
        assert len(rest) <= 1
        assert not rest or first != answer, "what is right is not asked for again"
        asked_again += len(rest)
    assert asked_again


def save_family(folder: str) -> None:
    """A folder of the new family: its config and code, and a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from modeling_scaled import ScaledConfig

        sizes: dict[str, Any] = {"vocab_size": 14, "hidden_size": 16, "intermediate_size": 32}
        config = ScaledConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    config.auto_map = {
        "AutoConfig": "modeling_scaled.ScaledConfig",
        "AutoModelForCausalLM": "modeling_scaled.ScaledForCausalLM",
    }
    config.save_pretrained(folder)
    for path in [*(RECIPES / "tiny" / "model").glob("token*"), EXAMPLES / "modeling_scaled.py"]:
        shutil.copy(path, folder)


def test_a_model_family(tmp_path):
    run_ranks(1, save_family, str(tmp_path / "model"))
    settings = [f"model.path={tmp_path / 'model'}", "model.random_init=true", "model.trust_remote_code=true"]
    recipe = small_recipe(tmp_path / "run", *FAST, *settings)
    (metrics,) = run_ranks(1, run_with_examples, recipe)
    assert metrics["updates"] == 1.0 and metrics["canary/gap"] < 1e-4
