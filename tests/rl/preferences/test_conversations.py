"""Given conversations of odd forms: where the assistant's part begins and ends, and which template writes them."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.errors import ConfigError
from shardproof.rl.sources.assistant_masks import masked_conversation
from shardproof.rl.sources.encoding import encode_prompts
from shardproof.rl.sources.given import encode_given
from shardproof.rl.sources.reading import read_training
from shardproof.rl.sources.rendering import Rendering, own_tools
from tests.ranks import run_ranks
from tests.rl.chat.templates import make_tokenizer
from tests.rl.preferences.peers import prepared
from tests.rl.preferences.test_rows import (
    BAD,
    CHANGING,
    CHAT,
    GOOD,
    MARKED,
    TALK,
    TOOLED,
    USER,
    encoded,
    recipe_of,
    rows_of,
    said,
)
from tests.rl.runs import write_rows

# The beginning of an answer opens a thought, which an answer without one does not begin with.
OPENING = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# The end of sequence stands behind the last turn alone.
CLOSING = CHAT + "{% if not add_generation_prompt %}</s>{% endif %}"
# A template that looks whether a message has the key, as Llama's does.
ASKING = CHAT.replace(
    "{{ m.content }}", "{{ m.content if 'tool_calls' not in m else m.tool_calls | length }}"
)


def mask_of(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """The conversation with brackets around what the assistant wrote."""
    tokenizer = make_tokenizer(template)
    found = masked_conversation("row 1", messages, tokenizer, variables)
    text, before = "", 0
    for token, flag in zip(found.tokens, found.mask, strict=True):
        text += "[" * (flag > before) + "]" * (flag < before) + tokenizer.decode([token])
        before = flag
    return text + "]" * before


def test_an_answer_may_begin_otherwise_than_it_was_asked_for():
    """A single answer was refused as one that others change."""
    talk = "<|im_start|>user\nthe weather?<|im_end|>\n<|im_start|>assistant\n[it is fine<|im_end|>\n]"
    assert mask_of(OPENING, [USER, GOOD]) == talk
    thought = said("assistant", "<think>\nlet me think\n</think>\n\nanswer")
    assert mask_of(OPENING, [USER, thought]).endswith(
        "<think>\n[let me think\n</think>\n\nanswer<|im_end|>\n]"
    )


def test_what_closes_a_conversation_belongs_to_its_last_turn():
    assert mask_of(CLOSING, TALK).replace("</s>", "") == mask_of(CHAT, TALK)
    assert mask_of(CLOSING, TALK).endswith("it will rain<|im_end|>\n</s>]")


def test_a_template_among_the_variables_is_the_one_that_counts():
    """Whether it marks the assistant's tokens, what it reads, and that there is one, is asked of no other."""
    marked = mask_of(MARKED, TALK)
    assert mask_of(CHANGING, TALK, chat_template=MARKED) == marked
    assert mask_of(MARKED, TALK, chat_template=CHAT) == marked
    own = {"chat_template": MARKED.replace("assistant\n{% e", "assistant\n{{ mood }}{% e")}
    tokenizer = make_tokenizer(None)
    for variables in (own, own | {"mood": "glad"}):
        rendering = Rendering(variables=variables)
        (prompt,) = encode_prompts(
            rows_of([{"prompt": [USER]}]), tokenizer, "prompt", False, None, rendering=rendering
        )
        assert prompt.text.endswith(f"assistant\n{variables.get('mood', '')}")
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "chat_template_kwargs": own | {"mood": ""}}
    (pair,) = encode_given(recipe_of("dpo"), rows_of([row]), tokenizer, "prompt")
    assert pair.text.endswith("assistant\n")
    odd = {**row, "chat_template_kwargs": own | {"mod": ""}}
    with pytest.raises(ConfigError, match=r"the chat template does not read 'mod'\. Did you mean 'mood'"):
        encode_given(recipe_of("dpo"), rows_of([row, odd]), tokenizer, "prompt")
    with pytest.raises(ConfigError, match="messages need a chat template"):
        encoded("dpo", [{**row, "chat_template_kwargs": None}], None)  # type: ignore[arg-type]


