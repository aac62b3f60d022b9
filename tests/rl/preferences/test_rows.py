"""Rows of given completions: their tokens and masks are TRL's, and what cannot be compared is refused or left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shardproof.config.load import load_recipe
from shardproof.config.schema import Recipe
from shardproof.errors import ConfigError, ShardproofError
from shardproof.rl.checks import check_inputs
from shardproof.rl.data import Prompt
from shardproof.rl.labelled import labelled_batch
from shardproof.rl.reward_pairs import scored_pairs
from shardproof.rl.sft import completion_batch
from shardproof.rl.sources.given import encode_given, limited, margin_of
from shardproof.rl.sources.reading import read_training
from shardproof.rl.sources.rows import Rows
from shardproof.train.batching import token_mean
from shardproof.train.loss import Scored, sft
from shardproof.train.passes import columns_of
from tests.ranks import run_ranks
from tests.rl.chat.templates import make_tokenizer
from tests.rl.preferences.peers import prepared, sft_loss
from tests.rl.runs import TINY, write_rows

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template that shows thoughts in the last turn alone: no beginning of a longer conversation.
CHANGING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER, GOOD, BAD = said("user", "the weather?"), said("assistant", "it is fine"), said("assistant", "rain")
TALK = [USER, GOOD, said("user", "and tomorrow?"), said("assistant", "it will rain")]
# Templates that show what may be called.
TOOLED, TOOLED_MARKED = (
    f"{{% for t in tools or [] %}}{{{{ t.name }}}}\n{{% endfor %}}{each}" for each in (CHAT, MARKED)
)
TOOLS = [{"name": "weather"}, {"name": "answer"}]
TEXTS = [
    {"prompt": "the weather in", "chosen": " Paris is fine", "rejected": " Rome"},
    {"prompt": "number ", "chosen": "123", "rejected": "321 answer"},
    {"prompt": "to", "chosen": "day", "rejected": "morrow"},  # tokens that merge with the prompt's
]
PAIRS = {
    "text": TEXTS,
    "prompt implied in text": [
        {"chosen": "the weather is fine", "rejected": "the weather will rain"},
        {"chosen": "answer 1", "rejected": "answer 12"},
    ],
    "messages": [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}],
    "tools": [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": TOOLS},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": TOOLS[:1]},
    ],
    "prompt implied in messages": [
        {"chosen": TALK, "rejected": [*TALK[:3], BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
}


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(TINY, [f"algorithm.name={name}", "output.eval_every=0", *overrides])


def rows_of(rows: list[dict[str, Any]]) -> Rows:
    return Rows((f"row {n}", dict(row)) for n, row in enumerate(rows, 1))


def encoded(name: str, rows: list[dict[str, Any]], template: str, *overrides: str) -> list[Prompt]:
    return encode_given(recipe_of(name, *overrides), rows_of(rows), make_tokenizer(template), "prompt")


def compare_pairs(form: str) -> None:
    expected = prepared("dpo", PAIRS[form], make_tokenizer(TOOLED))
    found = encoded("dpo", PAIRS[form], TOOLED)
    for row, prompt in zip(expected, found, strict=True):
        assert list(prompt.tokens) == row["prompt_ids"]
        # What is sampled for an evaluation follows the whole prompt, also where its end belongs to the completions.
        assert list(prompt.asked) == make_tokenizer(CHAT)(prompt.text)["input_ids"]
        assert list(prompt.completion) == row["chosen_ids"] and list(prompt.rejected) == row["rejected_ids"]


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_have_trls_tokens(form):
    run_ranks(1, compare_pairs, form)


def test_texts_to_score_need_no_common_beginning():
    """A reward model reads each whole, as TRL's; whoever says something to a prompt needs one."""
    rows: list[dict[str, Any]] = [
        {"chosen": "the weather", "rejected": "answer 1"},
        {"chosen": [USER, GOOD], "rejected": [said("user", "and tomorrow?"), BAD]},
    ]
    tokenizer = make_tokenizer(CHAT)
    text, talk = encoded("reward_model", rows, CHAT, "reward=none")
    for side, tokens in (("chosen", text.completion), ("rejected", text.rejected)):
        whole = tokenizer(rows[0][side])["input_ids"]
        assert [*text.tokens, *tokens] == [*whole, tokenizer.eos_token_id]
    for side, tokens in (("chosen", talk.completion), ("rejected", talk.rejected)):
        whole = tokenizer.apply_chat_template(rows[1][side], return_dict=True)["input_ids"]
        assert [*talk.tokens, *tokens] == whole
    batch = scored_pairs([text, talk], None)
    assert [len(sequence) for sequence in batch.sequences[2:]] == [
        len(talk.tokens) + len(tokens) + 1 for tokens in (talk.completion, talk.rejected)
    ]
    for row in rows:
        with pytest.raises(ConfigError, match="the prompt is empty"):
            encoded("dpo", [row], CHAT)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        encoded("reward_model", rows[:1], CHAT, "reward=none", "data.chat=true")


