"""Trajectories in the background: each at its own pace, and nothing left whatever happens."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof.environments import dispatcher
from shardproof.errors import RolloutFault
from shardproof.rl.conversations.conversation import Conversation
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.token_ledger import TokenLedger
from shardproof.rollout.trajectory import Segment, Trajectory
from tests.rl.background_engine import LONG_S, FakeEngine, wait_until
from tests.rl.background_parts import SAMPLING, USERS, make_rules, making, starts_from

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def users(user_module: Callable[[str, str], Path]) -> Path:
    return user_module("talking_users", USERS)


@pytest.mark.parametrize("where", ["start", "step", "reward"])
def test_a_trajectory_that_waits_holds_nobody_else(users, where):
    waits = {"where": where, "leave": str(users / "begun"), "wait": str(users / "go on")}
    with making(True, ["talking_users:score"]) as parts:
        batch = parts.begin([{"turns": 1}] * 3 + [waits])
        if where == "reward":  # the one worker is busy with it
            wait_until((users / "begun").exists)
        else:
            wait_until(lambda: batch.done() == [0, 1, 2])
            assert sorted(batch.wait([1, 0])) == [0, 1] and batch.done() == [2]
        assert batch.num_in_progress >= 1 and 3 not in batch.done()
        (users / "go on").touch()
        found = batch.wait()
        assert all(t.reward is not None and not t.reward.failed for t in found.values()) and 3 in found
        assert batch.done() == [] and batch.num_in_progress == 0 and batch.wait() == {}


def test_batches_are_in_progress_at_the_same_time(users):
    with making(True, held=True) as parts:
        first, second = parts.begin([{}] * 2), parts.begin([{}] * 2)
        wait_until(lambda: len(parts.engine.waiting) == 4)
        second.cancel()
        assert len(parts.engine.waiting) == 2
        third = parts.begin([{}])
        assert not first.settled() and not third.settled([0], within_s=0.01)
        while first.num_in_progress or third.num_in_progress:
            parts.engine.answer()
        assert first.settled() and third.settled([0]) and second.settled()
        assert len(first.wait()) == 2 and len(third.wait()) == 1
        with pytest.raises(ValueError, match="place 0 was taken or given up"):
            second.wait([0])


@pytest.mark.fault
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raise", "turn 1: LookupError: no such page"),
        ("die", "turn 1: its worker process died (exit code 7)"),
        ("hang", "turn 1: no answer in 1 s"),
    ],
)
def test_an_environment_that_fails_ends_its_own_conversation(users, what, error):
    with making(True, timeout_s=1.0 if what == "hang" else LONG_S) as parts:
        found = parts.begin([{}, {"do": what}, {}]).wait()
    failed = found[1]
    assert failed.ended == "failed" and error in failed.facts["environment"]["error"]
    assert failed.reward is not None and failed.reward.failed
    assert {found[place].ended for place in (0, 2)} <= {"done", "length"}


@pytest.mark.fault
def test_failures_that_are_to_end_the_run_are_raised_where_the_batch_is_awaited(users):
    closed = users / "closed"
    with making(True, stops=True, closed=closed, held=True) as parts:
        batch = parts.begin([{}, {"do": "raise"}, {}])
        wait_until(lambda: len(parts.engine.waiting) == 3)
        parts.engine.answer(parts.engine.waiting[1])
        for places in ([0], None):
            with pytest.raises(RolloutFault, match="about prompt 1, sample 0: turn 1: LookupError") as caught:
                batch.wait(places)
            assert caught.value.code == "R509"
        assert batch.done() == [0, 1, 2] and batch.num_in_progress == 0, "there is nothing to wait for"
        wait_until(lambda: not parts.engine.waiting)
        wait_until(lambda: closed.exists() and closed.read_text().count("closed") == 3)
        parts.engine.held = False
        assert len(parts.begin([{}]).wait()) == 1, "other batches go on"


@pytest.mark.fault
@pytest.mark.parametrize("stops", [False, True])
def test_a_reward_that_fails(users, stops):
    rows = [{"score": "raise"}, {}]
    with making(rewards=["talking_users:score"], stops=stops) as parts:
        batch = parts.begin(rows)
        if stops:
            with pytest.raises(RolloutFault, match=r"failed on sample 0 .*no such score") as caught:
                batch.wait()
            assert caught.value.code == "R504"
        else:
            first, second = batch.wait().values()
            assert first.reward.failed and "no such score" in first.reward.errors[0]
            assert not second.reward.failed


def wrong_type(engine: FakeEngine) -> None:
    engine.waiting[0].future.set_result("text")


def changed_tokens(engine: FakeEngine) -> None:
    asked = engine.waiting[0]
    other = replace(asked.request, trajectory=Trajectory.of_prompt((1, 2, 3)))
    asked.future.set_result(other.answered([5], [-1.0], False, 0))


def gives_up(engine: FakeEngine) -> None:
    engine.waiting[0].future.cancel()


def raises(engine: FakeEngine) -> None:
    engine.fail(engine.waiting[0], ConnectionError("no replica is left"))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (wrong_type, RolloutFault, "answered with a str"),
        (changed_tokens, RolloutFault, "changed segment 0"),
        (gives_up, RolloutFault, "gave up the request for prompt 0, sample 0"),
        (raises, ConnectionError, "no replica is left"),
    ],
)
def test_an_engine_that_fails_ends_the_batch(users, fault, error, said):
    with making(held=True) as parts:
        batch = parts.begin([{}] * 3)
        wait_until(lambda: len(parts.engine.waiting) == 3)
        fault(parts.engine)
        with pytest.raises(error, match=said):
            batch.wait([2])
        wait_until(lambda: parts.engine.waiting == [])


@pytest.mark.fault
def test_an_engine_that_takes_no_requests_ends_the_batch(users, monkeypatch):
    def refuse(request: Request, sampling: Sampling) -> None:
        raise RuntimeError("the engine is closed")

    with making(True) as parts:
        monkeypatch.setattr(parts.engine, "start", refuse)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            parts.begin([{}] * 2).wait()


@pytest.mark.fault
@pytest.mark.parametrize("end", ["cancel", "cancel some", "close", "close the environment"])
@pytest.mark.parametrize("where", ["start", "engine", "step", "reward"])
def test_what_is_given_up_in_any_state_leaves_nothing(users, monkeypatch, where, end):
    monkeypatch.setattr(dispatcher, "LEAVE_S", 60.0)  # on a busy machine
    closed, waits = users / "closed", {"leave": str(users / "begun"), "wait": str(users / "never")}
    with making(True, ["talking_users:score"], closed=closed, held=where == "engine") as parts:
        (worker,) = parts.rewards.pool.workers
        batch = parts.begin([{"where": where, "turns": 1, **waits}, {"turns": 1}])
        wait_until(lambda: parts.engine.waiting if where == "engine" else (users / "begun").exists())
        if end == "cancel":
            batch.cancel()
            assert batch.wait() == {} and batch.num_in_progress == 0
        elif end == "cancel some":
            batch.cancel([0])
            while batch.num_in_progress:
                parts.engine.answer()
            assert list(batch.wait()) == [1]
        elif end == "close":
            parts.background.close()
            with pytest.raises(RuntimeError, match="are closed"):
                batch.wait([0])
            batch.cancel()
        elif parts.conversations is not None and where in ("start", "step"):
            parts.conversations.close()
            with pytest.raises(RuntimeError, match="are closed"):
                batch.wait([0])
        assert parts.engine.waiting == [] or end == "close the environment"
        if where == "reward" and end != "close the environment":
            wait_until(lambda: worker.process.poll() is not None)
    assert closed.read_text().count("closed") == 2


def test_thousands_in_flight_cost_no_threads_and_what_was_taken_is_forgotten(users):
    num = 2000
    with making(True, ["exact_match"], held=True, rules=make_rules(max_turns=1)) as parts:
        batch = parts.begin([{"answer": "a"}] * num)
        wait_until(lambda: len(parts.engine.waiting) == num)
        threads = threading.active_count()
        assert count(Conversation) == num
        parts.engine.answer()
        found = batch.wait(range(num // 2))
        assert len(found) == num // 2 and threading.active_count() == threads
        batch.wait()
        wait_until(lambda: count(Conversation) == 0)
        del found
        assert parts.engine.waiting == [] and count(Trajectory) < 10


def count(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def test_what_is_drawn_so_far_can_be_gone_on_from_and_tokens_keep_their_versions(users):
    with making(held=True) as parts:
        batch = parts.begin([{}])
        wait_until(lambda: parts.engine.waiting)
        assert batch.so_far(0) is None
        (asked,) = parts.engine.waiting
        assert not parts.engine.draw(asked, 2)
        so_far = batch.so_far(0)
        assert isinstance(so_far, Segment) and so_far.token_versions == (0, 0)
        batch.cancel()
        parts.engine.version = 1
        (start,) = starts_from([{}])
        again = parts.background.begin([replace(start, begun=so_far)], SAMPLING)
        wait_until(lambda: parts.engine.waiting)
        parts.engine.answer()
        (segment,) = again.wait()[0].sampled
        assert segment.tokens[:2] == so_far.tokens and segment.version == 0
        assert segment.parts == ((2, 0), (len(segment.tokens) - 2, 1))


def test_what_was_drawn_to_its_end_is_kept_while_it_is_scored_and_not_asked_for_again(users):
    row = {"where": "reward", "leave": str(users / "begun"), "wait": str(users / "go on")}
    with making(rewards=["talking_users:score"]) as parts:
        batch = parts.begin([row])
        wait_until((users / "begun").exists)
        so_far = batch.so_far(0)
        assert so_far is not None
        (users / "go on").touch()
        made = batch.wait()[0]
        assert made.sampled == (so_far,) and batch.so_far(0) is None
        ledger, (start,) = TokenLedger(), starts_from([row])
        again = parts.background.begin([replace(start, begun=so_far)], SAMPLING, ledger)
        facts = {name: value for name, value in made.facts.items() if name != "replica"}
        assert again.wait()[0] == replace(made, facts=facts)
        assert parts.engine.num_started == 1 and len(ledger) == 1


def test_what_was_drawn_behind_an_end_that_has_come_nearer_since_is_drawn_anew():
    """A run may go on with fewer tokens, or with another stop id: what lies behind that was trained on."""
    (start,), drawn = starts_from([{}]), (5, 6, 7, 8)
    begun = Segment(drawn, "policy", (-1.0,) * 4, 0, True)
    for sampling in (replace(SAMPLING, max_new_tokens=3), replace(SAMPLING, stop_ids=(6,))):
        with making() as parts:
            made = [
                parts.background.begin([replace(start, begun=given)], sampling).wait()[0].sampled
                for given in (begun, None)
            ]
            assert made[0] == made[1] and parts.engine.num_started == 2


def test_an_interrupt_reaches_a_caller_that_waits(users):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with making(True, held=True) as parts:
            batch = parts.begin([{}] * 3)
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                batch.wait()
            wait_until(lambda: len(parts.engine.waiting) == 3)
            batch.cancel()
            assert parts.engine.waiting == []
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
