"""What the probe says about templates: which of them rewrite earlier turns, how, and which no environment can use."""

import pytest

from shardproof.errors import ConfigError
from shardproof.rl.chat import template as template_module
from shardproof.rl.chat.format import ChatFormat
from tests.rl.chat import templates
from tests.rl.chat.templates import make_tokenizer

TOOLS, USER, BOTH = (("tool",), True), (("user",), False), (("tool", "user"), True)


def probe(template, case, tool_format=None):
    roles, has_tools = case
    return [
        str(each) for each in ChatFormat.of(make_tokenizer(template), tool_format).probe(roles, has_tools)
    ]


@pytest.mark.parametrize(
    "name, case",
    [
        ("CHATML", USER),
        ("HERMES", USER),
        ("HERMES", TOOLS),
        ("HERMES", BOTH),
        ("FORGETFUL", TOOLS),  # thoughts stay until the user speaks
        ("HEADERS", BOTH),
        ("INSTRUCT", USER),
        ("ARGS", BOTH),
        ("TURNS", USER),
        ("PLAIN", USER),
        ("XML", BOTH),
        ("GLM", BOTH),
        ("DEEP", BOTH),
        ("CHANNELS", TOOLS),
    ],
)
def test_prefix_stable_templates(name, case):
    assert probe(getattr(templates, name), case) == []


@pytest.mark.parametrize(
    "name, case, expected",
    [
        (
            "FORGETFUL",
            USER,
            ['the policy\'s earlier turns once a "user" message follows: it drops "<think> ... </think>"'],
        ),
        (
            "FORGETFUL",
            BOTH,
            ['the policy\'s earlier turns once a "user" message follows: it drops "<think> ... </think>"'],
        ),
        ("OPENED", USER, ['the policy\'s earlier turns once a "user" message follows: it drops "<think>"']),
        ("MOVING", USER, ['earlier messages once a "user" message follows: it drops "Be brief."']),
        (
            "INSTRUCT",
            TOOLS,
            ['the policy\'s earlier turns once a "tool" message follows: it drops text before a tool call'],
        ),
        ("CHANNELS", BOTH, ['the policy\'s earlier turns once a "user" message follows: it drops thoughts']),
    ],
)
def test_rewrites_in_words(name, case, expected):
    found = probe(getattr(templates, name), case)
    assert found == [f"the chat template rewrites {each}" for each in expected]


def test_thoughts_in_the_content_of_a_turn_that_calls():
    shown = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% for c in"
    template = templates.HERMES.replace("{{ m.content }}{% for c in", shown)
    (found,) = probe(template, TOOLS)
    assert found.endswith('once a "tool" message follows: it drops "<think> ... </think>"')


def test_tools_that_move_to_the_last_question_are_a_rewrite():
    found = probe(templates.INSTRUCT, BOTH)
    assert any(
        'earlier messages once a "user" message follows: it drops "Tools: [{' in each for each in found
    )


def test_an_id_that_only_earlier_calls_have_is_a_rewrite():
    added = """arguments | tojson }}{% if m != messages[-1] %}, "id": "{{ c.id }}"{% endif %}}"""
    (found,) = probe(templates.HERMES.replace("arguments | tojson }}}", added), TOOLS)
    assert 'once a "tool" message follows: it writes "...", "days": 3}, "id": "t0001c000"}' in found


@pytest.mark.parametrize(
    "name, case, tool_format, expected",
    [
        ("CHATML", TOOLS, None, "writes no tool calls.*environment.tool_format"),
        ("REFUSING", TOOLS, "hermes", 'replies with "tool" messages.*tools are not supported'),
        ("REFUSING", (("tool",), False), None, 'replies with "tool" messages.*tools are not supported'),
        ("SILENT", (("tool",), False), None, 'leaves out "tool" messages'),
        ("SILENT", (("critic", "user"), False), None, 'leaves out "critic" messages'),
        ("TURNS", (("system",), False), None, "no role system"),
    ],
)
def test_templates_that_an_environment_cannot_use_are_refused(name, case, tool_format, expected):
    with pytest.raises(ConfigError, match=f"(?s)C001 rollout.*{expected}"):
        probe(getattr(templates, name), case, tool_format)


def test_calls_in_a_format_that_is_not_known():
    odd = templates.HERMES.replace("<tool_call>", "CALL<").replace("</tool_call>", ">LLAC")
    with pytest.raises(ConfigError, match=r"(?s)in a format that is not known.*environment\.tool_format"):
        probe(odd, TOOLS)


def test_a_template_that_does_not_tell_about_tools():
    silent = templates.HERMES.replace("Tools: {{ tools | tojson }}", "")
    with pytest.raises(ConfigError, match="does not tell the model about tools"):
        probe(silent, TOOLS)
    assert probe(silent, TOOLS, "hermes") == []  # the prompts tell it, and the recipe says how it calls


def test_the_name_of_a_tool_format_is_checked():
    with pytest.raises(
        ConfigError, match=r"environment\.tool_format='hermse' is not one of .*Did you mean 'hermes'"
    ):
        ChatFormat.of(make_tokenizer(templates.CHATML), "hermse")
    with pytest.raises(ConfigError, match="has no response_template"):
        probe(templates.HERMES, TOOLS, "response_template")


def test_an_endless_template_is_ended_once(monkeypatch):
    monkeypatch.setattr(template_module, "SECONDS", 0.3)
    with pytest.raises(ConfigError, match="C001 rollout: the chat template did not finish"):
        probe(templates.ENDLESS, USER)
    # Only where a tool answers: after the first such rendering nothing else is tried.
    endless = (
        "{% for m in messages %}{% if m.role == 'tool' %}" + templates.ENDLESS + "{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="C001 rollout: the chat template did not finish"):
        probe(endless + templates.HERMES, TOOLS)