def compare_labelled() -> None:
    for rows in (
        [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in TEXTS],
        [{"prompt": [USER], "completion": [GOOD], "label": False}],
    ):
        expected, found = prepared("kto", rows, make_tokenizer(CHAT)), encoded("kto", rows, CHAT)
        for row, prompt in zip(expected, found, strict=True):
            assert list(prompt.tokens) == row["prompt_ids"]
            assert list(prompt.completion) == row["completion_ids"]


def test_labelled_completions_have_trls_tokens():
    run_ranks(1, compare_labelled)


def compare_sft(case: str) -> None:
    """Tokens, labels and the loss; `case` says which tokens count, and of which rows."""
    template, asked, overrides = CHAT, {}, []
    if case.startswith("conversation"):
        rows: list[dict[str, Any]] = [{"messages": TALK}, {"messages": [said("system", "x"), *TALK[:2]]}]
        overrides = ["data.messages_column=messages"]
    elif case.startswith("messages"):
        rows = [{"prompt": TALK[:3], "completion": TALK[3:]}, {"prompt": [USER], "completion": [BAD]}]
    else:
        # Prompts that end with a token: ours are those that the model is later asked with, whatever follows them.
        texts = (("the weather in", " Paris is fine"), ("answer", " number 1"), ("to", " day</s>"))
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    plain_template = CHAT  # without marks the turns tell who wrote what
    if "tools" in case:
        called = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
        calls = {"role": "assistant", "content": None, "tool_calls": [called]}
        key = "messages" if case.startswith("conversation") else "completion"
        rows = [{**row, "tools": json.dumps(TOOLS), key: [*row[key], calls]} for row in rows]
        plain_template, template = TOOLED, TOOLED
    if "assistant" in case:
        template, asked = (
            TOOLED_MARKED if "tools" in case else MARKED,
            {"assistant_only_loss": True, "completion_only_loss": False},
        )
        overrides.append("data.train_on=assistant")
    elif "all" in case:
        asked = {"completion_only_loss": False}
        overrides.append("data.train_on=all")
    tokenizer = make_tokenizer(template)
    expected = prepared("sft", rows, tokenizer, **asked)
    for ours in {template, plain_template}:
        found = encoded("sft", rows, ours, *overrides)
        batch = completion_batch(found)
        assert batch.sequences == [row["input_ids"] for row in expected]
        labels = [[int(label != -100) for label in row["labels"][1:]] for row in expected]
        assert [mask.int().tolist() for mask in batch.columns["mask"]] == labels
    draw = torch.Generator().manual_seed(3)
    policy = [-torch.rand(length - 1, generator=draw) for length in batch.lengths]
    weighed = token_mean(batch, float(batch.counts().sum()))
    columns, counted = columns_of(weighed, torch.device("cpu"))
    empty = torch.empty(0)
    loss, _ = sft().function(Scored(torch.cat(policy), empty, empty), columns)
    theirs = sft_loss([row["labels"] for row in expected], policy)
    assert float((columns["weights"] * loss)[counted].sum()) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        "text, completion",
        "text, all",
        "messages, completion",
        "messages, all",
        "messages, assistant",
        "conversation, assistant",
        "conversation, all",
        "conversation, assistant, tools",
        "messages, completion, tools",
    ],
)
def test_supervised_rows_have_trls_tokens_masks_and_loss(case):
    run_ranks(1, compare_sft, case)


