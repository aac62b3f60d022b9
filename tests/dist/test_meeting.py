"""Where hosts meet: who takes part, who is lost, when ranks start again, and how a run ends, by a clock of the tests."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from shardproof.dist.meeting import (
    CLOSING,
    DONE,
    ENDED,
    FAILED,
    FINISHED,
    GATHERING,
    JOINED,
    LOST,
    REFUSED,
    RUNNING,
    STOPPED,
    WAITING,
    Meeting,
    Plan,
)


class Hosts:
    """Hosts that report to a meeting, each with what it last said."""

    def __init__(self, names="ab", **plan):
        self.now = 1000.0
        self.plan = Plan(**{"min_hosts": 2, "max_hosts": 2, **plan})
        self.meeting = Meeting(clock=lambda: self.now)
        self.reports = {}
        for name in names:
            self.add(name)

    def add(self, name, host=None, plan=None, **more):
        host = host or name
        self.reports[name] = {
            **{"id": name, "plan": asdict(plan or self.plan), "name": host, "address": f"10.0.0.{host}"},
            **{"ranks": 1, "state": WAITING, "round": 0, "restarts": 0, "job": "", **more},
        }

    def say(self, name, **changes):
        self.reports[name] |= changes
        return self.meeting.attend(self.reports[name], is_keeper=name == "a")

    def say_all(self, **changes):
        for name in self.reports:
            self.say(name, **changes)
        return {name: self.say(name) for name in self.reports}

    def wait(self, seconds, *talking):
        """Let time go by, while some hosts report every second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for name in talking:
                self.say(name)
        self.meeting.look()

    def run(self):
        """All hosts start their ranks."""
        number = self.say_all(state=WAITING, failure=None)[next(iter(self.reports))]["round"]
        return self.say_all(state=RUNNING, round=number)


def failure(kind=FAILED, code=3, text="T308 somewhere"):
    return {"kind": kind, "code": code, "text": text}


def test_ranks_start_when_enough_hosts_are_there_and_are_numbered_by_name():
    hosts = Hosts("", min_hosts=3, max_hosts=3)
    for number, name in enumerate(["node10", "node9", "a"]):
        hosts.add(name, ranks=number + 1)
    assert hosts.say("node10")["waiting"] == ["host node10 (10.0.0.node10)"]
    assert hosts.say("node9")["phase"] == GATHERING
    found = hosts.say("a")
    assert (found["phase"], found["round"], found["place"], found["store"]) == (RUNNING, 1, 0, None)
    assert [(each["name"], each["ranks"]) for each in found["hosts"]] == [
        ("a", 3),
        ("node9", 2),
        ("node10", 1),
    ]
    assert hosts.say("node10")["place"] == 2


def test_the_store_is_where_host_0_says_and_nobody_else():
    hosts = Hosts()
    hosts.say_all()
    hosts.say("b", store={"round": 1, "address": "10.0.0.b", "port": 666})
    assert hosts.say("a")["store"] is None
    hosts.say("a", store={"round": 1, "address": "10.0.0.a", "port": 1})
    assert hosts.say("b")["store"] == {"round": 1, "address": "10.0.0.a", "port": 1}


def test_a_run_is_finished_when_the_ranks_of_all_hosts_are():
    hosts = Hosts()
    hosts.run()
    assert hosts.say("a", state=DONE)["phase"] == RUNNING
    found = hosts.say("b", state=DONE)
    assert (found["phase"], found["cause"]["kind"], found["cause"]["code"]) == (ENDED, FINISHED, 0)
    hosts.meeting.leave("a")
    assert not hosts.meeting.is_over
    hosts.meeting.leave("b")
    assert hosts.meeting.is_over


def test_the_first_failure_ends_the_ranks_of_all_hosts_and_is_the_exit_code_of_all():
    hosts = Hosts()
    hosts.run()
    assert hosts.say("b", failure=failure(code=5, text="first"))["phase"] == CLOSING
    hosts.say("a", state=DONE, failure=failure(code=3, text="second"))
    ends = hosts.say("b", state=DONE), hosts.say("a")
    assert [(end["phase"], end["cause"]["code"], end["cause"]["text"]) for end in ends] == [
        (ENDED, 5, "first")
    ] * 2
    assert ends[0]["cause"]["host"] == "b"


def test_ranks_start_again_as_often_as_allowed():
    hosts = Hosts(max_restarts=2)
    for attempt in range(3):
        found = hosts.run()
        assert {(each["round"], each["restarts"]) for each in found.values()} == {(attempt + 1, attempt)}
        hosts.say("b", failure=failure())
        hosts.say_all(state=DONE)
    assert hosts.meeting.phase == ENDED and hosts.meeting.cause.kind == FAILED


