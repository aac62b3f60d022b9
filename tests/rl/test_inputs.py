"""Data are read once per host, and a host without the model is sent config and tokenizer."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from shardproof.config.load import from_json
from shardproof.rl import inputs
from shardproof.rl.checks import Data
from shardproof.rl.data import Prompt
from shardproof.rl.inputs import read_inputs
from shardproof.rl.shared_prompts import SharedPrompts, open_prompts, share_prompts
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.runs import RECIPES, comparable, run_recipe, small_recipe, write_rows
from tests.several_hosts import pretend_hosts

pytestmark = pytest.mark.distributed

ROWS = [
    Prompt({"prompt": "a", "answer": 1.5, "tags": [None, True, {"ü": "\ud83d"}]}, "a\n", (1, 2, 3)),
    Prompt({}, "", ()),
    Prompt({"n": -(2**70)}, "ß" * 100, tuple(range(151_000, 151_100)), (7,), (8, 9), (1, 0)),
    Prompt(
        {"p": 1}, "p", (1,), source="math", sampling={"top_k": 3}, template={"a": [1]}, number=3, whole=(1, 2)
    ),
]


def test_prompts_in_shared_memory_are_those_that_were_put_there():
    offered = share_prompts(
        Data(
            ROWS,
            {"": ROWS[:1], "other": ROWS[1:]},
            True,
            {"a": 2, "b": 1},
            [None, 0.5, 1.0],
            {"data.train": {"without an answer": 2}},
        )
    )
    assert offered is not None
    descriptor, address = offered
    found = open_prompts(json.loads(json.dumps(address.to_json())))
    os.close(descriptor)
    assert found is not None and found.has_messages
    assert isinstance(found.prompts, SharedPrompts) and list(found.prompts) == ROWS
    assert (
        found.prompts[-1] == ROWS[-1]
        and found.prompts[1:] == ROWS[1:]
        and list(found.held_out[""]) == ROWS[:1]
    )
    assert list(found.held_out["other"]) == ROWS[1:] and found.sources == {"a": 2, "b": 1}
    assert found.rates == [None, 0.5, 1.0] and found.dropped == {"data.train": {"without an answer": 2}}
    with pytest.raises(IndexError):
        found.prompts[4]


@pytest.mark.parametrize(
    "value", [(1, 2), datetime.date(2026, 1, 1), decimal.Decimal(1), {1: 2}, b"x", [[{"a": (1,)}]]]
)
def test_rows_that_json_would_change_are_not_shared(value):
    assert share_prompts(Data([Prompt({"value": value}, "", ())], {}, False)) is None


def run_counting(recipe, letters, shares=True):
    """(how often this rank read the data, its metrics, the type of its prompts)"""
    num, kinds, real_data, real_share = [0], [], inputs.read_data, inputs.share_prompts

    def read_data(*args):
        num[0] += 1
        return real_data(*args)

    def make(*args):
        made = real_inputs(*args)
        kinds.append(type(made.prompts).__name__)
        return made

    real_inputs = inputs.make_inputs
    with pytest.MonkeyPatch.context() as patch, pretend_hosts(letters):
        patch.setattr(inputs, "read_data", read_data)
        patch.setattr(inputs, "make_inputs", make)
        patch.setattr(inputs, "share_prompts", real_share if shares else lambda data: None)
        return num[0], comparable(run_recipe(recipe)), num[0], kinds


def test_one_rank_of_each_host_reads_the_data(tmp_path):
    words = ("train.steps=1", "output.save_model=false")
    results = run_ranks(3, run_counting, small_recipe(tmp_path / "shared", *words), "aab")
    assert [(num, kinds) for _, _, num, kinds in results] == [(1, []), (0, ["SharedPrompts"]), (1, [])]
    apart = run_ranks(3, run_counting, small_recipe(tmp_path / "apart", *words), "aab", False)
    assert [num for _, _, num, _ in apart] == [1, 1, 1]
    assert [metrics for _, metrics, _, _ in results] == [metrics for _, metrics, _, _ in apart]


def read_own(recipes, letters):
    with pretend_hosts(letters):
        read_inputs(from_json(recipes[dist.get_rank()]), None)


def test_rows_that_cannot_be_used_are_named_as_ever_and_with_the_rank_where_not_all_have_them(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    bad = write_rows(
        tmp_path / "bad.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": 3, "answer": "1"}]
    )
    both = [small_recipe(tmp_path, f"data.train={path}") for path in (good, bad)]
    for recipes, said in (
        ([both[1]] * 3, f"C005 data: {bad}:2: column 'prompt' holds int"),
        ([both[0], both[0], both[1]], f"C005 data: rank 2: {bad}:2: column 'prompt' holds int"),
    ):
        outcomes = run_ranks_outcomes(3, read_own, recipes, "aab")
        assert all(outcome[2].startswith(said) for outcome in outcomes), outcomes


def test_other_rows_and_tokens_on_another_host_are_named_with_it(tmp_path):
    """As the hub or an environment may have them: no file tells."""
    model = shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "model")
    text = (model / "tokenizer.json").read_text()
    pieces = json.loads(text)["model"]["vocab"]
    one, two = pieces["1"], pieces["2"]
    swapped = {**pieces, "1": two, "2": one}
    (model / "tokenizer.json").write_text(
        json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "vocab": swapped}})
    )
    recipes = [small_recipe(tmp_path / "run")] * 2 + [small_recipe(tmp_path / "run", f"model.path={model}")]
    outcomes = run_ranks_outcomes(3, read_own, recipes, "aab")
    for _, kind, message in outcomes:
        assert kind == "ConfigError" and "the same data: tokens of data.train is " in message
        assert "on host host-b (rank 2), " in message and "on host host-a (ranks 0, 1)" in message


def run_without_model(recipe, folders, letters):
    """A run whose ranks find the model in a folder of their own, or nowhere; then what is left of what was sent."""
    mine = json.loads(recipe)
    mine["model"]["path"] = folders[dist.get_rank()]
    sent = Path(tempfile.mkdtemp())
    with pytest.MonkeyPatch.context() as patch, pretend_hosts(letters):
        patch.setattr(tempfile, "tempdir", str(sent))
        return comparable(run_recipe(json.dumps(mine))), list(sent.glob("shardproof-model-*"))


def test_hosts_without_the_model_are_sent_it(tmp_path):
    whole = str(RECIPES / "tiny" / "model")
    partial = shutil.copytree(whole, tmp_path / "partial", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "empty").mkdir()
    words = ("train.steps=1", "output.save_model=false")
    expected = run_ranks(4, run_recipe, small_recipe(tmp_path / "expected", *words))
    folders = [str(tmp_path / "empty"), whole, str(tmp_path / "nowhere"), str(partial)]
    results = run_ranks(4, run_without_model, small_recipe(tmp_path / "run", *words), folders, "abcd")
    assert [metrics for metrics, _ in results] == [comparable(each) for each in expected]
    assert all(left == [] for _, left in results)
