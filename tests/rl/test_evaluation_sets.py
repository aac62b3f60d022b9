"""Several held-out sets, each at its own pace and with its own sampling, and the best model kept."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from transformers import AutoModelForCausalLM

from shardproof.config.evaluation_sets import held_out_sets
from shardproof.config.load import from_json, load_recipe
from shardproof.errors import ConfigError
from shardproof.rl.best import Best
from shardproof.rl.loggers import describe_evaluation
from shardproof.rl.loop import train
from shardproof.rl.same_run import Resume
from shardproof.weights.model_folder import ADAPTER_NAME
from tests.ranks import RankError, run_ranks
from tests.rl.runs import TINY, comparable, lines, run_recipe, small_recipe, write_rows

pytestmark = pytest.mark.distributed

ASIDE = "superseded-best"
ROWS = [{"question": f"{a}+{a}=", "sum": str(2 * a)} for a in range(6)]


def sets_in(folder):
    source = write_rows(folder / "doubles.jsonl", ROWS)
    columns = f"source='{source}', prompt_column='question', answer_column='sum'"
    return (
        "evaluation.sets=["
        f"{{name='doubles', {columns}, every=3, samples=4, temperature=1.5, pass_at=[1, 2], max_new_tokens=2}},"
        f"{{name='few', {columns}, prompts=2}}]"
    )


def test_sets_have_their_own_pace_rows_and_sampling(tmp_path):
    settings = ["train.steps=3", "output.eval_every=2", "output.save_model=false", sets_in(tmp_path)]
    found = run_ranks(2, run_recipe, small_recipe(tmp_path / "two", *settings))
    written = {line["step"]: line["metrics"] for line in lines(tmp_path / "two" / "metrics.jsonl")}
    assert comparable(found[0]) == comparable(found[1]) == comparable(written[3])
    paces = {"eval/reward": [0, 2], "eval/few/reward": [0, 2], "eval/doubles/reward": [0, 3]}
    for name, steps in paces.items():
        assert [step for step, metrics in written.items() if name in metrics] == steps
    doubles = {name for name in written[0] if name.startswith("eval/doubles/")}
    measured = ("reward", "reward_se", "exact_match", "failed", "avg@4", "maj@4")
    assert doubles == {
        f"eval/doubles/{name}"
        for name in (*measured, *(f"pass@{k}{end}" for k in (1, 2) for end in ("", "_low", "_high")))
    }
    assert written[0]["eval/doubles/avg@4"] == pytest.approx(written[0]["eval/doubles/pass@1"])
    assert "eval/few/pass@1" in written[0] and "eval/few/avg@1" not in written[0]
    run_ranks(1, run_recipe, small_recipe(tmp_path / "one", *settings))
    alone = {line["step"]: line["metrics"] for line in lines(tmp_path / "one" / "metrics.jsonl")}
    assert comparable(alone[0]) == comparable(written[0]), "the number of ranks changes nothing"


def test_a_set_with_a_pace_of_its_own_is_evaluated_before_the_first_step_too(tmp_path):
    settings = ["train.steps=1", "output.eval_every=0", "output.save_model=false", sets_in(tmp_path)]
    settings[-1] = settings[-1].replace("{name='few'", "{every=1, name='few'")
    run_ranks(1, run_recipe, small_recipe(tmp_path / "run", *settings))
    written = {line["step"]: line["metrics"] for line in lines(tmp_path / "run" / "metrics.jsonl")}
    assert [step for step, metrics in written.items() if "eval/few/reward" in metrics] == [0, 1]
    assert "eval/doubles/reward" in written[0] and "eval/reward" not in written[0]


def test_the_best_model_is_kept_and_a_worse_one_does_not_replace_it(tmp_path):
    settings = ["output.eval_every=1", "evaluation.best=eval/exact_match", "output.eval_prompts=24"]
    settings += ["optimizer.lr=0.5", "optimizer.schedule=constant"]  # so that training ruins the model
    recipe = small_recipe(tmp_path, *settings)
    run_ranks(2, run_recipe, recipe)
    scores = [line["metrics"]["eval/exact_match"] for line in lines(tmp_path / "metrics.jsonl")]
    assert scores[0] > max(scores[1:])
    note = json.loads((tmp_path / "best" / "best.json").read_text())
    assert note.pop("drawn")["prompts"] == 24
    assert note == {"step": 0, "metric": "eval/exact_match", "value": scores[0]}
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "best" / "model").state_dict()
    first = AutoModelForCausalLM.from_pretrained(TINY.parent / "tiny" / "model").state_dict()
    assert all((best[name] == first[name]).all() for name in first)
    # A run that goes on knows what was best, on every rank.
    note["step"] = 1
    (tmp_path / "best" / "best.json").write_text(json.dumps(note))
    run_ranks(2, run_recipe, small_recipe(tmp_path, *settings, "train.steps=3"))
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == note


def go_back(recipe: str, step: int) -> dict[str, float]:
    """One rank's run from a checkpoint; module-level, for `run_ranks`."""
    return train(from_json(recipe), resume=Resume(from_step=step))


