"""The pool: conversations in worker processes, each with its own state, thousands at once, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import psutil
import pytest

from shardproof.config.environment import ENVIRONMENTS
from shardproof.environments.protocol import Failure, Opening, Reply, Turn
from shardproof.environments.registry import BUILT_IN, resolve
from shardproof.errors import ConfigError, RolloutFault
from tests.environments.scripted import LONG_S, SOURCE, open_all, pool_of, say, say_one, texts

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("scripted_users", SOURCE)


@pytest.mark.parametrize("kind", ["Plain", "Async", "make"])
def test_conversations_keep_their_state_turn_by_turn(kind):
    names = [f"n{key}" for key in range(20)]
    with pool_of(kind, num_workers=2) as pool:
        assert (pool.facts.roles, pool.facts.tools, pool.facts.replayable) == (("user",), (), True)
        assert open_all(pool, *names) == {key: Opening(f"{name} {key}") for key, name in enumerate(names)}
        for number in (1, 2, 3):
            assert texts(say(pool, *["go_on"] * 20, number=number)) == [f"{name} {number}" for name in names]
        assert all(pool.seconds(key) > 0 for key in range(20))
        for key in range(20):
            pool.release(key)
        pool.open(3, {"name": "again"}, seed=1)
        assert dict(pool.answers()) == {3: Opening("again 1")}
        assert list(pool.answers()) == []


def test_answers_come_as_futures_to_whoever_asked():
    """Beside a caller that waits for its own in `answers`."""
    with pool_of("Async") as pool:
        later = [pool.begin(100 + n, {"name": f"n{n}"}, n) for n in range(3)]
        assert open_all(pool, "a") == {0: Opening("a 0")}
        assert [future.result(LONG_S) for future in later] == [Opening(f"n{n} {n}") for n in range(3)]
        waits, goes_on = pool.reply(100, Turn("wait")), pool.reply(101, Turn("go_on"))
        assert texts(say(pool, "go_on")) == ["a 1"] and texts([goes_on.result(LONG_S)]) == ["n1 1"]
        with pytest.raises(ValueError, match="conversation 100 has not answered yet"):
            pool.reply(100, Turn("go_on"))
        pool.release(100)
        assert waits.cancelled() and pool.seconds(101) > 0.0
        hangs = pool.reply(102, Turn("wait"))
        unsent = pool.reply(101, Turn(lambda: None)).result(LONG_S)
        assert isinstance(unsent, Failure) and "the turn cannot be sent to a worker" in unsent.error
    for future in (hangs, pool.reply(101, Turn("go_on"))):
        with pytest.raises(RuntimeError, match="workers are closed"):
            future.result(LONG_S)


def test_thousands_of_conversations_are_in_progress_at_once_in_one_process():
    """Each waits for all others, so that fewer at once would never end."""
    number, others = 2000, set(psutil.Process().children())
    with pool_of("Together", options={"number": number}) as pool:
        found = open_all(pool, *["x"] * number)
        assert Counter(type(answer) for answer in found.values()) == {Opening: number}
        (worker,) = set(psutil.Process().children()) - others
        assert worker.num_threads() < 10


def test_plain_methods_may_run_loops_of_their_own():
    with pool_of("Plain") as pool:
        open_all(pool, "a")
        assert texts(say(pool, "use_loops")) == ["a loop of its own"]
        assert texts(say(pool, "close_loop")) == ["a 2"]


def test_conversations_are_spread_over_the_workers_and_stay_there():
    with pool_of("Plain", num_workers=3) as pool:
        open_all(pool, *"abcdefghi")
        first, second = texts(say(pool, *["pid"] * 9)), texts(say(pool, *["pid"] * 9))
        assert first == second and sorted(Counter(first).values()) == [3, 3, 3]
        for key in range(9):
            if first[key] == first[0]:
                pool.release(key)
        for key in (20, 21, 22):
            pool.open(key, {"name": "new"}, 0)
        list(pool.answers())
        assert {texts(say_one(pool, key, "pid"))[0] for key in (20, 21, 22)} == {first[0]}


def test_waiting_for_other_conversations_does_not_count():
    """One waits a little, while the others keep the main thread for longer than one call may take."""
    with pool_of("Async", timeout_s=2.0) as pool:
        open_all(pool, *"abcdef", wait_s=0.1)
        assert texts(say(pool, *["block 0.5"] * 6)) == [f"{name} 1" for name in "abcdef"]
        assert all(pool.seconds(key) < 2.0 for key in range(6))


def test_a_conversation_ends_when_its_environment_took_too_long_in_all():
    with pool_of("Async", max_seconds=2.0) as pool:
        open_all(pool, *"ab")
        said = say(pool, "block 0.3", "go_on")
        assert texts(said) == ["a 1", "b 1"]
        assert 0.3 <= pool.seconds(0) < 2.0
        said = say(pool, "wait", "go_on", number=2)
        assert said[0] == Failure("turn 2: more than environment.max_seconds=2 in all", out_of_time=True)
        assert texts(said[1:]) == ["b 2"]
        assert say_one(pool, 0, "go_on") == [Failure("the conversation is over")]


@pytest.mark.parametrize("kind", ["Plain", "AsyncClose"])
def test_every_environment_is_closed_once(kind, tmp_path):
    file = tmp_path / "closed"
    with pool_of(kind, options={"closed": str(file)}, timeout_s=2.0) as pool:
        open_all(pool, *"abcd")
        say(pool, "go_on", "fail", "hang", "go_on")
        pool.release(0)
        pool.release(1)
        pool.release(2)
        assert texts(say_one(pool, 3, "go_on")) == ["d 2"]
    assert sorted(file.read_text().split()) == ["a", "b", "c", "d"]


def test_a_close_that_fails_hangs_or_dies_harms_nobody(tmp_path):
    with pool_of("BadClose", timeout_s=2.0) as pool:
        open_all(pool, "raise", "hang", "die", "fine")
        say(pool, *["go_on"] * 4)
        for key in range(3):
            pool.release(key)
        assert texts(say_one(pool, 3, "go_on")) == ["fine 2"]


def test_a_conversation_may_be_released_before_it_answered():
    with pool_of("Async") as pool:
        open_all(pool, *"ab")
        pool.step(0, Turn("wait"))
        pool.step(1, Turn("go_on"))
        pool.release(0)
        assert [key for key, _ in pool.answers()] == [1]


def test_answers_may_lead_to_more_questions():
    with pool_of("Async", num_workers=2) as pool:
        for key in range(6):
            pool.open(key, {"name": str(key)}, 0)
        turns = Counter()
        for key, _ in pool.answers():
            turns[key] += 1
            if turns[key] < 4:
                pool.step(key, Turn("go_on", number=turns[key]))
        assert turns == dict.fromkeys(range(6), 4)


def test_misuse_is_named():
    with pool_of("Async") as pool:
        open_all(pool, "a")
        with pytest.raises(ValueError, match="conversation 0 is open already"):
            pool.open(0, {}, 0)
        pool.step(0, Turn("wait"))
        with pytest.raises(ValueError, match="conversation 0 has not answered yet"):
            pool.step(0, Turn("go_on"))
    with pytest.raises(RuntimeError, match="workers are closed"):
        list(pool.answers())
    pool.release(0)
    pool.close()


def test_rows_come_from_the_environment():
    with pool_of("Plain") as pool:
        assert pool.rows("train") == [{"name": "train", "n": n} for n in range(3)]
        for split, problem in {
            "missing": r"KeyError: 'missing' \(scripted_users.py",
            "numbers": "a row is not a dict",
            "sets": "it is no JSON",
            "dies": r"its worker process died \(exit code 4\)",
        }.items():
            with pytest.raises(ConfigError, match=f"no rows for the split '{split}': {problem}") as caught:
                pool.rows(split)
            assert caught.value.code == "C005"
        assert len(pool.rows("train")) == 3
    with pool_of("Bare") as pool, pytest.raises(ConfigError, match="Bare has no rows"):
        pool.rows("train")


def test_a_worker_that_dies_between_calls_is_replaced_without_blame():
    others = set(psutil.Process().children())  # of other tests, which still need them
    with pool_of("Plain", num_workers=2) as pool:
        open_all(pool, *"abcd")
        pids = set(texts(say(pool, *["pid"] * 4)))
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        # The pids that were answered are not those of the replay.
        assert all("in the replay" in text for text in texts(say(pool, *["go_on"] * 4)))
        for key in range(4):
            pool.release(key)
        open_all(pool, *"efgh")
        say(pool, *["go_on"] * 4)
        for worker in set(psutil.Process().children()) - others:
            worker.kill()
        assert texts(say(pool, *["go_on"] * 4)) == ["e 2", "f 2", "g 2", "h 2"]


def test_a_worker_that_cannot_start_again_ends_the_run_by_name(users):
    with pool_of("Plain") as pool:
        open_all(pool, "a")
        (users / "scripted_users.py").write_text("import os\nos._exit(6)")
        assert texts(say(pool, "die")) == ["turn 1: its worker process died (exit code 7)"]
        pool.open(1, {"name": "b"}, 0)
        with pytest.raises(
            RolloutFault, match=r"did not start: its worker process died \(exit code 6\)"
        ) as caught:
            list(pool.answers())
        assert caught.value.code == "R509"


def test_workers_that_always_die_before_they_are_asked_end_the_run_by_name():
    with pool_of("NeverAsked") as pool:
        pool.open(0, {}, 0)
        with pytest.raises(RolloutFault, match=r"R509.*one after another.*\(exit code 11\)"):
            list(pool.answers())


@pytest.fixture
def heeds_interrupts():
    """Whatever started the tests may ignore SIGINT, as shells do for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_ends_the_wait_and_the_workers():
    with pytest.raises(KeyboardInterrupt), pool_of("Async", num_workers=2) as pool:
        open_all(pool, *"abc")
        pool.step(0, Turn("wait"))
        pool.step(1, Turn("interrupt_rank"))
        pool.step(2, Turn("wait"))
        list(pool.answers())


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_of_the_start_ends_the_workers():
    with pytest.raises(KeyboardInterrupt), pool_of("InterruptsRank"):
        pass


