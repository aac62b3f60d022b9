"""Rewards in the background: samples in parts, callers that are busy, and scoring that is given up."""

import signal
import time

import pytest

from shardproof.errors import RolloutFault
from shardproof.rl.rewards.runner import RewardRunner, RewardSpec

LONG_S = 60.0  # longer than anything here takes, unless it waits for what never comes

USERS = '''
import os, pathlib, signal, time

def meet(prompt, completion, row):
    """Leaves one file and waits for another, as the row says, then does what the completion says."""
    if "leave" in row:
        pathlib.Path(row["leave"]).touch()
    while "wait" in row and not os.path.exists(row["wait"]):
        time.sleep(0.005)
    if "note" in row:
        with open(row["note"], "a") as file:
            file.write(completion)
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


def fail(runner, pending):
    with pytest.raises(ZeroDivisionError), pending:
        _ = 1 / 0


@pytest.mark.parametrize("end", [leave, close, fail])
def test_what_is_cancelled_ends_its_worker_and_spoils_nothing(users, end):
    with make_runner() as runner:
        before, pending = list(runner.pool.workers), runner.start()
        pending.add([sample("hang", leave=users / "begun"), *[sample("1")] * 50])
        wait_until((users / "begun").exists)
        end(runner, pending)
        assert [one.total for one in runner.score([sample("2"), sample("3")])] == [2.0, 3.0]
        assert any(worker.process.poll() is not None for worker in before), "the one that hung"


def test_batches_that_are_pending_at_the_same_time_do_not_touch_each_other(users):
    with make_runner() as runner:
        before, slow = list(runner.pool.workers), runner.start()
        slow.add([sample("1", leave=users / "begun", wait=users / "go on")])
        wait_until((users / "begun").exists)
        given_up, kept = runner.start(), runner.start()
        given_up.add([sample("hang", leave=users / "hangs")])
        wait_until((users / "hangs").exists)
        kept.add([sample("3"), sample("4")])
        assert runner.pool.busy
        given_up.cancel()  # its worker is ended, and another one takes what waits
        assert sum(worker.process.poll() is not None for worker in before) == 1
        assert [one.total for one in kept.result()] == [3.0, 4.0]
        (users / "go on").touch()
        assert [(one.total, one.errors) for one in slow.result()] == [(1.0, ())]
        assert any(worker in before for worker in runner.pool.workers)


def test_batches_are_served_first_come_first(users):
    order = users / "order"
    with make_runner(num_workers=1) as runner:
        first, second = runner.start(), runner.start()
        first.add([sample("0", leave=users / "begun", wait=users / "go on")])
        wait_until((users / "begun").exists)
        second.add([sample("2", note=order)] * 3)
        first.add([sample("1", note=order)] * 3)
        one = runner.score_later(sample("3", note=order), 7)
        (users / "go on").touch()
        assert one.result(LONG_S).total == 3.0
        assert [len(first.result()), len(second.result())] == [4, 3]
    assert order.read_text() == "2221113"


def test_one_sample_is_scored_like_a_batch_and_can_be_given_up(users):
    samples = [sample("x" if n % 3 == 1 else str(n), answer=n) for n in range(9)]
    with make_runner(RewardSpec("numeric", 0.5)) as runner:
        whole = runner.score(samples)
        futures = [runner.score_later(each, place) for place, each in enumerate(samples)]
        assert [future.result(LONG_S) for future in futures] == whole
        before = list(runner.pool.workers)
        hangs = runner.score_later(sample("hang", leave=users / "begun", answer=1), 0)
        wait_until((users / "begun").exists)
        assert hangs.cancel()
        wait_until(lambda: any(worker.process.poll() is not None for worker in before))
        assert runner.score_later(samples[0], 0).result(LONG_S) == whole[0]
        waits = runner.score_later(sample("hang", answer=1), 0)
        runner.close()
        with pytest.raises(RuntimeError, match="workers are closed"):
            waits.result(LONG_S)
    with make_runner(RewardSpec("numeric"), on_error="stop") as runner:
        failed = runner.score_later(sample("hang"), 5)
        with pytest.raises(RolloutFault, match="'numeric' failed on sample 5"):
            failed.result(LONG_S)


def test_a_worker_that_cannot_start_again_fails_every_batch_and_later_ones_may_go_on(users, monkeypatch):
    with make_runner(num_workers=1) as runner:
        batches = [runner.start() for _ in range(2)]
        for batch in batches:
            batch.add([sample("hang", leave=users / "begun"), sample("1")])
        wait_until((users / "begun").exists)
        module = users / "meeting_rewards.py"
        text = module.read_text()
        module.write_text("import os; os._exit(3)")
        (worker,) = runner.pool.workers
        worker.process.kill()
        for batch in batches:
            with pytest.raises(RolloutFault, match="did not start: its worker process died"):
                batch.result()
        module.write_text(text)
        assert runner.score([sample("2")])[0].total == 2.0


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
