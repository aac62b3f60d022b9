"""Tools in worker processes: what one conversation's calls do harms no other conversation."""

from __future__ import annotations

import pytest

import shardproof as sp
from shardproof.environments.pool import EnvironmentPool
from shardproof.environments.registry import resolve
from shardproof.environments.spec import EnvironmentSpec

SOURCE = '''
import os, time

def double(x: int) -> int:
    """Double a number.

    Args:
        x: the number
    """
    return 2 * x

def misbehave(how: str) -> str:
    """Do something bad.

    Args:
        how: what
    """
    if how == "hang":
        time.sleep(1000)
    if how == "spin":
        while True:
            pass
    if how == "fork" and os.fork() == 0:
        time.sleep(0.1)
    if how == "die":
        os._exit(1)
    if how == "raise":
        raise ValueError("bad")
    return how

def undescribed(x):
    return x
'''


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("tool_users", SOURCE)


def pool_of(timeout_s: float = 60.0, **options: object) -> EnvironmentPool:
    return EnvironmentPool(EnvironmentSpec(resolve("tools"), options, timeout_s=timeout_s, num_workers=1))


@pytest.mark.fault
def test_calls_that_misbehave_are_answered_and_harm_no_other_conversation():
    kinds = ["hang", "spin", "fork", "raise"]
    functions = ["tool_users:double", "tool_users:misbehave"]
    with pool_of(functions=functions, python={"timeout_s": 60.0}, tool_timeout_s=3.0) as pool:
        assert [each["function"]["name"] for each in pool.facts.tools] == ["double", "misbehave", "python"]
        assert pool.facts.roles == ("tool",)
        for key in range(8):
            pool.open(key, {"prompt": "go"}, seed=key)
        assert {type(answer) for _, answer in pool.answers()} == {sp.Opening}
        for key, kind in enumerate(kinds):
            pool.step(key, sp.Turn("", calls=(sp.ToolCall("misbehave", {"how": kind}),)))
        for key in range(4, 8):
            pool.step(key, sp.Turn("", calls=(sp.ToolCall("double", {"x": key}),)))
        found = {key: answer.messages[0]["content"] for key, answer in pool.answers()}
        late = "Error: no answer in 3 s."
        assert [found[key] for key in range(4)] == [late, late, "fork", "Error: ValueError: bad"]
        assert [found[key] for key in range(4, 8)] == ["8", "10", "12", "14"]
        pool.step(5, sp.Turn("", calls=(sp.ToolCall("python", {"code": "6 * 7"}),)))
        assert [answer.messages[0]["content"] for _, answer in pool.answers()] == ["42"]


@pytest.mark.fault
def test_what_cannot_be_a_tool_is_refused_by_name_before_the_run():
    with pytest.raises(sp.ConfigError, match=r"C001.*tool_users:undescribed.*no docstring"):
        pool_of(functions=["tool_users:double", "tool_users:undescribed"])
