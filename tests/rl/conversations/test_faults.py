"""Environments that raise, hang, never end or answer nonsense: recorded and named, the other conversations unharmed."""

from __future__ import annotations

import pytest

from shardproof.config.load import from_json
from shardproof.errors import ShardproofError
from shardproof.rl.checks import check_inputs
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.conversations.environments import HERE
from tests.rl.conversations.kept import authors, recipe_with, run_and_keep
from tests.rl.runs import comparable, lines, run_recipe, small_recipe, write_rows

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def rows_of(tmp_path, answers):
    """A data file of prompts with these answers."""
    rows = [{"prompt": f"{n}+1=", "answer": str(answer)} for n, answer in enumerate(answers)]
    return f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}"


def test_an_environment_that_raises_in_turn_three_fails_its_conversations_by_name(tmp_path):
    settings = [rows_of(tmp_path, [0, 1] * 3), "rollout.max_new_tokens=8"]
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path / "run", "BreaksInTurnThree", *settings))
    failed = [t for t in found["trajectories"] if t["ended"] == "failed"]
    others = [t for t in found["trajectories"] if t["ended"] != "failed"]
    assert failed and {t["ended"] for t in others} <= {"done", "length"}
    error = "turn 3: LookupError: no such page (environments.py:"
    assert all(t["reward"]["failures"]["environment"].startswith(error) for t in failed)
    assert all(not any(a) for a, t in zip(found["advantages"], found["trajectories"]) if t in failed)
    metrics = found["metrics"]
    assert metrics["environment/failed"] == len(failed) and metrics["reward/failed"] == 0.0
    (note,) = [e for e in lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "environment"]
    assert note["text"].startswith(f"environment: {error}")


def test_every_different_error_of_a_step_is_noted_however_often_one_of_them_comes(tmp_path):
    settings = [rows_of(tmp_path, [0, 1, 3, 5]), "train.prompts_per_step=4", "rollout.group_size=4"]
    run_ranks(1, run_and_keep, recipe_with(tmp_path / "run", "BreaksForSome", *settings))
    notes = [e["text"] for e in lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "environment"]
    assert sorted(note.partition(" (")[0] for note in notes) == [
        f"environment: turn 1: LookupError: there is no page {page}" for page in (1, 3, 5)
    ]


@pytest.mark.parametrize("name", ["BreaksForSome", "CannotStartSome", "Hangs"])
def test_conversations_that_fail_leave_the_others_unharmed(tmp_path, name):
    settings = [rows_of(tmp_path, [0, 0, 1]), "environment.timeout_s=0.5", "train.prompts_per_step=3"]
    first, second = run_ranks(2, run_and_keep, recipe_with(tmp_path / "run", name, *settings))
    assert comparable(first["metrics"]) == comparable(second["metrics"])
    assert first["metrics"]["environment/failed"] == 4.0 and first["metrics"]["environment/reward"] == 1.0
    assert first["metrics"]["updates"] == 1.0
    for rank in (first, second):
        for t, mask in zip(rank["trajectories"], rank["masks"], strict=True):
            is_failed = t["facts"]["answer"] == "1"
            assert (t["ended"] == "failed") == is_failed
            assert any(mask) != is_failed, "what failed is not trained on"


@pytest.mark.parametrize("on_error", ["zero", "stop"])
def test_a_batch_that_failed_as_a_whole_ends_the_run_on_every_rank(tmp_path, on_error):
    settings = [rows_of(tmp_path, [1] * 6), f"environment.on_error={on_error}"]
    outcomes = run_ranks_outcomes(2, run_recipe, recipe_with(tmp_path / "run", "BreaksForSome", *settings))
    assert outcomes[0] == outcomes[1] and outcomes[0][1] == "RolloutFault"
    said = (
        "the whole batch failed, no sample has a reward" if on_error == "zero" else "the conversation about"
    )
    assert "R509" in outcomes[0][2] and said in outcomes[0][2]
    assert "turn 1: LookupError: there is no page 1 (environments.py:" in outcomes[0][2]


