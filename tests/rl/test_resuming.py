"""Going on with a run: in a folder of its own, with changed settings, from an older checkpoint, after what went wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardproof.config.load import from_json
from shardproof.rl.same_run import Resume
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import (
    RECIPES,
    comparable,
    lines,
    run_recipe,
    small_recipe,
    trajectory,
    write_rows,
)

pytestmark = pytest.mark.distributed

# A cosine depends on the number of steps, in which the parts of these runs differ.
SETTINGS = ("output.eval_every=0", "output.save_every=1", "output.keep=5", "optimizer.schedule=constant")


def recipe_of(folder: Path, *overrides: str) -> str:
    return small_recipe(folder, *SETTINGS, *overrides)


def run_with(recipe: str, allow: tuple[str, ...] = (), from_step: int | None = None) -> dict[str, float]:
    """One rank's run with the options of the command line; module-level, for `run_ranks`."""
    from shardproof.rl.loop import train

    return train(from_json(recipe), resume=Resume(allow, from_step))


def refusal(outcomes: list[Any], code: str = "C006") -> str:
    """What every rank was refused with."""
    assert {outcome[:2] for outcome in outcomes} == {("error", "ConfigError")}, outcomes
    assert code in outcomes[0][2]
    return outcomes[0][2]


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run of three steps, a checkpoint each; copies of it go on."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    run_ranks(1, run_recipe, recipe_of(folder, "train.steps=3"))
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    """A copy of the run in another place."""
    return shutil.copytree(begun, tmp_path / "run")


def test_a_run_does_not_touch_its_own_model(tmp_path):
    model = shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    outcomes = run_ranks_outcomes(2, run_recipe, recipe_of(model, f"model.path={model}"))
    assert "overlap" in refusal(outcomes)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_two_runs_do_not_share_a_folder(folder):
    """The folder is held by a process that is alive, then by one that was killed."""
    code = (
        "import sys, time; from pathlib import Path; from shardproof.folder_lock import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).acquire('output'); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = (folder / "metrics.jsonl").read_bytes()
        said = refusal(run_ranks_outcomes(2, run_recipe, recipe_of(folder, "train.steps=4")))
        assert f"process {holder.pid} on host {os.uname().nodename}" in said
        assert (folder / "metrics.jsonl").read_bytes() == before
    finally:
        holder.kill()
        holder.wait()
    (found,) = run_ranks(1, run_recipe, recipe_of(folder, "train.steps=3"))
    assert found["version"] == 3.0
    (found,) = run_ranks(1, run_recipe, recipe_of(folder, "train.steps=3"))  # the first one let go of it


def test_a_start_that_failed_refuses_nothing(tmp_path):
    wrong = recipe_of(tmp_path / "run", f"model.path={tmp_path / 'nowhere'}", "train.steps=1")
    (outcome,) = run_ranks_outcomes(1, run_recipe, wrong)
    assert outcome[0] == "error" and "L101" in outcome[2]
    (found,) = run_ranks(1, run_recipe, recipe_of(tmp_path / "run", "train.steps=1"))
    assert found["updates"] == 1.0


def test_what_cannot_change_results_may_change(folder, tmp_path):
    """After an out-of-memory, on another number of ranks, with data and model in other places."""
    data, model = tmp_path / "moved.jsonl", tmp_path / "moved"
    shutil.copy(RECIPES / "tiny" / "train.jsonl", data)
    shutil.copytree(RECIPES / "tiny" / "model", model)
    changed = (
        *("train.micro_batch_tokens=64", "rollout.batch_size=5", "model.checkpoint_activations=true"),
        *("model.strategy=fsdp1", f"data.train={data}", f"model.path={model}"),
    )
    whole = tmp_path / "whole"
    (expected,) = run_ranks(1, run_recipe, recipe_of(whole, "train.steps=4"))
    found, _ = run_ranks(2, run_recipe, recipe_of(folder, "train.steps=4", *changed))
    assert found["reward/mean"] == expected["reward/mean"]
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-3, abs=1e-5)
    assert json.loads((folder / "config.json").read_text())["model"]["strategy"] == "fsdp1"


def test_what_can_change_results_is_refused_with_both_values_unless_allowed(folder):
    changed = recipe_of(folder, "train.steps=4", "optimizer.lr=0.25")
    said = refusal(run_ranks_outcomes(2, run_recipe, changed))
    assert "(now 0.25)" in said and "optimizer.lr=0.00" in said and "--allow optimizer.lr" in said
    (found,) = run_ranks(1, run_with, changed, ("optimizer.lr",))
    assert found["version"] == 4.0
    (found,) = run_ranks(1, run_recipe, changed)  # it is the run's own now


