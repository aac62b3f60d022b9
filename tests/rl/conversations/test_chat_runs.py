"""Conversations through chat templates: tools in the prompt, and templates that rewrite earlier turns."""

from __future__ import annotations

import json

import pytest

from shardproof.config.load import from_json
from shardproof.errors import ShardproofError
from shardproof.rl.checks import check_inputs
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.chat.templates import CHATML, FORGETFUL, HERMES, make_tokenizer, tool
from tests.rl.conversations.kept import authors, recipe_with, run_and_keep, sequences
from tests.rl.runs import run_recipe, write_rows

pytestmark = pytest.mark.distributed


def chat_recipe(tmp_path, template, name, *settings, prompts=("hello", "what now?")):
    """A run of a chat model that says nonsense in short turns: every other token may end one."""
    tokenizer = make_tokenizer(template)
    model = make_checkpoint(
        tmp_path / "model", "llama", vocab_size=len(tokenizer), max_position_embeddings=512
    )
    tokenizer.save_pretrained(model)
    ends = list(range(0, len(tokenizer), 2))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    given = [f"model.path={model}", f"data.train={data}", "data.evaluation=none", "reward=none"]
    fast = ["train.prompts_per_step=2", "rollout.max_new_tokens=12"]
    return recipe_with(tmp_path / "run", name, *given, *fast, *settings), tokenizer


def test_a_template_that_rewrites_turns_is_refused_by_name_before_anything_is_loaded(tmp_path):
    recipe, _ = chat_recipe(tmp_path, FORGETFUL, "Chats")
    with pytest.raises(ShardproofError, match=r'R508 .*rewrites .* once a "user" message follows') as error:
        check_inputs(from_json(recipe))
    outcomes = run_ranks_outcomes(2, run_recipe, recipe)
    assert outcomes[0] == outcomes[1] and outcomes[0][2] == str(error.value)
    (found,) = run_ranks(
        1, run_and_keep, chat_recipe(tmp_path / "one", FORGETFUL, "Chats", "environment.max_turns=1")[0]
    )
    assert found["metrics"]["environment/turns"] == 1.0, "nothing is rewritten where no turn follows"


def test_split_trains_each_turn_behind_what_the_template_shows_then(tmp_path):
    recipe, tokenizer = chat_recipe(tmp_path, FORGETFUL, "Chats", "environment.on_rewrite=split")
    (found,) = run_ranks(1, run_and_keep, recipe)
    assert {len(sequences(t)) for t in found["trajectories"]} >= {3}
    for t in found["trajectories"]:
        turns, parts = t["facts"]["turns"], sequences(t)
        assert len(parts) == len(turns) and {authors(part) for part in parts} == {("prompt", "policy")}
        messages = [
            {"role": "user", "content": t["facts"]["prompt"].split("user\n")[1].split("<|im_end|>")[0]}
        ]
        for part, turn in zip(parts, turns, strict=True):
            shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert part["segments"][0]["tokens"] == tuple(tokenizer.encode(shown, add_special_tokens=False))
            messages += [{"role": "assistant", "content": turn["text"]}, *turn["reply"]]
        assert t["reward"]["total"] == sum(turn["reward"] for turn in turns)
    rows = [part for t in found["trajectories"] for part in sequences(t)]
    for row, mask in zip(rows, found["masks"], strict=True):
        prompt, policy = (segment["tokens"] for segment in row["segments"])
        assert mask == [0.0] * (len(prompt) - 1) + [1.0] * len(policy)
    assert found["metrics"]["mismatch/max"] < 1e-3


def test_keep_appends_to_the_sampled_tokens_whatever_the_template_would_rewrite(tmp_path):
    recipe, _ = chat_recipe(tmp_path, FORGETFUL, "Chats", "environment.on_rewrite=keep")
    (found,) = run_ranks(1, run_and_keep, recipe)
    assert all(not t["earlier"] for t in found["trajectories"])
    whole = [t for t in found["trajectories"] if t["ended"] == "done"]
    assert whole
    for t in whole:
        said = authors(t)
        assert said[0] == "prompt" and said.count("policy") == 3 and {"template", "environment"} <= set(said)
        for segment in t["segments"]:
            assert segment["trained"] == (segment["author"] == "policy")
    assert found["metrics"]["mismatch/max"] < 1e-3


def test_prompts_show_the_environments_tools(tmp_path):
    recipe, tokenizer = chat_recipe(tmp_path, HERMES, "Weather")
    (found,) = run_ranks(1, run_and_keep, recipe)
    for t in found["trajectories"]:
        messages = [{"role": "user", "content": "hello" if "hello" in t["facts"]["prompt"] else "what now?"}]
        shown = tokenizer.apply_chat_template(
            messages, tools=[tool()], tokenize=False, add_generation_prompt=True
        )
        assert t["facts"]["prompt"] == shown and "Tells the weather." in shown
        assert t["segments"][0]["tokens"] == tuple(tokenizer.encode(shown, add_special_tokens=False))
    replied = [t for t in found["trajectories"] if len(t["facts"]["turns"]) == 2]
    assert replied
    for t in replied:
        tokens = [token for segment in t["segments"] for token in segment["tokens"]]
        assert "<tool_response>\nrain\n</tool_response>" in tokenizer.decode(tokens)


def test_tools_need_a_chat_template(tmp_path):
    recipe = recipe_with(tmp_path, "Weather")
    with pytest.raises(
        ShardproofError, match="the environment has tools, and the tokenizer has no chat template"
    ):
        check_inputs(from_json(recipe))


def test_tool_calls_that_cannot_be_read_are_refused_even_if_there_is_one_turn(tmp_path):
    recipe, _ = chat_recipe(tmp_path, CHATML, "Weather", "environment.max_turns=1")
    with pytest.raises(ShardproofError, match=r"C001 .*so the policy's calls cannot be read"):
        check_inputs(from_json(recipe))