def run_rank(users, rest: str) -> subprocess.Popen[str]:
    program = f"""
        import sys
        sys.path.insert(0, {str(users)!r})
        from shardproof.environments.pool import EnvironmentPool, EnvironmentSpec
        from shardproof.environments.protocol import Turn
        def main():
            pool = EnvironmentPool(EnvironmentSpec("scripted_users:Plain", timeout_s=1000.0))
            for key in range(2):
                pool.open(key, {{"name": str(key)}}, 0)
            list(pool.answers())
            for key in range(2):
                pool.step(key, Turn("pid"))
            print(*(answer.messages[0]["content"] for _, answer in pool.answers()), flush=True)
            {rest}
        main()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_workers_leave_with_a_rank_that_is_killed_even_when_they_hang_in_c(users):
    rank = run_rank(users, "[pool.step(key, Turn('hang_in_c')) for key in range(2)]; list(pool.answers())")
    workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    rank.kill()
    rank.communicate()
    assert not psutil.wait_procs(workers, timeout=LONG_S)[1]


def test_a_rank_that_does_not_close_its_pool_leaves_without_a_word(users):
    rank = run_rank(users, "")
    out, error = rank.communicate(timeout=LONG_S)
    assert (rank.returncode, error) == (0, "")
    until = time.monotonic() + LONG_S
    while any(psutil.pid_exists(int(pid)) for pid in out.split()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(int(pid)) for pid in out.split())


def test_the_registry_has_the_names_that_recipes_may_use():
    assert set(BUILT_IN) == set(ENVIRONMENTS)
    assert resolve("tools") == BUILT_IN["tools"] and resolve("mine:Own") == "mine:Own"
    with pytest.raises(ConfigError, match="Did you mean 'tools'"):
        resolve("tool")


def test_replies_of_the_environments_first_role():
    with pool_of("Roles") as pool:
        assert pool.facts.roles == ("tool", "user") and pool.facts.tools == ({"type": "function"},)
        open_all(pool, "a")
        assert say(pool, "go_on") == [Reply([{"role": "tool", "content": "a 1"}])]
