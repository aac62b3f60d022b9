"""What environments do wrong is recorded, bounded and named; the other conversations go on as if nothing had happened."""

from __future__ import annotations

import pytest

from shardproof.environments import link
from shardproof.environments.protocol import Failure, Opening, Reply
from tests.environments.scripted import LONG_S, SOURCE, open_all, pool_of, say, say_one, texts

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("scripted_users", SOURCE)


@pytest.mark.parametrize("kind", ["Plain", "Async"])
def test_what_raises_ends_its_own_conversation_alone(kind):
    wrong = ["fail", "leave", "interrupt", "recurse", "no_such_method"]
    with pool_of(kind) as pool:
        open_all(pool, *"abcdef")
        assert texts(say(pool, *["go_on"] * 6)) == [f"{name} 1" for name in "abcdef"]
        pid = texts(say(pool, *["pid"] * 6, number=2))[5]
        answers = say(pool, *wrong, "go_on", number=3)
        assert texts(say_one(pool, 5, "pid")) == [pid], "the worker lives"
    assert all(isinstance(answer, Failure) for answer in answers[:5])
    said = texts(answers)
    assert said[0].startswith("turn 3: ValueError: first line second line \\ud800 (scripted_users.py:")
    assert [text.split(":")[1].strip() for text in said[1:5]] == [
        "SystemExit",
        "KeyboardInterrupt",
        "RecursionError",
        "AttributeError",
    ]
    assert said[5] == "f 3"


WRONG = {
    "returns b'x'": "returned a value of type bytes, expected text, a list of messages or None",
    "returns 7": "returned 7, expected text",
    "returns Reply(None)": "returned None, expected text",
    "returns ['x']": "message 1 is 'x', expected {'role'",
    "returns [dict(role='user',content='x'),dict(role='robot',content='')]": "message 2 has the role 'robot', expected one of user",
    "returns [dict(content='x')]": "message 1 has the role None",
    "returns [dict(role='user',content=b'x')]": "the content of message 1 is a value of type bytes, expected text",
    "returns [dict(role='user')]": "the content of message 1 is None, expected text",
    "returns [dict(role='user',content='',x=b'')]": "it is no JSON",
    "returns [dict(role='user',content='',x=float('nan'))]": "it is no JSON",
    "returns '\\ud800'": "text holds half of a surrogate pair",
    "returns Reply('',reward=float('nan'))": "the reward is nan, expected a finite number",
    "returns Reply('',reward=10**400)": "the reward is inf, expected a finite number",
    "returns Reply('',reward=-1e13)": "the reward is -1e+13, expected a number up to 1e+12",
    "returns Reply('',reward='1')": "the reward is '1', expected a number",
    "returns Reply('',done=1)": "done is 1, expected True or False",
    "returns Reply('',facts={'x':'y'})": "the fact 'x' is 'y', expected a number",
    "returns Reply('',facts={1:1})": "a fact is named 1, expected a short text",
    "returns Reply('',facts=3)": "facts is 3, expected",
    "returns [dict(role='user',content='')]*1001": "returned 1,001 messages, expected at most 1,000",
    "returns [dict(role='user',content='',x='y'*1001)]*1000": "messages have more than 1,000,000 characters beside",
    "returns Opening('x')": "returned a value of type Opening, expected text",
    "returns (c:={'role':'user','content':''},c.update(x=c))[:1]": "it is no JSON: Circular reference detected",
}


def test_what_is_no_answer_is_named_with_its_turn():
    with pool_of("Plain") as pool:
        open_all(pool, *map(str, range(len(WRONG))))
        answers = say(pool, *WRONG, number=1)
    for answer, (text, expected) in zip(answers, WRONG.items(), strict=True):
        assert isinstance(answer, Failure), text
        assert answer.error.startswith(f"turn 1: {expected}") and "\n" not in answer.error, text


def test_what_fits_into_json_comes_through():
    with pool_of("Plain", max_reply_chars=10) as pool:
        open_all(pool, *"abcdef")
        answers = say(
            pool,
            "emoji",
            "returns Reply('x',reward=True,facts={'n':2},done=True)",
            "returns ({'role':'user','content':'x','name':'n'},)",
            "returns Reply([{'role':'system','content':'s'}],fresh=True)",
            "flood",
            "returns [dict(role='user',content='12345678'),dict(role='user',content='90abc'),dict(role='user',content='d')]",
        )
    assert answers[:4] == [
        Reply([{"role": "user", "content": "\U0001f600 \u00e9 \x00 \u2028"}]),
        Reply([{"role": "user", "content": "x"}], 1.0, True, facts={"n": 2.0}),
        Reply([{"role": "user", "content": "x", "name": "n"}]),
        Reply([{"role": "system", "content": "s"}], fresh=True),
    ]
    assert texts(answers[4:]) == [
        "xxxxxxxxxx\n[cut: 10,000,000 characters, of which 10 are shown]",
        "12345678 90\n[cut: 5 characters, of which 2 are shown] [cut: 1 characters, of which 0 are shown]",
    ]


def test_a_beginning_that_is_none_is_named():
    with pool_of("Plain") as pool:
        for key, wrong in enumerate(["fail", "flood_opening", "die", "hang_in_no_way", "emoji"]):
            pool.open(key, {"start": wrong}, 0)
        found = dict(pool.answers())
        pool.open(9, {"name": "x", "unsent": lambda: None}, 0)
        ((_, unsent),) = pool.answers()
    with pool_of("make_one") as pool:
        (shared,) = open_all(pool, "a").values()
    assert shared.error == "start: makes the same object again; each conversation needs one of its own"
    assert found[0].error.startswith("start: ValueError")
    assert found[1].error == "start: it begins with 10,000,000 characters, expected at most 1,000,000"
    assert found[2].error == "start: its worker process died (exit code 7)"
    assert found[3].error.startswith("start: AttributeError")
    assert isinstance(found[4], Opening)
    assert unsent.error.startswith("the row cannot be sent to a worker")


