"""What a step learns from: completions that may be trained on, rewards that count, and evaluations that are comparable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import (
    RECIPES,
    comparable,
    lines,
    run_recipe,
    small_recipe,
    trajectory,
    with_last,
    write_rows,
)

pytestmark = pytest.mark.distributed

REWARDS = "tests.rl.user_rewards"
ONE_STEP = ("train.steps=1", "output.eval_every=0", "output.save_model=false")


def run_with_nan(recipe: str, rank: int, canary: bool) -> dict[str, float]:
    """A run in which a rank's engine is not sure of one token, in the canary or in the batch."""
    from shardproof.rollout.local import EmbeddedEngine

    complete = EmbeddedEngine.complete

    def complete_nan(self: Any, requests: Any, sampling: Any) -> Any:
        made = complete(self, requests, sampling)
        if dist.get_rank() == rank and (len(requests) == 1) == canary:
            made[-1] = with_last(made[-1], logprobs=(*made[-1].segments[-1].logprobs[:-1], float("nan")))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedEngine, "complete", complete_nan)
        return run_recipe(recipe)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo"])
def test_log_probs_that_are_no_numbers_stop_the_run_before_the_step(tmp_path, algorithm):
    settings = [*ONE_STEP, f"algorithm.name={algorithm}", "algorithm.tis_cap=none"]
    outcomes = run_ranks_outcomes(2, run_with_nan, small_recipe(tmp_path, *settings), 1, False)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == "RolloutFault"
    assert "R503 rollout: rank 1: the engine's log-prob of token" in outcomes[0][2]
    assert "of sequence 11 is nan" in outcomes[0][2]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_canary_that_is_no_number_stops_the_run(tmp_path):
    outcomes = run_ranks_outcomes(2, run_with_nan, small_recipe(tmp_path, *ONE_STEP), 1, True)
    assert outcomes[0] == outcomes[1]
    assert (
        "R503 sync: after version 0 engine and trainer log-probs of the canary differ by nan"
        in outcomes[0][2]
    )


# Where completions end.


def model_with(folder: Path, generation: Any = None, **config: Any) -> Path:
    """The tiny model's folder with another idea of where a completion ends."""
    shutil.copytree(RECIPES / "tiny" / "model", folder)
    stated = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(stated))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, (1,)),
        (None, {"eos_token_id": [1, 7]}, (1, 7)),
        ({"eos_token_id": 5}, {}, (1, 5)),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (1, 5, 6)),
        ({"eos_token_id": [5, 14, -1]}, {}, (1, 5)),  # the vocabulary has 14
        ({}, {"eos_token_id": 7}, (1,)),
    ],
)
def test_completions_end_where_the_tokenizer_or_the_generation_config_says(
    tmp_path, generation, config, expected
):
    from shardproof.config.load import from_json
    from shardproof.rl.checks import check_inputs

    model = model_with(tmp_path / "model", generation, **config)
    for random_init in ("false", "true"):
        recipe = small_recipe(tmp_path, f"model.path={model}", f"model.random_init={random_init}")
        assert check_inputs(from_json(recipe)).stop_ids == expected


@pytest.mark.parametrize("generation", [{"eos_token_id": "1"}, {"eos_token_id": [1, True]}, [5]])
def test_a_generation_config_that_says_nothing_sensible_is_refused(tmp_path, generation):
    from shardproof.config.load import from_json
    from shardproof.errors import ShardproofError
    from shardproof.rl.checks import check_inputs

    model = model_with(tmp_path / "model", generation)
    with pytest.raises(ShardproofError, match="L103"):
        check_inputs(from_json(small_recipe(tmp_path, f"model.path={model}")))


def test_a_run_stops_at_the_end_of_turn_of_the_generation_config(tmp_path):
    """Every token ends a completion, so each has one."""
    model = model_with(tmp_path / "model", {"eos_token_id": list(range(14))})
    first, second = run_ranks(2, run_recipe, small_recipe(tmp_path / "run", *ONE_STEP, f"model.path={model}"))
    assert comparable(first) == comparable(second)
    assert first["completion/length"] == 1.0 and first["completion/finished"] == 1.0


# Evaluation.


