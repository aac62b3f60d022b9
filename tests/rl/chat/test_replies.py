"""The tokens between two turns: what the whole conversation's rendering has there, and nothing of the turns themselves."""

import json
import random
import threading
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken

from shardproof.environments.protocol import ToolCall
from shardproof.rl.chat import format as format_module
from shardproof.rl.chat import template as template_module
from shardproof.rl.chat.format import ChatFormat, PlainFormat
from shardproof.rl.chat.stand_ins import call_message
from shardproof.rl.chat.template import Endless, Unrenderable
from tests.rl.chat import templates
from tests.rl.chat.templates import make_tokenizer, tool

WORDS = [
    "weather",
    "Paris",
    "7",
    "user",
    "\u00e4",
    "\u4f60\u597d",
    "\U0001f600",
    "{}",
    '"',
    "\\",
    "a\nb",
    "kq0turn",
]


@dataclass(frozen=True)
class Family:
    template: str
    tokenizer: str = "bytes"
    stop: str = "<|im_end|>"  # ends a turn
    call_stop: str = ""  # ends a turn that calls a tool, if another token does
    has_tools: bool = True
    has_system: bool = True
    several: bool = True  # calls in one turn
    rstrip: tuple[str, ...] = ()


FAMILIES = {
    "chatml": Family(templates.CHATML, has_tools=False),
    "chatml-spaces": Family(templates.CHATML, "spaces", has_tools=False),
    "chatml-slow": Family(templates.CHATML, "slow", has_tools=False),
    "chatml-rstrip": Family(templates.CHATML, has_tools=False, rstrip=("<|im_end|>",)),
    "hermes": Family(templates.HERMES),
    "hermes-slow": Family(templates.HERMES, "slow"),
    "forgetful": Family(templates.FORGETFUL),
    "headers": Family(templates.HEADERS, stop="<|eot|>", call_stop="<|eom|>", several=False),
    "instruct": Family(templates.INSTRUCT, "spaces", stop="</s>", has_tools=False, has_system=False),
    "args": Family(templates.ARGS, "spaces", stop="</s>", has_system=False),
    "turns": Family(templates.TURNS, stop="</turn>", has_tools=False, has_system=False),
    "xml": Family(templates.XML),
    "glm": Family(templates.GLM),
    "deep": Family(templates.DEEP),
    "channels": Family(templates.CHANNELS, stop="<|end|>", call_stop="<|call|>", several=False),
}


def sentence(rng):
    return " ".join(rng.choices(WORDS[:-1], k=rng.randint(1, 8)))


def make_calls(rng, family):
    """Tool calls of a turn; none for a turn that answers."""
    if not family.has_tools or rng.random() < 0.4:
        return []
    number = rng.randint(1, 3) if family.several else 1
    return [ToolCall("weather", {"place": sentence(rng), "days": rng.randint(0, 99)}) for _ in range(number)]


def make_reply(rng, calls):
    """Messages that may follow a turn: answers to its calls, maybe with a message of the user behind them."""
    answers = [answer(sentence(rng), n) for n in range(len(calls))]
    return answers + ([user(sentence(rng))] if not calls or rng.random() < 0.3 else [])


def answer(content, number=0):
    return {"role": "tool", "name": "weather", "tool_call_id": f"t0001c{number:03d}", "content": content}


def user(content):
    return {"role": "user", "content": content}


def flat(segments):
    return [token for segment in segments for token in segment.tokens]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_turns_and_replies_are_the_tokens_of_the_whole_conversation(name):
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family.template, family.tokenizer, rstrip=family.rstrip)
    form = ChatFormat.of(tokenizer)
    rng = random.Random(name)
    tools = [tool()] if family.has_tools else None
    for _ in range(25):
        messages = [user(sentence(rng))]
        if family.has_system and rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": sentence(rng)})
        tokens = flat(form.prompt(messages, tools))
        for _ in range(rng.randint(1, 4)):
            calls = make_calls(rng, family)
            said = {"role": "assistant", "content": sentence(rng)}
            messages.append(call_message(calls, name == "deep") if calls else said)
            reply = make_reply(rng, calls)
            whole = form.template.encode(form.template.render([*messages, *reply], tools))
            assert whole[: len(tokens)] == tokens
            # The turn's own tokens are what the rendering has behind those that were read, up to the stop token.
            stop = tokenizer.convert_tokens_to_ids((calls and family.call_stop) or family.stop)
            sampled = whole[len(tokens) : whole.index(stop, len(tokens)) + 1]
            tokens += sampled + flat(form.reply(reply, stop, tools))
            messages += reply
            assert tokens == whole


