"""The tokens between two turns: what the whole conversation's rendering has there, and nothing of the turns themselves."""

import random

import pytest

from shardproof.environments.protocol import ToolCall
from shardproof.rl.chat.format import ChatFormat
from shardproof.rl.chat.stand_ins import call_message
from tests.rl.chat import templates
from tests.rl.chat.templates import make_tokenizer, tool

WORDS = (
    "weather",
    "Paris",
    "rain",
    "7",
    "user",
    "\u00e4",
    "\u4f60\u597d",
    "\U0001f600",
    "{}",
    '"',
    "\\",
    "a\nb",
)

# name: template, tokenizer, stop token, has tools, has a system role
FAMILIES = {
    "chatml": (templates.CHATML, "bytes", "<|im_end|>", False, True),
    "chatml-spaces": (templates.CHATML, "spaces", "<|im_end|>", False, True),
    "chatml-slow": (templates.CHATML, "slow", "<|im_end|>", False, True),
    "hermes": (templates.HERMES, "bytes", "<|im_end|>", True, True),
    "hermes-slow": (templates.HERMES, "slow", "<|im_end|>", True, True),
    "forgetful": (templates.FORGETFUL, "bytes", "<|im_end|>", True, True),
    "headers": (templates.HEADERS, "bytes", "<|eot|>", True, True),
    "instruct": (templates.INSTRUCT, "spaces", "</s>", False, False),
    "args": (templates.ARGS, "spaces", "</s>", True, False),
    "turns": (templates.TURNS, "bytes", "</turn>", False, False),
    "xml": (templates.XML, "bytes", "<|im_end|>", True, True),
    "glm": (templates.GLM, "bytes", "<|im_end|>", True, True),
    "deep": (templates.DEEP, "bytes", "<|im_end|>", True, True),
    "channels": (templates.CHANNELS, "bytes", "<|end|>", True, True),
}


def sentence(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 8))).strip() or "x"


def make_reply(rng, form, calls):
    """Messages that may follow a turn: answers to its calls, maybe with a message of the user behind them."""
    answers = [
        {"role": "tool", "name": call.name, "tool_call_id": f"call{n:05d}", "content": sentence(rng)}
        for n, call in enumerate(calls)
    ]
    users = [{"role": "user", "content": sentence(rng)}]
    return answers + (users if not calls or rng.random() < 0.3 else [])


def make_turn(rng, has_tools, several):
    if has_tools and rng.random() < 0.6:
        number = rng.randint(1, 3) if several else 1
        calls = [
            ToolCall("weather", {"place": sentence(rng), "days": rng.randint(0, 99)}) for _ in range(number)
        ]
        return calls
    return []


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_turns_and_replies_are_the_tokens_of_the_whole_conversation(family):
    template, kind, stop, has_tools, has_system = FAMILIES[family]
    tokenizer = make_tokenizer(template, kind)
    form = ChatFormat.of(tokenizer)
    rng = random.Random(family)
    tools = [tool()] if has_tools else None
    several = family not in ("headers", "channels")
    for _ in range(25):
        messages = [{"role": "user", "content": sentence(rng)}]
        if has_system and rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": sentence(rng)})
        (prompt,) = form.prompt(messages, tools)
        assert prompt.author == "prompt"
        tokens = list(prompt.tokens)
        for _ in range(rng.randint(1, 4)):
            calls = make_turn(rng, has_tools, several)
            as_text = family == "deep"
            said = call_message(calls, as_text) if calls else {"role": "assistant", "content": sentence(rng)}
            messages.append(said)
            # The turn's own tokens, as the rendering has them: from the prompt's end to its stop token.
            closed = form.template.encode(form.template.render(messages, tools, prompt=False))
            assert closed[: len(tokens)] == tokens
            ends = {
                tokenizer.convert_tokens_to_ids(each) for each in (stop, "<|eom|>", "<|call|>", "<|return|>")
            }
            end = next(n for n in range(len(closed) - 1, 0, -1) if closed[n] in ends)
            sampled = closed[len(tokens) : end + 1]
            reply = make_reply(rng, form, calls)
            segments = form.reply(reply, sampled[-1], tools)
            if family == "channels" and not calls:  # <|return|> becomes <|end|> once another message follows
                sampled[-1] = tokenizer.convert_tokens_to_ids(stop)
            tokens += sampled + [token for segment in segments for token in segment.tokens]
            messages += reply
            assert tokens == form.template.encode(form.template.render(messages, tools))
            assert {segment.author for segment in segments} <= {"template", "environment"}
