"""The proof ledger and the facts of a run: what a run leaves that says what was compared."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import fail
from shardproof.report.ledger import alerts_of
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
        ("tokens", "policy"): 2,
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


def test_every_step_proves_its_tokens_and_some_have_a_line(tmp_path):
    overrides = ["train.steps=5", "output.eval_every=3", "output.save_model=false"]
    run_ranks(2, run_recipe, small_recipe(tmp_path, *overrides))
    proofs = [proof for proof in proofs_of(tmp_path) if proof["proof"] == "tokens"]
    assert [proof["step"] for proof in proofs] == [1, 3, 5] and all(proof["passed"] for proof in proofs)
    steps = [line["metrics"] for line in lines(tmp_path / "metrics.jsonl") if line["step"]]
    assert all(step["ledger/tokens"] == pytest.approx(24 * step["completion/length"]) for step in steps)
    details = proofs[0]["details"]
    assert details == {
        "tokens": steps[0]["ledger/tokens"],
        "trained": steps[0]["ledger/tokens"],
        "turns": 24,
        "conversations": 24,
    }
    text = (
        f"{details['tokens']} sampled tokens of 24 turns in 24 conversations are as the engine returned them"
    )
    assert text in proofs[0]["text"]


def run_with_a_changed_token(recipe: str) -> tuple[str, list[str]]:
    """A run in which, on rank 1, somebody writes into the second step's batch before it is trained on."""
    from shardproof.rl import loop

    collect, updated = loop.collect, []
    update = loop.update

    def changed(*given: Any, step: int, **settings: Any) -> Any:
        experience = collect(*given, step=step, **settings)
        if step == 1 and torch.distributed.get_rank() == 1:
            experience.batch.sequences[2][-1] += 1
        return experience

    def counted(*given: Any, **settings: Any) -> Any:
        updated.append("update")
        return update(*given, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", changed)
        patch.setattr(loop, "update", counted)
        return caught(recipe), updated


@pytest.mark.fault
def test_a_token_that_was_not_sampled_stops_every_rank_before_the_update(tmp_path):
    first, second = run_ranks(2, run_with_a_changed_token, small_recipe(tmp_path, "train.steps=3"))
    assert first == second and first[1] == ["update"]
    assert first[0].startswith("R507 attest: rank 1: trajectory 2 of prompt 1, turn 1, token ")
    assert "the batch has " in first[0] and "the engine sampled " in first[0]
    *_, failed = proofs_of(tmp_path)
    assert (failed["proof"], failed["passed"], failed["step"]) == ("tokens", False, 2)
    assert [finding["code"] for finding in failed["findings"]] == ["R507"]
    assert "R507" in (tmp_path / "report.html").read_text()


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
    assert (failed["details"]["gap"], failed["details"]["version"]) == (0.25, 1) and failed["details"][
        "digest"
    ]
    assert facts_of(tmp_path)["status"] == "failed"
    findings = [event["text"] for event in lines(tmp_path / "events.jsonl") if event["kind"] == "finding"]
    assert len(findings) == 1 and findings[0].startswith("R503")
    assert "R503" in (tmp_path / "report.html").read_text()


def damaged_model(source: str, folder: Path) -> str:
    """A copy of a model whose weights are cut short."""
    folder.mkdir()
    for path in Path(source).iterdir():
        content = path.read_bytes()
        (folder / path.name).write_bytes(content[:-100] if path.suffix == ".safetensors" else content)
    return str(folder)


@pytest.mark.fault
def test_a_model_that_cannot_be_loaded_is_red_too(tmp_path):
    recipe = small_recipe(tmp_path / "run")
    changed = json.loads(recipe)
    changed["model"]["path"] = damaged_model(changed["model"]["path"], tmp_path / "model")
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


def run_with(module: str, name: str, error: str, recipe: str) -> str:
    """A run in which a function of a module raises on every rank."""
    place = importlib.import_module(module)
    right = getattr(place, name)

    def wrong(*arguments: Any, **settings: Any) -> None:
        raise fail(error, "test", "broken here.") if error[1:].isdigit() else OSError(28, error)

    setattr(place, name, wrong)
    try:
        return caught(recipe)
    finally:
        setattr(place, name, right)


@pytest.mark.fault
@pytest.mark.parametrize(
    "name, error, proof",
    [
        ("save_checkpoint", "E408", "checkpoint"),
        ("save_checkpoint", "No space left on device", "checkpoint"),
        ("save_pretrained", "E404", "export"),
        ("save_pretrained", "No space left on device", "export"),
    ],
)
def test_what_could_not_be_written_is_red(tmp_path, name, error, proof):
    """An error of the disk or of a library is no proof either, although it has no finding."""
    recipe = small_recipe(tmp_path, "train.steps=1")
    (said,) = run_ranks(1, run_with, "shardproof.rl.saves", name, error, recipe)
    assert error in said
    proofs = proofs_of(tmp_path)
    *_, failed = proofs
    assert (failed["proof"], failed["passed"]) == (proof, False) and error in failed["text"]
    assert all(each["passed"] for each in proofs[:-1]) and facts_of(tmp_path)["status"] == "failed"


@pytest.mark.fault
def test_a_damaged_checkpoint_is_a_red_resume_that_is_named_once(tmp_path):
    overrides = ["output.save_every=1", "output.save_model=false"]
    run_ranks(2, run_recipe, small_recipe(tmp_path, "train.steps=2", *overrides))
    damaged = next((tmp_path / "checkpoints" / "step-00000002").glob("*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    first, second = run_ranks(2, caught, small_recipe(tmp_path, "train.steps=3", *overrides))
    assert first == second and "--from STEP; available steps: 1" in first
    *_, failed = proofs_of(tmp_path)
    assert (failed["proof"], failed["passed"], failed["text"]) == ("resume", False, first)
    alerts = alerts_of(lines(tmp_path / "events.jsonl"))
    assert [(alert["kind"], alert["num"]) for alert in alerts] == [("failed", 1)]


@pytest.mark.fault
def test_an_engine_that_cannot_be_made_is_no_failed_load(tmp_path):
    """The loads before it were proved, and stay so."""
    recipe = small_recipe(tmp_path, "algorithm.kl_coef=0.01")
    said = run_ranks(2, run_with, "shardproof.rl.setup", "make_engine", "R501", recipe)
    assert all(each.startswith("R501") for each in said)
    proofs = proofs_of(tmp_path)
    assert Counter((each["proof"], each["role"], each["passed"]) for each in proofs) == {
        ("load", "policy", True): 2,
        ("load", "reference", True): 2,
    }


@pytest.mark.fault
def test_a_load_that_fails_is_red_under_its_role(tmp_path):
    recipe = json.loads(small_recipe(tmp_path / "run", "algorithm.name=ppo"))
    recipe["critic"] = {"path": damaged_model(recipe["model"]["path"], tmp_path / "model")}
    outcomes = run_ranks(2, caught, json.dumps(recipe))
    assert outcomes[0] == outcomes[1] and outcomes[0].startswith("L103")
    *passed, failed = proofs_of(tmp_path / "run")
    assert [(each["role"], each["passed"]) for each in passed] == [("policy", True)] * 2
    assert (failed["proof"], failed["role"], failed["passed"]) == ("load", "critic", False)
