"""Environments with tools: every call is answered, whatever the policy wrote and whatever a tool does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import shardproof as sp
from shardproof.environments.tools import Tools


def add(x: float, y: float) -> float:
    """Add two numbers.

    Args:
        x: the first
        y: the second
    """
    assert isinstance(x, float) and isinstance(y, float)
    return x + y


def search(
    query: str, limit: int = 3, order: Literal["new", "old"] = "new", tags: list[str] | None = None
) -> dict:
    """Search the shelves.

    Args:
        query: what to look for
        limit: how many
        order: of the results
        tags: that all have
    """
    return {"query": query, "limit": limit, "order": order, "tags": tags}


async def wait(seconds: float) -> str:
    """Wait for a while.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "waited"


def spoil(items: list) -> str:
    """Empty a list.

    Args:
        items: the list
    """
    items.clear()
    return "emptied"


@dataclass
class Point:
    x: int
    y: int


class Strange:
    pass


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _hang() -> None:
    while True:
        time.sleep(0.01)


def _fork() -> str:
    if os.fork() == 0:
        return "child"
    os.wait()
    return "parent"


def _raise(error: BaseException) -> None:
    raise error


WHATEVER: dict[str, Any] = {
    "text": lambda: "plain",
    "none": lambda: None,
    "number": lambda: 1.5,
    "nested": lambda: {"a": [1, {"b": None}], "é": "ü"},
    "bytes": lambda: "naïve".encode(),
    "raw": lambda: b"\xff\xfe",
    "huge": lambda: "x" * 10_000_000,
    "emoji": lambda: "👍🏽" * 3,
    "pair": lambda: "\ud83d\ude00",
    "half": lambda: "a\ud800b",
    "nan": lambda: float("nan"),
    "point": lambda: [Point(1, 2)],
    "set": lambda: {3, 1, 2},
    "path": lambda: Path("/a"),
    "strange": Strange,
    "circle": lambda: (lambda it: it.append(it) or it)([]),
    "deep": lambda: json.loads("[" * 900 + "]" * 900),
    "long_number": lambda: 10**5000,
    "raise": lambda: _raise(ValueError("no such book")),
    "raise_huge": lambda: _raise(ValueError("x" * 10**7)),
    "silent": lambda: _raise(Silent()),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "hang": _hang,
    "fork": _fork,
}


def whatever(kind: str) -> Any:
    """Return or do something.

    Args:
        kind: of what
    """
    return WHATEVER[kind]()


def take(environment: sp.ToolEnvironment, *calls: tuple[str, dict], **turn: Any) -> sp.Reply:
    """The environment's reply to a turn with these calls."""
    turn = {"text": "", "calls": tuple(sp.ToolCall(name, arguments) for name, arguments in calls), **turn}
    return asyncio.run(environment.step(sp.Turn(**turn)))


def contents(reply: sp.Reply) -> list[str]:
    return [message["content"] for message in reply.messages]


@pytest.fixture(scope="module")
def tools() -> Tools:
    return Tools(functions=[add, search, wait, spoil, whatever])


def test_calls_are_answered_in_their_order(tools):
    reply = take(
        tools, ("add", {"x": 2, "y": 0.5}), ("search", {"query": "ü"}), ("wait", {"seconds": 0}), number=3
    )
    expected = {"query": "ü", "limit": 3, "order": "new", "tags": None}
    assert contents(reply) == ["2.5", json.dumps(expected, ensure_ascii=False), "waited"]
    assert [message["role"] for message in reply.messages] == ["tool"] * 3
    assert [message["name"] for message in reply.messages] == ["add", "search", "wait"]
    identities = [message["tool_call_id"] for message in reply.messages]
    assert len(set(identities)) == 3 and all(len(each) == 9 and each.isalnum() for each in identities)
    assert not reply.done and reply.reward is None
    assert reply.facts == {"calls": 3, "malformed_calls": 0, "unknown_tools": 0, "tool_errors": 0}