@pytest.mark.parametrize("what", ["data", "weights", "tokenizer"])
def test_replaced_sources_are_refused_by_name_unless_allowed(folder, tmp_path, what):
    rows = lines(RECIPES / "tiny" / "train.jsonl")
    rows[-1]["answer"] = "another"
    model = shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "model")
    if what == "data":
        key, override = "data.train", f"data.train={write_rows(tmp_path / 'train.jsonl', rows)}"
    else:
        key, override = "model.path", f"model.path={model}"
    if what == "weights":
        raw = bytearray((model / "model.safetensors").read_bytes())
        raw[-3] ^= 1
        (model / "model.safetensors").write_bytes(raw)
    if what == "tokenizer":
        content = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**content, "added": 1}))
    said = refusal(run_ranks_outcomes(1, run_recipe, recipe_of(folder, "train.steps=4", override)))
    part = {"data": "sha256", "weights": "weights", "tokenizer": "tokenizer_config.json"}[what]
    assert f"{key}[{part}]=" in said and f"--allow {key}" in said
    run_ranks(1, run_with, recipe_of(folder, "train.steps=4", override), (key,))


def test_a_run_that_writes_no_model_saves_its_last_step_and_may_be_trained_longer(tmp_path):
    """Its steps after the last regular checkpoint were lost, and with save_every=0 it could not go on at all."""
    for every, saved in ((0, [3]), (2, [2, 3])):
        folder = tmp_path / str(every)
        settings = [f"output.save_every={every}", "output.save_model=false"]
        for steps in (3, 4):
            (found,) = run_ranks(1, run_recipe, recipe_of(folder, *settings, f"train.steps={steps}"))
            if steps == 3:
                names = sorted(path.name for path in (folder / "checkpoints").iterdir())
                assert [name for name in names if name[0] != "."] == [f"step-{step:08d}" for step in saved]
        assert found["version"] == 4.0 and not (folder / "model").exists()


def test_an_older_checkpoint_may_be_taken_and_nothing_is_lost(folder):
    before = trajectory(folder)
    (found,) = run_ranks(1, run_with, recipe_of(folder, "train.steps=2"), (), 1)
    assert comparable(found) == before[1]
    assert trajectory(folder) == before[:2]
    assert [line["step"] for line in lines(folder / "metrics.superseded.jsonl")] == [2, 3]
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir() if not path.name.startswith(".")) == [
        *("step-00000001", "step-00000002", "superseded-step-00000002", "superseded-step-00000003"),
    ]
    (found,) = run_ranks(1, run_recipe, recipe_of(folder, "train.steps=3"))
    assert trajectory(folder) == before, "the next resume takes the new step 2, not the old step 3"


def test_a_run_may_begin_again(folder):
    before = trajectory(folder)
    run_ranks(1, run_with, recipe_of(folder, "train.steps=2"), (), 0)
    assert trajectory(folder) == before[:2]
    assert len(lines(folder / "metrics.superseded.jsonl")) == 3
    for _ in range(2):
        run_ranks(1, run_with, recipe_of(folder, "train.steps=1", "output.eval_every=1"), (), 0)
        steps = [line["step"] for line in lines(folder / "metrics.jsonl")]
        assert steps == [0, 1], "the evaluation before the first step is taken again too"


def test_a_damaged_checkpoint_is_named_with_the_older_ones(folder):
    for path in (folder / "checkpoints" / "step-00000003").glob("*.bin"):
        path.write_bytes(b"")
    outcomes = run_ranks_outcomes(2, run_recipe, recipe_of(folder, "train.steps=4"))
    assert [outcome[:2] for outcome in outcomes] == [("error", "ExportFault")] * 2
    assert "step-00000003" in outcomes[0][2] and "--from STEP; available steps: 2, 1" in outcomes[0][2]
    (found,) = run_ranks(1, run_with, recipe_of(folder, "train.steps=3"), (), 2)
    assert found["version"] == 3.0


def test_a_complete_run_without_its_checkpoints_is_not_begun_again(folder):
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "metrics.jsonl").read_bytes()
    said = refusal(run_ranks_outcomes(2, run_recipe, recipe_of(folder, "train.steps=4")))
    assert "holds metrics of 3 steps, but no checkpoint to resume from" in said
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "events.jsonl"])
def test_a_full_disk_ends_the_step_on_every_rank(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/full")
    outcomes = run_ranks_outcomes(2, run_recipe, recipe_of(folder, "train.steps=5"))
    assert [outcome[:2] for outcome in outcomes] == [("error", "ExportFault")] * 2, outcomes
    assert "E408" in outcomes[0][2] and "No space left on device" in outcomes[0][2]


def test_a_report_that_cannot_be_written_costs_a_line_and_not_the_run(folder):
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    run_ranks(1, run_recipe, recipe_of(folder, "train.steps=3"))
    events = [line["text"] for line in lines(folder / "events.jsonl") if line["kind"] == "report"]
    assert len(events) == 1 and "report.html was not written" in events[0]
