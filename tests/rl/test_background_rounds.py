"""Rounds of an engine that answers in the background: drawn order, finished order, what is too old, faults, resume."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.background_runs import prompts_of, recipe_of, run_and_note
from tests.rl.runs import lines

pytestmark = pytest.mark.distributed

NUM, SIZE, STEPS = 6, 4, 5  # prompts of a step, completions of each, steps
STOP, LONGEST = 1, 4  # the token that ends a completion, and how many one may have


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> list[list[str]]:
    """The prompts in drawn order: what a run that does not run ahead trains on."""
    (plain,) = run_ranks(1, run_and_note, recipe_of(tmp_path_factory.mktemp("plain"), 0))
    assert plain["checks"] == STEPS, "what was drawn is checked before every update"
    assert all(m["lag/max"] == 0.0 and m["ahead/buffered"] == 0.0 for m in plain["metrics"])
    assert all(m["time/trainer_idle"] > 0.0 for m in plain["metrics"])
    return prompts_of(plain)


@pytest.mark.parametrize("ahead", [1, 2])
def test_each_prompt_is_trained_on_in_its_step_and_interrupted_answers_say_their_versions(
    tmp_path, drawn, ahead
):
    ranks = run_ranks(2, run_and_note, recipe_of(tmp_path, ahead), {"every": 2, "fast": NUM * SIZE // 2})
    assert prompts_of(*ranks) == drawn
    assert sum(rank["started"] for rank in ranks) == NUM * SIZE * STEPS
    for step in range(1, STEPS):
        metrics, slow = ranks[0]["metrics"][step], 3 / (NUM * SIZE)
        assert metrics["lag/max"] <= ahead
        assert metrics["replica/fake"] == 1.0
        assert metrics["time/engine_idle"] == 0.25, "no longer than any rank says"
        # One token before a sync and the others after it, unless it was over with the first.
        assert 0.0 < metrics["ahead/interrupted"] <= slow
    several = [parts for rank in ranks for made in rank["steps"] for *_, parts in made if parts]
    assert several and all(len({version for _, version in parts}) == 2 for parts in several)
    drawn_for = {made[3] for rank in ranks for step in rank["steps"] for made in step}
    assert drawn_for == set(range(1, STEPS + 1))


def test_finished_order_does_not_wait_and_trains_on_every_prompt_once(tmp_path, drawn):
    settings = ["rollout.order=finished", "train.steps=6"]
    (run,) = run_ranks(1, run_and_note, recipe_of(tmp_path, 1, *settings), {"every": 3, "last": 6})
    found = prompts_of(run)
    assert all(len(step) == NUM for step in found)
    every = [prompt for step in found for prompt in step]
    assert len(set(every)) == len(every) == 6 * NUM, "each once"
    assert {prompt for step in drawn for prompt in step} <= set(every), (
        "and none that was drawn later in its place"
    )
    assert found[0] != drawn[0], "the first step did not wait for its slow completions"
    assert all(m["lag/max"] <= 1 and m["ahead/dropped"] == 0 for m in run["metrics"])


def test_prompts_that_would_get_too_old_are_given_up_counted_and_replaced(tmp_path, drawn):
    settings = ["rollout.order=finished", "rollout.too_old=drop"]
    ranks = run_ranks(2, run_and_note, recipe_of(tmp_path, 1, *settings), {"every": 6, "syncs": 99})
    found = prompts_of(*ranks)
    assert all(len(step) == NUM for step in found), "every batch is full"
    every = [prompt for step in found for prompt in step]
    assert len(set(every)) == len(every)
    dropped = [m["ahead/dropped"] for m in ranks[0]["metrics"]]
    assert sum(dropped) > 0 and dropped == [m["ahead/dropped"] for m in ranks[1]["metrics"]]
    assert dropped[0] == 0.0, "what was begun with the newest weights may still be taken"
    assert max(m["lag/max"] for m in ranks[0]["metrics"]) <= 1


@pytest.mark.fault
def test_an_error_of_one_ranks_engine_ends_every_rank_alike(tmp_path, nothing_left):
    outcomes = run_ranks_outcomes(2, run_and_note, recipe_of(tmp_path, 1), {"fails": True})
    assert outcomes[0] == outcomes[1]
    assert "R500 rollout: rank 1: OSError: the wire is cut" in outcomes[0][2]
    assert len(lines(tmp_path / "metrics.jsonl")) >= 1


@pytest.mark.parametrize("order", ["drawn", "finished"])
def test_a_resumed_run_goes_on_with_the_tokens_that_were_drawn(tmp_path, drawn, order):
    recipe = recipe_of(
        tmp_path, 2, "output.save_every=1", "optimizer.schedule=constant", f"rollout.order={order}"
    )
    how = {"every": 4, "syncs": 2, "fast": NUM * SIZE if order == "drawn" else 0}
    first = run_ranks(2, run_and_note, recipe, how, 2)
    rows = [
        row
        for rank in (0, 1)
        for row in lines(tmp_path / f"checkpoints/step-00000002/trajectories-{rank}.jsonl")
    ]
    drawn_of = [row["begun"]["tokens"] for row in rows if row.get("begun")]
    # On a busy machine an answer may be complete and not taken yet: then nothing of it is left to ask for.
    begun = [len(tokens) for tokens in drawn_of if tokens[-1] != STOP and len(tokens) < LONGEST]
    assert begun and set(begun) == {1}
    (rest,) = run_ranks(1, run_and_note, recipe)
    assert rest["begun"] == begun, "they go on from their first token"
    together = prompts_of(*first) + prompts_of(rest)
    if order == "drawn":
        assert together == drawn
    every = [prompt for step in together for prompt in step]
    assert len(set(every)) == len(every) == STEPS * NUM
    complete = sum("trajectory" in row for row in rows) + len(drawn_of) - len(begun)
    assert rest["started"] == (STEPS - 2) * NUM * SIZE - complete, "nothing that was complete is made again"


def test_a_resumed_run_asks_again_for_rewards_that_failed_and_draws_nothing_again(tmp_path):
    down = tmp_path / "down"
    down.write_text("even")
    entry = f"name='tests.rl.user_rewards:needs_a_service', options={{down='{down}'}}"
    reward = f"reward.functions=[{{{entry}}}]"
    recipe = recipe_of(tmp_path / "run", 2, "output.save_every=1", "optimizer.schedule=constant", reward)
    (first,) = run_ranks(1, run_and_note, recipe, None, 2)
    assert all(metrics["reward/failed"] for metrics in first["metrics"])
    rows = lines(tmp_path / "run/checkpoints/step-00000002/trajectories-0.jsonl")
    drawn = [row for row in rows if "trajectory" in row or row["begun"]]
    assert any(row["trajectory"]["reward"]["failures"] for row in drawn if "trajectory" in row)
    down.unlink()
    (rest,) = run_ranks(1, run_and_note, recipe)
    assert not any(metrics["reward/failed"] for metrics in rest["metrics"])
    assert rest["started"] == (STEPS - 2) * NUM * SIZE - len(drawn), "what was drawn is not drawn again"
    assert rest["checks"] == STEPS - 2


def test_of_ranks_that_share_sequences_the_first_samples_for_all(tmp_path, drawn):
    recipe = recipe_of(tmp_path, 1, "model.sequence_parallel=2", "train.steps=2", "output.eval_every=2")
    ranks = run_ranks(2, run_and_note, recipe)
    assert ranks[0]["steps"] == ranks[1]["steps"] and ranks[1]["started"] == 0
    assert prompts_of(ranks[0]) == drawn[:2]
    assert ranks[0]["metrics"][-1]["ahead/buffered"] == 0.0


@pytest.mark.parametrize("steps", [4, 5])
def test_an_evaluation_runs_beside_training(tmp_path, steps):
    recipe = recipe_of(tmp_path, 1, "output.eval_every=2", f"train.steps={steps}")
    run_ranks(2, run_and_note, recipe)
    found = [line["metrics"] for line in lines(tmp_path / "metrics.jsonl")]
    evaluated = [metrics["eval/step"] for metrics in found if "eval/reward" in metrics]
    assert evaluated == [0.0, 2.0, 4.0], "each once, and none is left out at the end"
    assert all(name in found[-1] for name in ("reward/mean", "lag/mean"))


def test_an_evaluation_that_a_killed_run_gave_up_begins_again(tmp_path):
    """With its step's weights: it began after the step of the checkpoint, so no line of it stays."""
    recipe = recipe_of(tmp_path, 1, "output.eval_every=2", "output.save_every=1", "train.steps=4")
    run_ranks(1, run_and_note, recipe, None, 2)
    run_ranks(1, run_and_note, recipe)
    found = [line["metrics"] for line in lines(tmp_path / "metrics.jsonl")]
    evaluated = [metrics["eval/step"] for metrics in found if "eval/reward" in metrics]
    assert evaluated == [0.0, 2.0, 4.0]
    assert [metrics["eval/version"] for metrics in found if "eval/reward" in metrics] == [0.0, 2.0, 4.0]


def test_memory_cannot_be_lent_while_the_engine_samples(tmp_path):
    outcomes = run_ranks_outcomes(1, run_and_note, recipe_of(tmp_path, 1, "rollout.offload_policy=true"))
    assert (
        "C001 rollout: rollout.ahead=1 and rollout.offload_policy=true exclude each other" in outcomes[0][2]
    )