def test_the_formats_own_identity_of_a_call_is_kept(tools):
    turn = sp.Turn("", calls=(sp.ToolCall("add", {"x": 1.0, "y": 1.0}, id="functions.add:0"),))
    assert asyncio.run(tools.step(turn)).messages[0]["tool_call_id"] == "functions.add:0"


def test_a_turn_without_calls_ends_the_conversation(tools):
    reply = take(tools, content="42")
    assert reply.done and not reply.messages and reply.reward is None and reply.facts["calls"] == 0


def test_schemas_are_those_of_transformers(tools):
    from transformers.utils import get_json_schema

    assert tools.tools == tuple(map(get_json_schema, [add, search, wait, spoil, whatever]))


@pytest.mark.parametrize(
    ("name", "arguments", "said", "counted"),
    [
        ("searchh", {}, ["no tool 'searchh'", "Tools: add, search, wait", "Did you mean 'search'?"], "unknown_tools"),
        ("a" * 10**6, {}, ["there is no tool"], "unknown_tools"),
        ("\ud800", {}, ["there is no tool"], "unknown_tools"),
        ("add", {}, ["x is missing; y is missing", '"number"'], "malformed_calls"),
        ("add", {"x": "2", "y": 1}, ['x must be of type number, and is "2" (string)'], "malformed_calls"),
        ("add", {"x": True, "y": 1}, ["x must be of type number, and is true (boolean)"], "malformed_calls"),
        ("add", {"x": 1, "y": 1, "z": 1}, ["z is not known"], "malformed_calls"),
        ("search", {"query": "a", "limit": 2.0}, ["limit must be of type integer, and is 2.0"], "malformed_calls"),
        ("search", {"quer": "a"}, ["query is missing", "quer is not known. Did you mean 'query'?"], "malformed_calls"),
        ("search", {"query": "a", "order": "up"}, ['order must be one of "new", "old"'], "malformed_calls"),
        ("search", {"query": "a", "tags": ["b", 3]}, ["tags[1] must be of type string"], "malformed_calls"),
        ("search", {"query": None}, ["query must be of type string, and is null"], "malformed_calls"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit_are_answered_with_what_is_wrong(tools, name, arguments, said, counted):
    reply = take(tools, (name, arguments), ("add", {"x": 1, "y": 1}))
    first, second = contents(reply)
    assert first.startswith("Error: ") and len(first) < 3000 and second == "2.0" and not reply.done
    first.encode()
    for each in said:
        assert each in first
    assert {key: value for key, value in reply.facts.items() if value} == {"calls": 2, counted: 1}


@pytest.mark.fault
def test_whatever_a_policy_makes_up_is_answered_with_text_that_can_be_encoded(tools):
    odd = "\ud800" * 1000
    calls = (
        sp.ToolCall(odd, {odd: odd}, id=odd),
        sp.ToolCall("search", {"query": 1, odd: odd, "order": odd}),
    )
    reply = asyncio.run(tools.step(sp.Turn(odd, calls=calls, malformed=(odd,))))
    assert len(json.dumps(reply.messages, ensure_ascii=False).encode()) < 40_000 and len(reply.messages) == 3


def test_malformed_calls_are_answered_with_how_a_call_looks(tools):
    reply = take(tools, malformed=("the call is not valid JSON", "it has no name"))
    assert len(reply.messages) == 2 and not reply.done and reply.facts["malformed_calls"] == 2
    assert contents(reply)[0] == (
        "Error: the call is not valid JSON. A call names a tool and gives its arguments, "
        'for example add with {"x": 1.5, "y": 1.5}.'
    )


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("text", "plain"),
        ("none", "null"),
        ("number", "1.5"),
        ("nested", '{"a": [1, {"b": null}], "é": "ü"}'),
        ("bytes", "naïve"),
        ("emoji", "👍🏽👍🏽👍🏽"),
        ("pair", "😀"),
        ("half", "a\ufffdb"),
        ("nan", "NaN"),
        ("point", '[{"x": 1, "y": 2}]'),
        ("set", "[1, 2, 3]"),
        ("path", '"/a"'),
        ("fork", "parent"),
    ],
)
def test_results_become_text(tools, kind, shown):
    reply = take(tools, ("whatever", {"kind": kind}))
    assert contents(reply) == [shown] and reply.facts["tool_errors"] == 0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raw", "2 bytes that are not text"),
        ("strange", "it holds a Strange, which is neither text nor JSON"),
        ("circle", "Circular reference"),
        ("long_number", "cannot be shown"),
        ("raise", "Error: ValueError: no such book"),
        ("raise_huge", "characters left out"),
        ("silent", "its message cannot be read (RuntimeError)"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("missing", "KeyError: 'missing'"),
    ],
)
def test_a_tool_that_fails_is_answered_and_counted(tools, kind, said):
    reply = take(tools, ("whatever", {"kind": kind}), ("whatever", {"kind": "text"}))
    first, second = contents(reply)
    assert said in first and first.startswith("Error: ") and len(first) < 1200 and second == "plain"
    assert reply.facts["tool_errors"] == 1 and not reply.done


