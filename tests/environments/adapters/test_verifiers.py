"""verifiers' environments: the real package, under an interpreter of its own."""

import pytest

from shardproof.environments.protocol import Failure, Opening, Reply, ToolCall
from shardproof.errors import ConfigError
from shardproof.user_code import find_modules_in
from tests.environments.adapters.played import PACKAGES, play, play_all, pool_of, turn


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Modules beside the recipe, as users have them who do not install their environments."""
    monkeypatch.setenv("SHARDPROOF_RECIPE_FOLDER", "")
    find_modules_in(PACKAGES)


@pytest.fixture(scope="module")
def sums():
    """One pool for several tests: a worker takes seconds to import verifiers."""
    find_modules_in(PACKAGES)
    options = {"id": "sums-taskset", "args": {"size": 44, "broken": True}, "evaluation_size": 2}
    with pool_of("verifiers", options) as pool:
        yield pool


def test_a_taskset_gives_rows_questions_and_its_own_reward(sums):
    assert (sums.facts.roles, sums.facts.tools, sums.facts.replayable) == (("user",), (), False)
    train, held_out = sums.rows("train"), sums.rows("evaluation")
    assert [row["answer"] for row in train] == [str(number) for number in range(3, 45)]
    assert [row["answer"] for row in held_out] == ["1", "2"]
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+1="}]
    assert train[0]["prompt"] == asked
    right = play(sums, train[0], turn("3"))
    assert right == [Opening(asked, []), Reply([], 2.0, True, False, {"length": 1.0, "right": 1.0})]
    wrong = play(sums, held_out[1], turn("no"))[1]
    assert wrong == Reply([], 0.0, True, False, {"length": 2.0, "right": 0.0})
    cut = play(sums, train[0], turn("3", finished=False, last=True))[1]
    assert (cut.reward, cut.done) == (2.0, True)


def test_many_rollouts_wait_for_the_policy_at_once(sums):
    rows = sums.rows("train")[:40]
    replies = play_all(sums, rows, [turn(row["answer"]) for row in rows])
    assert [reply.reward for reply in replies] == [2.0] * 40


@pytest.mark.fault
def test_a_task_that_raises_fails_its_conversation_by_name(sums):
    *_, score, setup = sums.rows("train")
    (failure,) = play(sums, setup)
    assert isinstance(failure, Failure) and "RuntimeError: no luck in setup" in failure.error
    _, failure = play(sums, score, turn("3"))
    assert isinstance(failure, Failure) and "RuntimeError: no luck in scoring" in failure.error


def test_settings_of_the_evaluation_split_are_its_own():
    options = {"id": "sums-taskset", "args": {"size": 3}, "evaluation_args": {"size": 2, "start": 50}}
    with pool_of("verifiers", options) as pool:
        assert [row["answer"] for row in pool.rows("train")] == ["1", "2", "3"]
        (first, _) = pool.rows("evaluation")
        assert first["answer"] == "51" and play(pool, first, turn("51"))[1].reward == 2.0


def test_an_environment_that_plays_the_user_takes_several_turns():
    with pool_of("verifiers", {"id": "guess-taskset", "size": 5}) as pool:
        row = pool.rows("train")[3]
        opening, higher, lower, found = play(pool, row, turn("1"), turn("7", number=2), turn("3", number=3))
        assert opening.messages == [{"role": "user", "content": "Guess a number. 3"}]
        assert higher == Reply([{"role": "user", "content": "higher"}], None, False, False, {})
        assert lower.messages == [{"role": "user", "content": "lower"}] and not lower.fresh
        assert found == Reply([], 1.0, True, False, {"guesses": 3.0, "found": 1.0})
        # The last turn that there may be is scored as well.
        assert play(pool, row, turn("1"), turn("7", number=2, last=True))[2] == Reply(
            [], 0.0, True, False, {"guesses": 2.0, "found": 0.0}
        )


def test_tools_of_a_taskset_are_the_policys():
    with pool_of("verifiers", {"id": "shop-taskset"}) as pool:
        assert pool.facts.roles == ("user", "tool")
        (schema,) = pool.facts.tools
        assert schema["function"]["name"] == "shop_price"
        row = pool.rows("train")[0]
        look = turn("", ToolCall("shop_price", {"item": "pear"}, "c1"))
        opening, told, end = play(pool, row, look, turn("40", number=2))
        assert [tool["function"]["name"] for tool in opening.tools] == ["shop_price"]
        assert told.messages == [
            {"role": "tool", "content": "40", "name": "shop_price", "tool_call_id": "c1"}
        ]
        assert (end.done, end.reward) == (True, 1.0)
        _, wrong, end = play(pool, row, turn("", ToolCall("buy", {})), turn("41", number=2))
        assert wrong.messages[0]["content"] == "error: unknown tool 'buy'" and end.reward == 0.0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "no-such-taskset"}, "'no-such-taskset' cannot be loaded: ModuleNotFoundError"),
        ({"id": "sums-taskset", "args": {"sizes": 3}}, "'sums-taskset' cannot be loaded: .*sizes"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=f"(?s)C001.*{message}"), pool_of("verifiers", options):
        pass


@pytest.mark.fault
def test_a_taskset_without_end_and_one_without_the_split_are_named():
    with pool_of("verifiers", {"id": "guess-taskset"}) as pool:
        with pytest.raises(Exception, match=r"set options\.size"):
            pool.rows("train")
        with pytest.raises(Exception, match=r"evaluation_args or options\.evaluation_size"):
            pool.rows("evaluation")


@pytest.mark.fault
def test_without_the_package_the_error_says_where_to_install_it():
    with (
        pytest.raises(ConfigError, match=r"(?s)pip install 'verifiers.*environment.python="),
        pool_of("verifiers", {"id": "sums-taskset"}, python=None),
    ):
        pass
