"""Runs over several sources with a curriculum: the same prompts on any number of ranks, and after a resume."""

from __future__ import annotations

import pytest

from shardproof.config.load import from_json
from shardproof.rl.loop import train
from shardproof.rl.same_run import Resume
from tests.ranks import run_ranks
from tests.rl.runs import RECIPES, lines, run_recipe, small_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed

ROWS = lines(RECIPES / "tiny" / "train.jsonl")[:90]
SETTINGS = (
    "output.eval_every=0",
    "output.samples_per_step=64",
    "optimizer.schedule=constant",
    "data.curriculum.decay=0.0",
    "data.curriculum.easy=1",
    "data.curriculum.useful=2",
    "data.curriculum.hard=1",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "sums.jsonl", ROWS[:20])
    table = "".join(f'"{row["prompt"]}",{row["answer"]}\n' for row in ROWS[20:])
    (folder / "more.csv").write_text("question,result\n" + table)
    tables = (
        f'{{source = "{folder}/sums.jsonl", weight = 1}}, {{source = "{folder}/more.csv", name = "table", '
        'weight = 2, prompt_column = "question", answer_column = "result"}'
    )
    return f"data.train=[{tables}]"


def drawn(folder):
    """The prompts of each step, in order."""
    found = {}
    for line in lines(folder / "samples.jsonl"):
        found.setdefault(line["step"], {})[line["group"]] = line["prompt"]
    return found


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(1, run_recipe, small_recipe(folder, *SETTINGS, sources, "train.steps=5"))
    return folder


def test_every_source_has_its_metrics(whole):
    for metrics in trajectory(whole):
        assert metrics["data/share/sums"] + metrics["data/share/table"] == pytest.approx(1.0)
        mean = sum(
            metrics[f"data/share/{name}"] * metrics[f"reward/mean/{name}"] for name in ("sums", "table")
        )
        assert mean == pytest.approx(metrics["reward/mean"])
        assert sum(metrics[f"pool/{name}"] for name in ("easy", "useful", "hard")) == pytest.approx(1.0)
    assert (
        20 / 90 < trajectory(whole)[-1]["pool/measured"] <= 30 / 90
    )  # some are drawn again: hard ones are few
    assert trajectory(whole)[-1]["pool/hard"] > 0


def test_ranks_draw_the_same_prompts(whole, sources, tmp_path):
    run_ranks(2, run_recipe, small_recipe(tmp_path / "run", *SETTINGS, sources, "train.steps=4"))
    for step, prompts in drawn(tmp_path / "run").items():
        # Rank 0 alone writes samples: of two ranks, every second prompt.
        assert prompts == {group: text for group, text in drawn(whole)[step].items() if group % 2 == 0}
    for one, other in zip(trajectory(tmp_path / "run"), trajectory(whole)):
        for name in ("data/share/sums", "pool/measured"):
            assert one[name] == other[name]


def go_on(recipe: str, step: int) -> dict[str, float]:
    """One rank's run from a checkpoint; module-level, for `run_ranks`."""
    return train(from_json(recipe), resume=Resume(from_step=step))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(sources, tmp_path, ahead):
    more = (sources, f"rollout.ahead={ahead}", "output.save_every=2", "output.keep=5", "train.steps=5")
    recipe = small_recipe(tmp_path / "run", *SETTINGS, *more)
    run_ranks(1, run_recipe, recipe)
    metrics, prompts = trajectory(tmp_path / "run"), drawn(tmp_path / "run")
    run_ranks(1, go_on, recipe, 2)
    assert trajectory(tmp_path / "run") == metrics
    assert drawn(tmp_path / "run") == prompts


def test_given_completions_are_mixed_too(tmp_path):
    rows = [{**row, "completion": row["answer"]} for row in ROWS[:30]]
    names = ("few", "many")
    for name, part in zip(names, (rows[:5], rows[5:]), strict=True):
        write_rows(tmp_path / f"{name}.jsonl", part)
    tables = ", ".join(f'{{source = "{tmp_path}/{name}.jsonl", weight = 1}}' for name in names)
    settings = (
        f"data.train=[{tables}]",
        "algorithm.name=sft",
        "data.evaluation=none",
        "output.eval_every=0",
        "train.steps=3",
    )
    run_ranks(1, run_recipe, small_recipe(tmp_path / "run", *settings))
    shares = [[metrics[f"data/share/{name}"] for name in names] for metrics in trajectory(tmp_path / "run")]
    assert [sum(each) for each in shares] == pytest.approx([1.0] * 3)
    assert 0.2 <= sum(few for few, _ in shares) / 3 <= 0.8
