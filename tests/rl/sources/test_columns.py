"""Columns of rows by their names in the recipe: answers under one name, and nothing in the place of something else."""

import pytest

from shardproof.config.load import from_json
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_inputs
from tests.rl.runs import small_recipe, write_rows

ROW = {"question": "1+1=", "answer": "3+4=7", "result": "2"}
SFT = ("algorithm.name=sft", "data.prompt_column=question")


def read(tmp_path, *overrides, row=ROW):
    source = write_rows(tmp_path / "rows.jsonl", [row])
    both = (f"data.train={source}", f"data.evaluation={source}")
    return check_inputs(from_json(small_recipe(tmp_path / "run", *both, *overrides)))


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("prompt_column", ("data.prompt_column=answer", "data.answer_column=question")),
        ("completion_column", (*SFT, "data.completion_column=answer", "data.answer_column=result")),
        ("messages_column", (*SFT, "data.messages_column=answer", "data.train_on=all", "data.answer_column=result")),
        ("chosen_column", ("algorithm.name=dpo", "data.chosen_column=answer", "data.answer_column=result")),
        ("label_column", ("algorithm.name=kto", "data.label_column=answer", "data.answer_column=result")),
    ],
)  # fmt: skip
def test_an_answer_takes_the_place_of_nothing_that_is_read(tmp_path, key, settings):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *settings)
    assert f"data.{key}='answer': under that name rewards find the answer" in str(caught.value)
    assert "rename the column 'answer'" in str(caught.value)


def test_a_column_called_answer_may_be_the_prompt_where_nothing_reads_answers(tmp_path):
    inputs = read(
        tmp_path,
        "data.prompt_column=answer",
        "data.answer_column=none",
        "reward.functions=[{name='length',options={target=2}}]",
    )
    assert inputs.prompts[0].text == "3+4=7"


def test_prompt_and_answer_may_change_places(tmp_path):
    """A source whose prompts are the answers of the others."""
    row, source = {"prompt": "1+1=", "answer": "2"}, tmp_path / "rows.jsonl"
    tables = f'{{source="{source}",prompt_column="answer",answer_column="prompt"}}'
    inputs = read(tmp_path, f"data.train=[{tables}]", row=row)
    (prompt,) = inputs.prompts
    assert (prompt.text, prompt.row["answer"]) == ("2", "1+1=")


def test_given_completions_have_their_answers_too(tmp_path):
    """`shardproof data --measure` scores completions of these rows, and knows each by its prompt and its answer."""
    row = {"question": "1+1=", "completion": "2", "result": "2"}
    inputs = read(tmp_path, *SFT, "data.answer_column=result", row=row)
    assert inputs.prompts[0].row["answer"] == inputs.held_out[""][0].row["answer"] == "2"
    (prompt,) = read(tmp_path, *SFT, "data.answer_column=none", "reward=none", row=row).prompts
    assert "answer" not in prompt.row
    held_out = write_rows(tmp_path / "held_out.jsonl", [row])
    del row["result"]
    (prompt,) = read(
        tmp_path, *SFT, "data.answer_column=result", f"data.evaluation={held_out}", row=row
    ).prompts
    assert "answer" not in prompt.row


def test_rows_know_the_source_or_the_held_out_set_that_they_are_of(tmp_path):
    """A reward that is about one source had nothing to say about the held-out set of the same name."""
    row = {"prompt": "1+1=", "answer": "2"}
    plain = write_rows(tmp_path / "plain.jsonl", [row])
    own = write_rows(tmp_path / "own.jsonl", [{**row, "data_source": each} for each in ("mine", None)])
    recipe = small_recipe(
        tmp_path / "run",
        f'data.train=[{{source="{plain}",name="sums"}}, {{source="{own}",name="others"}}]',
        f'evaluation.sets=[{{name="sums",source="{plain}"}}, {{name="held-out",source="{own}"}}]',
        f"data.evaluation={plain}",
        "reward.functions=[{name='exact_match',only={data_source='sums'}}]",
    )
    inputs = check_inputs(from_json(recipe))
    assert [prompt.row["data_source"] for prompt in inputs.prompts] == ["sums", "mine", "others"]
    named = {name: prompts[0].row.get("data_source") for name, prompts in inputs.held_out.items()}
    assert named == {"": None, "sums": "sums", "held-out": "mine"}
