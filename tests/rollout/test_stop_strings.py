"""Stop strings are found with the token that completes them: across tokens, in characters of several, in all engines."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import shardproof as sp
from shardproof.rl.conversations.steps import with_text
from shardproof.rl.data import Prompt
from shardproof.rollout.draft import Choice, Draft
from shardproof.rollout.engine import Request, Sampling, generate
from shardproof.rollout.local import EmbeddedEngine, ShardedEngine
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.sampling import Ends, overridden
from shardproof.rollout.stop_strings import StopStrings, without_stop
from shardproof.rollout.trajectory import Segment, Trajectory
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rollout.paged.test_decoder import CPU, ask, assert_same, gib_of, grown, make_model

SPECIAL = AddedToken("<end>", special=True)
PIECES = [
    "a",
    "b",
    "ab",
    "\n",
    "\n\n",
    " a",
    "b ",
    "</a",
    ">",
    "answer",
    "</answer>",
    "é",
    "漢",
    "🙂",
    "x>\n",
    ".",
]


def byte_level() -> Any:
    """Every byte is a token, and so are some longer pieces: characters come in halves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [spelled.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys([*letters, *pieces]))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = spelled, decoders.ByteLevel()
    made.add_special_tokens([SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentence_pieces() -> Any:
    """Words begin with a mark that a text does not begin with; unknown characters are bytes."""
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    pieces = [piece.replace(" ", "▁") for piece in [*PIECES, " ", " b"]]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(["<unk>", *bytes_of, *pieces]))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = {"byte level": byte_level, "sentence pieces": sentence_pieces}
STOPS = [["\n\n"], ["</answer>"], ["é"], ["漢🙂", "ab a"], [">\n", "b "], ["<end>"], [".<end>a"]]


def text(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def slowly(tokenizer: Any, strings: list[str], tokens: list[int], least: int) -> int | None:
    """The first token beyond `least` with which the text has one more of the strings."""
    for num in range(least + 1, len(tokens) + 1):
        before, after = (text(tokenizer, tokens[:k]) for k in (num - 1, num))
        if any(after.count(string) > before.count(string) for string in strings):
            return num
    return None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_is_found_with_the_token_that_completes_it(kind):
    tokenizer, rng, found = TOKENIZERS[kind](), random.Random(0), []
    halves = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é漢🙂".encode()]
    if kind == "byte level":
        halves = [tokenizer(chr(233)).input_ids[0], *tokenizer("漢🙂é").input_ids]
    common = [*tokenizer.convert_tokens_to_ids(list(tokenizer.get_vocab()))[-25:], *halves]
    for number in range(600):
        strings, least = STOPS[number % len(STOPS)], rng.choice([0, 0, 3])
        tokens = rng.choices(common, k=rng.randint(1, 40))
        whole = "".join(rng.choices(["a", " ", *strings], k=3))
        tokens[rng.randint(0, len(tokens)) :] = tokenizer(whole, add_special_tokens=False).input_ids
        sampling = Sampling(64, stop=StopStrings(strings, tokenizer), min_new_tokens=least)
        at_once, by_looks = Ends(sampling), Ends(sampling)
        at_once.look(tokens)
        for num in range(0, len(tokens) + 1, rng.choice([1, 3, 8])):
            by_looks.look(tokens[:num])
        by_looks.look(tokens)
        assert at_once.num == by_looks.num == slowly(tokenizer, strings, tokens, least), (strings, tokens)
        assert at_once.stop_string == by_looks.stop_string and (at_once.stop_string in strings) == bool(
            at_once.num
        )
        found.append(at_once.num)
    assert sum(num is not None for num in found) > 150 and None in found


def test_a_stop_string_behind_characters_of_several_tokens():
    """Bytes that follow each other are read as a whole or not at all: a look that begins within a character saw none."""
    tokenizer = sentence_pieces()

    def spelled(said: str) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in said.encode()]

    for string in ("\n", "龍\n"):
        for letter in "é龍🙂":
            for count in range(9):
                tokens = spelled(letter * count + string)
                ends = Ends(Sampling(64, stop=StopStrings([string], tokenizer)))
                assert ends.look(tokens) and ends.num == len(tokens), (string, letter, count)
                # What ended too early does not end it later, with the last byte of another character.
                least = Sampling(64, stop=StopStrings([string], tokenizer), min_new_tokens=len(tokens))
                assert not Ends(least).look([*tokens, *spelled("é龍a")])
                later, ends = [*tokens, *spelled("龍" + string)], Ends(least)
                assert ends.look(later) and ends.num == len(later)


def test_few_tokens_are_looked_at_and_stop_ids_end_before_strings():
    tokenizer, calls = byte_level(), []
    stops = StopStrings(["</answer>"], tokenizer)
    plain, stops._decode = stops._decode, lambda tokens: calls.append(len(tokens)) or plain(tokens)
    (letter,) = tokenizer("ab").input_ids[:1]
    ends = Ends(Sampling(9999, stop=stops, stop_ids=(3,)))
    for num in range(0, 4001, 8):
        assert not ends.look([letter] * num)
    assert calls == [1, 2]  # the token by itself, once
    end = tokenizer("</answer>").input_ids
    assert Ends(Sampling(9, stop=stops, stop_ids=(end[0],))).look(end)
    ends = Ends(Sampling(9, stop=stops, stop_ids=tuple(end[:1])))
    assert ends.look(end) and ends.num == 1 and ends.stop_string == ""


def test_requests_with_the_same_strings_look_at_a_token_once():
    """A row's strings are made anew for each of its requests, which asked the tokenizer about all of their tokens again."""
    tokenizer, calls = byte_level(), []
    plain = tokenizer.decode
    tokenizer.decode = lambda tokens, **how: calls.append(len(tokens)) or plain(tokens, **how)
    base, letters = Sampling(99, stop=StopStrings(["x"], tokenizer)), tokenizer("ab.").input_ids
    for strings in (["</answer>"], ["</answer>", "\n\n"]):
        for _ in range(3):
            assert not Ends(overridden(base, {"stop": strings})).look(letters)
        assert calls == [1, 2] * len(letters)
        calls.clear()
    for number in range(2000):
        base.stop.of([str(number)])
    assert not Ends(overridden(base, {"stop": ["</answer>"]})).look(letters) and calls  # not all are kept


class Numbers:
    """A tokenizer that writes each token as its number, so that stop strings go across tokens."""

    def decode(self, tokens, **how):
        return "".join(f"{token}." for token in tokens)


def stopping(*strings: str) -> StopStrings:
    return StopStrings(strings, Numbers())


SAMPLING = Sampling(60, stop_ids=(3,), stop=stopping("1.6", "7.2", ".9."))


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_tied")


@pytest.mark.parametrize("blocks", [None, 4])
def test_what_is_drawn_behind_a_stop_string_is_cut_off(model, blocks):
    """The host looks every 8 steps; rows are put back where there is little memory; rows have other settings."""
    requests = ask([tuple((5 * row + at) % 101 for at in range(40 + 2 * row)) for row in range(12)])
    own = [
        None,
        Sampling(60, stop=stopping("5.5", "8.4")),
        Sampling(50, stop_ids=(3, 8, 9), top_k=9, min_new_tokens=6),
    ]
    own += [Sampling(60, stop_ids=(3, 11), stop=SAMPLING.stop, repetition_penalty=1.3, frequency_penalty=0.2)]
    requests = [replace(each, sampling=own[row % 4]) for row, each in enumerate(requests)]
    gib = None if blocks is None else gib_of(model, blocks)
    decoder = PagedDecoder(model, CPU, most_rows=6, kv_cache_gib=gib)
    wanted = grown(model, requests, SAMPLING)
    assert_same(decoder(requests, SAMPLING, 3), wanted)
    assert [c.stop_string for c in decoder(requests, SAMPLING, 3)] == [c.stop_string for c in wanted]
    assert {"", "8.4", "1.6"} <= {c.stop_string for c in wanted} and {c.finished for c in wanted} == {
        True,
        False,
    }
    assert blocks is None or decoder.stats["put_back"]
    for request, found in zip(requests, wanted, strict=True):
        settings, said = request.settings(SAMPLING), list(found.sampled[-1].tokens)
        ends = Ends(settings)
        assert ends.look(said) == found.finished and (ends.num or len(said)) == len(said)
        assert len(said) > settings.min_new_tokens or not found.finished


def everywhere(folder: str) -> dict[str, Any]:
    policy = sp.load(folder, compute_dtype=torch.float32)
    embedded, sharded = EmbeddedEngine(policy, 4), ShardedEngine(policy, 4)
    embedded.load_weights(sp.WeightStream(policy, policy.settings.compute_dtype))
    requests = [
        replace(r, sampling=None if k % 2 else replace(SAMPLING, top_p=0.9, stop=stopping("0")))
        for k, r in enumerate(ask([(5, 6, 7), (9,), (8, 3)] * 2))
    ]
    requests[3] = replace(requests[3], sampling=replace(SAMPLING, temperature=0.0))  # a batch of its own
    found = {
        name: generate(engine, requests, SAMPLING)
        for name, engine in (("embedded", embedded), ("sharded", sharded))
    }
    embedded.decoder = PagedDecoder(embedded.model, embedded.device, most_rows=3)
    embedded.take_all_at_once()
    return {**found, "paged": generate(embedded, requests, SAMPLING)}


@pytest.mark.distributed
def test_engines_end_completions_alike(tmp_path):
    folder = str(make_checkpoint(tmp_path / "model", "qwen3_tied"))
    for found in run_ranks(2, everywhere, folder):
        embedded = found["embedded"]
        assert any(c.stop_string for c in embedded)
        for name in ("sharded", "paged"):
            assert_same(found[name], embedded)
            assert [c.stop_string for c in found[name]] == [c.stop_string for c in embedded]


def test_a_server_that_ends_late_or_never_is_cut():
    request = Request(Trajectory.of_prompt((1, 2)), 5, begun=Segment((4, 1), "policy", (-1.0, -1.0), 2, True))
    draft = Draft(request, Sampling(9, stop=stopping("1.6"), top_k=7, min_new_tokens=1, stop_ids=(3,)))
    params = draft.body(3, None)["sampling_params"]
    assert params["stop"] == ["1.6"] and params["detokenize"] and not params["skip_special_tokens"]
    assert params["top_k"] == 7 and "min_p" not in params and "min_tokens" not in params  # one was drawn
    # The string goes across what was drawn before and now: no server that goes on can know.
    draft.add(Choice((6, 8, 8), (-1.0, -2.0, -3.0), "length", None), [(3, 3)])
    found = draft.answer("")
    assert draft.complete and found.finished and found.stop_string == "1.6"
    assert found.sampled[-1].tokens == (4, 1, 6) and found.sampled[-1].parts == ((2, 2), (1, 3))
    assert found.sampled[-1].logprobs == (-1.0, -1.0, -1.0)


@pytest.mark.parametrize(
    ("said", "string", "read"),
    [
        ("so</answer>.", "</answer>", "so"),
        # Special tokens are no part of what is read, wherever they are in the string.
        ("so<end>", "<end>", "so"),
        ("so.<end>a", ".<end>a", "so"),
        ("s<end>o é<end>ab", " é<end>a", "so"),
        ("so<end>\n\n", "<end>\n", "so"),
        ("<end>漢<end>", "漢<end>", ""),
    ],
)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_text_before_a_stop_string(kind, said, string, read):
    tokenizer = TOKENIZERS[kind]()
    tokens, ends = (
        tokenizer(said, add_special_tokens=False).input_ids,
        Ends(Sampling(64, stop=StopStrings([string], tokenizer))),
    )
    assert ends.look(tokens)
    assert without_stop(tokens[: ends.num], string, tokenizer) == read


def test_the_text_that_rewards_read():
    prompt, said = Prompt({}, "", (1, 2)), Segment((3, 4, 5), "policy", trained=True)
    made = Trajectory.of_prompt((1, 2)).extended(said, True, "4.5")
    texts = [
        with_text(each, prompt, Numbers(), include_stop=keep).text
        for each in (made, replace(made, stop_string=""))
        for keep in (True, False)
    ]
    assert texts == ["3.4.5.", "3.", "3.4.", "3.4."]
    # Of which the last token belongs to a completion that the data give.
    cut = Prompt({}, "", (1,), (2, 9), whole=(1, 2))
    assert cut.asked == (1, 2) and prompt.asked == (1, 2)
    assert with_text(made, cut, Numbers()).text == "3.4.5."
