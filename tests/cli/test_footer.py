"""What a run says at its end, however it ended, and what a complete one says when it is started again."""

import json
import os

import pytest

from shardproof.cli.footer import Part
from shardproof.cli.options import Options
from shardproof.cli.readiness import says_complete
from shardproof.config.load import from_json
from tests.claims import leave_claim
from tests.rl.runs import small_recipe, write_rows


def step_of(number, **metrics):
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": number, "time": float(number), "metrics": named}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The third and the fourth step of a run of four, 104 seconds after they were begun, and what they left."""
    monkeypatch.setattr("shardproof.cli.footer.time.time", lambda: 1104.0)
    part = Part(from_json(small_recipe(tmp_path, "train.steps=4")), first_step=2, started=1000.0)
    times = {"time__rollout": 30.0, "time__update": 15.0, "time__sync": 1.0}
    rows = [step_of(0, eval__reward=0.25, eval__reward_se=0.02), *(step_of(n, **times) for n in (1, 2, 3))]
    rows.append(step_of(4, **times, eval__reward=0.75, time__evaluation=2.0))
    write_rows(tmp_path / "metrics.jsonl", rows)
    proofs = [{"step": step, "kind": "proof", "proof": "checkpoint", "seconds": 3.0} for step in (2, 4)]
    write_rows(tmp_path / "events.jsonl", [*proofs, {"step": 4, "kind": "skip", "text": ""}])
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "report.html").write_text("")
    return part


def footer(part, status, interrupted=False):
    path = os.path.join(part.recipe.output.folder, "run.json")
    with open(path, "w") as file:
        json.dump({"status": status, "step": 4}, file)
    return part.footer(interrupted)


def test_a_finished_run_says_what_it_learned_where_the_time_went_and_what_is_next(run, tmp_path):
    (tmp_path / "model").mkdir()
    outcome, times, report, model, after = footer(run, "finished")
    assert outcome == "Finished 4 steps. Held-out reward: 0.250 ± 0.020 at first, 0.750 at the end."
    shares = "rollout 1 min 0 s (58%), update 30 s (29%), start and other 7.0 s (7%), checkpoints 3.0 s (3%)"
    assert times == f"Time:    1 min 44 s: {shares}, sync 2.0 s (2%), evaluation 2.0 s (2%)"
    assert report.endswith("report.html") and model == f"Model:   {tmp_path / 'model'}"
    assert "raise train.steps" in after
    (tmp_path / "adapter").mkdir()
    assert f"Adapter: {tmp_path / 'adapter'}" in footer(run, "finished")


def test_a_run_without_rewards_ends_with_what_it_measured(run, tmp_path):
    for name, called in (("eval/reward/accuracy", "accuracy"), ("eval/pass@1", "pass@1")):
        rows = [{"step": step, "metrics": {name: value}} for step, value in ((0, 0.25), (4, 0.75))]
        write_rows(tmp_path / "metrics.jsonl", rows)
        outcome, *_ = footer(run, "finished")
        assert outcome == f"Finished 4 steps. Held-out {called}: 0.250 at first, 0.750 at the end."


@pytest.mark.parametrize(
    ("status", "interrupted", "how"),
    [
        ("stopped", True, "Stopped"),
        ("failed", False, "Failed"),
        ("running", True, "Stopped"),  # rank 0 was killed before it could write its end
        ("running", False, "Failed"),
    ],
)
def test_a_run_that_did_not_finish_says_how_to_resume(run, tmp_path, status, interrupted, how):
    outcome, *_, after = footer(run, status, interrupted)
    assert outcome == f"{how} after step 4. Last checkpoint: {tmp_path / 'checkpoints' / 'step-00000004'}"
    assert "rerun the same command to resume" in after


def test_a_run_that_never_owned_its_folder_says_little(run, tmp_path):
    assert run.footer() == []
    assert run.footer(interrupted=True) == ["Stopped before the run began. Next: rerun the same command"]
    footer(run, "finished")
    os.utime(tmp_path / "run.json", (0, 0))  # an earlier start wrote it
    assert run.footer() == []


def test_a_part_begins_at_the_checkpoint_that_it_resumes_from(run, tmp_path):
    assert Part.begin(run.recipe).first_step == 4
    assert Part.begin(run.recipe, from_step=2).first_step == 2, "steps 3 and 4 are computed again"
    (tmp_path / "checkpoints" / "step-00000004").rmdir()
    (tmp_path / "checkpoints" / "superseded-step-00000004").mkdir()
    assert Part.begin(run.recipe).first_step == 0


def test_damaged_lines_cost_no_footer(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff\n{"step": 3, "metrics": {"time/rollout": null}}\n')
    (tmp_path / "events.jsonl").unlink()
    assert footer(run, "failed")[0].startswith("Failed after step 4")


def test_a_complete_run_says_so_when_it_is_started_again(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "config.json").write_text(small_recipe(folder))

    def says(steps, *overrides, **options):
        recipe = from_json(small_recipe(folder, f"train.steps={steps}", *overrides))
        return says_complete(recipe, Options(**options))

    assert "This run is complete" in says(4) and "raise train.steps" in says(4)
    assert "the checkpoint of step 4, and train.steps is 2" in says(2)
    for status, step, complete in (("running", 4, False), ("finished", 2, False), ("finished", 4, True)):
        (folder / "run.json").write_text(json.dumps({"status": status, "step": step}))
        assert bool(says(4)) == complete, "the model may be that of an earlier part of the run"
    assert says(5) == "" and says(4, from_step=0) == "" and says(4, allow=("optimizer.lr",)) == ""
    (folder / "model").rmdir()
    assert says(4) == "", "the model is still to be written"
    assert "complete" in says(4, "output.save_model=false")


def test_a_killed_run_gets_its_page_from_the_launcher(run, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "step": 0}))
    leave_claim(tmp_path)
    assert run.footer()[0].startswith("Failed after step 4")
    assert '"status":"killed"' in (tmp_path / "report.html").read_text()
