"""A run that goes on with what was sampled ahead: no trajectory is trained on twice, and none is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardproof.config.load import from_json
from shardproof.rl.same_run import Resume
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import comparable, lines, small_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed

STEPS = 5
TWO = pytest.mark.parametrize("whole", [2], indirect=True)  # what does not depend on how far a run is ahead
SETTINGS = ("output.eval_every=0", "output.save_every=1", "output.keep=9", "optimizer.schedule=constant")
REWARDS = "reward.functions=[{name='tests.rl.user_rewards:even_answer'}]"  # in a process of its own


def recipe_of(folder: Path, ahead: int, *overrides: str) -> str:
    return small_recipe(folder, *SETTINGS, f"train.steps={STEPS}", f"rollout.ahead={ahead}", *overrides)


def run_and_note(
    recipe: str, options: dict[str, Any] | None = None, end: tuple[str, int] | None = None
) -> list[list[tuple[str, int, int | None]]]:
    """Each step's (prompt, group, version) on this rank.

    `end` ends the run in a step, by a signal or an error, or makes the rewards of what is sampled from then on fail.
    """
    from shardproof.rl import loop
    from shardproof.rl.stopping import Stopped

    collect, steps = loop.collect, []

    def note(*given: Any, step: int, **settings: Any) -> Any:
        if end == ("down", step):
            Path(from_json(recipe).reward.functions[0].options["down"]).touch()
        experience = collect(*given, step=step, **settings)
        if end == ("error", step):
            raise RuntimeError("the test ends the run")
        if end == ("SIGTERM", step):
            os.kill(os.getpid(), signal.SIGTERM)
        if end == ("SIGKILL", step):
            os.kill(os.getpid(), signal.SIGKILL)
        made = experience.trajectories
        steps.append([(t.facts["prompt"], t.group, t.version) for t in made])
        return experience

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", note)
        try:
            loop.train(from_json(recipe), resume=Resume(**(options or {})))
        except Stopped:
            pass
        except Exception as error:
            if "the test ends the run" not in str(error):
                raise
    return steps


def prompts_of(*ranks: list[list[tuple[str, int, int | None]]]) -> list[list[str]]:
    """Each step's prompts in the order in which they were drawn."""
    steps = []
    for parts in zip(*ranks, strict=True):
        by_group = {group: prompt for part in parts for prompt, group, _ in part}
        steps.append([by_group[group] for group in sorted(by_group)])
    return steps