def test_why_no_token_is_the_assistants_is_said():
    empty = CHAT + "{% generation %}{% endgeneration %}"
    with pytest.raises(ConfigError, match=r"put the template's \{% generation %\} around"):
        mask_of(empty, TALK)
    with pytest.raises(ConfigError, match="remove the row"):
        mask_of(CHAT, TALK[:1])
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.chat_template"):
        mask_of(CHANGING, TALK)


def compare_after_the_assistant() -> None:
    """Of a prompt that ends with the assistant's message, what follows is a message of its own, as in TRL."""
    more = said("assistant", "number 1")
    rows: dict[str, dict[str, Any]] = {
        "dpo": {"prompt": [USER, GOOD], "chosen": [more], "rejected": [BAD]},
        "kto": {"prompt": [USER, GOOD], "completion": [more], "label": True},
        "sft": {"prompt": [USER, GOOD], "completion": [more]},
    }
    for name, row in rows.items():
        (theirs,), (ours,) = prepared(name, [row], make_tokenizer(CHAT)), encoded(name, [row], CHAT)
        if name == "sft":
            labels = [-100] * len(ours.tokens) + list(ours.completion)
            assert theirs["labels"] == labels, name
            continue
        assert list(ours.tokens) == theirs["prompt_ids"], name
        assert list(ours.completion) == theirs["chosen_ids" if name == "dpo" else "completion_ids"], name
    implied = {"chosen": [USER, GOOD, more], "rejected": [USER, GOOD, BAD]}
    (theirs,), (ours,) = prepared("dpo", [implied], make_tokenizer(CHAT)), encoded("dpo", [implied], CHAT)
    assert [list(ours.completion), list(ours.rejected)] == [theirs["chosen_ids"], theirs["rejected_ids"]]


def test_completions_follow_a_prompt_that_ends_with_the_assistant_as_in_trl():
    run_ranks(1, compare_after_the_assistant)