@pytest.mark.parametrize(
    ("kind", "hangs"),
    [
        ("Plain", ["hang", "hang_and_catch"]),
        ("Async", ["hang", "wait", "wait_and_catch"]),
    ],
)
def test_calls_that_hang_are_ended_at_their_deadline(kind, hangs, monkeypatch):
    with pool_of(kind, timeout_s=1.5) as pool:
        names = "abcdef"[: len(hangs) + 1]
        open_all(pool, *names)
        said = texts(say(pool, "go_on", *hangs))
        going = texts(say_one(pool, 0, "go_on"))
    assert said == ["a 1"] + ["turn 1: no answer in 1.5 s"] * len(hangs) and going == ["a 2"]


def test_errors_whose_text_is_the_users_code_are_named_by_their_type():
    with pool_of("Plain", timeout_s=2.0) as pool:
        open_all(pool, *"abc")
        said = texts(say(pool, "say_nothing", "say_never", "go_on"))
    assert said[::2] == ["turn 1: Unspeakable", "c 1"]
    assert said[1].startswith("turn 1: Endless: its message cannot be read (TooLong)")


@pytest.mark.parametrize("kind", ["Plain", "Async"])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("hang_in_c", "no answer in 1.5 s"),
        ("die", "its worker process died (exit code 7)"),
        ("kill", "its worker process died (signal 9)"),
        ("write_everywhere", "it wrote to the connection of its worker"),
        ("child_holds_connection", "its worker process died (exit code 9)"),
    ],
)
def test_a_call_that_costs_its_worker_is_known_and_the_others_are_replayed(
    kind, wrong, expected, monkeypatch
):
    monkeypatch.setattr(link, "MARGIN_S", 0.5)
    with pool_of(kind, timeout_s=1.5 if "hang" in wrong else LONG_S) as pool:
        open_all(pool, *"abcd")
        before = texts(say(pool, *["go_on"] * 4))
        assert before == ["a 1", "b 1", "c 1", "d 1"]
        said = texts(say(pool, "go_on", "go_on", wrong, "go_on", number=2))
        after = [texts(say_one(pool, key, "go_on"))[0] for key in (0, 1, 3)]
    assert said == ["a 2", "b 2", f"turn 2: {expected}", "d 2"] and after == ["a 3", "b 3", "d 3"]


def test_of_several_suspects_each_is_tried_alone_once(tmp_path):
    with pool_of("Async", num_workers=2) as pool:
        open_all(pool, *"abcdefgh")
        said = texts(say(pool, *["go_on", "task_dies"] * 4))
        after = [texts(say_one(pool, key, "go_on"))[0] for key in (0, 2, 4, 6)]
    died = "turn 1: its worker process died (exit code 8)"
    assert said == ["a 1", died, "c 1", died, "e 1", died, "g 1", died]
    assert after == ["a 2", "c 2", "e 2", "g 2"]


def test_a_task_that_exits_fails_its_conversation_and_no_more():
    with pool_of("Async") as pool:
        open_all(pool, *"ab")
        said = texts(say(pool, "task_leaves", "go_on"))
    assert said[0].startswith("turn 1: SystemExit") and said[1] == "b 1"


def test_what_cannot_be_replayed_is_said(monkeypatch):
    with pool_of("Once") as pool:
        open_all(pool, *"abc")
        say(pool, *["go_on"] * 3)
        said = texts(say(pool, "go_on", "kill", "go_on", number=2))
        pool.open(9, {"name": "new"}, 0)
        assert dict(pool.answers()) == {9: Opening("new 0")}
    lost = "turn 2: its worker was lost (signal 9), and this environment is not replayable"
    # The first was answered before its worker was lost, or not: this is a race that both sides may win.
    assert said[0] in ("a 2", lost) and said[1:] == ["turn 2: its worker process died (signal 9)", lost]


def test_a_replay_that_answers_something_else_is_a_failure():
    with pool_of("Random") as pool:
        open_all(pool, *"ab")
        say(pool, "go_on", "go_on")
        say(pool, "go_on", "kill")
        ((_, answer),) = [(0, *say_one(pool, 0, "go_on"))]
    assert answer == Failure(
        "its worker was lost (signal 9), and turn 1 answered something else in the replay"
    )


def test_a_fork_that_comes_back_is_ended_and_says_nothing():
    with pool_of("Plain") as pool:
        open_all(pool, *"ab")
        assert texts(say(pool, "fork", "go_on")) == ["parent", "b 1"]
        assert texts(say(pool, "go_on", "fork")) == ["a 2", "parent"]


def test_rows_are_copies_and_output_is_no_answer(capfd):
    row = {"name": "a", "inner": [1]}
    with pool_of("Plain") as pool:
        pool.open(0, row, 0)
        pool.open(1, row, 0)
        list(pool.answers())
        assert texts(say(pool, "change", "write")) == ["[1, 'changed']", "a 1"]
        assert texts(say(pool, "go_on", "change")) == ["changed 2", "[1, 'changed']"]
    assert row == {"name": "a", "inner": [1]}
    assert '{"call": 1}' in capfd.readouterr().out