@pytest.mark.parametrize("chat", ["true", "false"])
def test_what_becomes_of_a_row_to_imitate_does_not_depend_on_the_others(chat):
    """Several sources may have rows of several forms."""
    rows: list[dict[str, Any]] = [
        {"prompt": "the weather?", "completion": "it is fine"},
        {"prompt": [USER], "completion": [GOOD]},
        {"prompt": [USER], "completion": "it is fine"},
    ]
    alone = [encoded("sft", [row], CHAT, f"data.chat={chat}")[0] for row in rows]
    together = encoded("sft", rows, CHAT, f"data.chat={chat}")
    assert together == alone
    # Text ends with the tokenizer's end of sequence, messages as the template ends them.
    ends = [prompt.completion[-1] for prompt in together]
    tokenizer = make_tokenizer(CHAT)
    assert ends == [tokenizer.eos_token_id, tokenizer("\n")["input_ids"][-1], tokenizer.eos_token_id]
    switched = CHAT.replace("assistant\n", "{{ switch }}")
    first, *_ = encoded("sft", rows[:2], switched, "data.chat_template_kwargs={switch='!'}")
    assert first.tokens == alone[0].tokens or chat == "true"


def test_a_template_that_writes_turns_differently_later_is_refused():
    for rows, overrides in (
        ([{"messages": TALK}], ["data.messages_column=messages", "data.train_on=assistant"]),
    ):
        with pytest.raises(ConfigError) as caught:
            encoded("sft", rows, CHANGING, *overrides)
        assert "row 1: the chat template rejects the conversation: it writes message 2 differently" in str(
            caught.value
        )


@pytest.mark.parametrize("name", ["dpo", "kto", "sft", "reward_model"])
def test_settings_of_templates_that_would_change_nothing_are_refused(name):
    """As where completions are sampled: for text, for messages, and for whole conversations."""
    texts: dict[str, Any] = {"prompt": "to", "chosen": "day", "rejected": "morrow"}
    texts |= {"completion": "day", "label": 1}
    talk: dict[str, Any] = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    talk |= {"completion": [GOOD], "label": 1, "messages": TALK}
    more = ["reward=none"] if name == "reward_model" else []
    odd = "data.chat_template_kwargs={thinking=true}"
    own = {"chat_template_kwargs": {"thinking": True}}
    whole = ["data.messages_column=messages", "data.train_on=all"]
    unread, plain = "the chat template does not read 'thinking'", "text that goes to the model unchanged"
    cases: list[tuple[dict[str, Any], list[str], str]] = [
        (texts, ["data.system_prompt=Hi."], f"{plain}; data.system_prompt"),
        (texts, [odd], "the chat template does not read 'thinking'"),
        (texts | own, [], f"{plain}; column 'chat_template_kwargs'"),
        (talk, [odd], unread),
        (talk | own, [], f"row 1: column 'chat_template_kwargs': {unread}"),
        *([(talk, [odd, *whole], unread), (talk | own, whole, unread)] if name == "sft" else []),
    ]
    for row, overrides, said_by_error in cases:
        with pytest.raises(ConfigError) as caught:
            encoded(name, [row], CHAT, *more, *overrides)
        assert said_by_error in str(caught.value)


@pytest.mark.parametrize("tools", ["[", "{}", 5, [5]])
def test_tools_that_are_no_list_of_them_are_refused(tools):
    with pytest.raises(ConfigError, match="row 1: column 'tools'"):
        encoded("dpo", [{**PAIRS["messages"][0], "tools": tools}], TOOLED)


def test_labels_and_margins_of_a_table_are_read_as_what_they_say(tmp_path):
    table = tmp_path / "labelled.csv"
    cells = {"1": 1.0, "0": -1.0, "true": 1.0, "FALSE": -1.0, " True": 1.0}
    table.write_text("prompt,completion,label\n" + "".join(f"1+1=,2,{cell}\n" for cell in cells))
    recipe = recipe_of("kto", f"data.train={table}", "data.evaluation=none", "reward=none")
    batch = labelled_batch(check_inputs(recipe).prompts, "label")
    assert [float(side[0]) for side in batch.columns["side"]] == list(cells.values())
    margins = {"0.5": 0.5, " 2": 2.0, "": 0.0}
    assert {cell: margin_of("row 1", {"margin": cell}) for cell in margins} == margins
    for odd in ("much", "nan", "1_0", "inf", 10**400, -(10**400), 1e300, "1e39"):
        with pytest.raises(ConfigError, match="expected a number"):
            margin_of("row 1", {"margin": odd})


