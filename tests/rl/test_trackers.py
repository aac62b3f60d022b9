"""Trackers by name, each with its own package and without a network."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardproof.config.load import from_json, load_recipe
from shardproof.errors import ConfigError
from shardproof.rl import trackers as trackers_module
from shardproof.rl.place import write_settings
from shardproof.rl.trackers import STATE_NAME, Trackers, check_logins
from tests.ranks import run_ranks
from tests.rl.background_engine import wait_until
from tests.rl.runs import TINY, lines, run_recipe, small_recipe
from tests.rl.tracker_readers import (
    read_mlflow,
    read_tensorboard,
    read_trackio,
    read_wandb,
    wandb_records,
)

METRICS = {"reward/mean": 0.5, "loss/policy": -0.25}


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts where it was started


def recipe_with(folder: Path, *names: str, **options: dict[str, Any]) -> Any:
    overrides = [f"output.folder={folder}", f"output.project={folder.parent.name}", "output.run_name=tiny"]
    overrides += [f"output.tracker_options.{n}.{k}={v}" for n, o in options.items() for k, v in o.items()]
    return load_recipe(TINY, [*overrides, f"output.trackers={json.dumps(names)}", "train.steps=4"])


class Part:
    """One part of a run as `RunFolder` tells it to trackers."""

    def __init__(self, recipe: Any, step: int = 0, last: int = 0, is_new: bool = True):
        self.folder, self.events = Path(recipe.output.folder), []
        self.folder.mkdir(exist_ok=True)
        self.trackers = Trackers(self.folder, lambda *event: self.events.append(event))
        self.trackers.start(recipe, step, last, is_new)

    def step(self, step: int, scale: float = 1.0) -> None:
        sample = {"step": step, "prompt": "1+1=", "completion": "2", "reward": 1.0}
        append(self.folder / "samples.jsonl", sample)
        self.trackers.log(step, {name: value * scale for name, value in METRICS.items()})


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(name: str, folder: Path) -> dict[int, dict[str, float]]:
    state = json.loads((folder / STATE_NAME).read_text())["run_ids"]
    if name == "tensorboard":
        return read_tensorboard(folder)
    if name == "wandb":
        return read_wandb(folder)
    if name == "trackio":
        return read_trackio(folder.parent.name, state[name])
    return read_mlflow(f"sqlite:///{folder.parent}/mlflow.db", state[name])


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_resumed_run_goes_on_in_the_same_place_and_repeats_no_step(tmp_path, offline, name):
    """Steps 1 to 3, then a resume from the checkpoint of step 2: step 3 is taken again."""
    folder = tmp_path / "run"
    first = Part(recipe_with(folder, name))
    for step in (1, 2, 3):
        first.step(step)
    append(folder / "events.jsonl", {"step": 3, "kind": "finding", "text": "R503: one wrong byte"})
    first.trackers.close("stopped")
    second = Part(recipe_with(folder, name), step=2, last=3, is_new=False)
    for step in (3, 4):
        second.step(step)
    (folder / "report.html").write_text("<html></html>")
    second.trackers.close("finished")
    wait_until(lambda: 4 in read(name, folder))  # wandb's own process may write after it has said that it did
    found = read(name, folder)
    assert {step: found[step] for step in sorted(found)} == dict.fromkeys((1, 2, 3, 4), METRICS)
    assert not first.events and not second.events
    said = {"wandb": _wandb_says, "trackio": _trackio_says, "mlflow": _mlflow_says}.get(name)
    if said is not None:
        said(folder)


def _wandb_says(folder: Path) -> None:
    records = wandb_records(folder)
    assert {record.run.run_id for record in records if record.HasField("run")} == {
        json.loads((folder / STATE_NAME).read_text())["run_ids"]["wandb"]
    }
    (alert,) = [record.alert for record in records if record.HasField("alert")]
    assert "one wrong byte" in alert.text
    config = {item.key: json.loads(item.value_json) for r in records for item in r.run.config.update}
    assert config["train"]["steps"] == 4
    tables = [
        item for r in records for item in r.history.item if (item.key or item.nested_key[0]) == "samples"
    ]
    assert tables and list(folder.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert list(folder.glob("wandb/offline-run-*/files/report.html"))


def _trackio_says(folder: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    (alert,) = SQLiteStorage.get_alerts(folder.parent.name)
    assert "one wrong byte" in alert["text"]
    assert any("samples" in log for log in SQLiteStorage.get_logs(folder.parent.name, "tiny"))


def _mlflow_says(folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent}/mlflow.db")
    run = client.get_run(json.loads((folder / STATE_NAME).read_text())["run_ids"]["mlflow"])
    assert run.info.status == "FINISHED" and run.info.run_name == "tiny"
    assert run.data.params["train.steps"] == "4"
    assert "one wrong byte" in run.data.tags["finding.step_3"]
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"report.html", "samples"}


class Flaky:
    """A user's logger whose service is down for a while, and which needs no more than two methods."""

    is_down = False
    got: list[tuple[int, dict[str, float]]]

    def __init__(self, folder: Path, label: str = ""):
        type(self).got, self.label = [], label

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if type(self).is_down:
            raise ConnectionError("no route to host")
        type(self).got.append((step, metrics))

    def close(self) -> None:
        assert self.label == "a"


