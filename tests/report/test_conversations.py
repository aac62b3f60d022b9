"""Conversations in the report, as a real browser shows them."""

from __future__ import annotations

import json

import pytest

from shardproof.report.page import write_report
from tests.report.folders import HOSTILE, write_lines
from tests.report.talks import make_talks, opening, solved, turn

OPEN = "document.querySelectorAll('.conversation > details').forEach(node => { node.open = true })"
LOST = ".conversation:nth-child(2)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(make_talks(tmp_path_factory.mktemp("talks") / "tiny-tools")).as_uri()


def open_all(tab, page: str):
    tab.open(page)
    tab.js(OPEN)
    tab.wait("[...document.querySelectorAll('.conversation')].every(node => node.querySelector('.part'))")
    return tab


def ways_of(tab, selector: str) -> list[str]:
    """Who wrote each part of a conversation, in order."""
    return tab.js(
        f"[...document.querySelectorAll('{selector} .part')].map(node => node.className.replace('part ', ''))"
    )


def test_turns_stand_by_writer_with_calls_answers_and_rewards(tab, page):
    open_all(tab, page)
    first = ".conversation:first-child"
    assert ways_of(tab, first) == ["prompt", "policy trained", "environment", "policy trained"]
    summary = tab.text(f"{first} summary")
    assert summary == "1.2done2 turns · 1 call · advantage +0.8"
    heads = tab.texts(f"{first} .by")
    assert heads[0] == "prompt96 tokens"
    assert heads[1] == "policy, turn 131 tokens · weights version 3 · advantage +0.8reward +0.2"
    assert heads[2] == "environment20 tokens, 16 of the template"
    assert tab.texts(f"{first} .call") == ['call multiply {"a": 12, "b": 10}answer 120']
    assert tab.texts(f"{first} .part.environment .by-environment") == ["120"]
    assert "<tool_response>" in tab.text(f"{first} .part.environment .by-template")
    assert tab.texts(f"{first} .cut") == ["End: the environment ended it."]
    assert tab.text("#samples .sample-group h4:nth-of-type(3)") == "4 conversations"


def test_what_is_not_trained_is_grey(tab, page):
    open_all(tab, page)
    colour = "getComputedStyle(document.querySelector('{}')).color"
    ink, dim = (tab.js(colour.format(each)) for each in ("body", ".part.prompt .text"))
    assert ink != dim
    assert tab.js(colour.format(".conversation:first-child .part.policy .text")) == ink
    failed = ".conversation:nth-child(3)"
    assert ways_of(tab, failed) == ["prompt", "policy"]
    assert tab.js(colour.format(f"{failed} .part.policy .text")) == dim
    assert "not trained" in tab.text(f"{failed} .part.policy .by")
    assert tab.text(f"{failed} .text.bad") == "TimeoutError: no answer in 30 s"
    assert tab.text(f"{failed} .badge.bad") == "failed"


def test_failed_and_malformed_calls_are_set_off(tab, page):
    open_all(tab, page)
    assert tab.texts(f"{LOST} summary .badge") == ["turns", "2 failed calls"]
    assert tab.texts(f"{LOST} .call.bad") == [
        "call multiplyy {\"a\": 12}failed Error: there is no tool 'multiplyy'. Tools: multiply. Did you mean 'multiply'?",
        "malformed call the call is not JSON: expected an object",
    ]
    assert tab.texts(f"{LOST} .by .reward.bad") == ["reward -0.1", "reward -0.1"]
    assert tab.texts(f"{LOST} .cut") == ["End: ended by the limit of turns."]


def test_a_split_conversation_says_where_the_policy_read_something_else(tab, page):
    open_all(tab, page)
    split = ".conversation:nth-child(4)"
    assert ways_of(tab, split) == ["prompt", "policy trained", "prompt", "policy trained"]
    assert tab.texts(f"{split} .cut")[0].startswith("sequence 2: from here on the policy read this")


def test_search_and_filters_leave_what_matches(tab, page):
    tab.open(page)
    assert tab.text("#samples-found") == ""
    tab.set("#filter-text", "TIMES 8?")
    assert tab.text("#samples-found") == "4 samples in 1 step" and tab.text("#samples output") == "step 2"
    tab.wait("document.querySelectorAll('#samples mark').length > 0")
    assert set(tab.texts("#samples mark")) == {"times 8?"}
    choose(tab, "#filter-author", "policy")
    assert tab.text("#sample-body") == "No sample matches."
    tab.set("#filter-text", "multiply")
    assert tab.text("#samples-found") == "8 samples in 4 steps"
    tab.set("#filter-text", "")
    choose(tab, "#filter-author", "")
    choose(tab, "#filter-reward", "-1")
    assert tab.text("#samples-found") == "4 samples in 4 steps"
    assert tab.text("#samples .sample-group h4:last-of-type") == "1 of 4 conversations"
    choose(tab, "#filter-reward", "1")
    assert tab.text("#samples-found") == "8 samples in 4 steps"
    choose(tab, "#filter-reward", "")
    assert tab.texts("#filter-ended option") == ["any", "done", "failed", "turns"]
    choose(tab, "#filter-ended", "failed")
    assert tab.texts("#samples .conversation summary .badge") == ["failed"]
    choose(tab, "#filter-ended", "")
    tab.click("#filter-failed")
    assert tab.texts("#samples .conversation summary .badge.bad") == ["2 failed calls"]
    tab.click("#filter-failed")
    assert tab.text("#samples-found") == "" and tab.count("#samples .conversation") == 4