@pytest.mark.parametrize(
    ("name", "rows", "said_by_error"),
    [
        ("dpo", [{"prompt": "1+1=", "chosen": "2"}], "has no column 'rejected' (data.rejected_column)"),
        ("dpo", [{"prompt": "1+1=", "chosen": "2", "rejected": ""}], "column 'rejected' holds nothing"),
        (
            "dpo",
            [{"prompt": "1+1=", "chosen": "2", "rejected": [BAD]}],
            "the prompt is text, and a completion is",
        ),
        ("dpo", [{"chosen": "2", "rejected": "3"}], "the prompt is empty"),
        ("dpo", [{"chosen": "2", "rejected": [BAD]}], "one completion is text, the other a list of messages"),
        (
            "dpo",
            [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}],
            "data.train: left out 1 of 1 rows: 1 with two equal completions: none is left",
        ),
        (
            "dpo",
            [{"prompt": "1+1=", "chosen": "2", "rejected": "1" * 80}],
            "does not fit the model's 64 positions",
        ),
        (
            "reward_model",
            [
                {"prompt": "1+1=", "chosen": "2", "rejected": "1" * 59}
            ],  # 64 tokens, and one where it is scored
            'set data.max_length=63 and data.on_max_length="truncate" or "drop"',
        ),
        ("kto", [{"prompt": "1+1=", "completion": "2"}], "has no column 'label' (data.label_column)"),
        (
            "kto",
            [{"prompt": "1+1=", "completion": "2", "label": "yes"}],
            "holds 'yes'; expected true or false",
        ),
        ("kto", [{"completion": "2", "label": 1}], "has no column 'prompt' (data.prompt_column)"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(tmp_path, name, rows, said_by_error):
    data = write_rows(tmp_path / "rows.jsonl", [{**row, "answer": "2"} for row in rows])
    more = ["reward=none"] if name == "reward_model" else []
    recipe = recipe_of(name, f"data.train={data}", "data.evaluation=none", *more)
    with pytest.raises(ConfigError) as caught:
        check_inputs(recipe)
    assert said_by_error in str(caught.value)


def test_nothing_is_cut_off_unless_the_recipe_says_so(caplog):
    row: dict[str, Any] = {}
    prompts = [
        Prompt(row, "short", (1, 2), (3, 4), (5,)),
        Prompt(row, "long", (1, 2, 3), (4, 5, 6), (7, 8)),
        Prompt(row, "no room", (1, 2, 3, 4), (5,), (6,)),
        Prompt(row, "equal", (1,), (5,), (5,)),
        Prompt(row, "equal at first", (1, 2), (3, 4, 5), (3, 4, 6)),
    ]
    with pytest.raises(ConfigError, match=r"has more than data\.max_length=4"):
        limited(recipe_of("dpo", "data.max_length=4"), prompts)
    kept, dropped = limited(recipe_of("dpo", "data.max_length=4", "data.on_max_length=truncate"), prompts)
    assert [(p.text, p.completion, p.rejected) for p in kept] == [
        ("short", (3, 4), (5,)),
        ("long", (4,), (7,)),
    ]
    assert dropped == {
        "with two equal completions": 1,
        "longer than data.max_length=4": 1,
        "with two completions that are equal up to data.max_length=4": 1,
    }
    kept, dropped = limited(recipe_of("dpo", "data.max_length=4", "data.on_max_length=drop"), prompts)
    assert [p.text for p in kept] == ["short"] and sum(dropped.values()) == 4


def compare_cut(train_on: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": TALK[:3], "completion": TALK[3:]},
        {"prompt": [USER], "completion": [BAD]},
    ]
    asked = {"completion_only_loss": train_on == "completion", "assistant_only_loss": train_on == "assistant"}
    prompts = encoded("sft", rows, MARKED, f"data.train_on={train_on}")
    for limit in (8, 14, 19, 24, 30):
        recipe = recipe_of("sft", f"data.max_length={limit}", "data.on_max_length=truncate")
        batch = completion_batch(limited(recipe, prompts)[0])
        theirs = prepared("sft", rows, make_tokenizer(MARKED), max_length=limit, **asked)
        assert batch.sequences == [row["input_ids"] for row in theirs], limit
        labels = [[int(label != -100) for label in row["labels"][1:]] for row in theirs]
        assert [mask.int().tolist() for mask in batch.columns["mask"]] == labels


@pytest.mark.parametrize("train_on", ["completion", "assistant", "all"])
def test_rows_to_imitate_are_cut_as_trl_cuts_them(train_on):
    """Also within the prompt, if there is something to learn before."""
    run_ranks(1, compare_cut, train_on)


def test_given_completions_need_no_answer_where_held_out_rows_are_scored(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    recipe = load_recipe(TINY.parent / "tiny-dpo.toml", [f"data.train={tmp_path}/pairs.jsonl"])
    assert recipe.reward is not None
    assert len(read_training(recipe, None).rows) == 1
    with pytest.raises(ShardproofError, match="no column 'answer'"):
        read_training(load_recipe(TINY, [f"data.train={tmp_path}/pairs.jsonl"]), None)


@pytest.mark.parametrize(
    ("overrides", "said_by_error"),
    [
        (["algorithm.preference.beta=0.2"], "algorithm.preference is for dpo and kto, not for grpo"),
        (["algorithm.name=dpo", "algorithm.preference.loss=kto"], "'kto' is not a loss of dpo"),
        (["algorithm.name=kto", "algorithm.preference.loss=sigmoid"], "'sigmoid' is not a loss of kto"),
        (["algorithm.name=kto", "algorithm.preference.precompute=true"], "precompute is not for kto"),
        (["algorithm.name=kto", "algorithm.preference.loss_weights=0.5"], "loss_weights is not for kto"),
        (
            ["algorithm.name=dpo", "algorithm.preference.discopop_tau=0.1"],
            "discopop_tau is for loss = 'discopop': set it",
        ),
        (
            ["algorithm.name=dpo", "algorithm.preference.divergence_alpha=0.7"],
            "divergence_alpha is for divergence = 'alpha': set it",
        ),
        (
            ["algorithm.name=kto", "train.prompts_per_step=1"],
            "kto measures the KL on completions of other prompts",
        ),
        (
            ["algorithm.name=dpo", "algorithm.preference.loss=exo_pair"],
            "'exo_pair' needs label_smoothing above 0",
        ),
        (
            [
                "algorithm.name=dpo",
                'algorithm.preference.loss=["hinge"]',
                "algorithm.preference.label_smoothing=0.1",
            ],
            "'hinge' does not know it",
        ),
        (
            [
                "algorithm.name=dpo",
                "algorithm.preference.loss=bco_pair",
                "algorithm.preference.divergence=js",
            ],
            "divergence='js' has no meaning for loss 'bco_pair'",
        ),
        (["algorithm.name=dpo", "algorithm.preference.loss_weights=[1, 2]"], "2 numbers for 1 losses"),
        (["algorithm.name=dpo", "data.train_on=all"], "data.train_on is not for dpo"),
        (
            ["algorithm.name=reward_model", "reward=none", "algorithm.gae_lambda=0.5", "algorithm.gamma=0.5"],
            "algorithm.gamma is not for reward_model",
        ),
        (["data.chosen_column=better"], "data.chosen_column is not for grpo"),
        (["algorithm.name=sft", "data.messages_column=talk"], "whole conversations have no completion"),
        (["algorithm.name=sft", "data.on_max_length=drop"], "needs data.max_length"),
        (
            ["algorithm.name=dpo", "algorithm.preference.reference_free=true", "reference.path=x"],
            "reference: algorithm.preference.reference_free=true uses no reference",
        ),
        (["algorithm.name=dpo", "reference.lr=0.1"], "reference.lr=0.1: a reference is never trained"),
        (
            ["algorithm.name=dpo", "algorithm.preset=trl"],
            "presets are for algorithms that sample, not for dpo",
        ),
        (
            ["algorithm.name=dpo", "algorithm.preference.loss=sigmod"],
            "algorithm.preference.loss.0: Input should be 'sigmoid', 'sigmoid_norm'",
        ),
        (
            ["algorithm.name=dpo", "algorithm.beta=0.1"],
            "unknown key 'algorithm.beta', did you mean 'algorithm.kl_coef' or 'algorithm.preference.beta'?",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(overrides, said_by_error):
    with pytest.raises(ConfigError) as caught:
        load_recipe(TINY, overrides)
    assert said_by_error in str(caught.value)
