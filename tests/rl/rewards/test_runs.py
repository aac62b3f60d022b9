"""Whole steps on two ranks with rewards that have nothing to say, several at once, and each normalised."""

import json

import pytest

from shardproof.config.load import from_json
from shardproof.rollout.trajectory import reward_of
from tests.ranks import run_ranks
from tests.rl.rewards.judge_server import JudgeServer
from tests.rl.runs import lines, run_recipe, small_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed

REWARDS = "tests.rl.user_rewards"
ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")


def run(folder, functions, *overrides):
    """The metrics of the only step."""
    given = ", ".join(functions)
    recipe = small_recipe(folder, *ONE_STEP, f"reward.functions=[{given}]", *overrides)
    run_ranks(2, run_recipe, recipe)
    return trajectory(folder)[-1]


def test_completions_without_a_signal_are_left_out_and_counted(tmp_path):
    name = f"{REWARDS}:silent_on_even_answers"
    metrics = run(tmp_path, [f'{{name="{name}", label="odd"}}', '{name="numeric", weight=0}'])
    num_silent = metrics["reward/silent"]
    assert 0 < num_silent < 24 and metrics["reward/odd/no_signal"] == num_silent
    assert metrics["reward/failed"] == metrics["reward/errors"] == 0
    samples = lines(tmp_path / "samples.jsonl")
    assert all("odd" in one["rewards"] or one.get("advantage", 0) == 0 for one in samples)
    assert sum(one.get("no_signal") == ["odd"] for one in samples) > 0


def test_the_mean_of_a_function_is_over_all_that_it_has_a_value_of(tmp_path):
    functions = [
        f'{{name="{REWARDS}:silent_on_even_answers", label="odd"}}',
        f'{{name="{REWARDS}:is_even", label="even", weight=0}}',
        f'{{name="{REWARDS}:one_or_refusal", label="one", weight=0}}',
    ]
    metrics = run(tmp_path, functions, "output.eval_every=1")
    assert 0 < metrics["reward/silent"] < 24
    # The total of these is not known, and what is even of them is.
    assert metrics["reward/even"] == pytest.approx(metrics["reward/silent"] / 24)
    # Where it failed it has no value: not 0.
    assert metrics["reward/errors"] == metrics["reward/silent"] and metrics["reward/one"] == 1.0
    assert metrics["eval/even"] == metrics["eval/silent"] / 4 and metrics["eval/one"] == 1.0


def test_a_completion_is_solved_if_the_first_function_that_is_about_its_row_says_so(tmp_path):
    rows = [{"prompt": f"{k}+1=", "answer": str(k + 1), "kind": "ab"[k % 2]} for k in range(8)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    functions = [
        '{name="numeric", only={kind="a"}}',
        '{name="regex(^)", label="any", only={kind="b"}}',
        f'{{name="{REWARDS}:silent", label="none"}}',
    ]
    data = (f"data.train={path}", f"data.evaluation={path}", "output.eval_prompts=8")
    metrics = run(tmp_path / "run", functions, *data, "train.prompts_per_step=8", "output.eval_every=1")
    assert metrics["reward/any"] == 1.0
    assert metrics["reward/solved"] == pytest.approx(0.5 + metrics["reward/numeric"] / 2)
    assert metrics["eval/pass@1"] == pytest.approx(0.5 + metrics["eval/numeric"] / 2)


def test_a_batch_about_which_nobody_says_anything_changes_nothing_and_stops_nothing(tmp_path):
    metrics = run(tmp_path, [f'{{name="{REWARDS}:silent"}}'])
    assert metrics["reward/silent"] == 24 and metrics["reward/mean"] == 0.0
    assert metrics["reward/failed"] == 0


def test_gdpo_learns_from_each_reward_by_itself(tmp_path):
    functions = ['{name="numeric"}', f'{{name="{REWARDS}:varied", label="varied", weight=0.5}}']
    settings = ("reward.normalise=each", "algorithm.name=gdpo")
    metrics = run(tmp_path, functions, *settings)
    assert metrics["reward/mean"] == pytest.approx(metrics["reward/numeric"] + 0.5 * metrics["reward/varied"])
    advantages = [one.get("advantage", 0) for one in lines(tmp_path / "samples.jsonl")]
    assert any(advantages)


def test_a_judge_a_program_and_a_format_score_one_run(tmp_path):
    with JudgeServer() as server:
        options = {"url": server.url, "model": "m", "prompt": "{completion} <<x>>"}
        given = ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
        functions = [
            f'{{name="judge", options={{{given}}}}}',
            '{name="length", options={target=4}}',
            '{name="length", label="short", options={limit=8, start=2}, weight=0.5}',
        ]
        metrics = run(tmp_path, functions)
    assert metrics["reward/judge"] == pytest.approx(0.7)
    assert 0 <= metrics["reward/judge/cached"] < 1 and metrics["reward/judge/tokens"] == 30
    assert 0 <= metrics["reward/length"] <= 1 and -1 <= metrics["reward/short"] <= 0
    assert [*(tmp_path / "judge").rglob("*.json")]


def totals(recipe):
    """On a rank: each step's rewards."""
    from shardproof.rl import loop

    collect, found = loop.collect, []

    def note(*given, **settings):
        experience = collect(*given, **settings)
        found.append([reward_of(made).total for made in experience.trajectories])
        return experience

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", note)
        loop.train(from_json(recipe))
    return found


def test_ranks_that_share_sequences_learn_from_the_same_rewards(tmp_path):
    """The first one asks: what is asked twice may say two things, and one rank may have time for less."""
    settings = ["model.sequence_parallel=2", "rollout.ahead=1", "output.save_every=1", "train.steps=2"]
    functions = f"reward.functions=[{{name='{REWARDS}:of_this_rank'}}]"
    first, second = run_ranks(2, totals, small_recipe(tmp_path, *settings, functions))
    assert first == second and [len(step) for step in first] == [24, 24]
    assert all(len(set(step)) > 1 and len(set(map(int, step))) == 1 for step in first)
