"""A run's claim on its folder: what beginning again puts aside, and what the run notices that others do to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardproof.config.load import from_json
from shardproof.errors import ShardproofError
from shardproof.folder_lock import ATTEMPT, FolderLock
from shardproof.rl.folder import RunFolder
from shardproof.rl.place import check_folder, checkpoint_steps
from shardproof.rl.same_run import Resume
from tests.ranks import run_ranks
from tests.rl.runs import small_recipe
from tests.rl.test_place import make_run

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def claim_from(recipe: str, step: int | None) -> None:
    """Claim and release; module-level, for `run_ranks`."""
    from shardproof.dist.launch import init_distributed

    init_distributed()
    folder = RunFolder(from_json(recipe), Resume((), step))
    folder.claim()
    folder.release()


def test_a_run_that_began_again_may_be_started_again(tmp_path):
    """A rank is lost after the first step of `--from 0` in the folder of a complete run: restarts have no `--from`."""
    folder = make_run(tmp_path / "run", steps=6, checkpoints=[4, 6], model=True)
    (folder / "model" / "name").write_text("old")
    recipe = small_recipe(folder)
    run_ranks(1, claim_from, recipe, 0)
    assert (folder / "superseded-model" / "name").read_text() == "old"
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "metrics": {}}\n')
    assert check_folder(from_json(recipe)).last_step == 1


def test_a_checkpoint_that_a_replacement_left_aside_is_put_aside_too(tmp_path):
    folder = make_run(tmp_path / "run", steps=6, checkpoints=[2, 4, 6])
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-00000006").rename(checkpoints / ".replaced-step-00000006")
    run_ranks(1, claim_from, small_recipe(folder), 2)
    assert checkpoint_steps(checkpoints) == (2,)
    assert (checkpoints / "superseded-step-00000006").is_dir()


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_what_a_role_has_of_later_steps_is_put_aside_too(tmp_path, role):
    """Its later checkpoints would count among the newest, and the one that the policy's last needs would be deleted."""
    folder = make_run(tmp_path / "run", steps=6, checkpoints=[2, 4, 6])
    shutil.copytree(folder / "checkpoints", folder / role)
    run_ranks(1, claim_from, small_recipe(folder), 2)
    assert checkpoint_steps(folder / role) == (2,)
    assert (folder / role / "superseded-step-00000006").is_dir()


def two_runs(recipe: str, place: str) -> str:
    """What the first run says at the end of its step after its folder was removed and another run began there."""
    from shardproof.dist.launch import init_distributed

    init_distributed()
    first, second = RunFolder(from_json(recipe)), RunFolder(from_json(recipe))
    first.claim()
    assert first.end_step(0) == (0, False)
    shutil.rmtree(place)
    second.claim()
    try:
        assert second.end_step(0) == (0, False)
        with pytest.raises(ShardproofError) as caught:
            first.end_step(0)
    finally:
        second.release()
    return str(caught.value)


def test_a_run_whose_folder_was_removed_does_not_write_into_the_next_ones(tmp_path: Path):
    recipe = small_recipe(tmp_path / "run")
    (said,) = run_ranks(1, two_runs, recipe, str(tmp_path / "run"))
    assert "E408" in said and "was removed, moved or taken over" in said


def two_attempts(recipe: str, place: str) -> tuple[str, list[str]]:
    """A run is frozen, started again, and goes on: what it then says, and the lines that it and the new one wrote."""
    from shardproof.dist.launch import init_distributed

    init_distributed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ATTEMPT, "job:0")
        frozen = RunFolder(from_json(recipe))
        frozen.claim()
        save = FolderLock(Path(place) / "checkpoints")  # the run froze in a save
        save.acquire("save")
        with pytest.raises(ShardproofError, match="is in use by process"):
            RunFolder(from_json(recipe)).claim()
        patch.setenv(ATTEMPT, "job:1")
        second = RunFolder(from_json(recipe))
        second.claim()
    second.note(1, "skipped", "by the second attempt")
    frozen.note(1, "skipped", "by the frozen one")
    frozen.outputs.append(Noting(second))
    frozen.log(1, {"loss": 1.0})
    with pytest.raises(ShardproofError) as caught:
        frozen.end_step(0)
    assert save.is_lost()  # so it publishes nothing
    frozen.end("failed", caught.value)
    frozen.release()
    assert second.end_step(0) == (0, False)
    second.end("finished")
    second.release()
    noted = [json.loads(line)["text"] for line in Path(place, "events.jsonl").read_text().splitlines()]
    return str(caught.value), [*noted, json.loads(Path(place, "run.json").read_text())["status"]]


class Noting:
    """A logger that notes what it gets in the folder of another run."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._folder.note(step, "skipped", "a step of the frozen one")

    def close(self) -> None:
        pass


def test_an_attempt_that_was_frozen_writes_nothing_into_the_next_ones_folder(tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    make_run(tmp_path / "run", steps=0, checkpoints=[])
    recipe = small_recipe(tmp_path / "run")
    ((said, noted),) = run_ranks(1, two_attempts, recipe, str(tmp_path / "run"))
    assert "E408" in said and "taken over" in said
    assert noted == ["by the second attempt", "finished"]
