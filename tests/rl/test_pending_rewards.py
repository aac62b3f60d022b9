"""Rewards in the background: samples in parts, callers that are busy, and scoring that is given up."""

import signal
import time

import pytest

from shardproof.errors import RolloutFault
from shardproof.rl.rewards import RewardRunner, RewardSpec

LONG_S = 60.0  # longer than anything here takes, unless it waits for what never comes

USERS = '''
import os, pathlib, signal, time

def meet(prompt, completion, row):
    """Leaves one file and waits for another, as the row says, then does what the completion says."""
    if "leave" in row:
        pathlib.Path(row["leave"]).touch()
    while "wait" in row and not os.path.exists(row["wait"]):
        time.sleep(0.005)
    if completion == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
    if completion in ("hang", "interrupt"):
        time.sleep(1000)
    return float(completion)
'''

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("meeting_rewards", USERS)


def make_runner(*more, timeout_s=LONG_S, **settings):
    return RewardRunner([RewardSpec("meeting_rewards:meet"), *more], timeout_s=timeout_s, **settings)


def sample(completion, **row):
    return "a prompt", completion, {name: str(value) for name, value in row.items()}


def wait_until(condition):
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.005)


def test_parts_of_a_batch_are_scored_like_the_whole(users):
    samples = [sample("x" if n % 7 == 3 else str(n), answer=2 * (n // 2)) for n in range(100)]
    with make_runner(RewardSpec("numeric", 0.5)) as runner:
        whole = runner.score(samples)
        with runner.start() as pending:
            for part in (samples[:1], [], samples[1:60], samples[60:]):
                pending.add(part)
            assert pending.result() == whole
        with runner.start() as pending:
            assert pending.result() == []
    assert [bool(one.errors) for one in whole] == [n % 7 == 3 for n in range(100)]


def test_rewards_run_while_the_caller_does_something_else(users):
    with make_runner() as runner, runner.start() as pending:
        pending.add([sample("1", wait=users / "done elsewhere")])
        (users / "done elsewhere").touch()
        assert [(one.total, one.errors) for one in pending.result()] == [(1.0, ())]


def test_samples_that_are_added_later_go_to_workers_that_are_idle(users):
    with make_runner() as runner, runner.start() as pending:
        pending.add([sample("1", leave=users / "first", wait=users / "second")])
        wait_until((users / "first").exists)
        pending.add([sample("2", leave=users / "second")])
        assert [(one.total, one.errors) for one in pending.result()] == [(1.0, ()), (2.0, ())]


def test_deadlines_hold_while_the_caller_is_busy(users):
    with make_runner(timeout_s=0.5, num_workers=1) as runner, runner.start() as pending:
        pending.add([sample("hang"), sample("2", leave=users / "second")])
        wait_until((users / "second").exists)
        first, second = pending.result()
    assert first.errors == ("meeting_rewards:meet: no answer in 0.5 s",) and second.total == 2.0


def test_a_worker_that_dies_between_two_parts_is_replaced_without_blame(users):
    with make_runner(num_workers=1) as runner, runner.start() as pending:
        pending.add([sample("1", leave=users / "begun")])
        wait_until(lambda: (users / "begun").exists() and not runner.pool.busy)
        (worker,) = runner.pool.workers
        worker.process.kill()
        worker.process.wait()
        pending.add([sample("2")])
        assert [(one.total, one.errors) for one in pending.result()] == [(1.0, ()), (2.0, ())]


def leave(runner, pending):
    pending.cancel()


def close(runner, pending):
    runner.close()


def start_another(runner, pending):
    assert runner.score([sample("5")])[0].total == 5.0


def fail(runner, pending):
    with pytest.raises(ZeroDivisionError), pending:
        _ = 1 / 0


@pytest.mark.parametrize("end", [leave, close, start_another, fail])
def test_what_is_cancelled_ends_its_worker_and_spoils_nothing(users, end):
    with make_runner() as runner:
        before, pending = list(runner.pool.workers), runner.start()
        pending.add([sample("hang", leave=users / "begun"), *[sample("1")] * 50])
        wait_until((users / "begun").exists)
        end(runner, pending)
        assert [one.total for one in runner.score([sample("2"), sample("3")])] == [2.0, 3.0]
        assert any(worker.process.poll() is not None for worker in before), "the one that hung"


def test_a_failure_is_raised_where_rewards_are_awaited_with_the_place_in_the_whole(users):
    with make_runner(on_error="stop", num_workers=1) as runner:
        with runner.start() as pending:
            pending.add([sample("1"), sample("2")])
            pending.add([sample("3"), sample("x", leave=users / "failed"), sample("hang")])
            wait_until((users / "failed").exists)
            pending.add([sample("4")])
            with pytest.raises(RolloutFault, match=r"failed on sample 3 .*could not convert") as caught:
                pending.result()
            assert caught.value.code == "R504"
        assert [one.total for one in runner.score([sample("6")])] == [6.0]


def test_a_built_in_reward_that_fails_does_not_wait_for_the_users(users):
    with make_runner(RewardSpec("numeric"), on_error="stop") as runner, runner.start() as pending:
        pending.add([sample("hang")])
        with pytest.raises(RolloutFault, match=r"'numeric' failed on sample 0 .*the row has no 'answer'"):
            pending.result()


@pytest.fixture
def interrupts_raise():
    """The handler of a foreground process: nohup and background jobs of scripts start processes that ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_reaches_a_caller_that_waits(users, interrupts_raise):
    with make_runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.score([sample("interrupt"), sample("1")])
        assert runner.score([sample("2")])[0].total == 2.0
