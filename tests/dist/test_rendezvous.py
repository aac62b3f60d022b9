"""Messages between the agents of hosts, over real sockets: only those who know the secret are heard."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from dataclasses import asdict

import pytest

from shardproof.dist import rendezvous
from shardproof.dist.attendance import Attendance
from shardproof.dist.meeting import DONE, ENDED, LOST, RUNNING, WAITING, Plan
from shardproof.dist.rendezvous import Denied, Line, Server, answer, derive_key

KEY = derive_key("0123456789abcdef")
PLAN = Plan(2, 2)


@pytest.fixture
def server():
    made = Server(["127.0.0.1"], 0, KEY)
    yield made
    made.close(patience_s=0)


def report(name, **changes):
    return {
        **{"id": name, "plan": asdict(PLAN), "name": name, "address": "", "ranks": 1, "state": WAITING},
        **{"round": 0, "restarts": 0, "job": "", **changes},
    }


def line(server, key=KEY):
    return Line("127.0.0.1", server.port, key)


def stranger(server):
    made = socket.create_connection(("127.0.0.1", server.port), 30)
    made.settimeout(30)
    return made


def test_hosts_meet_and_say_where_they_are_reached(server):
    a, b = line(server), line(server)
    assert a.call(report("a"))["waiting"] == ["host a (127.0.0.1)"]
    assert b.call(report("b"))["phase"] == RUNNING
    assert [host["address"] for host in a.call(report("a"))["hosts"]] == ["127.0.0.1"] * 2
    assert a.call({"id": "a", "leaves": True}) == {}
    assert list(server.meeting.members) == ["b"]


def test_another_secret_is_refused_on_both_sides_and_changes_nothing(server):
    other = line(server, derive_key("another secret 12"))
    with pytest.raises(Denied, match="another --rdzv-id"):
        other.call(report("b"))
    assert server.meeting.members == {} and server.meeting.plan is None


def test_something_else_that_listens_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(
            target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
        ).start()
        with pytest.raises(Denied, match="something else"):
            Line("127.0.0.1", port, KEY).call(report("a"))


def signed(key, server_nonce, nonce, message, number=0):
    session = rendezvous.hmac.digest(key, b"session" + server_nonce + nonce, "sha256")
    body = json.dumps(message).encode()
    mac = rendezvous.hmac.digest(session, struct.pack("!?Q", False, number) + body, "sha256")
    return struct.pack("!I", len(body)) + mac + body


def greet(connection):
    greeting = b"shardproof rendezvous 1\n"
    found = b""
    while len(found) < len(greeting) + 16:
        found += connection.recv(1024)
    assert found.startswith(greeting)
    return found[len(greeting) :]


def test_a_recorded_message_is_worth_nothing_later(server):
    nonce = b"n" * 16
    with stranger(server) as first:
        recorded = signed(KEY, greet(first), nonce, report("a"))
        first.sendall(nonce + recorded)
        assert first.recv(4)
        first.sendall(recorded)  # its number is another one now
        await_end(first)
    server.meeting.leave("a")
    with stranger(server) as again:
        greet(again)
        again.sendall(nonce + recorded)
        assert again.recv(4) == struct.pack("!I", 0), "the connection's key is another one"
    assert server.meeting.members == {}


STRANGE = {
    "nothing": b"",
    "something else": b"GET / HTTP/1.1\r\n\r\n" * 8,
    "an empty message": b"x" * 16 + struct.pack("!I", 0),
    "an endless message": b"x" * 16 + struct.pack("!I", 0xFFFFFFFF) + b"y" * 64,
    "a forged message": b"x" * 16 + struct.pack("!I", 100) + b"y" * 132,
    "half a message": b"x" * 16 + struct.pack("!I", 100) + b"y" * 3,
}


def test_strangers_change_nothing_and_hold_up_nobody(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CALL_S", 3.0)
    strangers = [stranger(server) for _ in STRANGE]
    for one, sent in zip(strangers, STRANGE.values()):
        one.sendall(sent)
    a = line(server)
    assert a.call(report("a"))["phase"] == "gathering"
    for one in strangers:
        await_end(one)
        one.close()
    assert list(server.meeting.members) == ["a"]
    a.close()


def await_end(connection):
    """Until the other side hangs up."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def test_a_crowd_of_silent_strangers_does_not_keep_hosts_out(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MAX_STRANGERS", 8)
    crowd = [stranger(server) for _ in range(40)]
    try:
        assert line(server).call(report("a"))["phase"] == "gathering"
        assert len(server._strangers) <= 8
    finally:
        for one in crowd:
            one.close()