def choose(tab, selector: str, value: str) -> None:
    node = f"document.querySelector('{selector}')"
    tab.js(
        f"{node}.value = {json.dumps(value)}; {node}.dispatchEvent(new Event('change', {{bubbles: true}}))"
    )


def test_a_prompt_that_stands_above_is_not_repeated(tab, tmp_path):
    folder = make_talks(tmp_path / "run", 1)
    sample = solved(1, "2 times 3?", 2, 3)
    write_lines(folder / "samples.jsonl", [sample | {"prompt": sample["segments"][0]["text"]}])
    open_all(tab, write_report(folder).as_uri())
    assert tab.text("#samples .part.prompt") == "prompt96 tokens, as shown above"
    assert "2 times 3?" in tab.text("#samples .sample-group > .text")


def test_the_ledger_has_a_row_for_the_trained_tokens(tab, page):
    tab.open(page)
    row = "[data-group='Trained tokens · policy']"
    assert tab.text(f"{row} .what") == "Trained tokens · policy2 steps · last at step 4"
    tab.click(f"{row} > summary")
    tab.wait("document.querySelectorAll('[data-proof=tokens] tbody tr').length === 2")


@pytest.mark.fault
def test_a_hostile_long_or_odd_conversation_is_text(tab, tmp_path):
    folder = make_talks(tmp_path / "run", 1)
    long = solved(1, HOSTILE, 2, 3)
    long["segments"] = [opening(HOSTILE)] + [
        turn(k, HOSTILE + "w" * 3000, 5, calls=[{"name": HOSTILE, "arguments": HOSTILE, "answer": HOSTILE}])
        for k in range(1, 200)
    ]
    odd = [
        None,
        7,
        "text",
        [],
        {},
        [None],
        [{"author": 3, "calls": 7, "tokens": "x", "turn": [], "malformed": {}}],
    ]
    rows = [long | {"ended": HOSTILE, "error": HOSTILE}]
    rows += [{**solved(2, "1", 2, 3), key: value} for key in ("segments", "ended", "error") for value in odd]
    write_lines(folder / "samples.jsonl", rows)
    page = write_report(folder)
    assert page.stat().st_size < 3_000_000
    tab.open(page.as_uri())
    for step in ("0", "1"):
        tab.set("#sample-step", step)
        tab.js(OPEN)
        tab.wait("document.querySelector('.conversation .part') !== null")
        tab.set("#filter-text", "taken")
        tab.set("#filter-text", "")
    assert tab.text("title") == "run · shardproof" and tab.messages() == []
    tab.set("#sample-step", "0")
    tab.js(OPEN)
    tab.wait("document.querySelector('.conversation .part') !== null")
    assert "50 more segments are only in samples.jsonl" in tab.text(
        "#samples .conversation > details > .cut:last-child"
    )
    assert "more characters" in tab.text("#samples .part.policy .text")


def test_a_run_without_conversations_has_a_plain_search(tab, tmp_path):
    folder = make_talks(tmp_path / "run", 1)
    rows = [{"step": 1, "prompt": f"{k}+1=", "completion": str(k + 1), "reward": float(k)} for k in range(3)]
    write_lines(folder / "samples.jsonl", rows)
    tab.open(write_report(folder).as_uri())
    assert tab.count("#filter-author") == 0 and tab.count(".writers") == 0 and tab.count(".completion") == 3
    tab.set("#filter-text", "2+1")
    assert tab.texts("#samples .completion .text") == ["3"]


@pytest.mark.parametrize("width", [320, 390, 1440])
def test_conversations_fit_every_width(browser, tmp_path, width):
    folder = make_talks(tmp_path / "run", 1)
    wide = solved(1, "q" * 400, 2, 3)
    wide["segments"].append(
        turn(3, "x" * 2000, 9, calls=[{"name": "n" * 200, "arguments": "y" * 300, "answer": "z" * 300}])
    )
    write_lines(folder / "samples.jsonl", [wide])
    with browser.tab(width, 844) as tab:
        open_all(tab, write_report(folder).as_uri())
        assert tab.js("document.documentElement.scrollWidth") <= width
        tab.click("#samples input[value=ends]")
        assert tab.js("document.documentElement.scrollWidth") <= width