def test_weights_and_penalties_do_not_count_in_an_evaluation(tmp_path):
    settings = ["train.steps=1", "output.eval_every=1", "output.eval_prompts=24", "output.save_model=false"]
    (plain,) = run_ranks(1, run_recipe, small_recipe(tmp_path / "plain", *settings))
    shaped = [*settings, "algorithm.overlong_from=1", "reward.functions=[{name='exact_match',weight=0.5}]"]
    run_ranks(1, run_recipe, small_recipe(tmp_path / "shaped", *shaped))
    before, after = (lines(tmp_path / run / "metrics.jsonl")[0] for run in ("plain", "shaped"))
    assert before["step"] == after["step"] == 0
    assert before["metrics"]["eval/pass@1"] == after["metrics"]["eval/pass@1"] > 0.0
    assert before["metrics"]["eval/exact_match"] == after["metrics"]["eval/exact_match"] > 0.0
    assert after["metrics"]["eval/reward"] == 0.5 * before["metrics"]["eval/reward"]
    assert plain["eval/reward"] == plain["eval/exact_match"] == plain["eval/pass@1"]


@pytest.mark.parametrize(("num_ranks", "samples"), [(2, 1), (1, 4)])
def test_an_evaluation_has_the_standard_error_over_prompts(tmp_path, num_ranks, samples):
    """Completions of one prompt are one draw, not several: as many samples as one likes make no error smaller."""
    settings = ["train.steps=1", "output.eval_every=1", "output.eval_prompts=24", "output.save_model=false"]
    settings += [f"output.eval_samples={samples}", f"reward.functions=[{{name='{REWARDS}:even_answer'}}]"]
    found = run_ranks(num_ranks, run_recipe, small_recipe(tmp_path, *settings))[0]
    share = found["eval/reward"]
    assert 0.2 < share < 0.8
    assert found["eval/reward_se"] == pytest.approx((share * (1 - share) / 23) ** 0.5, rel=1e-9)


def test_a_run_is_evaluated_before_its_first_step_and_a_resumed_one_is_not(tmp_path):
    settings = ["output.eval_every=2", "output.save_every=2", "optimizer.schedule=constant"]
    for steps in (2, 4):
        run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, f"train.steps={steps}"))
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in written if "eval/reward" in line["metrics"]] == [0, 2, 4]
    assert all(name.startswith(("eval/", "time/evaluation")) for name in written[0]["metrics"])
    assert "Held-out reward" in (tmp_path / "report.html").read_text()


def run_killed_in_its_first_step(recipe: str) -> None:
    from shardproof.rl import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "one_step", lambda *given: 1 / 0)
        run_recipe(recipe)


def test_a_run_that_begins_again_has_one_evaluation_before_its_first_step(tmp_path):
    recipe = small_recipe(tmp_path, "train.steps=1", "output.eval_every=1", "output.save_model=false")
    (outcome,) = run_ranks_outcomes(1, run_killed_in_its_first_step, recipe)
    assert outcome[1] == "ZeroDivisionError"
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0]
    run_ranks(1, run_recipe, recipe)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]


# Which prompts count.

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)]


def test_dynamic_sampling_can_be_switched_off_for_dapo(tmp_path):
    settings = [*ONE_STEP, "algorithm.name=dapo", "algorithm.dynamic_sampling=false"]
    (found,) = run_ranks(1, run_recipe, small_recipe(tmp_path, *settings))
    assert found["prompts/kept"] == 1.0 and found["reward/group_std"] < 0.5


def run_and_count(recipe: str) -> tuple[int, float]:
    """How many completions were sampled, and the share of prompts that the metrics say were trained on."""
    from shardproof.rl.rollouts import Sampler

    sampled, sample = [], Sampler.sample

    def count(self: Sampler, starts: Any, *others: Any) -> Any:
        sampled.append(len(starts))
        return sample(self, starts, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", count)
        metrics = run_recipe(recipe)
    return sum(sampled), metrics["prompts/kept"]


def test_surplus_groups_are_not_called_kept(tmp_path):
    settings = [*ONE_STEP, "algorithm.name=dapo", "train.prompts_per_step=12", "rollout.group_size=4"]
    ((num_sampled, kept),) = run_ranks(1, run_and_count, small_recipe(tmp_path, *settings))
    assert num_sampled > 12 * 4 and kept == 12 * 4 / num_sampled


def test_a_penalty_alone_is_no_signal(tmp_path):
    """Nothing is ever right here: DAPO has nothing to learn, however much the lengths differ."""
    rows = write_rows(tmp_path / "rows.jsonl", [row | {"answer": "none"} for row in SUMS])
    settings = [*ONE_STEP, "algorithm.name=dapo", "algorithm.overlong_from=1", f"data.train={rows}"]
    (found,) = run_ranks(1, run_recipe, small_recipe(tmp_path / "run", *settings))
    assert found["reward/std"] > 0.0, "penalties differ"
    assert found["prompts/kept"] == 0.0 and found["updates"] == 0.0


@pytest.mark.parametrize("algorithm", ["dapo", "ppo"])
def test_several_updates_are_the_same_at_any_number_of_ranks(tmp_path, algorithm):
    settings = [f"algorithm.name={algorithm}", "algorithm.updates_per_batch=3", "output.eval_every=0"]
    expected = None
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        run_ranks(num_ranks, run_recipe, small_recipe(folder, *settings, "output.save_model=false"))
        found = trajectory(folder)
        expected = expected or found
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-3, abs=1e-5)
            assert now["updates"] == 3.0


