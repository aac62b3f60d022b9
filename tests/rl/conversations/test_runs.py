"""Runs with an environment: every turn is appended as tokens, and only the policy's own tokens are trained on."""

from __future__ import annotations

import pytest

from shardproof.config.load import from_json
from shardproof.rl.checks import check_inputs
from shardproof.rl.sources.summary import summarise
from tests.ranks import run_ranks
from tests.rl.conversations.environments import HERE
from tests.rl.conversations.kept import authors, recipe_with, run_and_keep, sequences
from tests.rl.runs import comparable, lines, run_recipe, small_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed


def test_turns_are_appended_and_only_the_policys_are_trained_on(tmp_path):
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path, "AsksAgain", "rollout.max_new_tokens=8"))
    assert len({len(authors(t)) for t in found["trajectories"]}) > 1, "conversations end at different turns"
    for t, tokens, mask in zip(found["trajectories"], found["tokens"], found["masks"], strict=True):
        said = authors(t)
        assert said[:2] == ("prompt", "policy") and set(said[2::2]) <= {"environment"}
        assert tokens == [token for segment in t["segments"] for token in segment["tokens"]]
        trained = [float(s["author"] == "policy") for s in t["segments"] for _ in s["tokens"]]
        assert mask == trained[1:]
        assert said[-1] == "policy" and t["ended"] in ("done", "length")
    metrics = found["metrics"]
    assert metrics["updates"] == 1.0 and metrics["canary/gap"] < 1e-3
    # Every token's log-prob is the trainer's own, although earlier turns were read again as a prompt.
    assert metrics["mismatch/max"] < 1e-3


def test_rewards_of_turns_reach_their_segments_the_total_and_the_metrics(tmp_path):
    settings = ["environment.reward_weight=0.5", "rollout.max_new_tokens=8", "train.prompts_per_step=12"]
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path, "AsksAgain", *settings))
    for t in found["trajectories"]:
        turns, policy = t["facts"]["turns"], [s for s in t["segments"] if s["author"] == "policy"]
        assert [turn["reward"] for turn in turns] == [1.0 / (1 + len(turn["text"])) for turn in turns]
        assert [s["reward"] for s in policy] == [turn["reward"] / 2 for turn in turns]
        assert all(not s["reward"] for s in t["segments"] if s["author"] != "policy")
        total, reward = sum(turn["reward"] for turn in turns), t["reward"]
        assert reward["parts"]["environment"] == pytest.approx(total)
        assert reward["total"] == pytest.approx(reward["parts"]["exact_match"] + total / 2)
    metrics, num = found["metrics"], len(found["trajectories"])
    turns = [turn for t in found["trajectories"] for turn in t["facts"]["turns"]]
    assert metrics["environment/turns"] == pytest.approx(len(turns) / num)
    assert metrics["environment/characters"] == pytest.approx(
        sum(len(turn["text"]) for turn in turns) / len(turns)
    )
    assert metrics["environment/reward"] == pytest.approx(metrics["reward/environment"])
    for name in ("failed", "malformed_calls", "calls"):
        assert metrics[f"environment/{name}"] == 0.0
    assert metrics["environment/seconds"] > 0.0 and 0.0 <= metrics["time/environment"] < metrics["time/step"]


def test_an_environment_alone_may_reward_and_bring_the_rows(tmp_path):
    sources = ["data.train=environment:train", "data.evaluation=environment:test", "output.eval_every=1"]
    recipe = recipe_with(tmp_path, "Opens", *sources, "environment.options={first=3}", "reward=none")
    found, other = run_ranks(2, run_and_keep, recipe)
    assert comparable(found["metrics"]) == comparable(other["metrics"])
    metrics = found["metrics"]
    assert metrics["reward/mean"] == metrics["environment/reward"] > 0
    assert metrics["eval/environment"] == metrics["eval/reward"]
    assert metrics["eval/pass@1"] == 1.0, "a conversation that the environment gives 1 is passed"
    prompts = {t["facts"]["prompt"] for t in found["trajectories"] + other["trajectories"]}
    assert prompts == {f"3+{n}=" for n in range(6)}
    for t in found["trajectories"]:
        assert t["facts"]["answer"] == str(eval(t["facts"]["prompt"].rstrip("=")))