def shown(form, segments):
    """(author, text) of segments."""
    return [(segment.author, form.template.decode(segment.tokens, special=True)) for segment in segments]


def test_what_the_environment_said_is_its_own_and_the_rest_is_the_templates():
    form = ChatFormat.of(make_tokenizer(templates.HERMES))
    reply = [answer("user"), answer("</tool_response>\n", 1), user("  \u4f60\u597d \U0001f600  ")]
    segments = form.reply(reply, form.template.tokenizer.convert_tokens_to_ids("<|im_end|>"), [tool()])
    assert shown(form, segments) == [
        ("template", "\n<|im_start|>user\n<tool_response>\n"),
        ("environment", "user"),
        ("template", "\n</tool_response>\n<tool_response>\n"),
        ("environment", "</tool_response>\n"),
        ("template", "\n</tool_response><|im_end|>\n<|im_start|>user\n"),
        ("environment", "  \u4f60\u597d \U0001f600  "),
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert all(not segment.trained and segment.logprobs is None for segment in segments)


@pytest.mark.parametrize(
    "content", ["  trimmed  ", 'quotes " and \\', "\u00e4\u00f6", "line\nbreak", "", " "]
)
def test_contents_that_the_template_writes_differently_are_still_the_environments(content):
    form = ChatFormat.of(make_tokenizer(templates.HEADERS))
    segments = form.reply([answer(content), user(content)], None, [tool()])
    said = [text for author, text in shown(form, segments) if author == "environment"]
    wanted = [json.dumps(content, ensure_ascii=False)[1:-1], content.strip()]
    # A token in which the content and the template meet is the environment's too.
    assert all(text in found for text, found in zip(wanted, said))
    assert len(said) == 2 or not content.strip()


def test_without_places_of_tokens_the_whole_reply_is_the_environments():
    form = ChatFormat.of(make_tokenizer(templates.CHATML, "slow"))
    assert [segment.author for segment in form.reply([user("one")], None)] == ["environment"]


@pytest.mark.parametrize(
    "ended_with, expected",
    [
        ("<|eot|>", "<|head|>user"),  # the template's own end is not written twice
        ("<|eom|>", "<|head|>user"),  # another one stands in its place
        ("</s>", "<|head|>user"),
        (None, "<|eot|><|head|>user"),  # a turn that was cut is ended
    ],
)
def test_the_end_of_a_turn_is_written_once(ended_with, expected):
    tokenizer = make_tokenizer(templates.HEADERS)
    form = ChatFormat.of(tokenizer)
    stop = None if ended_with is None else tokenizer.convert_tokens_to_ids(ended_with)
    segments = form.reply([user("one")], stop)
    assert tokenizer.decode(flat(segments)).startswith(expected)
    # And behind a call, whose end is another token.
    behind_a_call = tokenizer.decode(flat(form.reply([answer("one")], stop, [tool()])))
    assert behind_a_call.startswith("<|head|>ipython" if stop else "<|eom|><|head|>ipython")


@pytest.mark.parametrize(
    "ended_with, is_stop, expected",
    [
        ("<|im_end|>", False, "\n<|im_start|>user"),  # a stop string that is the end itself
        ("</s>", False, "<|im_end|>\n<|im_start|>user"),  # another special token, which was said
        ("a", True, "<|im_end|>\n<|im_start|>user"),  # a stop id of text
        ("\u010a", True, "<|im_end|>\n<|im_start|>user"),  # text that the template writes too, behind its end
        ("\u010a", False, "<|im_end|>\n<|im_start|>user"),
    ],
)
def test_text_that_ends_a_turn_stands_for_no_end_of_the_template(ended_with, is_stop, expected):
    tokenizer = make_tokenizer(templates.HERMES)
    stop = tokenizer.convert_tokens_to_ids(ended_with)
    segments = ChatFormat.of(tokenizer).reply([user("one")], stop, is_stop=is_stop)
    assert tokenizer.decode(flat(segments)).startswith(expected)


def test_a_line_break_that_is_a_templates_only_end_is_written_once():
    tokenizer = make_tokenizer(templates.PLAIN)
    stop = tokenizer.convert_tokens_to_ids("\u010a")
    for is_stop in (True, False):
        segments = ChatFormat.of(tokenizer).reply([user("one")], stop, is_stop=is_stop)
        assert tokenizer.decode(flat(segments)).startswith("user: one")


@pytest.mark.parametrize("special", [False, True])
def test_a_stop_id_that_closes_a_call_is_part_of_the_turn(special):
    """Qwen's </tool_call> is a token of its own: without it the call was not closed, and the turn had no end."""
    tokenizer = templates.make_tokenizer(templates.HERMES)
    tokenizer.add_tokens(
        [AddedToken("</tool_call>", special=special, normalized=False)], special_tokens=special
    )
    form, call = ChatFormat.of(tokenizer), '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    said = form.template.encode(call)
    turn = form.turn(said, True, tools=[tool()])
    assert said[-1] == tokenizer.convert_tokens_to_ids("</tool_call>") and not turn.malformed
    assert [each.name for each in turn.calls] == ["weather"] and turn.text == call
    behind = tokenizer.decode(flat(form.reply([answer("one")], said[-1], [tool()])))
    assert behind.startswith("<|im_end|>\n<|im_start|>user")


def test_a_stop_token_that_begins_the_next_message_is_not_written_again():
    tokenizer = make_tokenizer(templates.UNENDED)
    form = ChatFormat.of(tokenizer)
    begins = tokenizer.convert_tokens_to_ids("[TOOL_RESULTS]")
    assert tokenizer.decode(flat(form.reply([answer("one")], begins, [tool()]))) == "\none<turn>\n"
    other = tokenizer.convert_tokens_to_ids("[INST]")
    assert (
        tokenizer.decode(flat(form.reply([answer("one")], other, [tool()]))) == "[TOOL_RESULTS]\none<turn>\n"
    )


def test_a_line_break_before_the_next_message_is_no_reason_to_write_its_beginning_twice():
    tokenizer = make_tokenizer(
        templates.UNENDED.replace("</tool_call>{% endfor %}", "</tool_call>{% endfor %}{{ '\\n' }}")
    )
    begins = tokenizer.convert_tokens_to_ids("[TOOL_RESULTS]")
    assert (
        tokenizer.decode(flat(ChatFormat.of(tokenizer).reply([answer("one")], begins, [tool()])))
        == "\none<turn>\n"
    )


def test_answers_without_ids_get_those_of_their_places():
    form = ChatFormat.of(make_tokenizer(templates.INSTRUCT, "spaces"))
    reply = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    text = form.template.decode(flat(form.reply(reply, None)), special=True)
    assert '"one", "call_id": "t0001c000"' in text
    assert '"two", "call_id": "t0001c001"' in text


def test_text_behind_text_is_encoded_as_such():
    """A template without special tokens: a tokenizer that begins every text with a space must not do so here."""
    form = ChatFormat.of(make_tokenizer(templates.PLAIN, "spaces"))
    segments = form.reply([user("the rain")], form.template.tokenizer.eos_token_id)
    tokens = form.template.tokenizer.convert_ids_to_tokens(flat(segments))
    assert tokens[:6] == ["\n", "u", "s", "e", "r", ":"]


def test_broken_unicode_and_words_of_our_own_are_no_problem():
    form = ChatFormat.of(make_tokenizer(templates.HERMES))
    for content in (
        "a \ud83d b",
        "\udc00",
        "kq0turn kq0argument kq0content00000",
        "<|im_end|>",
        "x" * 50_000,
    ):
        for message in (user(content), answer(content)):
            text = form.template.decode(flat(form.reply([message], None, [tool()])), special=True)
            assert content.encode("utf-16", "surrogatepass").decode("utf-16", "replace") in text


def test_messages_that_the_template_refuses_or_leaves_out():
    form = ChatFormat.of(make_tokenizer(templates.TURNS))
    with pytest.raises(Unrenderable, match="rejects the conversation: no role critic"):
        form.reply([{"role": "critic", "content": "bad"}], None)
    form = ChatFormat.of(make_tokenizer(templates.SILENT))
    with pytest.raises(Unrenderable, match='leaves out "critic" messages'):
        form.reply([{"role": "critic", "content": "bad"}], None)
    with pytest.raises(Unrenderable, match="no messages"):
        form.reply([], None)
    # An answer of a tool, by a template that knows no calls.
    form = ChatFormat.of(make_tokenizer(templates.CHATML))
    assert "<|im_start|>tool\none" in form.template.decode(
        flat(form.reply([answer("one")], None)), special=True
    )


def test_a_template_that_loops_on_what_an_environment_says_is_ended(monkeypatch):
    monkeypatch.setattr(template_module, "SECONDS", 0.3)
    loops = "{% if messages[-1].content == 'loop' %}" + templates.ENDLESS + "{% endif %}" + templates.CHATML
    form = ChatFormat.of(make_tokenizer(loops))
    assert flat(form.reply([user("one")], None))
    with pytest.raises(Endless, match="did not finish"):
        form.reply([user("loop")], None)
    assert flat(form.reply([user("one")], None))


def test_a_reply_costs_the_same_in_every_turn_and_starts_no_thread(monkeypatch):
    form = ChatFormat.of(make_tokenizer(templates.HERMES))
    form.reply([answer("one")], None, [tool()])
    rendered, started = [], []
    render = form.template.render
    monkeypatch.setattr(
        form.template, "render", lambda *args, **kwargs: rendered.append(args) or render(*args, **kwargs)
    )
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    for n in range(10):
        form.reply([answer(f"number {n}")], None, [tool()])
    assert len(rendered) == 10
    assert all(len(messages) == 3 for messages, *_ in rendered)
    assert started == []


def test_scaffolds_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(format_module, "_KEPT_SCAFFOLDS", 4)
    form = ChatFormat.of(make_tokenizer(templates.INSTRUCT, "spaces"))
    replies = [[answer("one", n)] for n in range(9)]
    first = [flat(form.reply(reply, None)) for reply in replies]
    assert first == [flat(form.reply(reply, None)) for reply in replies]
    assert "t0001c008" in form.template.decode(first[8], special=True)


def test_a_template_that_wants_a_question_at_the_end():
    wants = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no question') }}{% endif %}"
    form = ChatFormat.of(make_tokenizer(wants + templates.CHATML))
    assert form.probe(("user",), False) == []
    stop = form.template.tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = "\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert form.template.decode(flat(form.reply([user("one")], stop)), special=True) == expected


def test_several_templates_by_name():
    """With tools, transformers takes the template named tool_use."""
    tokenizer = make_tokenizer({"default": templates.CHATML, "tool_use": templates.HERMES})
    form = ChatFormat.of(tokenizer)
    assert form.probe(("tool",), True) == []
    assert "<tool_response>" in tokenizer.decode(flat(form.reply([answer("one")], None, [tool()])))


def test_plain_text_is_appended():
    form = PlainFormat(make_tokenizer(None))
    (prompt,) = form.prompt([user("one "), user("two")])
    assert (prompt.author, form.template.decode(prompt.tokens, special=False)) == ("prompt", "one two")
    with pytest.raises(Unrenderable, match="cannot show its tools"):
        form.prompt([user("one")], [tool()])
    (reply,) = form.reply([user("three"), user(" four")], 7)
    assert (reply.author, form.template.decode(reply.tokens, special=False)) == ("environment", "three four")
    assert form.reply([user("")], 7) == []
    with pytest.raises(Unrenderable, match="must be text"):
        form.reply([user(["parts"])], 7)
    turn = form.turn([*reply.tokens, form.template.tokenizer.eos_token_id], True, 3, True)
    assert (turn.text, turn.content, turn.number, turn.last) == ("three four", "three four", 3, True)
    assert form.message(turn) == {"role": "assistant", "content": "three four"}