def run_and_note(recipe: str) -> tuple[dict[str, float], list[tuple[float, bool, float]], list[list[float]]]:
    """(metrics, each completion's reward, whether it failed and its advantage, the weights that were trained with)."""
    from shardproof.rl import loop
    from shardproof.rl.algorithms.base import Algorithm

    found, weights = [], []
    collect, weigh = loop.collect, Algorithm.weigh

    def note_rewards(*given: Any, **settings: Any) -> Any:
        experience = collect(*given, **settings)
        for made, row in zip(experience.trajectories, experience.batch.columns["advantages"], strict=True):
            found.append((made.reward.trained, made.reward.failed, float(row.sum())))
        return experience

    def note_weights(*given: Any) -> Any:
        weighed = weigh(*given)
        weights.append([float(row.sum()) for row in weighed.columns["weights"]])
        return weighed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "collect", note_rewards)
        patch.setattr(Algorithm, "weigh", note_weights)
        return run_recipe(recipe), found, weights


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "dr_grpo", "ppo", "reinforce_pp"])
def test_completions_whose_reward_failed_are_left_out(tmp_path, algorithm):
    """Even answers make the reward raise: they are neither wrong nor right, and move nothing."""
    named = f"reward.functions=[{{name='{REWARDS}:refuses_even_answers'}}]"
    settings = [*ONE_STEP, named, f"algorithm.name={algorithm}", "rollout.group_size=8"]
    ((metrics, flat, (weights,)),) = run_ranks(1, run_and_note, small_recipe(tmp_path, *settings))
    failed = [entry for entry in flat if entry[1]]
    assert 0 < len(failed) < len(flat)
    assert metrics["reward/failed"] == metrics["reward/errors"] == len(failed)
    assert all(advantage == 0.0 for _, _, advantage in failed)
    assert [weight == 0.0 for weight in weights] == [entry[1] for entry in flat]
    known = [entry[0] for entry in flat if not entry[1]]
    assert metrics["reward/mean"] == pytest.approx(sum(known) / len(known))
    if algorithm != "dr_grpo":
        assert sum(weights) == pytest.approx(1.0, rel=1e-5)


# A start that fails on one rank.


def run_where_one_rank_cannot(recipe: str, what: str) -> None:
    from shardproof.rl.rewards import from_recipe
    from shardproof.rollout import local

    real = {"RewardRunner": from_recipe.RewardRunner, "_empty_replica": local._empty_replica}[what]

    def start(*given: Any, **settings: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(24, "Too many open files")
        return real(*given, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_recipe if what == "RewardRunner" else local, what, start)
        try:
            run_recipe(recipe)
        finally:
            workers = [p for p in psutil.Process().children() if "reward" in " ".join(p.cmdline())]
            assert not workers, workers


@pytest.mark.parametrize("what", ["RewardRunner", "_empty_replica"])
def test_what_one_rank_cannot_start_ends_the_run_on_all(tmp_path, what):
    named = f"reward.functions=[{{name='{REWARDS}:refuses_even_answers'}}]"
    outcomes = run_ranks_outcomes(2, run_where_one_rank_cannot, small_recipe(tmp_path, named), what)
    assert outcomes[0] == outcomes[1]
    assert (
        outcomes[0][0] == "error" and "rank 1" in outcomes[0][2] and "Too many open files" in outcomes[0][2]
    )
