"""Tool calls: each format reads what a template writes, says what is wrong with others, and never raises."""

import json
import random
import re

import pytest

from shardproof.environments.protocol import ToolCall
from shardproof.rl.chat.call_formats import FORMATS
from shardproof.rl.chat.format import ChatFormat
from shardproof.rl.chat.reading import MAX_CALLS
from tests.rl.chat import templates
from tests.rl.chat.templates import make_tokenizer, tool

TOOLS = [tool()]
PARIS = ToolCall("weather", {"place": "Paris", "days": 3})
ROME = ToolCall(
    "weather", {"place": 'Rome "7" \\ \u4f60\n\U0001f600', "exact": True, "parts": ["a", {"b": None}]}
)
WRITERS = {  # how each format writes a call; the text around them is the format's own
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{dumps(call)}\n</tool_call>" for call in calls),
    "xml": lambda calls: "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    ),
    "glm": lambda calls: "".join(
        f"<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>\n"
        for call in calls
    ),
    "mistral": lambda calls: "[TOOL_CALLS][" + ", ".join(dumps(call) for call in calls) + "]",
    "deepseek": lambda calls: (
        "<\uff5ctool\u2581calls\u2581begin\uff5c>"
        + "".join(
            f"<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{call.name}\n"
            f"```json\n{json.dumps(call.arguments)}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
            for call in calls
        )
        + "<\uff5ctool\u2581calls\u2581end\uff5c>"
    ),
    "kimi": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{call.name}:{n}<|tool_call_argument_begin|>"
            f"{json.dumps(call.arguments)}<|tool_call_end|>"
            for n, call in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "list": lambda calls: "<tool_calls>[" + ", ".join(dumps(call) for call in calls) + "]</tool_calls>",
    "invoke": lambda calls: (
        "<minimax:tool_call>\n"
        + "".join(
            f'<invoke name="{call.name}">\n'
            + "".join(
                f'<parameter name="{key}">{bare(value)}</parameter>\n'
                for key, value in call.arguments.items()
            )
            + "</invoke>\n"
            for call in calls
        )
        + "</minimax:tool_call>"
    ),
    "harmony": lambda calls: "<|start|>assistant".join(
        f" to=functions.{call.name}<|channel|>commentary json<|message|>{json.dumps(call.arguments)}<|end|>"
        for call in calls
    ),
    "llama": lambda calls: "; ".join(dumps(call, "parameters") for call in calls),
    "pythonic": lambda calls: (
        "["
        + ", ".join(
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
            for call in calls
        )
        + "]"
    ),
}


def dumps(call, key="arguments"):
    return json.dumps({"name": call.name, key: call.arguments})


def bare(value):
    return value if isinstance(value, str) else json.dumps(value)


def parse(name, text):
    return FORMATS[name][0](text, TOOLS)