def test_results_are_bounded(tools):
    reply = take(tools, ("whatever", {"kind": "huge"}))
    (text,) = contents(reply)
    assert len(text) < 10_100 and "[9990000 characters left out]" in text


@pytest.mark.fault
@pytest.mark.parametrize("call", [("whatever", {"kind": "hang"}), ("wait", {"seconds": 60.0})])
def test_a_tool_that_hangs_is_given_up_and_its_thread_is_ended(call):
    environment = Tools(functions=[whatever, wait], tool_timeout_s=0.2)
    reply = take(environment, call, ("whatever", {"kind": "text"}))
    assert contents(reply) == ["Error: no answer in 0.2 s.", "plain"] and reply.facts["tool_errors"] == 1
    until = time.monotonic() + 60
    while any(each.name == "tool call" for each in threading.enumerate()):
        assert time.monotonic() < until, "the thread of a call that was given up is still there"
        time.sleep(0.01)


def test_many_hanging_calls_share_the_time_of_one_turn():
    environment = Tools(functions=[whatever])
    environment.timeout_s = 0.5
    began = time.monotonic()
    reply = take(environment, *[("whatever", {"kind": "hang"})] * 5)
    assert time.monotonic() - began < 5 and reply.facts["tool_errors"] == 5
    assert all(each == "Error: no answer in 0.5 s." for each in contents(reply))


def test_many_conversations_wait_at_once():
    async def together() -> list[sp.Reply]:
        calls = (sp.ToolCall("wait", {"seconds": 0.3}),)
        return await asyncio.gather(
            *(Tools(functions=[wait]).step(sp.Turn("", calls=calls)) for _ in range(500))
        )

    began = time.monotonic()
    replies = asyncio.run(together())
    assert {contents(each)[0] for each in replies} == {"waited"} and time.monotonic() - began < 30


def test_a_tool_cannot_change_what_was_called(tools):
    arguments = {"items": [1, 2, 3]}
    assert contents(take(tools, ("spoil", arguments))) == ["emptied"]
    assert arguments == {"items": [1, 2, 3]}


def test_calls_beyond_the_limit_are_not_run():
    environment = Tools(functions=[add], max_calls=2)
    reply = take(environment, *[("add", {"x": 1, "y": 1})] * 1000, malformed=("bad",) * 1000)
    assert contents(reply)[1:3] == ["2.0", "Error: not run, because a turn may have at most 2 calls."]
    assert reply.facts == {"calls": 1000, "malformed_calls": 1000, "unknown_tools": 0, "tool_errors": 998}


def nothing_said(x: int):
    return x


def not_typed(x):
    """Double.

    Args:
        x: what
    """


def not_described(x: int):
    """Double."""


def many(*xs: int):
    """Add.

    Args:
        xs: what
    """


def of_path(path: Path):
    """Read.

    Args:
        path: where
    """


