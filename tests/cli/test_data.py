"""`shardproof data`: what it shows, and the file of pass rates that it measures."""

import datetime
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.cli.data_view import View
from shardproof.rl.measuring import measure_pass_rates
from shardproof.rl.sources.pass_rates import read_rates
from tests.ranks import run_ranks
from tests.rl.runs import RECIPES, TINY, small_recipe, write_rows


def run(*args, code=0):
    result = CliRunner().invoke(app, ["data", *map(str, args)], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.output


def token(text, number, *, trained=False, special=False):
    return {"id": number, "text": text, "special": special, "trained": trained}


def facts(tokens, **changes):
    lengths = {"min": 2, "median": 2.5, "p95": 3, "max": 3}
    sets = {
        "rows": 1200,
        "dropped": {"without an answer": 7},
        "duplicates": 3,
        "prompt_tokens": lengths,
        "longest": 67,
    }
    sets |= {"histogram": [{"from": 2, "to": 2, "rows": 1}, {"from": 3, "to": 9, "rows": 1199}]}
    sources = [{"name": n, "source": f"{n}.csv", "weight": 1.5, "rows": 600, "share": 0.5} for n in "ab"]
    shown = [{"row": 41, "text": "", "source": "a", "sequences": [{"name": "", "tokens": tokens}]}]
    return {
        "model": "m", "algorithm": "grpo", "samples": True, "max_new_tokens": 64, "context": 128,
        "stop_tokens": [token("</s>", 2)], "sets": {"train": sets}, "sources": sources, "split": "train",
        "shared": [{"set": "evaluation", "rows": 2, "examples": ["1+1="]}], "shown": shown, **changes,
    }  # fmt: skip


def printed(given, encoding="utf-8", width=80):
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, newline="\n") as stream:
        View(Console(file=stream, width=width)).show(given, "recipe.toml")
        stream.flush()
        return raw.getvalue().decode(encoding)


def test_every_fact_has_its_line():
    text = printed(facts([token("hi", 5)]))
    for line in (
        "recipe.toml: grpo on m",
        "train 1,200 7 3 2 2.5 3 3 67",
        "2 █ 1",
        "3-9 ████████████████████████████████████ 1,199",
        "a 600 1.5 50.0% a.csv",
        "Stop tokens: '</s>' (2)",
        "Context: the model has 128 positions; the longest sequence may need 67",
        "Left out of train: 7 rows without an answer",
        "In both train and evaluation: 2 prompts, such as '1+1='",
        "1. train, row 42, source a",
        "then up to 64 tokens are sampled, and trained on",
    ):
        assert line in [" ".join(each.split()) for each in text.splitlines()]


def test_a_conversation_that_does_not_begin_is_told():
    failed = {"row": 3, "text": "", "sequences": [], "error": "LookupError: no such page"}
    text = printed(facts([], shown=[failed], begins=True))
    assert "no conversation begins: LookupError: no such page" in text and "are sampled" not in text
    assert "these are the rows' own prompts" in text


