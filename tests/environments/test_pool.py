"""The pool: conversations in worker processes, each with its own state, many at once."""

from __future__ import annotations

import pytest

from shardproof.config.environment import ENVIRONMENTS
from shardproof.environments.pool import EnvironmentPool, EnvironmentSpec
from shardproof.environments.protocol import Opening, Reply, Turn
from shardproof.environments.registry import BUILT_IN, resolve
from shardproof.errors import ConfigError

USERS = '''
import asyncio
from shardproof import Environment, Opening, Reply

class Count(Environment):
    """Counts turns; which conversation it is, the row says."""
    def __init__(self, step_by=1):
        self.total, self.step_by = 0, step_by
    def start(self, row, seed):
        self.name = row["name"]
        return f"{self.name} {seed}"
    def step(self, turn):
        self.total += self.step_by
        return Reply(f"{self.name} {self.total} {turn.text}", reward=self.total, done=self.total > 2)
'''


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("pool_users", USERS)


def make_pool(name, **settings):
    return EnvironmentPool(EnvironmentSpec(f"pool_users:{name}", **{"timeout_s": 30.0, **settings}))


def test_conversations_keep_their_state_turn_by_turn(users):
    with make_pool("Count", options={"step_by": 2}) as pool:
        assert (pool.facts.roles, pool.facts.tools, pool.facts.replayable) == (("user",), (), True)
        for key in range(20):
            pool.open(key, {"name": f"n{key}"}, seed=100 + key)
        assert dict(pool.answers()) == {key: Opening(f"n{key} {100 + key}") for key in range(20)}
        for number in (1, 2):
            for key in range(20):
                pool.step(key, Turn("hello", number=number))
            content = {key: f"n{key} {2 * number} hello" for key in range(20)}
            assert dict(pool.answers()) == {
                key: Reply([{"role": "user", "content": content[key]}], 2.0 * number, done=number == 2)
                for key in range(20)
            }
        assert all(pool.seconds(key) > 0 for key in range(20))
        for key in range(20):
            pool.release(key)
        pool.open(3, {"name": "again"}, seed=1)
        assert dict(pool.answers()) == {3: Opening("again 1")}
        assert list(pool.answers()) == []


def test_the_registry_has_the_names_that_recipes_may_use():
    assert set(BUILT_IN) == set(ENVIRONMENTS)
    assert resolve("tools") == BUILT_IN["tools"] and resolve("mine:Own") == "mine:Own"
    with pytest.raises(ConfigError, match="Did you mean 'tools'"):
        resolve("tool")