def test_keys_that_a_table_adds_to_messages_are_not_seen():
    """Of rows in which one message calls tools, every message has the key."""
    plain: dict[str, Any] = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    nulls = {key: [{**each, "tool_calls": None, "name": None} for each in plain[key]] for key in plain}
    assert encoded("dpo", [nulls], ASKING)[0].completion == encoded("dpo", [plain], ASKING)[0].completion
    nulls = {"messages": [{**each, "tool_calls": None} for each in TALK]}
    for template in (ASKING, ASKING.replace(CHAT[-10:], CHAT[-10:] + "{% generation %}x{% endgeneration %}")):
        args = ("data.messages_column=messages", "data.train_on=all")
        found = encoded("sft", [nulls], template, *args)
        assert found[0].tokens == encoded("sft", [{"messages": TALK}], template, *args)[0].tokens
    call = {
        "id": None,
        "type": "function",
        "function": {"name": "weather", "arguments": None, "strict": None},
    }
    shown = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}\n{% endfor %}"
    rows = [{"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}]
    (prompt,) = encoded("sft", rows, shown, "data.messages_column=messages", "data.train_on=all")
    text = make_tokenizer(shown).decode((*prompt.tokens, *prompt.completion))
    assert '[{"type": "function", "function": {"name": "weather", "arguments": null}}]' in text


CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather"}}]}
ASKED = [USER, CALLED, said("tool", "fine")]


def compare_after_calls(path: str) -> None:
    """Rows as their file holds them: what a prompt's message calls stands in the place of what it says."""
    shown = CHAT.replace("{{ m.content }}", "{{ m.tool_calls | tojson if m.tool_calls else m.content }}")
    recipe = recipe_of("dpo", f"data.train={path}", "data.evaluation=none")
    rows = read_training(recipe, None).rows
    found = encode_given(recipe, rows, make_tokenizer(shown), "prompt")
    for ours, theirs in zip(found, prepared("dpo", list(rows), make_tokenizer(shown)), strict=True):
        assert list(ours.tokens) == theirs["prompt_ids"] and list(ours.completion) == theirs["chosen_ids"]


def test_a_prompt_may_hold_calls_that_say_nothing(tmp_path):
    row = {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}
    nulls = {**row, "prompt": [USER, {**CALLED, "content": None}, ASKED[2]]}
    run_ranks(1, compare_after_calls, str(write_rows(tmp_path / "rows.jsonl", [row, nulls])))


@pytest.mark.parametrize("name", ["grpo", "kto", "sft"])
def test_so_may_prompts_of_other_algorithms(tmp_path, name):
    row = {"prompt": ASKED, "completion": [GOOD], "label": True, "answer": "fine"}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    recipe = recipe_of(name, f"data.train={path}", "data.evaluation=none")
    assert read_training(recipe, None).rows[0]["prompt"] == ASKED


def test_keys_that_a_table_adds_to_tools_are_not_seen():
    place = {"type": "string", "enum": None, "default": None}
    tool = {"name": "weather", "parameters": {"properties": {"place": place, "days": None}}, "strict": None}
    plain = {
        "name": "weather",
        "parameters": {"properties": {"place": {"type": "string", "default": None}}},
    }
    assert own_tools("row 1", {"tools": [tool]}) == [plain]
    for deep in ("[" * 5000 + "]" * 5000, '[{"a":' + "[" * 700 + "]" * 700 + "}]"):
        try:
            own_tools("row 1", {"tools": deep})
        except ConfigError as error:
            assert "column 'tools' is" in str(error)


def test_a_text_to_score_may_have_no_token_of_its_prompt():
    """A letter and what follows it can be one token: a score is of the whole."""
    row = {"prompt": "t", "chosen": "o", "rejected": "he"}
    tokenizer = make_tokenizer(TOOLED)
    (prompt,) = encoded("reward_model", [row], TOOLED, "reward=none")
    for tokens, text in ((prompt.completion, "to</s>"), (prompt.rejected, "the</s>")):
        assert [*prompt.tokens, *tokens] == tokenizer(text)["input_ids"]


def test_a_column_of_conversations_that_nobody_named_is_pointed_at(tmp_path):
    data = write_rows(tmp_path / "talks.jsonl", [{"id": 1, "talk": TALK}])
    recipe = recipe_of("sft", f"data.train={data}", "data.evaluation=none", "reward=none")
    with pytest.raises(ConfigError) as caught:
        read_training(recipe, None)
    assert "column 'talk' holds a list of messages" in str(caught.value)
    assert "set data.messages_column = 'talk'" in str(caught.value)


def test_a_column_of_another_kind_is_not_suggested(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    recipe = recipe_of("kto", f"data.train={data}", "data.evaluation=none", "reward=none")
    with pytest.raises(ConfigError) as caught:
        encode_given(recipe, read_training(recipe, None).rows, make_tokenizer(CHAT), "prompt")
    assert "has no column 'completion'" in str(caught.value) and "Did you mean" not in str(caught.value)


def test_a_mask_without_the_end_of_turns_is_said(caplog):
    """The loss looks healthy, and the model never learns to stop."""
    args = ("data.messages_column=messages", "data.train_on=assistant")
    rows = [{"messages": TALK}, {"messages": TALK[:2]}]
    for template in (MARKED, CHAT, CLOSING, OPENING):
        encoded("sft", rows, template, *args)
    assert caplog.records == []
    end = "{{ m.content }}<|im_end|>\n{% endgeneration %}"
    assert end in MARKED
    encoded("sft", rows, MARKED.replace(end, "{{ m.content }}{% endgeneration %}<|im_end|>\n"), *args)
    assert "2 of 2 rows: the end of the assistant's turn is not learned" in caplog.text


def compare_all() -> None:
    """All tokens count, whoever wrote them, so that nothing has to be told apart."""
    rows = [{"messages": each} for each in (TALK, TALK[1:], TALK[:3], TALK[:1])]
    args = ("data.messages_column=messages", "data.train_on=all")
    for template in (CHANGING, OPENING, CLOSING, MARKED):
        theirs = prepared("sft", rows, make_tokenizer(template), completion_only_loss=False)
        ours = encoded("sft", rows, template, *args)
        assert [list(each.tokens + each.completion) for each in ours] == [
            each["input_ids"] for each in theirs
        ]
        assert all(set(each.trained) == {1} for each in ours) and all(each.completion for each in ours)
        tokenizer = make_tokenizer(template)
        asked = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ours[0].asked) == ours[0].text == asked


def test_a_template_that_rewrites_turns_does_not_matter_where_all_tokens_count():
    """Conversations of several turns were refused with Qwen3's template, though no mask is needed."""
    run_ranks(1, compare_all)
