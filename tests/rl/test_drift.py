"""The warning about a growing mismatch: when it comes, and when it must not."""

import json
import random
from typing import Any

import pytest

from shardproof.rl.drift import MismatchWatch
from tests.ranks import run_ranks
from tests.rl.runs import lines, run_recipe, small_recipe


def warned(values):
    """The steps, from 1, at which there is a finding."""
    watch = MismatchWatch()
    return [
        step
        for step, value in enumerate(values, start=1)
        if any(finding.code == "R510" for finding in watch.see(step, {"mismatch/kl": value}))
    ]


def noisy(level, num, seed=0):
    draw = random.Random(seed)
    return [level * draw.lognormvariate(0.0, 0.5) for _ in range(num)]


@pytest.mark.parametrize(
    "values",
    [
        noisy(0.02, 500),
        noisy(1e-12, 100) + noisy(1e-5, 400),  # far more rounding than before, and still rounding
        [0.0] * 40 + noisy(2e-3, 200),  # what running ahead brings after steps without lag
        [0.0, 0.0] + noisy(0.05, 300),
        (noisy(0.01, 60) + [5.0]) * 5,  # one odd batch now and then
        noisy(0.2, 300)[::-1] + noisy(0.02, 300),
        noisy(0.001, 10) + noisy(1.0, 10),  # too few to judge by
        [],
    ],
)
def test_a_mismatch_that_does_not_grow_is_not_mentioned(values):
    assert warned(values) == []


def test_a_jump_is_found_within_three_steps_and_said_again_only_later():
    steps = warned(noisy(0.004, 40) + noisy(0.3, 110))
    assert len(steps) == 3 and 41 < steps[0] <= 43
    assert steps[1] - steps[0] == steps[2] - steps[1] == 50


@pytest.mark.parametrize("stop", [1, 22, 40, 41, 60, 95])
def test_a_run_that_goes_on_finds_what_one_that_was_not_stopped_finds(stop):
    """A watch that began anew took the mismatch of the steps after the stop for what it had been before."""
    values = noisy(0.004, 40) + noisy(0.3, 110)
    watch, steps = MismatchWatch(), []
    for step, value in enumerate(values, start=1):
        if watch.see(step, {"mismatch/kl": value}):
            steps.append(step)
        if step == stop:
            state = json.dumps(watch.state(), allow_nan=False)
            watch = MismatchWatch()
            watch.restore(json.loads(state))
    assert steps == warned(values)
    watch.restore({})  # of a checkpoint of an earlier version
    assert watch.state() == MismatchWatch().state()


def test_slow_growth_is_found_too():
    (first, *_) = warned([0.002 * 1.01**step for step in range(400)])
    assert 0.01 < 0.002 * 1.01**first < 0.05


def test_what_came_back_is_not_mentioned_again():
    assert len(warned(noisy(0.004, 40) + noisy(0.3, 10) + noisy(0.004, 300))) == 1


def test_the_message_has_the_numbers():
    watch = MismatchWatch()
    for step in range(1, 31):
        watch.see(step, {"mismatch/kl": 0.015})
    found = [f for step in range(31, 34) for f in watch.see(step, {"mismatch/kl": 0.21})]
    (finding,) = found
    assert str(finding).startswith(
        "R510 update: step 32: the mismatch KL of the last 3 steps is 0.21 per token, 14 times"
    )
    assert "algorithm.correction" in str(finding)


def test_runs_without_the_metric_and_a_start_from_zero():
    watch = MismatchWatch()
    assert not any(watch.see(step, {"reward/mean": 1.0}) for step in range(100))
    steps = warned([0.0] * 30 + [0.5] * 3)
    assert steps == [32]


def run_with_growing_mismatch(recipe: str) -> None:
    from shardproof.rl import loop

    step_metrics, steps = loop.step_metrics, []

    def grown(*given: Any) -> dict[str, float]:
        steps.append(len(steps))
        return step_metrics(*given) | {"mismatch/kl": 0.2 if len(steps) > 24 else 0.002}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "step_metrics", grown)
        run_recipe(recipe)


@pytest.mark.distributed
def test_a_run_notes_it_once_and_goes_on(tmp_path):
    quick = ["train.steps=28", "output.eval_every=0", "output.save_model=false", "train.prompts_per_step=2"]
    run_ranks(2, run_with_growing_mismatch, small_recipe(tmp_path, *quick))
    (event,) = [line for line in lines(tmp_path / "events.jsonl") if line["kind"] == "finding"]
    assert event["step"] == 26 and event["text"].startswith("R510 update: step 26: the mismatch KL")
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
