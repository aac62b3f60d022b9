"""What the agent of a host does and says when nothing else in the run helps it: waiting, interrupted, forgotten."""

from __future__ import annotations

import logging
import signal
import threading
import time

import pytest

from shardproof.dist import agent as agents
from shardproof.dist.agent import Agent, Work
from shardproof.dist.attendance import Attendance
from shardproof.dist.meeting import CLOSING, ENDED, LOST, RUNNING, STOPPED, WAITING, Plan

PLAN = Plan(2, 2, max_restarts=1)
_LIMIT_S = 60


class Ranks:
    """Ranks that run until they are killed."""

    def __init__(self, *_):
        self.are_running, self.failure, self.results = True, None, {}

    def poll(self, _):
        time.sleep(0.01)

    def send(self, _):
        pass

    def kill(self):
        self.are_running = False


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Start an agent on a thread, with a function for the meeting: (the agent, what `run` returned, the thread)."""
    monkeypatch.setattr(agents, "RankProcesses", Ranks)

    def start(meeting):
        attendance = Attendance(meeting, PLAN, "b", 1)
        made, ends = Agent(Work(print, (), 1, str(tmp_path)), PLAN, attendance, "a:29500", "127.0.0.1"), []
        thread = threading.Thread(target=lambda: ends.append(made.run()), daemon=True)
        thread.start()
        return made, ends, thread

    return start


def told(phase, round=1, **more):
    return {"phase": phase, "round": round, "restarts": 0, "job": "j", "cause": None, **more}


def begun(round=1):
    hosts = [{"name": name, "address": "127.0.0.1", "ranks": 1} for name in "ab"]
    return told(RUNNING, round, place=1, hosts=hosts, store={"address": "127.0.0.1", "port": 1})


def cause(kind, text):
    return {"kind": kind, "text": text, "code": 3, "host": "a", "number": 0, "seconds": 0.0}


def until(condition):
    end = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_interrupt_waits_for_no_other_host(begin):
    reports = []

    def meeting(report):
        reports.append(report)
        return told(CLOSING, cause=cause(STOPPED, "")) if report.get("stop") else begun()

    made, ends, thread = begin(meeting)
    until(lambda: any(report.get("state") == RUNNING for report in reports))
    made._signals.number = signal.SIGINT
    until(lambda: any(report.get("stop") for report in reports))
    made._signals.is_repeated = True
    thread.join(_LIMIT_S)
    assert not thread.is_alive(), "the ranks of host a have not ended, and nothing ends this command"
    assert ends[0].cause.kind == STOPPED and ends[0].cause.code == 130 and made.was_killed


def test_a_host_more_than_the_run_has_room_for_says_what_it_waits_for(begin, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(agents, "_SAY_S", 0.0)
    made, _, thread = begin(lambda _: told(RUNNING))
    until(lambda: "the run has all of its hosts; this one takes part if one is lost" in caplog.text)
    made._signals.number = signal.SIGTERM
    thread.join(_LIMIT_S)
    assert not thread.is_alive()


def test_a_host_that_the_meeting_forgot_says_why_it_starts_again(begin, caplog):
    ids = []

    def meeting(report):
        if report.get("id") not in ids:
            ids.append(report.get("id"))
        if len(ids) > 1:
            return told(ENDED, cause=cause(LOST, "over"))
        return begun() if report["state"] == WAITING else {"unknown": True}

    _, ends, thread = begin(meeting)
    thread.join(_LIMIT_S)
    assert ends[0].cause.text == "over"
    assert "this host was given up, or the rendezvous was started anew" in caplog.text


def test_a_run_that_is_stopped_does_not_wait_for_an_endpoint_that_is_gone(begin, monkeypatch):
    monkeypatch.setattr(agents, "_LOST_GRACE_S", 0.0)
    stopped, lines = {**cause(STOPPED, "host a was stopped by signal 2"), "code": 130, "number": 2}, []

    def meeting(report):
        if report.get("state") != RUNNING or len(lines) > 1:
            if lines:
                raise OSError("gone")
            return begun()
        lines.append(report)
        return told(CLOSING, cause=stopped)

    monkeypatch.setattr(Agent, "_is_cut_off", property(lambda _: len(lines) > 1))
    _, ends, thread = begin(meeting)
    thread.join(_LIMIT_S)
    assert not thread.is_alive(), "it waits for the endpoint to come back"
    assert ends[0].cause.kind == STOPPED and ends[0].cause.code == 130
