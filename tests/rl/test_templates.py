"""Calls under a deadline: a chat template that does not end is ended."""

import threading

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from shardproof.errors import ConfigError
from shardproof.rl.sources import encoding
from shardproof.rl.templates import Overdue, call_each
from tests.rl.test_data import make_tokenizer

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_results_come_in_order():
    assert call_each([lambda n=n: n * n for n in range(100)], 60.0) == [n * n for n in range(100)]
    assert call_each([], 60.0) == []


def test_an_error_of_a_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_each([lambda: 1, lambda: 1 // 0], 60.0)


def test_an_endless_call_is_ended():
    ended = threading.Event()

    def never():
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(Overdue) as caught:
        call_each([lambda: 1, never], 0.3)
    assert caught.value.index == 1
    assert ended.wait(60.0)


def test_calls_share_a_thread_until_one_does_not_end():
    (first,) = call_each([threading.get_ident], 60.0)
    assert call_each([threading.get_ident], 60.0) == [first] != [threading.get_ident()]

    def never():
        while True:
            pass

    with pytest.raises(Overdue):
        call_each([never], 0.3)
    assert (
        call_each([lambda: 1, threading.get_ident], 60.0)[0] == 1
    )  # on another thread, whatever became of that one


def test_calls_from_several_threads_do_not_mix():
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: call_each([lambda: n] * 50, 60.0)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n] * 50 for n in range(8)}


def test_a_chat_template_that_does_not_end(monkeypatch):
    monkeypatch.setattr(encoding, "_TEMPLATE_SECONDS", 0.3)
    rows = [{"prompt": "one"}, {"prompt": "two"}]
    with pytest.raises(ConfigError, match="row 1: the chat template did not finish") as caught:
        encoding.encode_prompts(rows, make_tokenizer(ENDLESS), "prompt", True, None)
    assert caught.value.code == "C005"


def test_a_panic_of_the_tokenizers_library_is_said_in_words(capfd):
    inner = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    # Its engine gives up on this text, and the library panics, which is no Exception in Python.
    inner.normalizer = normalizers.Replace(Regex("(a|aa)+$"), "x")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    with pytest.raises(ConfigError, match=r"C005 data: the tokenizer fails on the data.*retry-limit"):
        encoding.encode_prompts([{"prompt": "a" * 60 + "c"}], tokenizer, "prompt", False, None)