@pytest.mark.parametrize(("best_at", "is_kept"), [(1, True), (2, True), (3, False)])
def test_going_back_behind_the_best_model_puts_it_aside_and_keeps_one_of_an_earlier_step(
    tmp_path, best_at, is_kept
):
    settings = ["output.eval_every=1", "output.save_every=1", "output.keep=5", "train.steps=3"]
    recipe = small_recipe(tmp_path, *settings, "evaluation.best=eval/exact_match")
    run_ranks(1, run_recipe, recipe)
    noted = tmp_path / "best" / "best.json"
    note = {"step": best_at, "metric": "eval/exact_match", "value": 2.0}  # more than any evaluation reaches
    noted.write_text(json.dumps(note))
    run_ranks(1, go_back, recipe, 2)
    assert (json.loads(noted.read_text()) == note) is is_kept
    assert (tmp_path / "superseded-best").exists() is not is_kept


def test_what_was_best_before_a_run_began_anew_counts_no_more(tmp_path):
    settings = ["output.eval_every=1", "train.steps=1", "output.save_model=false"]
    recipe = small_recipe(tmp_path, *settings, "evaluation.best=eval/exact_match")
    run_ranks(1, run_recipe, recipe)
    note = {"step": 0, "metric": "eval/exact_match", "value": 2.0}
    (tmp_path / "best" / "best.json").write_text(json.dumps(note))
    first, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(first)  # as if the run had been killed in its first step
    shutil.rmtree(tmp_path / "checkpoints")
    run_ranks(1, run_recipe, recipe)
    assert json.loads((tmp_path / "best" / "best.json").read_text())["value"] <= 1.0


def test_a_best_model_that_a_run_goes_on_from_before_is_put_aside(tmp_path):
    """A run that was killed after its best evaluation: what it finds on its way there again may be worse."""
    settings = ["output.eval_every=1", "output.save_every=1", "train.steps=3", "output.save_model=false"]

    def run_that_is_killed(best: str) -> None:
        run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, f"evaluation.best={best}"))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")  # as if it had not come to its last save

    run_that_is_killed("eval/exact_match")
    note = {"step": 3, "metric": "eval/exact_match", "value": 2.0}  # more than any evaluation reaches
    (tmp_path / "best" / "best.json").write_text(json.dumps(note))
    run_that_is_killed("eval/exact_match")
    aside, now = (json.loads((tmp_path / each / "best.json").read_text()) for each in (ASIDE, "best"))
    assert aside == note and now["value"] <= 1.0 and (tmp_path / ASIDE / "model" / "config.json").exists()
    # Another metric finds another model.
    run_that_is_killed("eval/pass@1")
    assert json.loads((tmp_path / ASIDE / "best.json").read_text()) == now
    assert json.loads((tmp_path / "best" / "best.json").read_text())["metric"] == "eval/pass@1"