FLAKY = f"{__name__}:Flaky"


def test_a_tracker_that_fails_costs_one_warning_and_gets_everything_later(tmp_path, monkeypatch, caplog):
    recipe = from_json(small_recipe(tmp_path / "run", f"output.trackers=['{FLAKY}']"))
    options = {FLAKY: {"label": "a"}}
    recipe = recipe.model_copy(
        update={"output": recipe.output.model_copy(update={"tracker_options": options})}
    )
    clock = [100.0]
    monkeypatch.setattr(trackers_module.time, "monotonic", lambda: clock[0])
    part = Part(recipe)
    with caplog.at_level(logging.WARNING):
        part.step(1)
        monkeypatch.setattr(Flaky, "is_down", True)
        part.step(2)
        clock[0] += 61
        part.step(3)  # tried again, in vain
        monkeypatch.setattr(Flaky, "is_down", False)
        part.step(4)  # too early
        assert [step for step, _ in Flaky.got] == [1]
        part.trackers.close("finished")
    assert Flaky.got == [(step, METRICS) for step in (1, 2, 3, 4)]
    (warning,) = caplog.messages
    assert "Flaky" in warning and "no route to host" in warning
    assert part.events == [(2, "tracker", warning)]


def test_a_tracker_that_stays_away_is_said_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(Flaky, "is_down", True)
    part = Part(from_json(small_recipe(tmp_path / "run", f"output.trackers=['{FLAKY}']")))
    part.step(1)
    part.trackers.close("failed")
    assert "metrics.jsonl has every step" in part.events[-1][2] and len(part.events) == 2


class Choosy:
    """A user's logger that refuses one step, whenever it is sent."""

    closed = 0

    def __init__(self, folder: Path):
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            raise ValueError("not this one")

    def close(self) -> None:
        type(self).closed += 1


def test_a_tracker_is_closed_although_it_refused_something(tmp_path):
    part = Part(from_json(small_recipe(tmp_path / "run", f"output.trackers=['{__name__}:Choosy']")))
    part.step(1)
    part.step(2)
    part.trackers.close("finished")
    assert Choosy.closed == 1 and "metrics.jsonl has every step" in part.events[-1][2]


@pytest.mark.fault
def test_a_line_that_a_full_disk_tore_ends_nothing(tmp_path):
    part = Part(from_json(small_recipe(tmp_path / "run", f"output.trackers=['{FLAKY}']")))
    for name in ("samples.jsonl", "events.jsonl"):
        with (part.folder / name).open("a") as file:
            file.write('{"step": 1, "text": "to\n[1]\n')
    part.step(1)
    shutil.rmtree(part.folder)
    part.trackers.log(2, METRICS)
    assert [step for step, _ in Flaky.got] == [1, 2]


