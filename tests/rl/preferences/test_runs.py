"""Runs on pairs and labels: they learn, go on where they ended, and score with the reference they are told to."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.config.load import load_recipe, to_json
from shardproof.rl.checks import check_inputs
from tests.ranks import run_ranks
from tests.rl.runs import RECIPES, comparable, lines, numbers, run_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed

SMALL = (
    "train.steps=4",
    "train.prompts_per_step=6",
    "train.micro_batch_tokens=40",
    "optimizer.schedule=constant",
    "output.trackers=[]",
    "output.eval_every=2",
    "output.eval_prompts=5",
)
LORA = ("model.lora.r=4", "optimizer.lr=0.01")


def recipe_of(folder: Path, *overrides: str) -> str:
    settings = [*SMALL, f"output.folder={folder}", *overrides]
    return to_json(load_recipe(RECIPES / "tiny-dpo.toml", settings))


def make_labelled(folder: Path) -> list[str]:
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "completion": str(a + b + (a + b) % 2),
            "label": (a + b) % 2 == 0,
            "answer": "0",
        }
        for a in range(4)
        for b in range(3)
    ]
    data = write_rows(folder / "labelled.jsonl", rows)
    return ["algorithm.name=kto", f"data.train={data}", f"data.evaluation={data}"]


def few_pairs(folder: Path) -> list[str]:
    """Data of which all rows are soon scored."""
    return [
        f"data.{key}={write_rows(folder / name, lines(RECIPES / 'tiny' / name)[:24])}"
        for key, name in (("train", "pairs.jsonl"), ("evaluation", "pairs-evaluation.jsonl"))
    ]


def close(first: Path, second: Path, tolerance: float, but: tuple[str, ...] = ()) -> None:
    for a, b in zip(trajectory(first), trajectory(second), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - set(but):
            assert a[name] == pytest.approx(b[name], abs=tolerance, rel=tolerance), name


def test_the_tiny_recipe_learns_which_of_two_sums_is_right(tmp_path):
    overrides = [
        "output.trackers=[]",
        f"output.folder={tmp_path / 'run'}",
        "train.steps=24",
        "output.eval_every=24",
    ]
    recipe = to_json(load_recipe(RECIPES / "tiny-dpo.toml", overrides))
    first, second = run_ranks(2, run_recipe, recipe)
    assert comparable(first) == comparable(second)
    steps = trajectory(tmp_path / "run")
    assert steps[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3) and steps[0]["reward/margin"] == 0.0
    assert steps[-1]["loss/policy"] < 0.6 and steps[-1]["reward/accuracy"] > 0.75
    assert steps[-1]["eval/loss"] < 0.6 and steps[-1]["eval/reward/accuracy"] > 0.75
    assert steps[-1]["reward/margin"] == pytest.approx(
        steps[-1]["reward/chosen"] - steps[-1]["reward/rejected"]
    )


@pytest.mark.parametrize("kind", ["dpo", "dpo with LoRA, precomputed", "kto"])
def test_a_run_that_is_resumed_has_the_numbers_of_one_that_never_ended(tmp_path, kind):
    overrides = make_labelled(tmp_path) if kind == "kto" else []
    overrides += LORA if "LoRA" in kind else ()
    if "precomputed" in kind:
        overrides += ["algorithm.preference.precompute=true", *few_pairs(tmp_path)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, run_recipe, recipe_of(whole, *overrides))
    run_ranks(2, run_recipe, recipe_of(parts, *overrides, "train.steps=2"))
    run_ranks(2, run_recipe, recipe_of(parts, *overrides))
    assert numbers(parts) == numbers(whole)
    first = trajectory(whole)[0]["reward/chosen"]
    assert first == pytest.approx(0.0, abs=1e-6), "the policy begins as its own reference"
    assert trajectory(whole)[-1]["reward/chosen"] != 0.0


def test_the_reference_scores_before_the_first_step_what_it_would_in_every_step(tmp_path):
    precompute = "algorithm.preference.precompute=true"
    other = f"reference.path={RECIPES / 'tiny' / 'model'}"
    odd, few = "algorithm.preference.ld_alpha=0.4", few_pairs(tmp_path)
    for name, overrides in {"full": [odd, *few], "other": [other, *few]}.items():
        for folder, more in ((name, []), (f"{name}-once", [precompute])):
            run_ranks(2, run_recipe, recipe_of(tmp_path / folder, *overrides, *more, "train.steps=2"))
        # In the first step both completions of a pair are worth the same but for rounding.
        close(tmp_path / name, tmp_path / f"{name}-once", 2e-4, but=("reward/accuracy",))


def test_packed_sequences_have_the_loss_of_sequences_by_themselves(tmp_path):
    """A micro-batch holds many sequences end to end, none of which sees another: there is nothing to pack in advance."""
    sft = ["algorithm.name=sft", "algorithm.preference={}", "data.completion_column=chosen", "train.steps=2"]
    run_ranks(1, run_recipe, recipe_of(tmp_path / "packed", *sft, "train.micro_batch_tokens=4096"))
    run_ranks(2, run_recipe, recipe_of(tmp_path / "single", *sft, "train.micro_batch_tokens=1"))
    close(tmp_path / "packed", tmp_path / "single", 1e-5)


def test_kto_lowers_its_loss_and_reports_both_labels(tmp_path):
    overrides = [
        *make_labelled(tmp_path),
        "train.steps=16",
        "train.prompts_per_step=12",
        "optimizer.lr=0.002",
    ]
    run_ranks(2, run_recipe, recipe_of(tmp_path / "run", *overrides, "train.micro_batch_tokens=4096"))
    steps = trajectory(tmp_path / "run")
    assert steps[0]["loss/policy"] == pytest.approx(0.5) and steps[-1]["loss/policy"] < 0.47
    assert steps[-1]["reward/chosen"] > steps[-1]["reward/rejected"] and steps[-1]["kl/mean"] >= 0.0
    assert (
        steps[-1]["eval/loss"] < 0.47 and steps[-1]["eval/reward/chosen"] > steps[-1]["eval/reward/rejected"]
    )


def test_the_recipe_for_gpus_passes_a_dry_run_with_a_small_model(tmp_path):
    """Rows hold both conversations, as those of the data set do; one is too long and is cut."""
    asked = [{"role": "user", "content": "3*4="}]

    def row(better: str, worse: str) -> dict[str, object]:
        answers = {"chosen": better, "rejected": worse}
        return {key: [*asked, {"role": "assistant", "content": text}] for key, text in answers.items()}

    rows = [row("12", "13"), row("12", "11" * 40), row("12", "12")] * 30
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = [
        f"model.path={RECIPES / 'tiny-agent' / 'model'}",
        f"data.train={data}",
        f"data.evaluation={data}",
        "data.max_length=32",
        f"output.folder={tmp_path / 'run'}",
    ]
    command = ["train", str(RECIPES / "ultrafeedback_dpo.toml"), *settings, "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    recipe = load_recipe(RECIPES / "ultrafeedback_dpo.toml", settings)
    prompts = check_inputs(recipe).prompts
    assert len(prompts) == 60, "rows with two equal completions are left out"
    assert max(len(prompt.tokens) + len(prompt.rejected) for prompt in prompts) == 32