def test_a_message_from_a_host_that_makes_no_sense_ends_its_connection_alone(server):
    wrong = line(server)
    with pytest.raises(OSError):
        wrong.call({"id": "b", "state": WAITING})
    assert line(server).call(report("a"))["phase"] == "gathering"


def test_a_connection_that_ends_is_noted_and_one_that_is_idle_is_not(server, monkeypatch):
    a, b = line(server), line(server)
    a.call(report("a")), b.call(report("b"))
    b.close()
    until = time.monotonic() + 60
    while server.meeting.members["b"].closed_at is None and time.monotonic() < until:
        time.sleep(0.01)
    assert server.meeting.members["b"].closed_at is not None
    monkeypatch.setattr(rendezvous, "_IDLE_S", 0.2)
    a.call(report("a"))
    await_end(a._connection)
    time.sleep(0.2)
    assert server.meeting.members["a"].closed_at is None


def test_a_meeting_that_keeps_on_takes_the_next_run():
    server = Server(["127.0.0.1"], 0, KEY, keeps_on=True)
    try:
        first = server.meeting
        a, b = line(server), line(server)
        for state in (WAITING, RUNNING, DONE):
            for each, name in ((a, "a"), (b, "b")) * 2:
                found = each.call(report(name, state=state, round=int(state != WAITING)))
        assert found["phase"] == ENDED
        a.call({"id": "a", "leaves": True}), b.call({"id": "b", "leaves": True})
        until = time.monotonic() + 60
        while server.meeting is first and time.monotonic() < until:
            time.sleep(0.01)
        assert line(server).call(report("c"))["phase"] == "gathering"
    finally:
        server.close(patience_s=0)


def test_an_agent_connects_again_and_hears_of_a_lost_host(server):
    plan = Plan(2, 2, lost_after_s=5.0)
    mine, theirs = line(server), line(server)
    a = Attendance(lambda said: answer(server.meeting, said, is_keeper=True), plan, "a", 1)
    b = Attendance(mine.call, plan, "b", 1)
    a.start(), b.start()
    try:
        found = wait_until(b, lambda told: told["phase"] == RUNNING)
        assert found["place"] == 1
        a.update(state=RUNNING, round=1)
        b.update(state=RUNNING, round=1)
        mine._connection.shutdown(socket.SHUT_RDWR)  # a router forgot it
        b.update(state=RUNNING)
        assert wait_until(b, lambda told: told["phase"] == RUNNING)["round"] == 1
        b.leave()
        mine.close()
        theirs.call(report("c", plan=asdict(plan)))  # whoever is there keeps the clock going
        assert b.was_heard
    finally:
        a.leave(), b.leave()


def wait_until(attendance, condition):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = attendance.wait(1.0)
        if found is not None and condition(found):
            return found
    raise AssertionError(f"{found} {attendance.trouble}")


def test_an_agent_that_was_heard_outlasts_a_stranger_at_the_endpoint():
    answers = iter([{"phase": "gathering", "restarts": 0, "job": "", "waiting": []}])

    def call(_):
        found = next(answers, None)
        if found is None:
            raise Denied("something else listens there")
        return found

    a = Attendance(call, PLAN, "a", 1)
    a.start()
    until = time.monotonic() + 60
    while not a.trouble and time.monotonic() < until:
        time.sleep(0.01)
    assert a.refusal is None and a.trouble == "something else listens there" and a.is_alive()
    a.leave()


def test_a_host_that_goes_quiet_is_lost_by_the_real_clock():
    server = Server(["127.0.0.1"], 0, KEY)
    try:
        plan = asdict(Plan(2, 2, lost_after_s=0.5))
        a, b = line(server), line(server)
        for state in (WAITING, RUNNING):
            for each, name in ((a, "a"), (b, "b")) * 2:
                each.call(report(name, plan=plan, state=state, round=int(state == RUNNING)))
        until = time.monotonic() + 60
        while server.meeting.cause is None and time.monotonic() < until:
            time.sleep(0.05)
        assert server.meeting.cause.kind == LOST
    finally:
        server.close(patience_s=0)


def test_an_endpoint_that_can_be_no_name_of_a_host_is_a_trouble_like_others():
    a = Attendance(Line("a..b", 29500, KEY).call, PLAN, "a", 1)
    a.start()
    until = time.monotonic() + 60
    while not a.trouble and time.monotonic() < until:
        time.sleep(0.01)
    assert "label" in a.trouble and a.is_alive(), "the agent goes on, and says what it waits for"
    a.leave()