def test_a_best_model_of_other_draws_is_put_aside(tmp_path):
    """What few rows or one greedy completion reached is no measure for what many do."""
    settings = ["output.eval_every=1", "output.save_every=1", "output.save_model=false"]
    settings += ["evaluation.best=eval/exact_match"]
    run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, "train.steps=1"))
    noted = tmp_path / "best" / "best.json"
    note = json.loads(noted.read_text()) | {"value": 2.0}  # more than any evaluation reaches
    assert note["drawn"]["prompts"] == 4 and note["drawn"]["temperature"] == 0.0
    noted.write_text(json.dumps(note))
    run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, "train.steps=2", "output.eval_every=2"))
    assert json.loads(noted.read_text()) == note and not (tmp_path / ASIDE).exists()
    run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, "train.steps=3", "output.eval_prompts=5"))
    assert json.loads(noted.read_text())["drawn"]["prompts"] == 5
    assert json.loads((tmp_path / ASIDE / "best.json").read_text()) == note


def test_a_best_model_that_was_replaced_in_part_goes_under_no_evaluation(tmp_path):
    """The model of one step with the adapter of another, or with the number of another."""
    settings = ["model.lora.r=2", "output.eval_every=1", "output.save_every=1", "output.save_model=false"]
    settings += ["evaluation.best=eval/exact_match", "output.eval_prompts=24"]
    run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, "train.steps=1"))
    noted, weights = tmp_path / "best" / "best.json", tmp_path / "best" / "adapter" / ADAPTER_NAME
    noted.write_text(json.dumps({"step": 1, "metric": "eval/exact_match", "value": -1.0}))  # less than any
    weights.write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # another tool's, which no save replaces
    recipe = small_recipe(tmp_path, *settings, "train.steps=3")
    with pytest.raises(RankError, match="E408"):
        run_ranks(1, run_recipe, recipe)
    assert (tmp_path / "best" / "model").exists() and not noted.exists()
    weights.unlink()
    run_ranks(1, run_recipe, recipe)
    assert json.loads(noted.read_text())["step"] >= 2 and (tmp_path / ASIDE / "model").exists()


def test_a_label_does_not_hide_how_a_function_reads_answers(tmp_path):
    rewards = "reward.functions=[{name='exact_match', label='right'}]"
    settings = ["output.eval_every=1", "output.eval_samples=4", "train.steps=1", "output.save_model=false"]
    run_ranks(1, run_recipe, small_recipe(tmp_path, *settings, rewards))
    assert all("eval/maj@4" in line["metrics"] for line in lines(tmp_path / "metrics.jsonl"))


def test_sets_draw_as_they_say_or_as_the_evaluation_or_as_training():
    overrides = [
        *("output.eval_every=1", "rollout.top_k=9", "rollout.min_p=0.1", "rollout.max_new_tokens=8"),
        *("evaluation.top_k=0", "evaluation.temperature=0.7", "evaluation.max_new_tokens=6"),
        "evaluation.sets=[{name='a', source='x', top_k=3, min_p=0.0, top_p=0.5, max_new_tokens=5, samples=2}]",
    ]
    whole, own = held_out_sets(load_recipe(TINY, overrides))
    assert whole.drawing == {
        "temperature": 0.7, "max_new_tokens": 6, "top_p": 1.0, "top_k": 0, "min_p": 0.1
    }  # fmt: skip
    assert own.drawing == {
        "temperature": 0.7, "max_new_tokens": 5, "top_p": 0.5, "top_k": 3, "min_p": 0.0
    }  # fmt: skip
    assert (whole.length_key, own.length_key) == (
        "evaluation.max_new_tokens",
        "evaluation.sets.0.max_new_tokens",
    )
    greedy, few = held_out_sets(
        load_recipe(TINY, [overrides[0], "evaluation.sets=[{name='a', source='x', samples=3}]"])
    )
    assert (greedy.temperature, few.temperature, few.length_key) == (0.0, 1.0, "rollout.max_new_tokens")
    # What a set that samples reads, the others may have, too.
    sampled = "evaluation.sets=[{name='a', source='x', samples=2}]"
    greedy, few = held_out_sets(load_recipe(TINY, [overrides[0], "evaluation.top_p=0.5", sampled]))
    assert (greedy.temperature, few.temperature, few.top_p) == (0.0, 1.0, 0.5)
    load_recipe(TINY, [overrides[0], "evaluation.top_p=0.5", "evaluation.temperature=0"])


def test_what_is_never_evaluated_asks_for_nothing():
    sets = "evaluation.sets=[{name='a', source='x', every=2, samples=8}]"
    recipe = load_recipe(TINY, ["output.eval_every=0", "evaluation.pass_at=[1, 8]", sets])
    assert [(each.every, each.pass_at) for each in held_out_sets(recipe)] == [(0, (1, 8)), (2, (1, 8))]