def test_no_file_and_no_tracker_gets_a_password(tmp_path, monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(
        trackers_module, "SERVICES", {"mlflow": lambda start: started.append(start) or Silent()}
    )
    options = {"tracking_uri": "https://me:pw@host/"}
    recipe = recipe_with(tmp_path / "run", "mlflow", mlflow=options)
    Part(recipe)
    assert dict(started[0].options) == options, "it needs them itself"
    assert "me:pw" not in json.dumps(started[0].config)
    write_settings(tmp_path / "run", recipe, {})
    assert all("me:pw" not in path.read_text() for path in (tmp_path / "run").iterdir())


class Silent:
    run_id, takes_steps_again = None, True


def test_a_tracker_that_cannot_start_stops_a_run_that_begins_and_no_other(tmp_path):
    recipe = from_json(small_recipe(tmp_path / "run", f"output.trackers=['{FLAKY}']"))
    options = {FLAKY: {"no_such_option": 1}}
    recipe = recipe.model_copy(
        update={"output": recipe.output.model_copy(update={"tracker_options": options})}
    )
    with pytest.raises(ConfigError, match=r"C007.*could not be started.*no_such_option"):
        Part(recipe)
    part = Part(recipe, step=2, last=2, is_new=False)
    part.step(3)
    ((step, kind, text),) = part.events
    assert (step, kind) == (2, "tracker") and "gets no metrics until the run is restarted" in text


def test_going_back_behind_a_step_begins_a_new_run_in_the_tracker(tmp_path, offline):
    folder = tmp_path / "run"
    first = Part(recipe_with(folder, "wandb"))
    first.step(1)
    first.trackers.close("stopped")
    before = json.loads((folder / STATE_NAME).read_text())
    second = Part(recipe_with(folder, "wandb"), step=1, last=3, is_new=True)
    second.step(2)
    second.trackers.close("finished")
    after = json.loads((folder / STATE_NAME).read_text())
    assert before["run_ids"] != after["run_ids"]


@pytest.mark.distributed
def test_a_run_on_two_ranks_logs_once_what_its_own_file_holds(tmp_path, monkeypatch):
    """Rank 0 alone logs; the second part goes on where the first ended."""
    folder = tmp_path / "run"
    overrides = [
        "output.trackers=['tensorboard', 'wandb']",
        "output.tracker_options.wandb.mode=offline",
    ]
    run_ranks(2, run_recipe, small_recipe(folder, *overrides, "output.save_every=1"))
    run_ranks(2, run_recipe, small_recipe(folder, *overrides, "train.steps=3"))
    wanted = {line["step"]: line["metrics"] for line in lines(folder / "metrics.jsonl")}
    assert sorted(wanted) == [0, 1, 2, 3]
    for name in ("tensorboard", "wandb"):
        found = read(name, folder)
        assert sorted(found) == sorted(wanted)
        for step, metrics in wanted.items():
            assert found[step] == pytest.approx(metrics, rel=1e-6), f"{name}, step {step}"
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2, "one per part, none of rank 1"


@pytest.mark.parametrize(
    ("overrides", "trackers"),
    [
        ([], ["tensorboard"]),
        (["output.tensorboard=false"], []),
        (["output.tensorboard=true"], ["tensorboard"]),
        (["output.trackers=['wandb','tensorboard']", "output.tensorboard=false"], ["wandb"]),
        (["output.trackers=['wandb']", "output.tensorboard=true"], ["tensorboard", "wandb"]),
    ],
)
def test_the_old_key_is_read_into_the_new_one(overrides, trackers):
    assert load_recipe(TINY, overrides).output.trackers == trackers


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["output.trackers=['wand']"], "Did you mean 'wandb'"),
        (["output.tensorboard=1.5"], "tensorboard must be true or false"),
        (["output.tracker_options.wandb.entity=me"], "add 'wandb' to output.trackers"),
        (
            ["output.trackers=['wandb']", "output.tracker_options.wandb.project=x"],
            "set output.project instead",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe(TINY, overrides)


def test_a_missing_login_is_found_before_anything_starts(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    output = load_recipe(TINY, ["output.trackers=['wandb']"]).output
    (finding,) = check_logins(output)
    assert "not logged in at api.wandb.ai" in finding.message and "wandb login" in str(finding.fix)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert not check_logins(output)
    monkeypatch.setenv("NETRC", str(tmp_path / "other"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not check_logins(output)