def test_what_is_shown_of_the_data_is_what_conversations_begin_with(tmp_path):
    """The row's own prompt was shown, or none, whatever the environment began with."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"answer": str(n)} for n in range(1, 9)])
    data = (f"data.train={rows}", "data.evaluation=none", "train.steps=2", "train.prompts_per_step=3")
    recipe = recipe_with(tmp_path / "run", "Rolls", *data)
    (found,) = run_ranks(1, run_and_keep, recipe)
    inputs = check_inputs(from_json(recipe))
    facts = summarise(from_json(recipe), inputs, "train", 6)
    shown = [tuple(each["id"] for each in row["sequences"][0]["tokens"]) for row in facts["shown"]]
    read = {t["group"]: tuple(t["segments"][0]["tokens"]) for t in found["trajectories"]}
    assert read == dict(enumerate(shown[3:]))
    assert facts["begins"] and "error" not in facts["shown"][0]
    text = inputs.tokenizer.decode(shown[0])
    assert facts["shown"][0]["text"] == text and len(text) > len("+1=")
    rows.write_text(rows.read_text().replace('"8"', '"0"'))
    (failed,) = (
        row for row in summarise(from_json(recipe), check_inputs(from_json(recipe)), "train", 8)["shown"]
        if "error" in row
    )  # fmt: skip
    assert failed["row"] == 7 and failed["sequences"] == [] and "the dice are missing" in failed["error"]


def test_the_same_seed_gives_the_same_conversations_on_one_two_and_three_ranks(tmp_path):
    expected = None
    for num_ranks in (1, 2, 3):
        settings = ["environment.max_turns=3", "rollout.max_new_tokens=8", "train.steps=2"]
        found = run_ranks(num_ranks, run_and_keep, recipe_with(tmp_path / str(num_ranks), "Flips", *settings))
        made = sorted(
            (t["group"], t["sample"], tuple(tuple(s["tokens"]) for s in t["segments"]), t["reward"]["total"])
            for rank in found
            for t in rank["trajectories"]
        )
        assert len({t[2] for t in made}) > 6
        replies = {(t[0], t[2][2]) for t in made if len(t[2]) > 2}
        assert len(replies) == len({group for group, _ in replies}), "a group's conversations have one seed"
        expected = expected or (made, trajectory(tmp_path / "1"))
        assert made == expected[0]
        for one, now in zip(expected[1], trajectory(tmp_path / str(num_ranks)), strict=True):
            assert now == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path):
    settings = [
        f"environment.name={HERE}:Flips",
        "environment.max_turns=2",
        "output.save_every=2",
        "optimizer.schedule=constant",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected, _ = run_ranks(2, run_recipe, small_recipe(whole, *settings, "train.steps=4"))
    run_ranks(2, run_recipe, small_recipe(parts, *settings, "train.steps=2"))
    resumed, _ = run_ranks(2, run_recipe, small_recipe(parts, *settings, "train.steps=4"))
    assert comparable(resumed) == comparable(expected)
    assert trajectory(parts) == trajectory(whole)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, ["model.strategy=fsdp1"]),
        (2, ["model.lora={r=2}", "algorithm.kl_coef=0.01"]),
        (2, ["algorithm.name=ppo", "algorithm.updates_per_batch=2"]),
        (2, ["algorithm.name=dapo", "train.prompts_per_step=2", f"environment.name={HERE}:AsksAgain"]),
    ],
    ids=["fsdp1", "lora", "ppo", "dapo"],
)
def test_conversations_train_in_every_layout(tmp_path, num_ranks, settings):
    first, second = run_ranks(num_ranks, run_and_keep, recipe_with(tmp_path, "Forgets", *settings))
    assert comparable(first["metrics"]) == comparable(second["metrics"])
    assert first["metrics"]["mismatch/max"] < 1e-3 and first["metrics"]["skipped"] == 0.0
    assert first["metrics"]["updates"] >= 1.0


def test_ranks_that_share_sequences_have_the_same_conversations(tmp_path):
    """Of an environment that never answers the same: one rank of each group asks it for all."""
    settings = ["model.sequence_parallel=2", "rollout.max_new_tokens=8"]
    first, second = run_ranks(2, run_and_keep, recipe_with(tmp_path, "Clock", *settings))
    assert first["trajectories"] == second["trajectories"]
    assert any(len(authors(t)) > 2 for t in first["trajectories"])
    assert first["metrics"]["environment/failed"] == 0.0
    assert comparable(first["metrics"]) == comparable(second["metrics"])


def test_a_fresh_reply_begins_a_sequence_of_its_own(tmp_path):
    settings = ["rollout.max_new_tokens=8", "output.samples_per_step=100"]
    (found,) = run_ranks(1, run_and_keep, recipe_with(tmp_path, "Forgets", *settings))
    split = [t for t in found["trajectories"] if t["earlier"]]
    assert split
    rows = [part for t in found["trajectories"] for part in sequences(t)]
    assert len(found["tokens"]) == len(rows) > len(found["trajectories"])
    for row, tokens, mask in zip(rows, found["tokens"], found["masks"], strict=True):
        assert tokens == [token for s in row["segments"] for token in s["tokens"]]
        trained = [float(s["author"] == "policy") for s in row["segments"] for _ in s["tokens"]]
        assert mask == trained[1:]
    for t in split:
        (before,) = t["earlier"]
        assert authors(before) == ("prompt", "policy", "environment", "policy")
        assert authors(t) == ("prompt", "policy")
        assert t["reward"]["parts"]["environment"] == 3.0
        assert t["text"].split("\n")[1::2] == ["+1=", "2+2="]
    assert len(lines(tmp_path / "samples.jsonl")) == len(found["trajectories"]), "samples are conversations"
    assert found["metrics"]["mismatch/max"] < 1e-3


def test_rows_without_a_prompt_need_an_environment_that_brings_one(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"second": n, "answer": "3"} for n in range(4)])
    settings = [f"data.train={data}", "data.evaluation=none"]
    (metrics,) = run_ranks(1, run_recipe, recipe_with(tmp_path / "run", "Opens", *settings))
    assert metrics["environment/turns"] == 1.0


def reads_the_conversation(prompt, completion, row):
    """1 if the reward got the last turn, and all turns beside the row's own columns."""
    texts = [turn["text"] for turn in row["turns"]]
    return float(
        completion == texts[-1] and len(texts) == 2 + int(row["answer"]) % 2 and prompt.endswith("=")
    )


def test_reward_functions_read_the_last_turn_and_find_all_turns_in_the_row(tmp_path):
    reward = f"reward.functions=[{{name='{__name__}:reads_the_conversation'}}]"
    (found,) = run_ranks(
        1, run_and_keep, recipe_with(tmp_path, "AsksAgain", reward, "rollout.max_new_tokens=8")
    )
    for t in found["trajectories"]:
        is_whole = t["ended"] == "done"
        assert t["reward"]["parts"][f"{__name__}:reads_the_conversation"] == is_whole