@pytest.fixture(scope="module", params=[1, 2])
def whole(request, tmp_path_factory) -> tuple[int, Path, list[list[str]]]:
    """(ahead, folder, each step's prompts) of a run that nothing disturbed, with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    (steps,) = run_ranks(1, run_and_note, recipe_of(folder, request.param, REWARDS))
    return request.param, folder, prompts_of(steps)


def same_end(folder: Path, whole: Path) -> None:
    assert trajectory(folder) == trajectory(whole)
    weights, expected = (load_file(each / "model" / "model.safetensors") for each in (folder, whole))
    assert all((weights[name] == expected[name]).all() for name in expected)


def test_a_checkpoint_holds_what_was_sampled_for_later_steps(whole):
    ahead, folder, _ = whole
    for step in range(1, STEPS + 1):
        made = folder / "checkpoints" / f"step-{step:08d}"
        extra = json.loads((made / "state.json").read_text())["extra"]
        coming = list(range(step, min(step + ahead, STEPS)))
        assert [each["step"] for each in extra["buffer"]["rounds"]] == coming
        assert extra["position"] == 6 * (step + len(coming))
        file = made / "trajectories-0.jsonl"
        assert file.exists() == bool(coming)
        rows = lines(file) if coming else []
        assert len({(row["step"], row["group"], row["sample"]) for row in rows}) == 6 * 4 * len(coming)
        assert all(row["trajectory"]["reward"]["parts"] and row["turns"] for row in rows)


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_goes_on_from_any_step_with_the_same_bits(whole, tmp_path, step):
    ahead, before, prompts = whole
    folder = shutil.copytree(before, tmp_path / "run")
    (steps,) = run_ranks(1, run_and_note, recipe_of(folder, ahead, REWARDS), {"from_step": step})
    assert prompts_of(steps) == prompts[step:]
    same_end(folder, before)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_ended_and_resumed_has_the_same_bits(whole, tmp_path, how):
    ahead, before, prompts = whole
    recipe = recipe_of(tmp_path / "run", ahead, REWARDS)
    outcomes = run_ranks_outcomes(1, run_and_note, recipe, None, (how, 2))
    if how == "SIGTERM":
        assert prompts_of(outcomes[0][1]) == prompts[:3], "the step in which it came is taken to its end"
    (steps,) = run_ranks(1, run_and_note, recipe)
    assert prompts_of(steps) == prompts[-len(steps) :] and len(steps) == (2 if how == "SIGTERM" else 3)
    same_end(tmp_path / "run", before)


@TWO
def test_another_number_of_ranks_trains_on_every_prompt_once(whole, tmp_path):
    ahead, _, prompts = whole
    recipe = recipe_of(tmp_path / "run", ahead, REWARDS)
    first = run_ranks(2, run_and_note, recipe, None, ("error", 2))
    files = sorted(path.name for path in (tmp_path / "run/checkpoints/step-00000002").glob("traj*"))
    assert files == ["trajectories-0.jsonl", "trajectories-1.jsonl"]
    (rest,) = run_ranks(1, run_and_note, recipe)
    assert prompts_of(*first) + prompts_of(rest) == prompts
    versions = [{version for *_, version in made} for made in rest]
    assert versions == [{max(step - ahead, 0)} for step in range(2, STEPS)], "nothing was sampled again"


@TWO
def test_more_steps_draw_the_prompts_that_come_next(whole, tmp_path):
    ahead, before, prompts = whole
    folder = shutil.copytree(before, tmp_path / "run")
    (steps,) = run_ranks(1, run_and_note, recipe_of(folder, ahead, REWARDS, f"train.steps={STEPS + 2}"))
    shutil.rmtree(folder)
    (longer,) = run_ranks(1, run_and_note, recipe_of(folder, ahead, REWARDS, f"train.steps={STEPS + 2}"))
    assert prompts + prompts_of(steps) == prompts_of(longer)


@TWO
@pytest.mark.parametrize("other", [0, 1, 3])
def test_ahead_may_change_if_that_is_allowed(whole, tmp_path, other):
    """What would get too old is sampled again; prompts are the same, each in its step."""
    _, before, prompts = whole
    folder = shutil.copytree(before, tmp_path / "run")
    options = {"from_step": 2, "allow": ("rollout.ahead",)}
    (steps,) = run_ranks(1, run_and_note, recipe_of(folder, other, REWARDS), options)
    assert prompts_of(steps) == prompts[2:]
    lags = [2 + step - min(version for *_, version in made) for step, made in enumerate(steps)]
    assert max(lags) <= other and (lags[-1] == other or other == 3)


@TWO
@pytest.mark.fault
def test_a_damaged_buffer_is_refused_by_name(whole, tmp_path):
    ahead, before, _ = whole
    folder = shutil.copytree(before, tmp_path / "run")
    recipe, options = recipe_of(folder, ahead, REWARDS), {"from_step": 3}
    file = folder / "checkpoints/step-00000003/trajectories-0.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    outcomes = run_ranks_outcomes(2, run_and_note, recipe, options)
    assert outcomes[0] == outcomes[1] and "E407 resume" in outcomes[0][2]
    assert "step-00000003: trajectories-0.jsonl does not match its checksum" in outcomes[0][2]
    file.unlink()
    outcomes = run_ranks_outcomes(1, run_and_note, recipe, options)
    assert "step-00000003: trajectories-0.jsonl is missing" in outcomes[0][2]


@TWO
def test_a_checkpoint_without_a_buffer_resumes_with_an_empty_one(whole, tmp_path):
    """As earlier versions wrote them."""
    from shardproof.checkpoints.folders import STATE_NAME, sums_of, write_sums

    ahead, before, prompts = whole
    folder = shutil.copytree(before, tmp_path / "run")
    made = folder / "checkpoints/step-00000004"
    state = json.loads((made / STATE_NAME).read_text())
    del state["extra"]["buffer"]
    state["extra"]["position"] = 6 * 4
    (made / STATE_NAME).write_text(json.dumps(state))
    (made / "trajectories-0.jsonl").unlink()
    write_sums(made, sums_of(made, [path.name for path in made.iterdir() if path.name != "checksums.txt"]))
    (steps,) = run_ranks(1, run_and_note, recipe_of(folder, ahead, REWARDS), {"from_step": 4})
    assert prompts_of(steps) == prompts[4:]
    assert {version for made in steps for *_, version in made} == {4}


@TWO
def test_other_data_begin_where_the_rounds_of_the_buffer_began(whole, tmp_path):
    ahead, before, _ = whole
    folder = shutil.copytree(before, tmp_path / "run")
    rows = [{"prompt": f"{a}+{a}=", "answer": str(a + a)} for a in range(1, 20)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = {"from_step": 2, "allow": ("data.train",)}
    (steps,) = run_ranks(1, run_and_note, recipe_of(folder, ahead, REWARDS, f"data.train={data}"), options)
    found = [prompt for made in prompts_of(steps) for prompt in made]
    assert len(found) == 18 and set(found) <= {row["prompt"] for row in rows}
    assert comparable(lines(folder / "metrics.jsonl")[-1]["metrics"])["version"] == STEPS


@TWO
def test_rewards_that_failed_are_asked_for_again(whole, tmp_path):
    """What was sampled ahead while they failed ended the run, and does not end it again once they are repaired."""
    ahead, before, _ = whole
    down, module = tmp_path / "down", "tests.rl.user_rewards"
    entry = f"name='{module}:needs_a_service', label='{module}:even_answer', options={{down='{down}'}}"
    recipe = recipe_of(tmp_path / "run", ahead, f"reward.functions=[{{{entry}}}]")
    (outcome,) = run_ranks_outcomes(1, run_and_note, recipe, None, ("down", 1))
    assert "R504 reward: the whole batch failed" in outcome[2] and "the service is down" in outcome[2]
    assert len(trajectory(tmp_path / "run")) == 1 + ahead
    down.unlink()
    run_ranks(1, run_and_note, recipe)
    same_end(tmp_path / "run", before)


@TWO
def test_other_rewards_score_what_was_sampled_before(whole, tmp_path):
    ahead, before, prompts = whole
    folder = shutil.copytree(before, tmp_path / "run")
    options = {"from_step": 2, "allow": ("reward.functions",)}
    recipe = recipe_of(folder, ahead, "reward.functions=[{name='exact_match', weight=2}]")
    (steps,) = run_ranks(1, run_and_note, recipe, options)
    assert prompts_of(steps) == prompts[2:]
    versions = [{version for *_, version in made} for made in steps]
    assert versions == [{max(step - ahead, 0)} for step in range(2, STEPS)], "nothing was sampled again"
    for metrics in trajectory(folder)[2:]:
        assert metrics["reward/mean"] == pytest.approx(2 * metrics["reward/exact_match"])
        assert not any("even_answer" in name for name in metrics)
