"""What sampled tokens say: text, thought, content and calls, and the message that a turn becomes again."""

import pytest

from shardproof.environments.protocol import ToolCall
from shardproof.rl.chat.call_formats import OWN
from shardproof.rl.chat.format import ChatFormat
from tests.rl.chat import templates
from tests.rl.chat.templates import make_tokenizer, tool

TOOLS = [tool()]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
ROME = ToolCall("weather", {"place": "Rome"})


def read(template, text, tools=None, stop="<|im_end|>", kind="bytes"):
    form = ChatFormat.of(make_tokenizer(template, kind))
    tokens = form.template.encode(text + stop)
    return form, form.turn(tokens, finished=True, number=1, last=False, tools=tools)


@pytest.mark.parametrize("kind", ["bytes", "spaces", "slow"])
@pytest.mark.parametrize(
    "text", ["It rains.", "", " two  words \n", "a <tool_call> b", "\u4f60 \U0001f600", "{}"]
)
def test_without_tools_a_turn_is_its_text(kind, text):
    form, turn = read(templates.HERMES, text, kind=kind)
    tokens = form.template.encode(text)
    assert turn.text == turn.content == form.template.tokenizer.decode(tokens, skip_special_tokens=True)
    assert (turn.thought, turn.calls, turn.malformed) == ("", (), ())


def test_a_turn_that_was_cut_has_all_its_tokens():
    form = ChatFormat.of(make_tokenizer(templates.CHATML))
    turn = form.turn(form.template.encode("It rains"), finished=False, number=2, last=True)
    assert (turn.text, turn.finished, turn.number, turn.last) == ("It rains", False, 2, True)
    assert form.turn([], finished=False, number=1, last=False).text == ""


@pytest.mark.parametrize(
    "text, thought, content",
    [
        ("<think>\nhm\n</think>\n\nIt rains.", "hm", "It rains."),
        ("\n<think>hm</think>It rains.", "hm", "It rains."),
        ("<think>\n\n</think>\n\nIt rains.", "", "It rains."),
        ("<think>\nhm, and never", "hm, and never", ""),
        ("It rains. <think>hm</think>", "", "It rains. <think>hm</think>"),
        ("[THINK]hm[/THINK]It rains.", "hm", "It rains."),  # special tokens in this tokenizer
    ],
)
def test_thoughts(text, thought, content):
    _, turn = read(templates.FORGETFUL, text)
    assert (turn.thought, turn.content) == (thought, content)
    _, turn = read(templates.FORGETFUL, f"{text}{CALL}", TOOLS)
    assert turn.thought == (thought if "never" not in text else f"hm, and never{CALL}")
    assert turn.calls == ((ROME,) if "never" not in text else ())


def test_a_thought_that_the_prompt_opened():
    form, turn = read(templates.OPENED, "hm\n</think>\n\nIt rains.")
    assert (turn.thought, turn.content, turn.text) == ("hm", "It rains.", "hm\n</think>\n\nIt rains.")
    assert form.message(turn)["content"] == "<think>\nhm\n</think>\n\nIt rains."


def test_calls_and_text_around_them():
    form, turn = read(templates.HERMES, f"Let me look.\n{CALL}", TOOLS)
    assert (turn.content, turn.calls, turn.malformed) == ("Let me look.", (ROME,), ())
    assert turn.text == f"Let me look.\n{CALL}"
    message = form.message(turn)
    assert message["content"] == "Let me look."
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"place": "Rome"}}
    assert message["tool_calls"][0]["id"] == "t0001c000"  # as the answer of a tool names it


def test_special_tokens_that_mark_calls_stay_in_the_text_and_others_do_not():
    begin, end = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    call = f'{begin}weather<\uff5ctool\u2581sep\uff5c>{{"place": "Rome"}}{end}'
    form, turn = read(templates.DEEP, f"a<|head|>b{call}", TOOLS)
    assert (turn.calls, turn.content, turn.text) == ((ROME,), "ab", f"ab{call}")
    assert form.message(turn)["tool_calls"][0]["function"]["arguments"] == '{"place": "Rome"}'
    _, turn = read(templates.DEEP, f"a<|head|>b{call}")
    assert turn.text == 'abweather{"place": "Rome"}'  # as completions are read without tools


def test_malformed_calls_are_told_and_stay_in_the_message():
    form, turn = read(templates.HERMES, "<tool_call>{</tool_call>", TOOLS)
    assert turn.calls == ()
    assert len(turn.malformed) == 1
    assert form.message(turn) == {"role": "assistant", "content": "<tool_call>{</tool_call>"}


def test_channels():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It rains."
    _, turn = read(templates.CHANNELS, text, stop="<|return|>")
    assert (turn.thought, turn.content) == ("hm", "It rains.")
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"place": "Rome"}'
    )
    _, turn = read(templates.CHANNELS, text, TOOLS, stop="<|call|>")
    assert (turn.thought, turn.content, turn.calls) == ("hm", "", (ROME,))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("HERMES", "hermes"),
        ("FORGETFUL", "hermes"),
        ("UNENDED", "hermes"),
        ("XML", "xml"),
        ("GLM", "glm"),
        ("INSTRUCT", "mistral"),
        ("ARGS", "mistral"),
        ("DEEP", "deepseek"),
        ("CHANNELS", "harmony"),
        ("HEADERS", "llama"),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "spaces", "slow"])
def test_the_format_of_calls_is_the_one_that_the_template_writes(name, expected, kind):
    form = ChatFormat.of(make_tokenizer(getattr(templates, name), kind))
    assert form.calls.name == expected
    assert form.calls.arguments_as_text is (name == "DEEP")


def test_a_format_that_the_recipe_names_is_taken():
    form = ChatFormat.of(make_tokenizer(templates.CHATML), "hermes")
    turn = form.turn(form.template.encode(CALL), finished=False, number=1, last=False, tools=TOOLS)
    assert turn.calls == (ROME,)
    assert form.message(turn) == {"role": "assistant", "content": CALL}  # the template writes no calls itself


RESPONSE = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}


def test_the_tokenizers_own_response_template_comes_first():
    tokenizer = make_tokenizer(templates.HERMES)
    tokenizer.response_template = RESPONSE
    form = ChatFormat.of(tokenizer)
    assert form.calls.name == OWN
    tokens = form.template.encode(f"<think>hm</think>Let me look.{CALL}<|im_end|>")
    turn = form.turn(tokens, finished=True, number=1, last=False, tools=TOOLS)
    assert (turn.thought, turn.content, turn.calls) == ("hm", "Let me look.", (ROME,))
    broken = form.turn(form.template.encode("<tool_call>{</tool_call>"), False, 1, False, TOOLS)
    assert broken.calls == ()
    assert "could not parse" in broken.malformed[0]
    tokenizer.response_template = {"fields": {}}  # it reads nothing: the families' formats are tried
    assert ChatFormat.of(tokenizer).calls.name == "hermes"


def test_what_rendering_a_turn_anew_changes():
    def respelling(template, has_tools):
        return ChatFormat.of(make_tokenizer(template)).respelling(has_tools)

    assert respelling(templates.CHATML, False) == []
    assert respelling(templates.TURNS, False) == ["changes spaces around what the policy says"]
    assert "changes spaces in tool calls" in respelling(templates.HERMES, True)
    assert "changes spaces around thoughts, or drops them" in respelling(templates.FORGETFUL, False)