def test_nothing_starts_again_while_ranks_of_a_host_still_run():
    hosts = Hosts(max_restarts=1)
    hosts.run()
    hosts.say("b", failure=failure(), state=DONE)
    hosts.wait(100, "a", "b")
    assert hosts.meeting.phase == CLOSING
    hosts.say("a", state=DONE)
    hosts.say_all(state=WAITING, failure=None)
    assert hosts.meeting.phase == RUNNING and hosts.meeting.round == 2


@pytest.mark.parametrize("kind", [STOPPED, REFUSED])
def test_a_stop_and_an_unusable_recipe_are_not_restarted(kind):
    hosts = Hosts(max_restarts=5)
    hosts.run()
    hosts.say("b", failure=failure(kind, 143 if kind == STOPPED else 2))
    hosts.say_all(state=DONE)
    assert hosts.meeting.phase == ENDED and hosts.meeting.cause.kind == kind


@pytest.mark.parametrize("phase", [GATHERING, RUNNING, CLOSING])
def test_a_signal_to_one_agent_ends_the_run_on_all_hosts(phase):
    hosts = Hosts(max_restarts=5)
    if phase == GATHERING:
        hosts.say("b")
    else:
        hosts.run()
    if phase == CLOSING:
        hosts.say("a", failure=failure())
    hosts.say("b", stop=15)
    if phase != GATHERING:
        hosts.say_all(state=DONE)
        hosts.say_all(state=WAITING, failure=None)
    cause = hosts.meeting.cause
    assert (hosts.meeting.phase, cause.kind, cause.code, cause.number) == (ENDED, STOPPED, 143, 15)
    assert cause.text == "host b (10.0.0.b) was stopped by signal 15"


def test_a_silent_host_is_lost_and_named():
    hosts = Hosts(lost_after_s=30.0)
    hosts.run()
    hosts.wait(29, "a")
    assert hosts.meeting.phase == RUNNING
    hosts.wait(2, "a")
    cause = hosts.meeting.cause
    assert hosts.meeting.phase == CLOSING and (cause.kind, cause.host, cause.seconds) == (LOST, "b", 31.0)
    assert cause.text == "host b (10.0.0.b) was lost: no sign of life for 31 s"
    assert hosts.say("a", state=DONE)["phase"] == ENDED


def test_a_host_whose_connection_was_closed_is_lost_unless_it_comes_back():
    hosts = Hosts()
    hosts.run()
    hosts.meeting.closed("b")
    hosts.wait(2, "a")
    hosts.say("b")
    hosts.wait(10, "a", "b")
    assert hosts.meeting.phase == RUNNING
    hosts.meeting.closed("b")
    hosts.wait(4, "a")
    assert hosts.meeting.cause.text == "host b (10.0.0.b) was lost: its connection was closed"


def test_nobody_is_lost_because_the_meeting_itself_stood_still():
    hosts = Hosts(lost_after_s=30.0)
    hosts.run()
    hosts.now += 300.0
    hosts.meeting.look()
    hosts.wait(5, "a", "b")
    assert hosts.meeting.phase == RUNNING


def lose(hosts, name, seconds=31):
    talking = [each for each in hosts.reports if each != name]
    hosts.wait(seconds, *talking)
    del hosts.reports[name]
    hosts.say_all(state=DONE)
    return hosts.say_all(state=WAITING)


def test_a_run_goes_on_with_a_host_fewer():
    hosts = Hosts("abc", min_hosts=2, max_hosts=3, max_restarts=1, host_wait_s=30.0)
    hosts.run()
    lose(hosts, "c")
    assert hosts.meeting.phase == GATHERING, "the host may come back"
    hosts.wait(31, "a", "b")
    found = hosts.say("b")
    assert found["phase"] == RUNNING and [each["name"] for each in found["hosts"]] == ["a", "b"]
    assert (found["round"], found["restarts"], found["place"]) == (2, 1, 1)


