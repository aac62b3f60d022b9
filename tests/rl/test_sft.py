"""Supervised fine-tuning through the same recipes and the same loop."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardproof.config.load import load_recipe, to_json
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_inputs
from shardproof.rl.sources.given import encode_given
from shardproof.rl.sources.rows import Rows
from tests.ranks import run_ranks
from tests.rl.preferences.peers import prepared
from tests.rl.runs import TINY, comparable, run_recipe, small_recipe, trajectory, write_rows

pytestmark = pytest.mark.distributed

SFT = ("algorithm.name=sft", "optimizer.lr=0.003", "train.prompts_per_step=16")


def make_rows(folder):
    """Sums whose answer is always one too many."""
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b + 1), "answer": str(a + b + 1)}
        for a in range(4)
        for b in range(4)
    ]
    return write_rows(folder / "rows.jsonl", rows)


def test_it_learns_what_it_is_shown_and_is_measured_by_loss_and_reward(tmp_path):
    data = make_rows(tmp_path)
    overrides = [
        *SFT,
        f"data.train={data}",
        f"data.evaluation={data}",
        "train.steps=30",
        "output.eval_every=15",
    ]
    first, second = run_ranks(2, run_recipe, small_recipe(tmp_path / "run", *overrides))
    assert comparable(first) == comparable(second)
    steps = trajectory(tmp_path / "run")
    assert steps[0]["loss/policy"] > 0.5 and steps[-1]["loss/policy"] < 0.3
    assert steps[14]["eval/loss"] > steps[-1]["eval/loss"]
    assert steps[-1]["eval/reward"] > 0.7


def test_weights_may_be_drawn_and_no_reward_is_needed(tmp_path):
    data = make_rows(tmp_path)
    text = TINY.read_text().replace('[reward]\nfunctions = [{ name = "exact_match" }]\n', "")
    recipe = tmp_path / "sft.toml"
    recipe.write_text(text.replace('"tiny/', f'"{TINY.parent}/tiny/'))
    overrides = [*SFT, "model.random_init=true", f"data.train={data}", "data.evaluation=none"]
    overrides += ["train.steps=1", "output.eval_every=0", f"output.folder={tmp_path / 'run'}"]
    results = run_ranks(2, run_recipe, to_json(load_recipe(recipe, overrides)))
    assert results[0]["loss/policy"] == pytest.approx(2.6, abs=0.3), "untrained: about log of the vocabulary"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def compare_after_spaces(scheme: str) -> None:
    """A tokenizer that puts a space before a text, as Llama 2's does: a completion is inside one."""
    inner = Tokenizer(
        models.WordLevel({t: n for n, t in enumerate(["<s>", "</s>", "?", *"\u2581245+=\n"])}, "?")
    )
    spaces = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.Split("", "isolated")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "2+2=", "completion": " 4"}]
    recipe = load_recipe(TINY, [*SFT, "output.eval_every=0"])
    found = encode_given(recipe, Rows((f"row {n}", row) for n, row in enumerate(rows)), tokenizer, "prompt")
    for prompt, row in zip(found, prepared("sft", rows, tokenizer), strict=True):
        assert [*prompt.tokens, *prompt.completion] == row["input_ids"]
        assert len(prompt.tokens) == row["labels"].count(-100)
    # Of a prompt whose end merges with what follows, TRL leaves that end out.
    inner = Tokenizer(models.BPE({"\u2581": 0, "2": 1, "\u25812": 2, "</s>": 3, "\n": 4}, [("\u2581", "2")]))
    inner.pre_tokenizer = spaces
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    (prompt,) = encode_given(
        recipe, Rows([("row", {"prompt": "2 ", "completion": "2"})]), tokenizer, "prompt"
    )
    assert (prompt.tokens, prompt.completion) == ((2, 0), (1, 3))


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_completion_gets_no_space_that_its_row_does_not_have(scheme):
    run_ranks(1, compare_after_spaces, scheme)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "1+1="}], "has no column 'completion' (data.completion_column)"),
        ([{"prompt": "1+1=", "completion": ""}], "column 'completion' holds nothing"),
        ([{"prompt": "1+1=", "completion": 2}], "column 'completion' holds int"),
        ([{"prompt": "1+1=", "completion": "1" * 80}], "with a completion of 81 does not fit the model's 64"),
    ],
)
def test_rows_that_cannot_be_imitated_are_refused(tmp_path, rows, said):
    data = write_rows(tmp_path / "rows.jsonl", [{**row, "answer": "2"} for row in rows])
    recipe = load_recipe(TINY, [*SFT, f"data.train={data}", "data.evaluation=none", "output.eval_every=0"])
    with pytest.raises(ConfigError) as caught:
        check_inputs(recipe)
    assert said in str(caught.value)