def plain(calls):
    return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_back(name):
    for calls in ([PARIS], [ROME], [PARIS, ROME], [ToolCall("weather")]):
        found = parse(name, WRITERS[name](calls))
        assert plain(found.calls) == plain(calls)
        assert found.malformed == ()
        assert found.content == ""


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama", "pythonic", "harmony"}))
def test_text_around_calls_is_the_content(name):
    found = parse(name, "Let me look.\n" + WRITERS[name]([PARIS]))
    assert plain(found.calls) == plain([PARIS])
    assert found.content == "Let me look."


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_no_call(name):
    for text in ("", "It is 7 degrees.", "[1, 2]", '{"answer": 7}', "{", "a < b > c", "[x for x in y]", "{{"):
        found = parse(name, text)
        assert (found.calls, found.malformed, found.content) == ((), (), text.strip())


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_is_named_and_does_not_raise(name):
    whole = WRITERS[name]([PARIS, ROME])
    for end in range(len(whole)):
        found = parse(name, whole[:end])
        assert len(found.calls) <= 2
        assert all(isinstance(reason, str) and len(reason) < 300 for reason in found.malformed)
    assert parse(name, whole[: len(whole) // 4]).calls == ()


@pytest.mark.parametrize(
    "body, reason",
    [
        ('{"name": "weather", "arguments": {"place": }}', "not valid JSON: Expecting value at character 44"),
        ('{"arguments": {}}', "the call has no name"),
        ('{"name": 7, "arguments": {}}', "no name: expected text .* found a number"),
        ('{"name": "weather", "arguments": [1]}', "the arguments of 'weather' are a list"),
        ('{"name": "weather", "arguments": "Paris"}', "not valid JSON"),
        ("[1, 2]", "a call is a JSON object .* found a list"),
        ('{"name": "weather", "arguments": {"days": NaN}}', "NaN, which is no number"),
        ('{"name": "weather", "arguments": {"days": 1e999}}', "too large"),
        ('{"name": "weather", "arguments": {"days": %s}}' % ("9" * 5000), "not valid JSON"),
        ('{"name": "weather", "arguments": {"days": 1, "days": 2}}', "has the key 'days' twice"),
        ('{"name": "weather", "arguments": {"place": "\\ud800"}}', "not valid Unicode"),
        ('{"name": "weather", "arguments": {"x": %s}}' % ("[" * 100 + "]" * 100), "nested deeper than"),
        ("[" * 100_000, "nested deeper than|not valid JSON"),
        ('{"name": "weather"} and more', "text behind the JSON"),
        ("", "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body, reason):
    found = parse("hermes", f"<tool_call>{body}</tool_call>")
    assert found.calls == ()
    (said,) = found.malformed
    assert re.search(reason, said), said
    assert len(said) < 300


def test_a_mark_inside_of_an_argument_closes_nothing():
    call = ToolCall("weather", {"place": "</tool_call><tool_call>"})
    assert plain(parse("hermes", WRITERS["hermes"]([call])).calls) == plain([call])


def test_good_calls_beside_a_bad_one_are_kept():
    text = WRITERS["hermes"]([PARIS]) + "<tool_call>{</tool_call>" + WRITERS["hermes"]([ROME])
    found = parse("hermes", text)
    assert plain(found.calls) == plain([PARIS, ROME])
    assert len(found.malformed) == 1


def test_bare_arguments_have_the_types_of_the_schema():
    text = (
        "<function=weather><parameter=place>7</parameter><parameter=days>7</parameter>"
        "<parameter=exact>True</parameter><parameter=parts>[1]</parameter><parameter=other>8</parameter></function>"
    )
    (call,) = parse("xml", text).calls
    assert call.arguments == {"place": "7", "days": 7, "exact": True, "parts": [1], "other": 8}
    (call,) = FORMATS["xml"][0]("<function=f><parameter=a>seven</parameter></function>", []).calls
    assert call.arguments == {"a": "seven"}


def test_ids_that_the_model_writes_are_kept():
    (call,) = parse("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {}, "id": "abcdefghi"}]').calls
    assert call.id == "abcdefghi"
    (call,) = parse("mistral", "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{}").calls
    assert call.id == "abcdefghi"


@pytest.mark.parametrize("name", FORMATS)
def test_more_calls_than_anyone_means_are_not_read(name):
    found = parse(name, WRITERS[name]([PARIS] * (2 * MAX_CALLS)))
    assert len(found.calls) <= MAX_CALLS
    assert len(found.malformed) <= MAX_CALLS + 1


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"',
    '"}',
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "=",
    ",",
    ":",
    '"',
    "\\",
    "\\u",
    "name",
    "arguments",
    '"name": ',
    "<function=",
    "</function>",
    ">",
    "<",
    "<parameter=",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<tool_calls>",
    "</tool_calls>",
    'invoke name="',
    '<invoke name="',
    "</invoke>",
    '<parameter name="',
    "f(a=1)",
    "1e999",
    "NaN",
    "-",
    "9",
    "<",
    "start",
    ">",
    "<",
    "message",
    ">",
    "<",
    "channel",
    ">",
    "to=functions.",
    "<",
    "tool_call_begin",
    ">",
    "<",
    "tool_call_end",
    ">",
    ";",
    "```json",
    "\n",
    " ",
    "�",
    "😀",
    "<think>",
    "</think>",
    "null",
    "true",
    "#",
    "'",
]


def test_no_text_makes_a_parser_raise():
    rng = random.Random(7)
    for _ in range(3000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 40)))
        for name in FORMATS:
            found = parse(name, text)
            assert isinstance(found.content, str)
            json.dumps([dict(call.arguments) for call in found.calls])  # plain values only


@pytest.mark.parametrize("name", FORMATS)
def test_long_texts_of_marks_are_read_in_milliseconds(name):
    """Not measured: with time that grows as the square of the length, this would take minutes."""
    for piece in sorted(set(PIECES) - {"", "\ud800"}):
        found = parse(name, piece * (400_000 // len(piece)))
        assert len(found.calls) + len(found.malformed) <= MAX_CALLS + 1


@pytest.mark.parametrize("name", ["HERMES", "DEEP", "ARGS", "CHANNELS", "HEADERS", "XML"])
@pytest.mark.parametrize("kind", ["bytes", "spaces", "slow"])
def test_no_tokens_make_a_turn_raise(name, kind):
    tokenizer = make_tokenizer(getattr(templates, name), kind)
    form = ChatFormat.of(tokenizer)
    rng = random.Random(f"{name} {kind}")
    for _ in range(60):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 60))]
        turn = form.turn(tokens, rng.random() < 0.5, 2, False, TOOLS)
        assert turn.number == 2
        assert isinstance(form.message(turn)["content"], str)