def test_a_run_that_needs_all_its_hosts_waits_for_the_replacement_and_ends_without():
    hosts = Hosts(max_restarts=1, timeout_s=100.0)
    hosts.run()
    lose(hosts, "b")
    hosts.wait(90, "a")
    assert hosts.meeting.phase == GATHERING
    hosts.add("b2", "b")
    assert hosts.say("b2")["phase"] == RUNNING and hosts.say("a")["round"] == 2
    hosts = Hosts(max_restarts=1, timeout_s=100.0)
    hosts.run()
    lose(hosts, "b")
    hosts.wait(102, "a")
    cause = hosts.meeting.cause
    assert hosts.meeting.phase == ENDED and (cause.kind, cause.code) == (LOST, 3)
    assert (
        "host b (10.0.0.b) was lost" in cause.text
        and "1 of 2 hosts were there after 100 s: host a" in cause.text
    )


def test_a_new_agent_on_the_same_host_stands_for_the_old_one():
    hosts = Hosts(max_restarts=1, lost_after_s=300.0)
    hosts.run()
    hosts.add("b2", "b")  # its machine was switched off and on again
    hosts.wait(7, "a", "b2")
    assert hosts.meeting.cause.kind == LOST and hosts.meeting.cause.host == "b"


def test_a_host_that_joins_is_taken_in_after_a_save_and_costs_no_restart():
    hosts = Hosts("a", min_hosts=1, max_hosts=2, host_wait_s=5.0)
    hosts.say("a")
    hosts.wait(6, "a")
    hosts.run()
    hosts.add("b")
    assert hosts.say("b")["phase"] == CLOSING and hosts.meeting.cause.kind == JOINED
    hosts.say("a", state=DONE, failure=failure(STOPPED, 143))
    found = hosts.say("a", state=WAITING, failure=None)
    assert (found["phase"], found["round"], found["restarts"], len(found["hosts"])) == (RUNNING, 2, 0, 2)


def test_a_host_that_joins_before_ranks_were_started_takes_part_at_once():
    """Nobody begins without a host that is known to be there: each began alone while the other reported, for ever."""
    hosts = Hosts("a", min_hosts=1, max_hosts=2, host_wait_s=1.0)
    hosts.say("a")
    hosts.wait(1)
    assert hosts.meeting.phase == RUNNING, "host a begins alone"
    hosts.add("b")
    assert hosts.say("b")["phase"] == CLOSING
    assert hosts.say("a")["phase"] == GATHERING, "no rank of host a was started"
    hosts.wait(1)  # as long as a host waits for others, and as both are silent between two reports
    found = [hosts.say(name) for name in "ab"]
    assert [each["phase"] for each in found] == [RUNNING, RUNNING]
    assert [each["place"] for each in found] == [0, 1] and found[0]["round"] == 2


def test_a_host_that_is_known_but_falls_silent_holds_up_nobody():
    hosts = Hosts("a", min_hosts=1, max_hosts=2, host_wait_s=1.0, lost_after_s=5.0)
    hosts.say("a")
    hosts.wait(1)
    hosts.run()
    hosts.add("b")
    hosts.say("b")
    hosts.say("a", state=DONE, failure=failure(STOPPED, 143))  # and it never says that it waits
    hosts.meeting.members["a"].is_keeper = False
    hosts.wait(4, "b")
    assert hosts.meeting.phase == GATHERING
    hosts.wait(3, "b")
    assert [each["name"] for each in hosts.say("b")["hosts"]] == ["b"]


def test_a_host_that_joins_a_run_which_just_finishes_changes_nothing():
    hosts = Hosts("a", min_hosts=1, max_hosts=2, host_wait_s=0.0)
    hosts.run()
    hosts.add("b")
    hosts.say("b")
    assert hosts.say("a", state=DONE)["cause"]["kind"] == FINISHED


def test_hosts_beyond_the_largest_number_wait_and_step_in():
    hosts = Hosts("ab", max_restarts=1)
    hosts.run()
    hosts.add("c")
    assert hosts.say("c")["phase"] == RUNNING and "hosts" not in hosts.say("c")
    hosts.wait(31, "a", "c")
    hosts.say("a", state=DONE)
    hosts.say("a", state=WAITING)
    assert [each["name"] for each in hosts.say("c")["hosts"]] == ["a", "c"]


def test_hosts_must_have_been_started_alike():
    hosts = Hosts("")
    hosts.add("a")
    hosts.say("a")
    hosts.add("b", plan=Plan(2, 2, max_restarts=3))
    assert hosts.say("b") == {
        "refused": "host b was started with other options than the hosts before it: max_restarts 3 against 0"
    }
    hosts.meeting.leave("a")
    assert hosts.say("b")["phase"] == GATHERING, "a host that is gone again decides nothing"


def test_too_few_hosts_end_in_time():
    hosts = Hosts("a", timeout_s=60.0)
    hosts.say("a")
    hosts.wait(62, "a")
    cause = hosts.meeting.cause
    assert (cause.kind, cause.code) == (REFUSED, 2)
    assert cause.text == "1 of 2 hosts were there after 60 s: host a (10.0.0.a)"