@pytest.mark.fault
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (nothing_said, "it has no docstring"),
        (not_typed, "its argument 'x' has no type"),
        (not_described, "no description for the argument 'x'"),
        (many, "its argument 'xs' cannot be given by name"),
        (of_path, "path is a Path, which a model cannot write"),
        (3, "it is no function"),
    ],
)
def test_functions_that_cannot_be_described_are_refused_at_the_start(function, why):
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        Tools(functions=[function])
    finding = caught.value.findings[0]
    assert why in finding.message and getattr(function, "__name__", "3") in finding.message
    assert "docstring" in finding.fix


@pytest.mark.fault
@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (["no_such_module:f"], "no_such_module"),
        (["json:lods"], "Did you mean 'loads'?"),
        ([add, add], "two tools are named 'add'"),
    ],
)
def test_functions_that_are_not_there_are_refused_by_name(functions, said):
    with pytest.raises(sp.ConfigError, match="C001") as caught:
        Tools(functions=functions)
    assert said in str(caught.value)


def now() -> str:
    """Tell the time."""
    return "noon"


class Shop(sp.ToolEnvironment):
    """A shop with a till, whose tools are methods."""

    functions = (now,)

    def start(self, row, seed):
        self.stock, self.money = dict(row["stock"]), row["money"]

    @sp.tool
    def buy(self, item: str, count: int = 1) -> str:
        """Buy something.

        Args:
            item: what to buy
            count: how many
        """
        if self.stock.get(item, 0) < count:
            raise ValueError(f"there are only {self.stock.get(item, 0)} of {item}")
        self.stock[item] -= count
        self.money -= count
        return f"{self.money} left"

    @sp.tool
    async def leave(self) -> sp.Reply:
        """Leave the shop."""
        return sp.Reply("goodbye", reward=float(self.money), done=True)

    def finish(self, turn):
        return -1.0

    def count(self) -> int:
        """Not a tool."""
        return 3


def test_methods_are_tools_and_keep_state_per_conversation():
    one, other = Shop(), Shop()
    for shop in (one, other):
        shop.start({"stock": {"apple": 2}, "money": 5}, seed=0)
    assert [each["function"]["name"] for each in one.tools] == ["buy", "leave", "now"]
    assert "self" not in json.dumps(one.tools)
    assert contents(take(one, ("buy", {"item": "apple"}), ("buy", {"item": "apple"}))) == ["4 left", "3 left"]
    assert contents(take(one, ("buy", {"item": "apple"}))) == ["Error: ValueError: there are only 0 of apple"]
    assert contents(take(other, ("buy", {"item": "apple"}), ("now", {}))) == ["4 left", "noon"]
    assert contents(take(one, ("count", {})))[0].startswith("Error: there is no tool 'count'")


def test_a_tool_can_reward_and_end_a_conversation():
    shop = Shop()
    shop.start({"stock": {"apple": 2}, "money": 5}, seed=0)
    reply = take(shop, ("leave", {}), ("buy", {"item": "apple"}))
    assert reply.done and reply.reward == 5.0 and shop.money == 5
    assert contents(reply) == ["goodbye", "Not run: the conversation is over."]


@pytest.mark.parametrize("turn", [{"content": "bye"}, {"last": True}, {"finished": False}])
def test_finish_rewards_the_last_turn(turn):
    shop = Shop()
    shop.start({"stock": {"apple": 2}, "money": 5}, seed=0)
    calls = [] if "content" in turn else [("buy", {"item": "apple"})]
    reply = take(shop, *calls, **turn)
    assert reply.done and reply.reward == -1.0 and len(reply.messages) == len(calls)


def test_finish_can_go_on():
    class Patient(Shop):
        roles = ("tool", "user")

        async def finish(self, turn):
            return "Anything else?"

    shop = Patient()
    reply = take(shop, content="hm")
    assert not reply.done and reply.messages == [{"role": "user", "content": "Anything else?"}]


def test_describing_functions_imports_no_torch(tmp_path):
    (tmp_path / "mine.py").write_text(
        'def f(x: int) -> int:\n    """Do.\n\n    Args:\n        x: it\n    """\n'
    )
    code = (
        "import sys\nfrom shardproof.environments.tools import Tools\n"
        "assert 'transformers' not in sys.modules\nTools(functions=['mine:f'])\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)
