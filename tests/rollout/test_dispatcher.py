"""The dispatcher: order, back-pressure, replicas that fail in every way, and answers that several versions draw."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardproof.errors import ShardproofError
from shardproof.rollout import sending
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.draft import continued_seed
from shardproof.rollout.engine import Answering, Request, Sampling
from shardproof.rollout.replica_link import ReplicaAddress
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.rollout.vllm_versions import interface_of
from tests.rollout.fake_vllm import LIMIT_S, FakeVllm, logprob_of, token_of

RUN = "run-1"
EIGHT = Sampling(8)
PAUSE, RESUME, GENERATE = "/pause", "/resume", "/inference/v1/generate"

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Dispatcher, list[FakeVllm]]]]:
    """Makes servers that serve version 0, and a dispatcher that knows it."""
    ends: list[Callable[[], None]] = []

    def build(
        num: int = 1, vllm: str = "0.32.0", sockets: Path | None = None, **options: Any
    ) -> tuple[Dispatcher, list[FakeVllm]]:
        servers = [FakeVllm(None if sockets is None else sockets / str(k), vllm) for k in range(num)]
        ends.extend(server.close for server in servers)
        for k, server in enumerate(servers):
            server.name = str(k)
        addresses = [ReplicaAddress(server.name, server.url) for server in servers]
        options = {"in_flight": 4, "request_timeout_s": LIMIT_S, "look_s": 0.01, "silent_s": 5.0} | options
        dispatcher = Dispatcher(addresses, RUN, interface_of(vllm), **options)
        ends.insert(0, dispatcher.close)
        for server in servers:
            server.serve(RUN, 0)
        dispatcher.release(0, [str(k) for k in range(num)])
        return dispatcher, servers

    yield build
    for end in ends:
        end()


def request(seed: int, prompt: tuple[int, ...] = (1, 2, 3), begun: Segment | None = None) -> Request:
    return Request(Trajectory.of_prompt(prompt, group=seed), seed, begun=begun)


def drawn(weights: int, seed: int, num: int = 8) -> list[tuple[int, float]]:
    """(token, log-prob) of an answer that these weights draw alone."""
    tokens = [token_of(weights, seed, place) for place in range(num)]
    return [(token, logprob_of(weights, token)) for token in tokens]


def said(asked: Answering) -> list[tuple[int, float]]:
    (segment,) = asked.future.result(LIMIT_S).sampled
    assert segment.logprobs is not None
    return list(zip(segment.tokens, segment.logprobs, strict=True))


def replica(asked: Answering) -> str:
    return asked.future.result(LIMIT_S).facts["replica"]


def error(asked: Answering) -> str:
    found = asked.future.exception(LIMIT_S)
    assert isinstance(found, ShardproofError)
    return str(found)


def at_work(servers: list[FakeVllm]) -> FakeVllm:
    """The one server that has a request."""
    servers[0].until(lambda: sum(len(server.running) for server in servers) == 1)
    (found,) = [server for server in servers if server.running]
    return found


def sync(dispatcher: Dispatcher, servers: list[FakeVllm], version: int) -> None:
    """What a sync does, as far as a dispatcher can see it."""
    dispatcher.hold()
    for server in servers:
        # Before 0.32 the label comes first: see Sending.
        steps = [lambda s=server: s.do(PAUSE), lambda s=server: s.mark(f"{RUN}/{version}/pending")]
        for step in steps if server.says_versions else reversed(steps):
            step()
        server.serve(RUN, version)
        server.do(RESUME)
    dispatcher.release(version, [server.name for server in servers])


def test_answers_depend_on_seed_and_version_alone(make: Any, tmp_path: Path) -> None:
    dispatcher, _ = make(3, sockets=tmp_path)
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(20)]
    assert [said(each) for each in asked] == [drawn(0, seed) for seed in range(20)]
    found = [each.future.result() for each in asked]
    assert [t.group for t in found] == list(range(20))
    assert all(t.sampled[0].version == 0 and t.sampled[0].parts == () and not t.finished for t in found)
    assert {replica(each) for each in asked} == {"0", "1", "2"}


def test_a_stop_token_finishes(make: Any) -> None:
    dispatcher, _ = make()
    stop = token_of(0, 5, 3)
    found = dispatcher.start(request(5), Sampling(8, stop_ids=(stop,))).future.result(LIMIT_S)
    assert found.finished and len(found.sampled[0].tokens) == 4


def test_a_request_may_have_a_limit_of_its_own(make: Any) -> None:
    dispatcher, _ = make()
    asked = [dispatcher.start(replace(request(5), max_new_tokens=num), EIGHT) for num in (3, 8, 99)]
    assert [said(each) for each in asked] == [drawn(0, 5, num) for num in (3, 8, 8)]
    with pytest.raises(ShardproofError, match="max_new_tokens"):
        replace(request(5), max_new_tokens=0)


def test_first_in_first_out_and_never_more_than_in_flight(make: Any) -> None:
    dispatcher, (server,) = make(in_flight=2)
    server.hold_back()
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(7)]
    for done in range(1, 7):
        server.until(lambda done=done: len(server.bodies) == min(done + 1, 7))
        server.finish()
        assert said(asked[done - 1]) == drawn(0, done - 1)
    server.go_on()
    assert said(asked[6]) == drawn(0, 6)
    assert server.most_at_once == 2
    assert [body["sampling_params"]["seed"] for body in server.bodies] == list(range(7))


def test_the_replica_with_the_least_work_is_next(make: Any) -> None:
    dispatcher, servers = make(3)
    for server in servers:
        server.hold_back()
    # Work: tokens to read, and most to draw. 100 + 8, 3 + 50, 3 + 8; then the third has least until it has 4 * 11.
    sizes = [(100, 8), (3, 50), (3, 8), (3, 8), (3, 8), (3, 8), (3, 40), (1, 1)]
    for seed, (read, write) in enumerate(sizes):
        dispatcher.start(request(seed, tuple(range(read))), Sampling(write))
    for server, num in zip(servers, (1, 3, 4), strict=True):
        server.until_at(num)
    seeds = [[body["sampling_params"]["seed"] for body in server.bodies] for server in servers]
    assert seeds == [[0], [1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("vllm", ["0.32.0", "0.26.0"])
def test_what_waited_for_a_sync_is_spread_over_all_replicas(make: Any, vllm: str) -> None:
    dispatcher, servers = make(2, vllm=vllm)
    dispatcher.hold()
    for server in servers:
        server.hold_back()
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(4)]
    dispatcher.release(0, ["0", "1"])
    for server in servers:
        server.until_at(2)
        server.go_on()
    assert [said(each) for each in asked] == [drawn(0, seed) for seed in range(4)]


@pytest.mark.parametrize("fault", ["die", "half", "garbage", (500, "out of memory"), (429, "later")])
@pytest.mark.parametrize("vllm", ["0.32.0", "0.26.0"])
def test_requests_of_a_failing_replica_go_to_another(make: Any, fault: Any, vllm: str) -> None:
    dispatcher, (bad, good) = make(2, vllm=vllm)
    bad.next_faults.extend([fault] * 3)
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(12)]
    assert [said(each) for each in asked] == [drawn(0, seed) for seed in range(12)]
    assert good.bodies


def test_requests_of_a_hanging_replica_go_to_another_and_nothing_is_left_there(make: Any) -> None:
    dispatcher, (bad, good) = make(2, silent_s=0.05)
    bad.hangs.add("/weight_info")
    bad.hold_back()
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(2)]
    assert [said(each) for each in asked] == [drawn(0, seed) for seed in range(2)]
    bad.until(lambda: bad.disconnected == 1)
    assert [replica(each) for each in asked] == ["1", "1"]
    bad.hangs.clear()  # as soon as its label is right it is used again
    bad.go_on()
    good.kill()
    assert replica(dispatcher.start(request(9), EIGHT)) == "0"


def test_a_replica_that_was_restarted_serves_again_with_its_label_only(make: Any) -> None:
    dispatcher, (server,) = make()
    server.kill()
    asked = dispatcher.start(request(4), EIGHT)
    server.revive()  # with the weights of the beginning
    server.until(lambda: server.calls.count("/weight_info") > 2)
    server.mark(f"{RUN}/0/pending")
    server.until(lambda: server.calls.count("/weight_info") > 4)
    assert not asked.future.done()
    server.serve(RUN, 0)
    assert said(asked) == drawn(0, 4)


def test_without_any_replica_requests_fail_and_name_them(make: Any) -> None:
    dispatcher, servers = make(2, unserved_s=0.05)
    for server in servers:
        server.kill()
    message = error(dispatcher.start(request(1), EIGHT))
    assert message.startswith("R505") and "no vLLM server has served version 0 for 0.05 s" in message
    assert all(f"replica {k} ({server.url}): " in message for k, server in enumerate(servers))
    servers[0].revive()
    servers[0].serve(RUN, 0)
    asked = dispatcher.start(request(2), EIGHT)
    while asked.future.exception(LIMIT_S) is not None:  # until it is seen that one serves again
        asked = dispatcher.start(request(2), EIGHT)
    assert said(asked) == drawn(0, 2)


def test_what_every_replica_refuses_is_the_requests_fault(make: Any) -> None:
    dispatcher, servers = make(2)
    for server in servers:
        server.next_faults.append((400, "the prompt is too long"))
    message = error(dispatcher.start(request(1), EIGHT))
    assert message.startswith("R506") and "the prompt is too long (status 400)" in message
    assert [len(server.bodies) for server in servers] == [1, 1]
    assert said(dispatcher.start(request(2), EIGHT)) == drawn(0, 2)  # the replicas are not to blame


def test_what_one_replica_refuses_is_asked_elsewhere(make: Any) -> None:
    dispatcher, (picky, other) = make(2)
    picky.refuses[GENERATE] = (400, "no")
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(9)]
    assert [said(each) for each in asked] == [drawn(0, seed) for seed in range(9)]
    assert {replica(each) for each in asked} == {"1"} and len(other.bodies) == 9


def test_what_only_a_dead_replica_could_answer_is_refused_in_the_end(make: Any) -> None:
    dispatcher, (picky, other) = make(2, in_flight=1, unserved_s=0.05)
    picky.refuses_seeds.update({0: (400, "no"), 1: (400, "no")})
    other.hold_back()
    first, second = (dispatcher.start(request(seed), EIGHT) for seed in range(2))
    other.until(lambda: len(other.running) == 1 and picky.bodies)
    other.kill()  # which the request waited for that the first one refused
    assert all(error(each).startswith("R506") for each in (first, second))


def test_a_replica_without_the_adapter_is_left_until_it_has_it(make: Any) -> None:
    dispatcher, (server,) = make(adapter=True)
    server.adapters[f"{RUN}/0"] = 0
    assert said(dispatcher.start(request(1), EIGHT)) == drawn(0, 1)
    server.kill()
    server.revive()
    server.mark("default")
    asked = dispatcher.start(request(2), EIGHT)
    server.until(lambda: server.calls.count("/weight_info") > 2)
    server.adapters[f"{RUN}/0"] = 0
    server.serve(RUN, 0)
    assert said(asked) == drawn(0, 2)
    assert {body["model"] for body in server.bodies} == {f"{RUN}/0"}


def test_a_request_that_fails_everywhere_fails(make: Any) -> None:
    dispatcher, servers = make(2)
    for server in servers:
        server.refuses[GENERATE] = (500, "illegal memory access")
    message = error(dispatcher.start(request(1), EIGHT))
    assert message.startswith("R505") and "failed 4 times" in message and "illegal memory access" in message


def test_a_deadline_holds_for_each_request(make: Any) -> None:
    dispatcher, (server,) = make(request_timeout_s=0.05, in_flight=1)
    server.hold_back()
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(2)]
    for each in asked:
        assert "R505" in error(each) and "within 0.05 s" in error(each)
    server.until(lambda: server.disconnected == 2)


@pytest.mark.parametrize("vllm", ["0.32.0", "0.31.0"])
def test_an_answer_goes_on_with_new_weights(make: Any, vllm: str) -> None:
    dispatcher, servers = make(2, vllm=vllm)
    for server in servers:
        server.hold_back()
    asked = dispatcher.start(request(6, prompt=(9, 9)), EIGHT)
    at_work(servers).draw(3)
    sync(dispatcher, servers, 1)
    first = at_work(servers)
    tokens = tuple(token_of(0, 6, k) for k in range(3))
    logprobs = tuple(logprob_of(0, token) for token in tokens)
    assert asked.so_far == Segment(tokens, "policy", logprobs, 0, trained=True)
    first.draw(2)
    first.kill()  # the tokens of version 1 are lost with it, those of version 0 are not
    second = at_work(servers)
    assert second is not first
    second.draw(4)
    sync(dispatcher, [second], 2)  # the first is not among those that took it
    at_work([second]).go_on()
    tail = drawn(1, continued_seed(6, 3), 4) + drawn(2, continued_seed(6, 7), 1)
    assert said(asked) == drawn(0, 6, 3) + tail
    found = asked.future.result()
    (segment,) = found.sampled
    assert segment.parts == ((3, 0), (4, 1), (1, 2)) and segment.version == 0
    assert segment.token_versions == (0, 0, 0, 1, 1, 1, 1, 2) and found.facts["replica"] == str(
        servers.index(second)
    )
    assert second.bodies[-1]["token_ids"] == [9, 9, *segment.tokens[:7]]
    assert second.bodies[-1]["sampling_params"]["max_tokens"] == 1


def test_one_version_draws_an_answer_as_if_it_was_never_interrupted(make: Any) -> None:
    dispatcher, (server,) = make()
    server.hold_back()
    asked = dispatcher.start(request(6), EIGHT)
    server.until_at(1)
    server.draw(3)
    sync(dispatcher, [server], 0)  # a sync that failed, and brought back what was there
    server.until_at(1)
    server.go_on()
    assert said(asked) == drawn(0, 6)
    assert asked.future.result().sampled[0].parts == ()


@pytest.mark.parametrize("label", [f"{RUN}/1/pending", "run-2/1", f"{RUN}/2", "default", ""])
def test_tokens_of_weights_that_were_not_committed_are_drawn_again(make: Any, label: str) -> None:
    dispatcher, (server,) = make()
    server.hold_back()
    asked = dispatcher.start(request(6), EIGHT)
    server.until_at(1)
    server.draw(2)
    server.mark(label)
    server.weights = 7
    server.draw(6)  # all eight, six of them not ours
    server.until(lambda: server.calls.count("/weight_info") > 2)
    assert not asked.future.done()
    server.serve(RUN, 0)
    server.until_at(1)
    server.go_on()
    assert said(asked) == drawn(0, 6)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_before_weight_versions_only_what_surely_is_of_the_version_counts(
    make: Any, rolled_back: bool
) -> None:
    """A request that waited at a paused server meets pending weights; after a rollback the label is the old one again."""
    dispatcher, (server,) = make(vllm="0.30.0")
    server.hold_back()
    server.do(PAUSE)
    asked = dispatcher.start(request(6), EIGHT)
    server.until_at(1)
    dispatcher.hold()
    server.mark(f"{RUN}/1/pending")
    server.weights = 1
    server.do(RESUME)
    server.draw(3)
    if rolled_back:
        server.mark(f"{RUN}/0/pending")
        server.do(PAUSE)
        server.serve(RUN, 0)
    else:
        server.draw(5)
    server.until(lambda: server.calls.count("/collective_rpc") > 1)
    assert asked.so_far is None
    server.serve(RUN, 0)
    server.do(RESUME)
    server.go_on()
    dispatcher.release(0, ["0"])
    assert said(asked) == drawn(0, 6)


def test_a_resumed_run_goes_on_where_an_answer_was(make: Any) -> None:
    dispatcher, (server,) = make()
    sync(dispatcher, [server], 3)
    tokens = [token for token, _ in drawn(2, 6, 5)]
    logprobs = [logprob for _, logprob in drawn(2, 6, 5)]
    begun = Segment(tuple(tokens), "policy", tuple(logprobs), 1, trained=True, parts=((2, 1), (3, 2)))
    asked = dispatcher.start(request(6, begun=begun), EIGHT)
    assert said(asked) == drawn(2, 6, 5) + drawn(3, continued_seed(6, 5), 3)
    assert asked.future.result().sampled[0].parts == ((2, 1), (3, 2), (3, 3))
    # What was complete is not asked for again.
    for sampling in (Sampling(5), Sampling(8, stop_ids=(tokens[-1],))):
        found = dispatcher.start(request(6, begun=begun), sampling).future.result(LIMIT_S)
        assert found.sampled == (begun,) and found.finished == bool(sampling.stop_ids)
    assert len(server.bodies) == 1


def test_to_cancel_gives_a_request_up_also_at_the_replica(make: Any) -> None:
    dispatcher, (server,) = make(in_flight=1)
    server.hold_back()
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(4)]
    server.until_at(1)
    assert asked[0].future.cancel() and asked[2].future.cancel()
    server.until(lambda: server.disconnected == 1 and len(server.running) == 1)
    server.go_on()
    assert [said(asked[k]) for k in (1, 3)] == [drawn(0, 1), drawn(0, 3)]
    assert [body["sampling_params"]["seed"] for body in server.bodies] == [0, 1, 3]
    assert dispatcher.activity()["ahead/in_flight"] == 0


def test_close_with_requests_under_way_leaves_nothing(make: Any) -> None:
    sockets = len(psutil.Process().net_connections("all"))
    dispatcher, (server, dead) = make(2, in_flight=2)
    dead.kill()
    server.hold_back()
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(5)]
    server.until_at(2)
    dispatcher.close()
    for each in asked:
        with pytest.raises(CancelledError):
            each.future.result(LIMIT_S)
    server.until(lambda: server.disconnected == 2)
    server.close()
    dead.close()
    dispatcher.close()
    assert not [t for t in threading.enumerate() if t.name == "dispatcher"]
    assert len(psutil.Process().net_connections("all")) <= sockets


def test_nothing_is_kept_of_requests_that_were_answered(make: Any) -> None:
    """A caller who does not read answers holds them; the dispatcher holds what is under way."""
    dispatcher, (server,) = make(in_flight=3)
    asked = [dispatcher.start(request(seed), EIGHT) for seed in range(50)]
    for each in asked:
        each.future.result(LIMIT_S)
    server.hold_back()
    later = [dispatcher.start(request(seed), EIGHT) for seed in range(50, 60)]
    server.until_at(3)
    assert server.most_at_once <= 3  # bodies of the seven that wait are not written yet
    gone = [weakref.ref(each) for each in asked] + [weakref.ref(each.draft) for each in asked]  # type: ignore[attr-defined]
    del asked, each
    gc.collect()
    assert all(ref() is None for ref in gone)
    assert dispatcher.activity()["ahead/in_flight"] == len(later) == 10


def test_activity_counts_idle_replicas(make: Any) -> None:
    dispatcher, (server, _) = make(2)
    server.hold_back()
    dispatcher.start(request(1), EIGHT)
    server.until_at(1)
    dispatcher.activity()
    found = dispatcher.activity()
    assert found["ahead/in_flight"] == 1
    server.go_on()
    assert 0 < found["time/engine_idle"] < LIMIT_S


def test_nothing_is_lost_or_doubled_when_replicas_die_at_random(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills, pauses and new versions in a fixed random order: each request has one answer, whose parts are true."""
    # How many of the kills meet one request is a matter of time.
    monkeypatch.setattr(sending, "_MOST_FAILURES", 1000)
    rng = random.Random(17)
    dispatcher, servers = make(3, in_flight=3)
    asked = []
    version = 0
    for server in servers:
        server.hold_back()
    for seed in range(60):
        asked.append(dispatcher.start(request(seed), EIGHT))
        victim = rng.choice(servers)
        action = rng.choice(["draw", "draw", "draw", "kill", "sync", "half"])
        if action == "kill":
            victim.kill()
            victim.revive()
            victim.serve(RUN, version)
        elif action == "sync":
            version += 1
            sync(dispatcher, servers, version)
        elif action == "half":
            victim.next_faults.append("half")
        for server in servers:
            server.draw(rng.randrange(1, 6))
    for server in servers:
        server.next_faults.clear()
        server.go_on()
    for seed, each in enumerate(asked):
        found = said(each)
        (segment,) = each.future.result().sampled
        wanted: list[tuple[int, float]] = []
        for num, drawer in segment.parts or ((8, segment.version),):
            assert drawer is not None
            wanted += drawn(drawer, continued_seed(seed, len(wanted)), num)
        assert found == wanted and len(found) == 8
    answers = Counter(each.future.result().group for each in asked)
    assert answers == Counter(range(60))
    assert dispatcher.activity()["ahead/in_flight"] == 0
    assert any(len(each.future.result().sampled[0].parts) > 1 for each in asked)
