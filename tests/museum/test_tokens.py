"""Tokens on their way from the engine to the update: what the policy read and said, and what is trained on.

A script plays the engine: it says given tokens, and the ledger records them as it records an engine's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardproof as sp
from shardproof.config.load import parse_recipe
from shardproof.environments.protocol import Opening
from shardproof.environments.spec import EnvironmentFacts
from shardproof.errors import ShardproofError
from shardproof.rl.batches import make_batch
from shardproof.rl.chat.format import ChatFormat
from shardproof.rl.conversations.prepare import make_rules
from shardproof.rollout.engine import Request
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Segment, Trajectory
from tests.museum.pieces import piece
from tests.rl.chat.templates import CHATML, FORGETFUL, HERMES, make_tokenizer

pytestmark = pytest.mark.fault

GROUP, SAMPLE = 4, 1
NAME = f"trajectory {SAMPLE} of prompt {GROUP}"
QUESTION = {"role": "user", "content": "the weather in Rome"}
MORE = {"role": "user", "content": "and tomorrow"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def begin(segments) -> Trajectory:
    return Trajectory(tuple(segments), GROUP, SAMPLE)


def say(ledger: TokenLedger, asked: Trajectory, tokens: list[int]) -> Trajectory:
    """What an engine does: it appends the tokens that it drew, and the ledger records them."""
    answered = Request(asked, 0).answered(tokens, [-0.25 * (k + 1) for k in range(len(tokens))], True, 3)
    ledger.record(asked, answered)
    return answered


def append(said: Trajectory, segments) -> Trajectory:
    for segment in segments:
        said = said.extended(segment)
    return said


def proved(said: Trajectory, ledger: TokenLedger) -> list[str]:
    """What the check says of a batch of this conversation."""
    return attested(make_batch(said.sequences), said, ledger)


def attested(batch: sp.Batch, said: Trajectory, ledger: TokenLedger) -> list[str]:
    findings = sp.attest_batch(batch, [said], ledger)
    assert {finding.code for finding in findings} <= {"R507"}
    return [finding.message for finding in findings]


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer(CHATML)


def letter_by_letter(tokenizer, word: str, rest: str) -> list[int]:
    """A turn that says a word in more tokens than the tokenizer would write it with, and the token that ends it."""
    letters = [token for letter in word for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert len(letters) > len(tokenizer.encode(word, add_special_tokens=False))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return [*letters, *tokenizer.encode(rest, add_special_tokens=False), end]


@piece("ms-swift-10012")
def test_ms_swift_10012(chatml):
    ledger = TokenLedger()
    drawn = letter_by_letter(chatml, "the", " weather")
    said = say(ledger, begin(ChatFormat.of(chatml).prompt([QUESTION])), drawn)
    assert proved(said, ledger) == []
    again = chatml.encode(chatml.decode(drawn), add_special_tokens=False)
    assert chatml.decode(again) == chatml.decode(drawn), "the text is the same"
    turn = said.segments[-1]
    encoded = replace(turn, tokens=tuple(again), logprobs=turn.logprobs[: len(again)])
    (message,) = proved(replace(said, segments=(*said.segments[:-1], encoded)), ledger)
    assert message.startswith(
        f"{NAME}, turn 1, token 0: the batch has {again[0]}, the engine sampled {drawn[0]}."
    )


@piece("verl-6719")
def test_verl_6719(chatml):
    """The policy reads its own first turn in other tokens than it said it in; the batch has those that it said."""
    form, ledger = ChatFormat.of(chatml), TokenLedger()
    drawn = letter_by_letter(chatml, "the", " weather")
    first = say(ledger, begin(form.prompt([QUESTION])), drawn)
    answer = {"role": "assistant", "content": chatml.decode(drawn[:-1])}
    rendered = begin(form.prompt([QUESTION, answer, MORE]))
    second = say(ledger, rendered, drawn).segments[-1]
    appended = append(first, form.reply([MORE], drawn[-1]))
    assert chatml.decode(appended.tokens) == chatml.decode(rendered.tokens), "the text is the same"
    (message,) = proved(append(appended, [second]), ledger)
    at = len(first.segments[0].tokens)
    assert message.startswith(
        f"{NAME}, turn 2, token {at} of what it follows: the batch has {drawn[0]}, "
        f"the engine read {rendered.tokens[at]}."
    )
    kept = TokenLedger()
    first = say(kept, begin(form.prompt([QUESTION])), drawn)
    assert proved(say(kept, append(first, form.reply([MORE], drawn[-1])), drawn), kept) == []


@piece("verl-6921")
def test_verl_6921():
    """A reply that is rendered on its own lacks what the template writes between the turns."""
    tokenizer = make_tokenizer(HERMES)
    form, ledger = ChatFormat.of(tokenizer), TokenLedger()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
    drawn = [*tokenizer.encode(call, add_special_tokens=False), end]
    reply = {"role": "tool", "name": "weather", "content": "fine today"}
    alone = form.template.encode(form.template.render([reply], None))
    first = say(ledger, begin(form.prompt([QUESTION], [WEATHER])), drawn)
    second = say(ledger, first.extended(Segment(tuple(alone), "environment")), drawn).segments[-1]

    turn = form.turn(drawn, True, tools=[WEATHER])
    whole = form.prompt([QUESTION, form.message(turn), reply], [WEATHER])[0].tokens
    appended = append(first, form.reply([reply], end, [WEATHER]))
    assert appended.tokens == whole, "here the reply has what the template writes between the turns"
    assert len(whole) == len(first.tokens) + len(alone) + 1
    (message,) = proved(append(appended, [second]), ledger)
    at = len(first.tokens)
    assert message.startswith(
        f"{NAME}, turn 2, token {at} of what it follows: the batch has {whole[at]}, the engine read {alone[0]}."
    )
    assert tokenizer.decode([whole[at]]) == "\n"


def rules_for(tokenizer, on_rewrite: str):
    """What a run does with this tokenizer before its first conversation."""
    recipe = parse_recipe(
        {
            "model": {"path": "models/any"},
            "data": {"train": "rows.jsonl", "chat": True},
            "train": {"steps": 1},
            "output": {"folder": "runs/any"},
            "environment": {"name": "worlds:World", "on_rewrite": on_rewrite},
        },
        "recipe.toml",
    )
    return make_rules(recipe, tokenizer, False, EnvironmentFacts(("user",), (), True), Opening(), None)


def by_differences(form: ChatFormat, messages) -> list[tuple[str, str]]:
    """(role, what a longer conversation's text adds to the shorter one's), where the texts begin to differ."""
    found, before = [], ""
    for number, message in enumerate(messages, 1):
        text = form.template.render(messages[:number], None, prompt=message["role"] == "user")
        same = next((k for k, (a, b) in enumerate(zip(before, text)) if a != b), len(before))
        found.append((message["role"], text[same:]))
        before = text
    return found


@piece("nemo-rl-2821")
def test_nemo_rl_2821():
    tokenizer = make_tokenizer(FORGETFUL)
    with pytest.raises(ShardproofError) as caught:
        rules_for(tokenizer, "refuse")
    assert caught.value.code == "R508"
    assert 'rewrites the policy\'s earlier turns once a "user" message follows: it drops "<think>' in str(
        caught.value
    )
    assert rules_for(tokenizer, "split").splits

    # Built all the same, the batch has the first answer twice.
    form, ledger = ChatFormat.of(tokenizer), TokenLedger()
    answer = "<think>\nlet me think about it\n</think>\n\nfine today"
    messages = [
        QUESTION,
        {"role": "assistant", "content": answer},
        MORE,
        {"role": "assistant", "content": "rain"},
    ]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first = say(ledger, begin(form.prompt([QUESTION])), [*form.template.encode(answer), end])
    said = say(ledger, append(first, form.reply([MORE], end)), [*form.template.encode("rain"), end])
    assert proved(said, ledger) == []
    turns = iter(said.sampled)
    built = [
        next(turns) if role == "assistant" else Segment(tuple(form.template.encode(text)), "prompt")
        for role, text in by_differences(form, messages)
    ]
    twice = begin(built)
    assert tokenizer.decode(twice.tokens).count("fine today") == 2
    (message,) = proved(twice, ledger)
    assert message.startswith(f"{NAME}, turn 2, token {len(first.tokens)} of what it follows: the batch has ")


@piece("art-883")
def test_art_883():
    """A later request shows an earlier turn without its first token; the rest of it is trained behind that."""
    ledger = TokenLedger()
    first = say(ledger, begin([Segment((1,), "prompt")]), [2, 3])
    second = say(ledger, begin([Segment((1, 3, 4), "prompt")]), [5])
    said = replace(second, earlier=(first,))
    batch = make_batch(said.sequences)
    assert attested(batch, said, ledger) == []
    batch.columns["mask"][1][0] = 1.0
    batch.columns["rollout_logps"][1][0] = first.segments[-1].logprobs[1]
    (message,) = attested(batch, said, ledger)
    assert message.startswith(
        f"{NAME}, before turn 1, token 1 of the sequence: its mask is 1, but it was not sampled (author: prompt)"
    )


@piece("trl-4975")
def test_trl_4975(chatml):
    form, ledger = ChatFormat.of(chatml), TokenLedger()
    drawn = [*form.template.encode("fine today"), chatml.convert_tokens_to_ids("<|im_end|>")]
    first = say(ledger, begin(form.prompt([QUESTION])), drawn)
    said = say(ledger, append(first, form.reply([MORE], drawn[-1])), drawn)
    batch = make_batch([said])
    assert attested(batch, said, ledger) == []
    batch.columns["mask"][0][len(said.segments[0].tokens) - 1 :] = 1.0  # all that follows the prompt
    (message,) = attested(batch, said, ledger)
    assert message.startswith(
        f"{NAME}, after turn 1, token {len(first.tokens)} of the sequence: its mask is 1, but it was not sampled "
        "(author: template)"
    )
