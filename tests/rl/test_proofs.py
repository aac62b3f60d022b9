"""The proof ledger and the facts of a run: what a run leaves that says what was compared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.rl import handover
from tests.ranks import run_ranks
from tests.rl.runs import lines, run_recipe, small_recipe

pytestmark = pytest.mark.distributed


def proofs_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["kind"] == "proof"]


def facts_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_every_hand_over_of_a_run_has_its_line(tmp_path):
    overrides = ["algorithm.name=ppo", "algorithm.kl_coef=0.01", "train.steps=2", "output.save_every=1"]
    run_ranks(2, run_recipe, small_recipe(tmp_path, *overrides))
    proofs = proofs_of(tmp_path)
    assert Counter((proof["proof"], proof["role"]) for proof in proofs) == {
        ("load", "policy"): 2,
        ("load", "reference"): 2,
        ("load", "critic"): 2,
        ("sync", "policy"): 3,
        ("checkpoint", "policy"): 2,
        ("checkpoint", "critic"): 2,
        ("export", "policy"): 1,
    }
    assert all(proof["passed"] and proof["compared"] and proof["text"] for proof in proofs)
    assert sorted(proof["rank"] for proof in proofs if proof["proof"] == "load") == [0, 0, 0, 1, 1, 1]
    for proof in proofs:
        if proof["proof"] == "sync":
            assert proof["details"]["gap"] <= proof["details"]["tolerance"] and proof["details"]["digest"]
    facts = facts_of(tmp_path)
    assert (facts["status"], facts["step"], facts["ranks"]) == ("finished", 2, 2)
    assert facts["changed"]["algorithm.name"] == {"value": "ppo", "default": "grpo"}
    assert facts["packages"]["torch"] == torch.__version__ and facts["hardware"]["cores"] > 0


def test_a_resumed_run_notes_what_it_read(tmp_path):
    overrides = ["output.save_every=1", "output.save_model=false"]
    run_ranks(2, run_recipe, small_recipe(tmp_path, "train.steps=1", *overrides))
    run_ranks(2, run_recipe, small_recipe(tmp_path, "train.steps=2", *overrides))
    assert [proof["step"] for proof in proofs_of(tmp_path) if proof["proof"] == "resume"] == [1]
    assert facts_of(tmp_path)["step"] == 2


def run_with_a_wrong_canary(recipe: str) -> str:
    """A run whose engine disagrees with the trainer from the second sync on."""
    gaps = iter([0.0])
    right = handover.canary_gap
    handover.canary_gap = lambda *arguments: next(gaps, 0.25)
    try:
        run_recipe(recipe)
    except Exception as error:
        return str(error)
    finally:
        handover.canary_gap = right
    return "nothing was raised"


@pytest.mark.fault
def test_a_hand_over_that_fails_is_red_and_the_run_has_its_page(tmp_path):
    first, second = run_ranks(2, run_with_a_wrong_canary, small_recipe(tmp_path))
    assert first == second and first.startswith("R503")
    *_, failed = proofs_of(tmp_path)
    assert (failed["proof"], failed["passed"], failed["step"]) == ("sync", False, 1)
    assert [finding["code"] for finding in failed["findings"]] == ["R503"]
    assert facts_of(tmp_path)["status"] == "failed"
    findings = [event["text"] for event in lines(tmp_path / "events.jsonl") if event["kind"] == "finding"]
    assert len(findings) == 1 and findings[0].startswith("R503")
    assert "R503" in (tmp_path / "report.html").read_text()


@pytest.mark.fault
def test_a_model_that_cannot_be_loaded_is_red_too(tmp_path):
    recipe = small_recipe(tmp_path / "run")
    source = json.loads(recipe)["model"]["path"]
    broken = tmp_path / "model"
    broken.mkdir()
    for path in Path(source).iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[:-100] if path.suffix == ".safetensors" else content)
    changed = json.loads(recipe)
    changed["model"]["path"] = str(broken)
    outcomes = run_ranks(2, caught, json.dumps(changed))
    assert outcomes[0] == outcomes[1] and outcomes[0].startswith("L103")
    (failed,) = proofs_of(tmp_path / "run")
    assert (failed["proof"], failed["passed"]) == ("load", False) and failed["findings"][0]["code"] == "L103"


def caught(recipe: str) -> str:
    try:
        run_recipe(recipe)
    except Exception as error:
        return str(error)
    return "nothing was raised"