def test_tokens_stand_over_their_ids_and_what_is_trained_on_is_marked():
    tokens = [
        token("<s>", 1, special=True),
        token(" a\n\t", 12345),
        token("b", 7, trained=True),
        token("</s>", 2, trained=True),
    ]
    lines = printed(facts(tokens)).splitlines()
    at = next(n for n, line in enumerate(lines) if "<s>" in line)
    assert [line.rstrip() for line in lines[at - 1 : at + 3]] == [
        "  4 tokens, 2 trained on",
        "  <s> ·a↵→  b </s>",
        "  1   12345 7 2",
        "            ▔▔▔▔▔▔▔",
    ]
    plain = printed(facts(tokens), encoding="ascii")
    assert "<s> _a\\n\\t b </s>" in plain and "^^^^^^^" in plain and "#" in plain


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_lacks_are_escaped_and_ids_stay_below(encoding):
    shared = [{"set": "evaluation", "rows": 1, "examples": ["漢字="]}]
    lines = printed(facts([token("漢", 5), token("b", 7)], shared=shared), encoding=encoding).splitlines()
    at = next(n for n, line in enumerate(lines) if "2 tokens" in line)
    assert lines[at + 1 : at + 3] == ["  \\u6f22 b", "  5      7"]
    assert any("such as '\\u6f22\\u5b57='" in line for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_of_tokens_fit_the_terminal_and_hold_every_token(width):
    tokens = [token(f"word{n}" * (n % 4 + 1), n) for n in range(100)]
    lines = printed(facts(tokens), width=width).splitlines()
    at = next(n for n, line in enumerate(lines) if line.strip() == "100 tokens") + 1
    block = lines[at:-1]
    assert max(map(len, block)) <= width
    assert [int(each) for line in block[1::2] for each in line.split()] == list(range(100))


def test_the_middle_of_a_long_sequence_is_left_out():
    text = printed(facts([token("x", n) for n in range(5000)]))
    assert "… 4856 tokens …" in text and "4999" in text and "2500" not in text


def test_tokens_cannot_steer_the_terminal():
    text = printed(facts([token("\x1b[2J\x07[red]", 3), token("\u202eabc", 4)]))
    assert "\x1b[2J" not in text and "\x07" not in text and "\u202e" not in text
    assert "[red]" in text


def test_the_demos_data():
    text = run(TINY, "--rows", "1")
    assert "train       2,100" in text and "Stop tokens: '<eos>' (1)" in text
    assert "then up to 4 tokens are sampled, and scored" in run(TINY, "--rows", "1", "--split", "evaluation")
    found = json.loads(run(TINY, "--json", "--rows", "2", "--split", "evaluation").splitlines()[-1])
    assert found["sets"]["evaluation"]["rows"] == 400 and len(found["shown"]) == 2


def test_json_holds_what_no_terminal_can_show(tmp_path):
    data = write_rows(tmp_path / "odd.jsonl", [{"prompt": "1+1=", "answer": "é\ud800"}])
    given = (TINY, f"data.train={data}", "data.evaluation=none", "output.eval_every=0")
    assert json.loads(run(*given, "--json").splitlines()[-1])["shown"][0]["answer"] == "é\ud800"


def test_json_holds_the_dates_of_a_row(tmp_path):
    """A traceback stood there, though the row could be trained on."""
    row = {"prompt": "1+1=", "answer": "2", "chat_template_kwargs": {"today": datetime.date(2024, 1, 2)}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    template = "{{ messages[0].content }}{{ today.day }}"
    given = (TINY, f"data.train={tmp_path / 'rows.parquet'}", "data.evaluation=none", "output.eval_every=0")
    given += ("data.chat=true", f'data.chat_template_kwargs={{chat_template="{template}"}}')
    (shown,) = json.loads(run(*given, "--json").splitlines()[-1])["shown"]
    assert shown["text"] == "1+1=2" and shown["template"]["today"] == "2024-01-02"


def test_held_out_sets_may_have_any_name(tmp_path):
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 2)
    sets = ", ".join(f'{{name="{name}", source="{few}"}}' for name in ("train", "evaluation", "few"))
    given = (TINY, f"evaluation.sets=[{sets}]", "--json", "--rows", "1")
    found = json.loads(run(*given, "--split", "eval/train").splitlines()[-1])
    rows = {name: each["rows"] for name, each in found["sets"].items()}
    assert rows == {"train": 2100, "evaluation": 400, "eval/train": 2, "eval/evaluation": 2, "few": 2}
    assert found["shown"][0]["text"] == "1+1="


def test_rows_with_other_completions_are_no_duplicates(tmp_path):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "answer": "2"}
    data = write_rows(tmp_path / "pairs.jsonl", [row, row, {**row, "rejected": "4"}, {**row, "chosen": "02"}])
    recipe = (RECIPES / "tiny-dpo.toml", f"data.train={data}", "--json", "--rows", "0")
    assert json.loads(run(*recipe).splitlines()[-1])["sets"]["train"]["duplicates"] == 1


