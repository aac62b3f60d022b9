"""The messages that docs/own-data.md and docs/own-reward.md quote are those that a dry run gives."""

import json
from pathlib import Path

import pytest

from shardproof.config.load import load_recipe
from shardproof.errors import ShardproofError
from shardproof.rl.checks import check_inputs

ROOT = Path(__file__).parents[2]
ROW = '{"question": "1+2=", "result": 3}\n'
FILES = {
    "train.jsonl": '{"question": "1+10=", "result": 11}\n',
    "array.jsonl": f"[{ROW.strip()}]",
    "cells.csv": 'question,result\n"1+2=",3\n1+2=,3,4\n',
    "train.txt": ROW,
    "bad.jsonl": ROW + '{"question": "1+2=", "result": }\n',
    "empty.jsonl": ROW + '{"question": "", "result": 3}\n',
    "null.jsonl": ROW + '{"question": "1+1=", "result": null}\n',
    "type.jsonl": ROW + '{"question": 7, "result": 3}\n',
    "closeness.py": "def close(prompt, completion, row):\n    return 0.0\n",
    "from_trl.py": "def correct(completions, solution, **kwargs):\n    return [0.0]\n",
}
# (page, override, what the page quotes)
QUOTED = [
    (
        "own-data",
        "data.train={}/train.txt",
        "train.txt is not a .jsonl, .json, .csv, .tsv or .parquet file",
    ),
    ("own-data", "data.train={}/array.jsonl", "array.jsonl:1 begins an array. Expected one object per line"),
    ("own-data", "data.train={}/cells.csv", "cells.csv:3 has 3 cells; expected 2"),
    ("own-data", "data.train={}/*.parquet", "no file matches"),
    (
        "own-data",
        "data.chat_template_kwargs={{enable_thinking=false}}",
        "data.chat_template_kwargs is set, but no prompt goes through a chat template",
    ),
    (
        "own-data",
        "data.system_prompt=Brief.",
        "the prompt is text that goes to the model unchanged; data.system_prompt needs a chat template",
    ),
    (
        "own-data",
        "data.pass_rate_between=[0.1,0.9]",
        "pass_rate_between needs pass_rates: measure them with `shardproof data RECIPE --measure N`",
    ),
    ("own-data", "data.train={}/tran.jsonl", "tran.jsonl does not exist. Did you mean 'train.jsonl'?"),
    (
        "own-data",
        "data.prompt_column=prompt",
        "train.jsonl:1 has no column 'prompt' (data.prompt_column); it has 'question', 'result'",
    ),
    (
        "own-data",
        "data.answer_column=answer",
        "train.jsonl:1 has no column 'answer' (data.answer_column)",
    ),
    (
        "own-data",
        "data.train={}/bad.jsonl",
        "bad.jsonl:2 is not valid JSON: Expecting value: line 1 column 32",
    ),
    ("own-data", "data.train={}/empty.jsonl", "empty.jsonl:2: the prompt is empty"),
    (
        "own-data",
        "data.train={}/null.jsonl",
        "null.jsonl:2: reward 'exact_match': the row's 'answer' is null",
    ),
    (
        "own-data",
        "data.train={}/type.jsonl",
        "column 'question' holds int; expected a string, or a list of {role, content}",
    ),
    ("own-data", "data.chat=true", "the prompt needs a chat template, but the tokenizer has none"),
    ("own-data", "data.max_prompt_tokens=4", "the prompt has 5 tokens, more than data.max_prompt_tokens=4"),
    (
        "own-data",
        "rollout.max_new_tokens=64",
        "with rollout.max_new_tokens=64 does not fit the model's 64 positions",
    ),
    ("own-data", "algorithm.name=sft", "train.jsonl:1 has no column 'completion' (data.completion_column)"),
    ("own-data", "output.eval_every=1", "output.eval_every needs held-out prompts: set data.evaluation"),
    (
        "own-reward",
        "reward.functions=[{{name='closenes:close'}}]",
        "reward 'closenes:close' cannot be imported: ModuleNotFoundError: No module named 'closenes'",
    ),
    (
        "own-reward",
        "reward.functions=[{{name='closeness:clsoe'}}]",
        "'closeness' has no 'clsoe'. Did you mean 'close'?",
    ),
    (
        "own-reward",
        "reward.functions=[{{name='from_trl:correct',signature='trl'}}]",
        "reward 'from_trl:correct' needs the column 'solution', and no row of data.train has it",
    ),
    (
        "own-reward",
        "reward.functions=[{{name='exactmatch'}}]",
        "reward 'exactmatch' is not one of exact_match, numeric, math_verify,",
    ),
]


@pytest.mark.parametrize(("page", "override", "quote"), QUOTED, ids=lambda value: str(value)[:30])
def test_a_quoted_error_is_the_one_that_users_get(tmp_path, monkeypatch, page, override, quote):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    recipe: dict[str, dict[str, object]] = {
        "model": {"path": str(ROOT / "recipes" / "tiny" / "model")},
        "data": {"train": "train.jsonl", "prompt_column": "question", "answer_column": "result"},
        "train": {"steps": 1},
        "output": {"folder": "run"},
    }
    lines = [
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for section, keys in recipe.items()
    ]
    text = (
        "".join(lines) + '[reward]\nfunctions = [{ name = "exact_match" }]\n[rollout]\nmax_new_tokens = 4\n'
    )
    (tmp_path / "recipe.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert quote in (ROOT / "docs" / f"{page}.md").read_text()
    with pytest.raises(ShardproofError) as failed:
        check_inputs(load_recipe("recipe.toml", [override.format(tmp_path)]))
    assert quote in str(failed.value)
