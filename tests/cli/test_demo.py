"""`shardproof demo`: what it proves, the wrong bytes it injects, what it learns, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.rl.runs import RECIPES, small_recipe, write_rows

pytestmark = pytest.mark.distributed

ROOT = RECIPES.parent
TINY = RECIPES / "tiny"


def prove(recipe_json: str, folder: str) -> dict[str, Any]:
    """What the ranks of a demo show before they train."""
    from shardproof.cli.demo_proofs import describe_faults, describe_load, inject_faults, load_model
    from shardproof.config.load import from_json
    from shardproof.shard.attest import attest

    recipe = from_json(recipe_json)
    policy = load_model(recipe)
    lines = describe_load(policy)
    injected = inject_faults(recipe, Path(folder))
    return {
        "load": lines,
        "faults": describe_faults(injected),
        "findings": {fault.place: fault.findings for fault in injected},
        "afterwards": attest(policy),
    }


@pytest.mark.fault
def test_one_wrong_byte_is_named_in_memory_in_transfer_and_on_disk(tmp_path):
    first, second = run_ranks(2, prove, small_recipe(tmp_path / "run"), str(tmp_path / "faults"))
    assert first == second
    name = "model.layers.1.mlp.down_proj.weight"
    (memory,), (transfer,), (disk,) = (first["findings"][place] for place in ("memory", "transfer", "disk"))
    assert (memory.code, memory.rank, memory.tensor) == ("S207", 1, name)
    assert (transfer.code, transfer.tensor) == ("E404", name)
    assert disk.code == "E407" and disk.tensor == "rank-0.bin"
    assert first["afterwards"] == [] and list(tmp_path.iterdir()) == []
    shown = "\n".join(first["load"] + first["faults"])
    assert "rank 0: loaded" in shown and "rank 1: loaded" in shown and "0 findings" in shown
    assert "MISSED" not in shown


def test_a_fault_that_no_check_finds_is_said_so():
    from shardproof.cli.demo_proofs import Injected, describe_faults

    assert "    nothing: THE FAULT WAS MISSED" in describe_faults([Injected("memory", "a bit", "attest", [])])


# The questions.


def read_sums(name: str) -> dict[str, str]:
    rows = [json.loads(line) for line in (TINY / name).read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows)
    return {row["prompt"]: row["answer"] for row in rows}


def turned(prompt: str) -> str:
    """`7+12=` for `12+7=`."""
    a, b = prompt.removesuffix("=").split("+")
    return f"{b}+{a}="


def test_the_held_out_questions_are_many_and_not_trained_on_in_either_order():
    training, held_out = read_sums("train.jsonl"), read_sums("evaluation.jsonl")
    assert len(held_out) >= 300
    assert not training.keys() & (held_out.keys() | {turned(prompt) for prompt in held_out})
    for prompt, answer in (training | held_out).items():
        a, b = prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(answer)


def test_the_model_was_made_without_the_held_out_questions():
    """The script that makes the model splits the sums as the files do, and trains on one side alone."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "scripts" / "make_tiny_model.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    training, held_out = made.split_sums(made.LIMIT, made.HELD_OUT)
    assert [f"{a}+{b}=" for a, b in training] == list(read_sums("train.jsonl"))
    assert [f"{a}+{b}=" for a, b in held_out] == list(read_sums("evaluation.jsonl"))
    seen = {row["prompt"] for row in made.careless_rows(training, 0)}
    assert seen == set(read_sums("train.jsonl"))


def test_the_recipe_evaluates_on_every_held_out_question_at_both_ends():
    from shardproof.config.load import load_recipe

    recipe = load_recipe(TINY.with_suffix(".toml"))
    assert recipe.output.eval_prompts >= len(read_sums("evaluation.jsonl"))
    assert recipe.output.eval_samples == 1 and recipe.train.steps % recipe.output.eval_every == 0
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) < 1_000_000


# The folder and the outcome.


def test_a_demo_replaces_only_what_a_demo_wrote(tmp_path):
    from shardproof.cli.demo import prepare
    from shardproof.errors import ConfigError

    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(
        ConfigError, match=r"C006 demo: .*mine holds files that the demo did not write[^$]*--output"
    ):
        prepare(foreign, None)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]

    output = tmp_path / "demo"
    first = prepare(output, None)
    assert Path(first.output.folder) == output / "run" and Path(first.model.path) == output / "tiny" / "model"
    (output / "run").mkdir()
    (output / "run" / "metrics.jsonl").write_text("old")
    (output / "notes.txt").write_text("mine")
    second = prepare(output, 5)
    assert (second.train.steps, second.output.eval_every) == (5, 5)
    assert not (output / "run").exists() and (output / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    from shardproof.cli.demo import prepare
    from shardproof.errors import ConfigError

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"C007 demo: .*file.* cannot be written"):
        prepare(tmp_path / "file" / "demo", None)


def test_the_outcome_is_told_with_its_standard_error_and_what_to_do_next(tmp_path, monkeypatch):
    from shardproof.cli.demo import describe_outcome, prepare, read_outcome

    recipe = prepare(tmp_path / "demo", None)
    scores = {0: (0.25, 0.0217), 1: None, 2: (0.9, 0.015)}
    rows = [
        {"step": step, "time": float(step), "metrics": {"eval/reward": score[0], "eval/reward_se": score[1]}}
        if score
        else {"step": step, "time": float(step), "metrics": {"reward/mean": 0.5}}
        for step, score in scores.items()
    ]
    (tmp_path / "demo" / "run").mkdir()
    write_rows(tmp_path / "demo" / "run" / "metrics.jsonl", rows)
    outcome = read_outcome(recipe)
    assert (outcome.steps, outcome.before, outcome.after) == (2, (0.25, 0.0217), (0.9, 0.015))
    assert outcome.questions == len(read_sums("evaluation.jsonl"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/elsewhere/bin/shardproof", "demo"])
    text = "\n".join(describe_outcome(outcome, Path("demo"), 61.0))
    assert "25.0% ± 2.2%" in text and "90.0% ± 1.5%" in text and "1 min 1 s" in text
    assert "demo/run/report.html" in text and 'from_pretrained("demo/run/model")' in text
    assert "/elsewhere/bin/shardproof train demo/tiny.toml data.train=" in text


def test_the_command_is_named_as_it_can_be_called_again(tmp_path, monkeypatch):
    from shardproof.cli.demo import own_command

    program = tmp_path / ".venv" / "bin" / "shardproof"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_command() == ".venv/bin/shardproof"
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command() == "shardproof"
    monkeypatch.setattr("sys.argv", [str(tmp_path / "__main__.py")])
    assert own_command().endswith(" -m shardproof")
