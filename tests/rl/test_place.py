"""Where a run may be, and when a folder is another's."""

import json
import shutil

import pytest

from shardproof.config.load import from_json
from shardproof.errors import ConfigError
from shardproof.rl.place import check_folder, read_state, write_settings
from shardproof.rl.rewards.functions import find_reward
from shardproof.rl.rewards.specs import RewardSpec, Surroundings
from shardproof.rl.same_run import Resume
from tests.rl.runs import RECIPES, small_recipe

MODEL = RECIPES / "tiny" / "model"


def recipe_for(folder, *overrides):
    return from_json(small_recipe(folder, *overrides))


def refused(folder, *overrides, resume=None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_folder(recipe_for(folder, *overrides), resume)
    assert caught.value.code in ("C001", "C006")
    return str(caught.value)


def make_run(folder, *overrides, steps=0, checkpoints=(), model=False):
    """A folder as a run of `steps` steps leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder, recipe_for(folder, *overrides), {})
    lines = [{"step": step, "time": 1.0, "metrics": {}} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in checkpoints:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    if model:
        (folder / "model").mkdir()
    return folder


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "models" / "mine")


@pytest.mark.parametrize("place", ["", ".", "runs", ".."])
@pytest.mark.parametrize("role", ["model", "reference", "critic"])
def test_a_folder_that_is_holds_or_lies_in_a_model_is_refused(model, place, role):
    overrides = {
        "model": [],
        "reference": ["algorithm.kl_coef=0.1"],
        "critic": ["algorithm.name=ppo"],
    }[role]
    said = refused(model / place, f"{role}.path={model}", *overrides)
    assert f"{role}.path=" in said and "overlap" in said


def test_links_are_followed(model, tmp_path):
    (tmp_path / "runs").symlink_to(model)
    assert "overlap" in refused(tmp_path / "runs" / "a", f"model.path={model}")
    (tmp_path / "alias").symlink_to(model)
    assert "overlap" in refused(model, f"model.path={tmp_path / 'alias'}")


def test_a_folder_around_its_data_is_refused_and_one_beside_them_is_not(tmp_path):
    data = tmp_path / "data" / "rows.jsonl"
    data.parent.mkdir()
    data.write_text("{}\n")
    assert "data.train=" in refused(data.parent, f"data.train={data}")
    assert "data.evaluation=" in refused(tmp_path, f"data.evaluation={data}")
    check_folder(recipe_for(data.parent / "runs", f"data.train={data}"))


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_an_empty_name_is_refused(name):
    recipe = recipe_for("runs/x")
    output = recipe.output.model_copy(update={"folder": name})
    with pytest.raises(ConfigError, match=r"output\.folder is empty"):
        check_folder(recipe.model_copy(update={"output": output}))


def test_another_models_folder_is_told_from_a_runs(model):
    assert "that no run wrote" in refused(model)
    (model / "config.json").unlink()
    assert "model.safetensors" in refused(model)


def test_what_people_keep_beside_a_run_is_no_obstacle(tmp_path):
    for name in ("train.log", "slurm-1.out", "recipe.toml", ".gitignore", ".lock"):
        (tmp_path / name).write_text("")
    assert not check_folder(recipe_for(tmp_path)).is_used


def test_a_run_begins_where_its_pass_rates_were_measured_with_a_judge(tmp_path):
    around = Surroundings(folder=str(tmp_path))
    options = {"url": "http://localhost:1", "model": "m"}
    judge = find_reward(RewardSpec("judge", options=options), around)._call
    judge._cache.put("ab" * 32, {"text": "Score: 7"})
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]
    assert not check_folder(recipe_for(tmp_path)).is_used
    (tmp_path / "other").mkdir()
    assert f"{tmp_path} holds other, but no config.json" in refused(tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(tmp_path / "file")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert "is a file" in refused(tmp_path / "gone")


def test_a_folder_in_which_no_step_was_taken_is_free(tmp_path):
    make_run(tmp_path / "run", "optimizer.lr=0.5")
    assert not check_folder(recipe_for(tmp_path / "run", "algorithm.name=rloo")).is_used


def test_a_used_folder_asks_for_the_same_settings(tmp_path):
    make_run(tmp_path / "run", "optimizer.lr=0.5", steps=2, checkpoints=[2])
    said = refused(tmp_path / "run", "optimizer.lr=0.25")
    assert "optimizer.lr=0.5 (now 0.25)" in said and "--allow optimizer.lr" in said
    allowed = Resume(allow=("optimizer.lr",))
    assert check_folder(recipe_for(tmp_path / "run", "optimizer.lr=0.25"), allowed).steps == (2,)
    again = Resume(from_step=0)
    assert check_folder(recipe_for(tmp_path / "run", "optimizer.lr=0.25"), again).is_used


def test_settings_without_the_mark_of_today_are_a_runs_too(tmp_path):
    make_run(tmp_path / "run", steps=2, checkpoints=[2])
    (tmp_path / "run" / "config.json").write_text(small_recipe(tmp_path / "run"))
    assert check_folder(recipe_for(tmp_path / "run")).steps == (2,)
    assert "data.train=" in refused(tmp_path / "run", "data.train=other.jsonl"), "nothing else is known of it"


@pytest.mark.parametrize(
    "made", [{"model": True}, {"overrides": ["train.steps=5"]}, {"overrides": ["output.save_every=3"]}]
)
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_unasked(tmp_path, made):
    overrides = ["train.steps=50", *made.get("overrides", [])]
    make_run(tmp_path / "run", *overrides, steps=5, model=made.get("model", False))
    said = refused(tmp_path / "run", *overrides)
    assert "holds metrics of 5 steps, but no checkpoint to resume from" in said and "--from 0" in said
    check_folder(recipe_for(tmp_path / "run", *overrides), Resume(from_step=0))


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    overrides = ["train.steps=50", "output.save_every=10"]
    make_run(tmp_path / "run", *overrides, steps=10)
    assert check_folder(recipe_for(tmp_path / "run", *overrides)).last_step == 10


def test_the_asked_checkpoint_must_be_there(tmp_path):
    make_run(tmp_path / "run", steps=6, checkpoints=[4, 6])
    said = refused(tmp_path / "run", resume=Resume(from_step=5))
    assert "--from 5" in said and "it has 4, 6" in said
    check_folder(recipe_for(tmp_path / "run"), Resume(from_step=4))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100000, b'"text"', b'{"model_type": "qwen3"}'])
def test_a_damaged_settings_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refused(tmp_path)


@pytest.mark.parametrize(
    "digests", [True, "x", [1], {"model.path": [1]}, {"data.train": "x"}, {"data.train": {"rows": 5}}]
)
def test_damaged_digests_are_refused_by_file(tmp_path, digests):
    make_run(tmp_path, steps=3, checkpoints=[2])
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"shardproof": {"digests": digests}}))
    assert "config.json is damaged" in refused(tmp_path)


@pytest.mark.parametrize("name", ["~", "~/runs/mine", "~root/runs"])
def test_no_folder_is_called_like_a_home(name):
    assert f"output.folder={name!r}" in refused(name)


def test_damaged_lines_do_not_hide_the_last_step(tmp_path):
    make_run(tmp_path, steps=3, checkpoints=[2])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n["step"]\n{"step": "9"}\n{"step": 4, "ti')
    assert read_state(tmp_path).last_step == 3