def test_a_meeting_that_was_started_anew_learns_how_far_the_hosts_had_come():
    hosts = Hosts("", max_restarts=3)
    hosts.add("a")
    hosts.add("b", round=4, restarts=2, job="the run")
    found = hosts.say_all()["b"]
    assert (found["round"], found["restarts"], found["job"]) == (5, 2, "the run")
    hosts = Hosts("", max_restarts=1)
    hosts.add("b", round=4, restarts=2, job="the run")
    found = hosts.say("b")["cause"]
    assert found["kind"] == LOST, "a finding of the launcher's own: no rank of a host failed"
    assert found["text"] == "the rendezvous was started anew while ranks ran; restarts allowed: 1"


def test_a_host_that_the_others_went_on_without_is_told_so():
    hosts = Hosts("abc", min_hosts=2, max_hosts=3, max_restarts=1, lost_after_s=5.0)
    hosts.run()
    frozen = dict(hosts.reports["c"])
    lose(hosts, "c", 6)
    assert hosts.meeting.attend(frozen) == {"unknown": True}
    found = hosts.meeting.attend({**frozen, "id": "c2", "state": WAITING})
    assert found["phase"] == RUNNING and found["round"] == 2 and len(found["hosts"]) == 3


def test_a_host_that_comes_back_before_the_others_have_ended_counts_the_restart_once():
    hosts = Hosts(max_restarts=1, lost_after_s=5.0)
    hosts.run()
    hosts.wait(6, "a")
    del hosts.reports["b"]
    hosts.add("b2", "b", round=1, restarts=1)  # its link was mended; a's ranks still end
    assert hosts.say("b2")["phase"] == CLOSING
    hosts.say("a", state=DONE, failure=failure())
    found = hosts.say("a", state=WAITING, failure=None)
    assert (found["phase"], found["round"], found["restarts"], len(found["hosts"])) == (RUNNING, 2, 1, 2)


def test_a_new_start_does_not_learn_the_end_of_the_run_before_it():
    hosts = Hosts()
    hosts.run()
    hosts.say_all(state=DONE)
    hosts.add("c")
    assert hosts.say("c") == {"later": "an earlier run is still ending there"}
    hosts.add("b2", "b", round=1)
    assert hosts.say("b2")["phase"] == ENDED, "but a host of this very run does"


def test_a_host_that_cannot_take_part_ends_the_run_for_all_before_it_begins():
    hosts = Hosts("ab", min_hosts=3, max_hosts=3)
    hosts.say("a")
    hosts.add("c", refuses="C007 output: the disk is full")
    assert hosts.say("c") == {"phase": ENDED, "told": 1}
    found = [hosts.say(name)["cause"] for name in "ab"]
    assert [(each["kind"], each["code"], each["host"]) for each in found] == [(REFUSED, 2, "c")] * 2
    assert found[1]["text"] == "C007 output: the disk is full", "a host that comes later is told as well"
    assert hosts.say("c")["told"] == 3


def test_a_host_that_cannot_replace_another_ends_nothing():
    hosts = Hosts(max_restarts=1)
    hosts.run()
    lose(hosts, "b")
    hosts.add("c", refuses="C007 output: the disk is full")
    assert hosts.say("c")["phase"] == GATHERING and list(hosts.meeting.members) == ["a"]


def test_a_host_that_knows_of_later_rounds_joins_one_that_runs_without_confusing_it():
    hosts = Hosts("a", min_hosts=1, max_hosts=1, max_restarts=3)
    hosts.run()
    hosts.add("b", round=5, restarts=2, job="the run")  # it was cut off while host 0 began anew
    hosts.say("b")
    found = hosts.say("a")
    assert (found["phase"], found["round"]) == (RUNNING, 1)
    hosts.say("a", state=DONE, failure=failure())
    found = hosts.say("a", state=WAITING, failure=None)
    assert (found["phase"], found["round"]) == (RUNNING, 6), "later than any round that a host knows"


def test_a_host_whose_command_ends_in_a_round_is_lost_at_once():
    hosts = Hosts()
    hosts.say_all()
    hosts.meeting.leave("a")  # it could not make the store that the ranks of all hosts wait for
    found = hosts.say("b")
    assert (found["phase"], found["cause"]["kind"]) == (ENDED, LOST)
    assert found["cause"]["text"] == "host a (10.0.0.a) was lost: its command has ended"