def test_pairs_show_both_completions():
    text = run(RECIPES / "tiny-dpo.toml", "--rows", "1")
    assert "chosen: " in text and "rejected: " in text and "3 trained on" in text


def test_labels_and_margins_are_shown_as_the_loss_reads_them(tmp_path):
    """A label column that is read the wrong way round shows before anything is trained."""
    rows = [{"prompt": "1+1=", "completion": "2", "label": label} for label in ("1", "false")]
    data = write_rows(tmp_path / "labelled.jsonl", rows)
    given = (RECIPES / "tiny-dpo.toml", f"data.train={data}", "data.evaluation=none", "output.eval_every=0")
    text = run(*given, "algorithm.name=kto", "reward=none")
    assert "row 1, desirable" in text and "row 2, undesirable" in text
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    data = write_rows(tmp_path / "pairs.jsonl", [{**pair, "margin": 0.5}, {**pair, "chosen": "02"}])
    text = run(
        *(RECIPES / "tiny-reward-model.toml", f"data.train={data}", "data.evaluation=none"),
        "output.eval_every=0",
    )
    # A score is read behind a text: none of its tokens is learned.
    assert text.count("margin") == 1 and "row 1, margin 0.5" in text and "trained on" not in text


def test_mistakes_are_named_as_in_a_run(tmp_path):
    assert "Did you mean 'evaluation'?" in run(TINY, "--split", "evaluations", code=2)
    assert "no column 'question'" in run(TINY, "data.prompt_column=question", code=2)
    assert "C001" in run(tmp_path / "nowhere.toml", code=2)
    assert "--to says where --measure writes" in run(TINY, "--to", tmp_path / "f", code=2)
    assert "--measure writes a file" in run(TINY, "--json", "--measure", "2", code=2)
    # The training set was measured, whatever was asked for.
    said = run(TINY, "--split", "evaluation", "--measure", "2", code=2)
    assert "--measure samples the rows to train on, not those of --split evaluation" in " ".join(said.split())
    for name, said in (("no/f", "the folder does not exist"), (".", "is a folder"), ("f.csv", "f.jsonl'")):
        assert said in run(TINY, "--measure", "2", "--to", tmp_path / name, code=2)


def test_what_nothing_judges_is_not_called_unsolved():
    """A teacher's text needs no rewards. Pass rates of 0 were written then, and a curriculum called every prompt hard."""
    recipe = (RECIPES / "tiny-distillation.toml", "reward=none", "output.eval_every=0")
    assert "--measure needs rewards" in run(*recipe, "--measure", "2", code=2)
    assert "which nothing says" in run(*recipe, "data.curriculum.easy=0.1", code=2)
    measured = (RECIPES / "tiny-distillation.toml", "data.curriculum.easy=0.1", "--rows", "0")
    assert "distillation" in run(*measured)


def measure(recipe, path):
    """One rank's part; module-level, for `run_ranks`."""
    from pathlib import Path

    from shardproof.config.load import from_json

    return measure_pass_rates(from_json(recipe), 4, Path(path))


@pytest.mark.distributed
def test_pass_rates_are_the_same_on_any_number_of_ranks(tmp_path):
    rows = [json.loads(line) for line in (RECIPES / "tiny" / "train.jsonl").read_text().splitlines()[:30]]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    recipe = small_recipe(tmp_path / "run", f"data.train={source}", "rollout.batch_size=24")
    found = []
    for num_ranks in (1, 3):
        path = tmp_path / f"rates-{num_ranks}.jsonl"
        (told, *_) = run_ranks(num_ranks, measure, recipe, str(path))
        found.append(read_rates(str(path)))
        assert told["prompts"] == len(found[-1]) == 30
        assert told["mean"] == pytest.approx(sum(found[-1].values()) / 30)
    assert found[0] == found[1] and 0 < sum(found[0].values()) < 30
