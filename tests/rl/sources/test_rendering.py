"""The system prompt and the variables of the chat template: for all rows, and for single ones."""

import pytest

from shardproof.environments.protocol import Opening
from shardproof.errors import ConfigError
from shardproof.rl.chat.format import ChatFormat
from shardproof.rl.conversations.conversation import Conversation, Rules
from shardproof.rl.data import Prompt
from shardproof.rl.sources.encoding import encode_prompts
from shardproof.rl.sources.rendering import Rendering
from shardproof.rl.sources.rows import Rows
from shardproof.rollout.trajectory import Trajectory
from tests.rl.chat.templates import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOKENIZER = make_tokenizer(TEMPLATE)
THOUGHTS = "<think>\n\n</think>\n\n"
USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}


def encode(*rows, chat=True, **rendering):
    found = Rows((f"rows.jsonl:{n}", {"prompt": "hi", **row}) for n, row in enumerate(rows, 1))
    return encode_prompts(found, TOKENIZER, "prompt", chat, None, rendering=Rendering(**rendering))


def refused(*rows, **settings):
    with pytest.raises(ConfigError) as caught:
        encode(*rows, **settings)
    assert caught.value.code == "C005"
    return str(caught.value)


def test_variables_reach_the_template():
    assert encode({})[0].text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    without = encode({}, variables={"enable_thinking": False})[0]
    assert without.text.endswith(f"assistant\n{THOUGHTS}") and without.template is None
    tokens = TOKENIZER.apply_chat_template(
        [USER], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert list(without.tokens) == list(tokens)


def test_a_rows_variables_override_the_runs():
    on, plain, off = encode(
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
        variables={"enable_thinking": False},
    )
    assert [THOUGHTS in each.text for each in (on, plain, off)] == [False, True, True]
    assert (on.template, plain.template) == ({"enable_thinking": True}, None)


def test_a_rows_variable_without_a_value_is_none():
    """A table has the columns of all rows: no thoughts for one row must not turn off the thoughts of the others."""
    (row,) = encode(
        {"chat_template_kwargs": {"enable_thinking": None, "tools_in_user_message": None}},
        variables={"enable_thinking": False},
    )
    assert THOUGHTS in row.text and row.template is None


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([{}], {"variables": {"enable_thinkng": False}}, "does not read 'enable_thinkng'. Did you mean 'enable_thinking'?"),
        ([{}], {"variables": {"tokenize": True}}, "'tokenize' is decided by the run"),
        ([{}], {"variables": {"enable_thinking": True}, "chat": False}, "no prompt goes through a chat template"),
        ([{}, {"chat_template_kwargs": {"thinking": 1}}], {}, "rows.jsonl:2: column 'chat_template_kwargs': the chat template does not read"),
        ([{"chat_template_kwargs": {"enable_thinking": True}}], {"chat": False}, "rows.jsonl:1: the prompt is text that goes to the model unchanged; column"),
        ([{}], {"system": "Be brief.", "chat": False}, "data.system_prompt needs a chat template"),
        ([{"prompt": [USER]}, {"prompt": [SYSTEM, USER]}], {"system": "Be brief."}, "rows.jsonl:2: data.system_prompt is set, and the prompt begins with a system message"),
    ],
)  # fmt: skip
def test_what_would_change_nothing_or_two_things_at_once_is_refused(rows, settings, said):
    assert said in refused(*rows, **settings)


@pytest.mark.parametrize(("what", "expected"), [("keep", "own"), ("replace", "Be brief.")])
def test_a_system_prompt_stands_before_every_prompt(what, expected):
    text, own = encode({}, {"prompt": [SYSTEM, USER]}, system="Be brief.", on_system=what)
    assert text.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert own.text.startswith(f"<|im_start|>system\n{expected}<|im_end|>\n<|im_start|>user\nhi")
    assert own.text.count("<|im_start|>system") == 1


def conversation(opening, row=None, template=None, **rendering):
    made = Rendering(**rendering)
    rules = Rules(
        format=ChatFormat.of(TOKENIZER, variables=made.variables),
        is_templated=True,
        decode=lambda tokens, special: TOKENIZER.decode(tokens, skip_special_tokens=special),
        prompt_column="prompt",
        roles=("user",),
        tools=(),
        max_turns=3,
        max_tokens=None,
        max_seconds=None,
        splits=False,
        masks=False,
        filler=(0, 0),
        rendering=made,
    )
    (prompt,) = encode({**(row or {})}, **rendering)
    talk = Conversation(prompt, 0, Trajectory.of_prompt(prompt.tokens), rules)
    assert isinstance(prompt, Prompt)
    talk.begin(opening, 4)
    return TOKENIZER.decode(talk.current.tokens), talk


def test_conversations_begin_alike_whoever_brings_the_messages():
    settings = {"system": "Be brief.", "variables": {"enable_thinking": False}}
    of_row, _ = conversation(Opening(), **settings)
    of_environment, talk = conversation(Opening([USER]), **settings)
    assert of_row == of_environment == encode({}, **settings)[0].text
    assert [message["role"] for message in talk.messages] == ["system", "user"]


def test_a_rows_variables_hold_for_its_whole_conversation():
    row = {"chat_template_kwargs": {"enable_thinking": True}}
    text, talk = conversation(Opening([USER]), row, variables={"enable_thinking": False})
    assert THOUGHTS not in text
    (reply,) = ["".join(TOKENIZER.decode(s.tokens) for s in talk.format.reply([USER], None))]
    assert reply.endswith("<|im_start|>assistant\n")
    other = talk.rules.format.reply([USER], None)
    assert "".join(TOKENIZER.decode(s.tokens) for s in other).endswith(THOUGHTS)


def test_an_environment_with_a_system_message_of_its_own_is_refused_unless_the_recipe_says_what_to_do():
    with pytest.raises(ValueError, match="a system message of its own"):
        conversation(Opening([SYSTEM, USER]), system="Be brief.")
    text, _ = conversation(Opening([SYSTEM, USER]), system="Be brief.", on_system="keep")
    assert "own" in text and "Be brief." not in text