def test_on_error_stop_ends_the_run_at_the_first_failure(tmp_path):
    settings = [rows_of(tmp_path, [0, 0, 1]), "environment.on_error=stop", "train.prompts_per_step=3"]
    outcomes = run_ranks_outcomes(2, run_recipe, recipe_with(tmp_path / "run", "BreaksForSome", *settings))
    assert outcomes[0] == outcomes[1] and outcomes[0][1] == "RolloutFault"
    assert "R509 rollout" in outcomes[0][2] and "prompt " in outcomes[0][2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "CannotStart",
            "R509 data: the environment cannot begin a conversation about any of the first 3 rows: ",
        ),
        ("Mute", "C001 environment"),
        ("Absent", "has no 'Absent'"),
        ("NeverEnds", "rows: ValueError: start() gave no messages, and the row has no column 'prompt'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path, name, said):
    settings = []
    if name == "NeverEnds":
        data = write_rows(tmp_path / "rows.jsonl", [{"question": "1"}] * 3)
        settings = [f"data.train={data}", "reward=none", "data.evaluation=none"]
    recipe = recipe_with(tmp_path / "run", name, *settings)
    with pytest.raises(ShardproofError) as error:
        check_inputs(from_json(recipe))
    assert said in str(error.value)
    outcomes = run_ranks_outcomes(2, run_recipe, recipe)
    assert outcomes[0] == outcomes[1] and said in outcomes[0][2]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reply_that_is_none_fails_and_rows_stay_as_they_were(tmp_path):
    (outcome,) = run_ranks_outcomes(1, run_recipe, recipe_with(tmp_path / "parts", "AnswersInParts"))
    assert "R509" in outcome[2] and "turn 1: " in outcome[2] and "expected text" in outcome[2]
    means = []
    for name in ("SaysNothing", "Scribbles"):
        recipe = recipe_with(tmp_path / name, name, "train.prompts_per_step=24")
        (found,) = run_ranks(1, run_and_keep, recipe)
        assert {t["ended"] for t in found["trajectories"]} <= {"done", "length"}
        means.append(found["metrics"]["reward/mean"])
    assert means[0] == means[1] > 0, "rewards read the row as it was"


# Limits.


@pytest.mark.parametrize("truncation", ["train", "mask"])
def test_a_conversation_that_never_ends_has_at_most_max_turns(tmp_path, truncation):
    settings = ["environment.max_turns=3", f"environment.truncation={truncation}", "rollout.max_new_tokens=8"]
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path, "NeverEnds", *settings))
    masked = truncation == "mask"
    for t, mask in zip(found["trajectories"], found["masks"], strict=True):
        assert len(t["facts"]["turns"]) <= 3 and authors(t)[-1] == "policy"
        assert t["ended"] in ("turns", "length")
        assert any(mask) != masked and t["reward"]["left_out"] == masked
        last = t["facts"]["turns"][-1]["reward"]
        # It was told that the turn was the last one, and what cut it, and its reward for that turn counts.
        assert last == (1.0 if t["ended"] == "turns" else 11.0)
    assert found["metrics"]["environment/truncated"] == 1.0
    assert found["metrics"]["environment/reward"] > 0 and found["metrics"]["reward/mean"] > 0
    assert found["metrics"].get("updates") == (0.0 if masked else 1.0)


def test_a_reply_that_leaves_no_room_for_a_turn_ends_the_conversation(tmp_path):
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path, "TalksALot", "environment.max_tokens=64"))
    ended = [t for t in found["trajectories"] if t["ended"] == "tokens"]
    assert ended
    for t in ended:
        assert authors(t) == ("prompt", "policy"), "the reply is not part of it"
        assert t["facts"]["turns"][0]["reply"][0]["content"] == "1+" * 40
        assert t["reward"]["parts"]["environment"] == 0.5


def test_an_environment_without_time_left_ends_its_conversation_and_did_not_fail(tmp_path):
    settings = [rows_of(tmp_path, [0, 1]), "environment.max_seconds=0.5", "train.prompts_per_step=2"]
    (found,) = run_ranks(
        1, run_and_keep, recipe_with(tmp_path / "run", "Hangs", *settings, "rollout.group_size=2")
    )
    assert {(t["facts"]["answer"], t["ended"]) for t in found["trajectories"]} == {
        ("0", "done"),
        ("1", "time"),
    }
    assert found["metrics"]["environment/failed"] == 0.0 and found["metrics"]["environment/truncated"] == 0.5
    assert all(any(mask) for mask in found["masks"])


def test_a_prompt_that_does_not_fit_a_conversation_is_refused(tmp_path):
    recipe = small_recipe(tmp_path, f"environment.name={HERE}:NeverEnds", "environment.max_tokens=8")
    with pytest.raises(ShardproofError, match=r"does not fit environment\.max_tokens=8"):
        check_inputs(from_json(recipe))
