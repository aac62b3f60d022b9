"""OpenEnv's environments: a real server, and its clients in workers under an interpreter of their own."""

import pytest

from shardproof.environments.protocol import Failure, Opening, Reply, ToolCall
from shardproof.errors import ConfigError
from tests.environments.adapters.played import game_server, play, play_all, pool_of, turn


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    with game_server(tmp_path_factory.mktemp("game")) as url:
        yield url


def user(text):
    return [{"role": "user", "content": text}]


def test_an_episode_is_reset_by_the_rows_seed_and_rewarded_step_by_step(game):
    with pool_of("openenv", {"url": game, "observation_key": "text", "prompt": "A game.", "size": 5}) as pool:
        rows = pool.rows("train")
        assert len(rows) == 5 and rows[3] == {"seed": 3}
        assert not {row["seed"] for row in rows} & {row["seed"] for row in pool.rows("evaluation")}
        opening, wrong, right = play(pool, rows[3], turn("5"), turn(" 3\n", number=2))
        assert opening == Opening("A game.\n\nGuess a number from 0 to 9.")
        assert wrong == Reply(user("wrong"), -0.1, False, False, {})
        assert right == Reply([], 1.0, True, False, {})


def test_many_episodes_go_on_at_once(game):
    with pool_of("openenv", {"url": game, "observation_key": "text", "size": 40}) as pool:
        rows = pool.rows("train")
        replies = play_all(pool, rows, [turn(str(row["seed"] % 10)) for row in rows])
        assert [reply.reward for reply in replies] == [1.0] * 40


def test_observations_by_a_template_and_columns_for_reset(game):
    options = {"observation": "{text} ({left} left)", "system_prompt": "Play.", "reset_columns": ["secret"]}
    with pool_of("openenv", {"url": game, **options}) as pool:
        opening, wrong, right = play(pool, {"secret": 7}, turn("5"), turn("7", number=2))
        assert opening.messages == [
            {"role": "system", "content": "Play."},
            *user("Guess a number from 0 to 9. (3 left)"),
        ]
        assert wrong.messages == user("wrong (2 left)") and right.reward == 1.0


@pytest.mark.fault
def test_a_turn_that_is_no_action_is_answered(game):
    with pool_of("openenv", {"url": game, "action_key": ""}) as pool:
        turns = [turn(text) for text in ("hello", "[1]", '{"number": "3"}', '{"message": "3"}')]
        opening, *refused, right = play(pool, {"seed": 3}, *turns)
        assert opening == Opening('{"text": "Guess a number from 0 to 9.", "left": 3}')
        said = [reply.messages[0]["content"] for reply in refused]
        assert said[0].startswith("That is not JSON: ") and said[1] == "That is not a JSON object."
        assert said[2] == "That action is not accepted: the environment expects other fields."
        assert all(reply.facts == {"refused": 1.0} for reply in refused) and right.reward == 1.0


def test_mcp_tools_of_an_environment_are_the_policys(tmp_path):
    with (
        game_server(tmp_path, "shop") as url,
        pool_of("openenv", {"url": url, "tools": True, "prompt": "Buy."}) as pool,
    ):
        assert [tool["function"]["name"] for tool in pool.facts.tools] == ["price"]
        calls = [ToolCall("price", {"item": "pear"}, "c1"), ToolCall("steal", {"item": "pear"}, "c2")]
        opening, told, end = play(pool, {}, turn("", *calls), turn("40", number=2))
        assert opening == Opening(user("Buy."), list(pool.facts.tools))
        first, second = told.messages
        assert first == {"role": "tool", "name": "price", "content": "40", "tool_call_id": "c1"}
        assert second["content"].startswith("error: ") and "steal" in second["content"]
        assert told.reward == 1.0 and end == Reply([], None, True, False, {})
        over = play(pool, {}, turn("", ToolCall("price", {"item": "all"})))[1]
        assert (over.reward, over.done) == (0.5, True)


@pytest.mark.fault
def test_an_environment_that_raises_fails_its_conversation_alone(game):
    with pool_of("openenv", {"url": game, "observation_key": "text"}) as pool:
        failure, right = play_all(pool, [{"seed": 1}, {"seed": 2}], [turn("raise"), turn("2")])
        assert isinstance(failure, Failure) and "cannot do that (code: EXECUTION_ERROR)" in failure.error
        assert right.reward == 1.0


@pytest.mark.fault
def test_a_server_that_dies_fails_what_it_held_by_name(tmp_path):
    with game_server(tmp_path) as url, pool_of("openenv", {"url": url, "observation_key": "text"}) as pool:
        found = play_all(pool, [{"seed": 1}, {"seed": 2}], [turn("5"), turn("die")])
        assert isinstance(found[1], Failure) and f"OpenEnv at {url}, step: ConnectionClosed" in found[1].error
        (failure,) = play(pool, {"seed": 1})
        assert isinstance(failure, Failure) and f"OpenEnv at {url}, connect: ConnectionError" in failure.error


@pytest.mark.fault
def test_wrong_options_are_named(game, tmp_path):
    with pool_of("openenv", {"url": game, "observation_key": "txt"}) as pool:
        (failure,) = play(pool, {"seed": 1})
        assert "the observation has no 'txt'; it has text, left" in failure.error
    nobody = {"url": "http://127.0.0.1:1", "tools": True}
    with (
        pytest.raises(ConfigError, match=r"(?s)does not list its tools.*start the server"),
        pool_of("openenv", nobody),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"(?s)pip install 'openenv.*environment.python="),
        pool_of("openenv", {"url": game}, python=None),
    ):
        pass