def test_an_evaluation_draws_with_settings_of_its_own(tmp_path):
    """The most likely token alone, at any temperature: all completions of a row are the same."""
    settings = ["output.eval_every=1", "output.eval_samples=4", "evaluation.pass_at=[1,4]", "train.steps=1"]
    settings += ["output.save_model=false", "rollout.top_k=5", "evaluation.top_k=1"]
    run_ranks(1, run_recipe, small_recipe(tmp_path, *settings))
    for line in lines(tmp_path / "metrics.jsonl"):
        assert line["metrics"]["eval/pass@4"] == line["metrics"]["eval/pass@1"]


def test_what_no_reward_speaks_of_has_no_mean_and_is_not_the_best(tmp_path):
    rows = [{"prompt": row["question"], "answer": row["sum"], "quiet": True} for row in ROWS]
    silent = write_rows(tmp_path / "silent.jsonl", rows)
    mixed = write_rows(tmp_path / "mixed.jsonl", [*rows[:2], {**rows[2], "quiet": False}])
    settings = [
        *("output.eval_every=1", "train.steps=1", "output.save_model=false", "evaluation.best=eval/reward"),
        f"data.evaluation={silent}",
        f"evaluation.sets=[{{name='mixed', source='{mixed}'}}]",
        "reward.functions=[{name='tests.rl.user_rewards:quiet'}, {name='tests.rl.user_rewards:nan', weight=0}]",
    ]
    run_ranks(1, run_recipe, small_recipe(tmp_path / "run", *settings))
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        found = line["metrics"]
        assert found["eval/reward"] is found["eval/tests.rl.user_rewards:quiet"] is None
        assert (found["eval/silent"], found["eval/failed"], found["eval/pass@1"]) == (4.0, 0.0, 0.0)
        assert found["eval/mixed/tests.rl.user_rewards:nan"] is None, "it failed, which is no 0"
        assert (found["eval/mixed/reward"], found["eval/mixed/silent"]) == (-1.0, 2.0)
    assert not (tmp_path / "run" / "best").exists()
    said = describe_evaluation(
        {"eval/reward": math.nan, "eval/mixed/reward": -1.0, "eval/mixed/reward_se": 0.0}
    )
    assert said == "held-out reward unknown, mixed reward -1.000 ± 0.000"
    measured = {
        "eval/pass@1": 0.5,
        "eval/more/reward": 1.0,
        "eval/more/pass@1": 0.25,
        "eval/most/pass@1": 0.75,
    }
    assert describe_evaluation(measured) == "held-out pass@1 0.500, more reward 1.000, most pass@1 0.750"
    assert (
        describe_evaluation({"eval/reward/accuracy": 0.5, "eval/loss": 1.0})
        == "held-out accuracy 0.500, held-out loss 1.0000"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["output.eval_every=2", "data.evaluation=none"], "set data.evaluation"),
        (["output.eval_every=2", "evaluation.pass_at=[8]"], "pass@8 needs as many completions"),
        (["output.eval_every=2", "output.eval_samples=4", "evaluation.temperature=0"], "are the same: use 1"),
        (["output.eval_every=0", "evaluation.best=eval/reward"], "nothing is evaluated"),
        (["output.eval_every=2", "evaluation.best=reward"], "is not the name of an evaluation's metric"),
        (
            ["output.eval_every=2", "evaluation.pass_at=[8]"],
            "raise output.eval_samples, or lower evaluation.pass_at",
        ),
        (["evaluation.sets=[{name='a b', source='x.jsonl'}]"], "not a name of letters"),
        (["evaluation.sets=[{name='reward', source='x.jsonl'}]"], "begin with eval/reward/; choose another"),
        (
            ["evaluation.sets=[{name='a', source='x.jsonl'}, {name='a', source='y.jsonl'}]"],
            "two have the name 'a'",
        ),
        (["output.eval_every=0", "evaluation.sets=[{name='a', source='x.jsonl'}]"], "it is never evaluated"),
        (
            ["output.eval_every=2", "rollout.min_new_tokens=3", "evaluation.max_new_tokens=2"],
            "max_new_tokens=2 is below rollout.min_new_tokens=3",
        ),
        (["evaluation.sets=[{name='a', source='environment:test'}]"], "add an [environment]"),
        (
            ["output.eval_every=2", "output.eval_samples=8", "evaluation.best=eval/pass@1"],
            "is not measured: add 1 to pass_at, or use eval/pass@8",
        ),
        (
            ["output.eval_every=2", "output.eval_samples=8", "evaluation.best=eval/avg@4"],
            "each row has 8 completions; use eval/avg@8",
        ),
        (["output.eval_every=2", "evaluation.best=eval/maj@1"], "each row has 1 completion"),
        (
            ["algorithm.name=sft", "reward=none", "output.eval_every=2", "evaluation.best=eval/pass@1"],
            "nothing scores held-out completions; use eval/loss",
        ),
        (
            ["algorithm.name=sft", "reward=none", "output.eval_every=2", "evaluation.best=eval/reward"],
            "nothing scores held-out completions; use eval/loss",
        ),
        (["output.eval_every=2", "evaluation.best=eval/loss"], "grpo samples its completions"),
        (
            ["output.eval_every=2", "evaluation.top_p=0.9"],
            "evaluation.top_p=0.9 changes nothing: with one completion",
        ),
        (
            ["output.eval_every=2", "evaluation.sets=[{name='a', source='x.jsonl', top_k=3, samples=1}]"],
            "evaluation of a: top_k=3 changes nothing",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(overrides, said):
    with pytest.raises(ConfigError) as caught:
        load_recipe(TINY, overrides)
    assert said in str(caught.value)


def test_totals_that_nothing_counts_in_are_no_metric_of_the_best_model():
    recipe = TINY.parent / "tiny-distillation.toml"  # whose one reward is only measured
    with pytest.raises(ConfigError, match="all weights are 0; use eval/exact_match"):
        load_recipe(recipe, ["evaluation.best=eval/reward"])
    load_recipe(recipe, ["evaluation.best=eval/exact_match"])


@pytest.mark.parametrize(
    ("best", "near"), [("eval/pass@one", "eval/pass@1"), ("eval/exact/match", "eval/exact_match")]
)
def test_a_metric_that_is_not_measured_is_named_with_those_that_are(tmp_path, best, near):
    recipe = small_recipe(tmp_path, "output.eval_every=1", f"evaluation.best={best}")
    with pytest.raises(RankError, match=rf"'{best}' is not measured\. Did you mean '{near}'"):
        run_ranks(1, run_recipe, recipe)


@pytest.mark.parametrize(
    ("metric", "measured", "meant"),
    [
        # No set has this name.
        ("eval/aimee/reward", ("eval/reward", "eval/aime/reward"), "eval/aime/reward"),
        ("eval/reward/accuracyy", ("eval/loss", "eval/reward/accuracy"), "eval/reward/accuracy"),
        ("eval/aime/pass@k", ("eval/reward", "eval/aime/pass@1"), "eval/aime/pass@1"),
        # This set has its turn at another step.
        ("eval/aime/reward", ("eval/reward", "eval/reward_se"), None),
        ("eval/reward", ("eval/aime/reward",), None),
    ],
)
def test_a_metric_that_no_set_has_is_refused_at_the_first_evaluation_of_its_set(
    metric, measured, meant, monkeypatch
):
    monkeypatch.setattr("shardproof.rl.best.dist.get_rank", lambda: 1)
    monkeypatch.setattr("shardproof.rl.best.broadcast", lambda value: value)
    overrides = ["output.eval_every=1", "evaluation.sets=[{name='aime', source='x.jsonl'}]"]
    sets = held_out_sets(load_recipe(TINY, [*overrides, f"evaluation.best={metric}"]))
    best = Best(None, metric, sets)
    if meant is None:
        best.see(0, dict.fromkeys(measured, 0.0), None)
        return
    with pytest.raises(ConfigError, match="is not measured") as caught:
        best.see(0, dict.fromkeys((*measured, "time/evaluation"), 0.0), None)
    assert f"Did you mean {meant!r}?" in str(caught.value)
    assert f"use one of {', '.join(sorted(measured))};" in str(caught.value)
