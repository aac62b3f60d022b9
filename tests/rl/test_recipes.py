"""The recipes with environments: the tiny one learns, those for GPUs pass a dry run, and their modules do what they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shardproof.cli import app
from tests.rl.runs import RECIPES, lines, write_rows

AGENT = RECIPES / "tiny-agent"


def load_module(path, monkeypatch):
    """A module that is in no package; `sys.path` and `sys.modules` are as before when the test ends."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.distributed
@pytest.mark.slow
def test_a_tiny_model_learns_to_call_a_tool(tmp_path):
    overrides = [
        "train.steps=10",
        "output.eval_prompts=200",
        "output.save_every=0",
        "output.save_model=false",
        "output.trackers=[]",
        f"output.folder={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "shardproof", "train", str(RECIPES / "tiny-tools.toml"), *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = {line["step"]: line["metrics"] for line in lines(tmp_path / "run" / "metrics.jsonl")}
    assert steps[0]["eval/reward"] < 0.2 and steps[10]["eval/reward"] > 0.8
    sampled = [steps[step]["reward/mean"] for step in range(1, 11)]
    assert sampled[0] < 0.2 and sampled[-1] > 0.4, [round(reward, 2) for reward in sampled]
    # Whatever is right was computed by the tool.
    assert sampled[-1] <= steps[10]["environment/calls"]


@pytest.mark.invariant
def test_held_out_products_are_in_no_training_in_either_order(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(RECIPES.parent / "scripts"), *sys.path])
    monkeypatch.delitem(sys.modules, "make_tiny_model", raising=False)
    monkeypatch.delitem(sys.modules, "tiny_agent", raising=False)
    script = load_module(RECIPES.parent / "scripts" / "make_tiny_agent.py", monkeypatch)

    def pairs(name):
        rows = lines(AGENT / f"products-{name}.jsonl")
        found = [tuple(map(int, row["prompt"].removesuffix("=").split("*"))) for row in rows]
        assert [row["answer"] for row in rows] == [str(a * b) for a, b in found]
        return found

    first, training, held_out = script.split_pairs()
    assert pairs("train") == training and pairs("evaluation") == held_out
    unordered = [{tuple(sorted(pair)) for pair in each} for each in (first, training, held_out)]
    assert len(unordered[2]) == 400 and not unordered[2] & (unordered[0] | unordered[1])
    assert not unordered[0] & unordered[1]


@pytest.mark.parametrize("name", ["search_agent", "code_agent"])
def test_the_agents_for_gpus_pass_a_dry_run_with_a_small_model(name, tmp_path, monkeypatch):
    rows = [{"question": "What is 6 times 7?", "answer": "42"}] * 80
    passages = write_rows(tmp_path / "passages.jsonl", [{"title": "Six", "text": "Six times 7 is 42."}])
    settings = [
        f"model.path={AGENT / 'model'}",
        f"data.train={write_rows(tmp_path / 'train.jsonl', rows)}",
        f"data.evaluation={write_rows(tmp_path / 'evaluation.jsonl', rows)}",
        "data.max_prompt_tokens=128",
        "environment.max_tokens=256",
        "rollout.engine=embedded",
        "rollout.max_new_tokens=16",
        "train.ranks=1",
        f"output.folder={tmp_path / 'run'}",
    ]
    if name == "search_agent":
        settings.append(f"environment.options.passages={json.dumps(str(passages))}")
    monkeypatch.setenv("SHARDPROOF_RECIPE_FOLDER", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = CliRunner().invoke(app, ["train", str(RECIPES / f"{name}.toml"), *settings, "--dry-run"])
    assert done.exit_code == 0, done.output


def test_the_search_agent_finds_passages_and_rewards_shared_words(tmp_path, monkeypatch):
    agent = load_module(RECIPES / "search_agent.py", monkeypatch)
    passages = [
        ("Paris", "Paris is the capital of France."),
        ("Lyon", "Lyon is a city in France."),
        ("Oslo", "Oslo is the capital of Norway, and a city."),
    ]
    index = agent.Index(passages)
    assert index.search("the CAPITAL of France?", 3)[0] == passages[0]
    assert index.search("city france", 1) == [passages[1]]
    assert index.search("Norway", 3) == [passages[2]]
    assert index.search("zebra", 3) == agent.Index([]).search("zebra", 3) == []

    rows = [{"title": title, "text": text} for title, text in passages]
    search = agent.Search(str(write_rows(tmp_path / "passages.jsonl", rows)), results=1)
    search.start({"answer": "Oslo"}, seed=0)
    assert search.search("Norway") == "Oslo: Oslo is the capital of Norway, and a city."
    assert search.search("zebra") == "Nothing was found."

    assert agent.shared_words("oslo!", "Oslo") == 1.0
    assert agent.shared_words("It is Oslo", "Oslo") == pytest.approx(0.5)
    assert agent.shared_words("Oslo Oslo", "Oslo") == pytest.approx(2 / 3)
    assert agent.shared_words("", "Oslo") == agent.shared_words("Paris", "") == 0.0
