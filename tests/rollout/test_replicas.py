"""Several servers of a run: one sync to all, those that fail are out and come back, and none serves anything unproved.

The servers are stand-ins; tests/rollout/vllm/test_replicas.py has real ones.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardproof.config.vllm import VllmSettings
from shardproof.errors import ShardproofError
from shardproof.findings import Finding
from shardproof.rollout import replicas as module
from shardproof.rollout.replicas import Replicas
from shardproof.rollout.sync import Delivered, Delivery
from shardproof.rollout.vllm_places import Place, places
from shardproof.rollout.vllm_server import Served, VllmServer
from tests.rollout.fake_vllm import LIMIT_S, FakeVllm, canary_logprobs

RUN = "run"
CANARY = [3, 1, 4, 1, 5]
CONFIG = {"dtype": "float32", "backend": "shardproof"}
FACTS = {**CONFIG, "logprobs_mode": "processed_logprobs"}
SHORT = {"sync_timeout_s": 10.0, "start_timeout_s": 5.0}
Made = tuple[list[FakeVllm], Replicas]


def payload(version: int) -> Delivered:
    return Delivered(version, canary_logprobs(version, CANARY), {"version": version})


def make(fakes: list[FakeVllm], **settings: Any) -> Replicas:
    chosen = VllmSettings(mode="server", url=[fake.url for fake in fakes], **{**SHORT, **settings})
    served = Served(Path("model"), "float32", "cpu")
    deliveries = [
        Delivery(VllmServer(chosen, served, place), RUN, CANARY, 1e-3, CONFIG) for place in places(chosen)
    ]
    return Replicas(deliveries, chosen.sync_timeout_s)


@pytest.fixture
def build(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    """Makes servers and what brings weights to them; their watches look often."""
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    monkeypatch.setattr(module, "_MOST_WAIT_S", 0.05)
    with ExitStack() as stack:

        def build(num: int = 2, vllm: str = "0.32.0", **settings: Any) -> Made:
            fakes = [stack.enter_context(FakeVllm(vllm=vllm, facts=FACTS)) for _ in range(num)]
            replicas = make(fakes, **settings)
            stack.callback(replicas.stop)
            replicas.start()
            replicas.identify()
            return fakes, replicas

        yield build


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def failure(action: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(ShardproofError) as caught:
        action(*args, **options)
    return str(caught.value)


def labels(fakes: list[FakeVllm]) -> list[str | None]:
    return [fake.label for fake in fakes]


@pytest.mark.parametrize("vllm", ["0.32.0", "0.26.0"])
def test_one_payload_reaches_all(build, vllm):
    fakes, replicas = build(3, vllm)
    for version in range(3):
        proof = replicas.deliver(payload(version))
        assert proof.version == version and proof.gap == 0
        assert {"prepare", "transfer", "verify", "total"} <= set(proof.seconds)
        assert labels(fakes) == [f"{RUN}/{version}"] * 3
        assert [fake.weights for fake in fakes] == [version] * 3
        assert replicas.serving == ["0", "1", "2"]
    assert replicas.moved(busy=False) == []


def test_none_serves_a_version_before_all_have_decided(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].hangs.add("/finish_weight_update")
    sync = threading.Thread(target=replicas.deliver, args=(payload(1),))
    sync.start()
    fakes[0].until(lambda: fakes[0].calls.count("/inference/v1/generate") >= 3)  # its canary has answered
    fakes[1].until(lambda: fakes[1].calls.count("/finish_weight_update") == 2)
    assert labels(fakes) == [f"{RUN}/1/pending"] * 2
    fakes[1].hangs.clear()
    fakes[1].kill()
    sync.join()
    assert fakes[0].label == f"{RUN}/1" and replicas.serving == ["0"]


PHASES = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/inference/v1/generate",
    "/update_weight_version",
]


@pytest.mark.parametrize("path", PHASES)
def test_a_replica_that_dies_in_a_sync_is_out_and_comes_back_proved(build, path, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].dies_at = path
    replicas.deliver(payload(1))
    assert replicas.serving == ["0"] and labels(fakes)[0] == f"{RUN}/1"
    assert "R505 replica 1: the server stopped or did not answer in time" in caplog.text
    asked = len(fakes[1].calls)
    fakes[1].revive()
    until(lambda: replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/1"] * 2 and fakes[1].weights == 1
    events = []
    until(lambda: events.extend(replicas.events()) or events[-1:] == ["replica 1 is back at version 1"])
    assert "R505 replica 1" in events[0] and not replicas.events()
    # Its label came last, after the canary.
    paths = [path for path in fakes[1].calls[asked:] if path not in ("/health", "/weight_info")]
    marks = [place for place, path in enumerate(paths) if path == "/update_weight_version"]
    assert marks[-1] > max(place for place, path in enumerate(paths) if path == "/inference/v1/generate")


def test_a_replica_that_dies_at_its_commit_is_out(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    commit = replicas.all[1].delivery.commit

    def doomed(*args: Any) -> None:
        del replicas.all[1].delivery.commit
        fakes[1].kill()
        commit(*args)

    replicas.all[1].delivery.commit = doomed
    replicas.deliver(payload(1))
    assert replicas.serving == ["0"]
    fakes[1].revive()
    until(lambda: replicas.serving == ["0", "1"])


def test_a_replica_that_refuses_is_out_until_it_takes_the_weights(build, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[0].refuses["/update_weights"] = (500, "no room")
    replicas.deliver(payload(1))
    assert replicas.serving == ["1"] and fakes[0].label == f"{RUN}/1/pending"
    assert "R505 replica 0: the server refused a request: no room." in caplog.text
    # It is tried again, and its reason is said once.
    until(lambda: fakes[0].calls.count("/update_weights") > 4)
    assert caplog.text.count("no room") == 1
    replicas.deliver(payload(2))
    assert replicas.serving == ["1"] and fakes[1].label == f"{RUN}/2"
    fakes[0].refuses.clear()
    until(lambda: replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/2"] * 2 and fakes[0].weights == 2


def test_a_replica_that_answers_nonsense_is_out_and_its_watch_lives_on(build, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    control = fakes[1]._control
    fakes[1]._control = lambda path, body: {} if path == "/collective_rpc" else control(path, body)
    replicas.deliver(payload(1))
    assert replicas.serving == ["0"]
    assert "R505 replica 1: the server's answer was not understood (KeyError: 'results')." in caplog.text
    fakes[1]._control = control
    until(lambda: replicas.serving == ["0", "1"])


def test_old_weights_under_a_new_version_are_found_by_the_canary(build, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].keeps_weights = True
    replicas.deliver(payload(1))
    assert replicas.serving == ["0"]
    assert "R503 replica 1: engine and trainer log-probs of the canary differ by 1" in caplog.text
    fakes[1].keeps_weights = False
    until(lambda: replicas.serving == ["0", "1"])


def test_if_all_refuse_everything_is_rolled_back(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    for fake in fakes:
        fake.keeps_weights = True  # at version 0, which is what is brought back
    message = failure(replicas.deliver, payload(1))
    assert message.startswith("R503 sync: no replica took the weights. replica 0: engine and trainer")
    assert "replica 1: engine and trainer" in message
    assert "Version 1 was not committed; replicas 0, 1 are back at version 0." in message
    assert replicas.serving == ["0", "1"] and labels(fakes) == [f"{RUN}/0"] * 2


def test_a_single_server_is_rolled_back_or_repaired_later(build):
    (fake,), replicas = build(1, sync_timeout_s=1.0)
    replicas.deliver(payload(0))
    fake.dies_at = "/update_weights"
    message = failure(replicas.deliver, payload(1))
    assert message.startswith("R505 sync: the server stopped or did not answer in time")
    assert "version 0 could not be restored either (no vLLM server answered" in message
    assert replicas.serving == []
    fake.revive()
    until(lambda: replicas.serving == ["0"])
    assert fake.label == f"{RUN}/0"


def test_the_first_sync_must_reach_all(build):
    fakes, replicas = build()
    fakes[1].facts["dtype"] = "bfloat16"
    message = failure(replicas.deliver, payload(0))
    assert message.startswith(
        "R506 sync: replica 1: the server has dtype 'bfloat16', this run needs 'float32'"
    )
    assert "Version 0 was not committed; the engine has no weights." in message
    assert labels(fakes)[0] == f"{RUN}/0/pending" and replicas.serving == []


def test_a_replica_whose_host_got_nothing_is_out_and_not_asked(build, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].refuses["/update_weights"] = (500, "no such memory")
    asked = fakes[1].calls.count("/update_weights")
    replicas.deliver(payload(1), lost={"1": Finding("R505", "sync", "its host cannot be reached.")})
    assert replicas.serving == ["0"] and "its host cannot be reached" in caplog.text
    until(lambda: fakes[1].calls.count("/update_weights") > asked)  # by its watch
    fakes[1].refuses.clear()
    until(lambda: replicas.serving == ["0", "1"])


def test_what_differs_between_replicas_reaches_each(build):
    fakes, replicas = build()
    both = Delivered(
        5, canary_logprobs(5, CANARY), {"version": 7}, {"0": {"version": 5}, "1": {"version": 5}}
    )
    replicas.deliver(both)
    assert [fake.weights for fake in fakes] == [5, 5]


def test_a_replica_that_died_between_syncs_is_brought_to_what_is_committed_when_it_is_back(build, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].kill()
    until(lambda: replicas.serving == ["0"])
    until(lambda: "no vLLM server answers at" in caplog.text)
    replicas.deliver(payload(1))
    replicas.deliver(payload(2))
    assert replicas.serving == ["0"]
    fakes[1].revive()
    until(lambda: replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/2"] * 2
    fakes[0].serve("somebody", 9)  # another run took it
    until(lambda: fakes[0].label == f"{RUN}/2" and replicas.serving == ["0", "1"])


def test_a_repair_that_a_sync_overtakes_brings_the_newest_weights(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].hangs.add("/finish_weight_update")
    fakes[1].serve("somebody", 9)
    fakes[1].until(lambda: fakes[1].calls.count("/finish_weight_update") == 2)  # the repair is in the middle
    replicas.deliver(payload(1))
    assert replicas.serving == ["0"] and fakes[1].label == f"{RUN}/0/pending"
    fakes[1].hangs.clear()
    fakes[1].kill()
    seen: list[str | None] = []
    mark = fakes[1]._mark
    fakes[1]._mark = lambda label: (seen.append(label), mark(label))
    fakes[1].revive()
    until(lambda: replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/1"] * 2
    assert f"{RUN}/0" not in seen


def test_a_repair_finishes_with_the_version_that_is_committed_by_then(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    delivery, seen = replicas.all[1].delivery, list[str | None]()
    stage, mark = delivery.stage, fakes[1]._mark
    fakes[1]._mark = lambda label: (seen.append(label), mark(label))

    def overtaken(brought: Delivered, seconds: float) -> None:
        del delivery.stage
        stage(brought, seconds)
        replicas.deliver(payload(1))  # goes to the other one alone

    delivery.stage = overtaken
    fakes[1].serve("somebody", 9)
    until(lambda: fakes[1].label == f"{RUN}/1" and replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/1"] * 2
    assert seen == ["somebody/9", f"{RUN}/0/pending", f"{RUN}/1/pending", f"{RUN}/1"]


def test_weights_that_were_replaced_are_named_with_their_replica(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    replicas.deliver(payload(1))
    fakes[1].weights = 0  # reload_weights: the label stays
    assert replicas.moved(busy=False) == replicas.moved(busy=True) == ["1"]
    message = failure(replicas.check_alone, ["1"])
    assert (
        "R503 generate: replica 1: the server's log-probs of the canary moved by 1 since version 1" in message
    )
    until(lambda: replicas.serving == ["0", "1"])
    assert fakes[1].weights == 1 and labels(fakes) == [f"{RUN}/1"] * 2
    fakes[0].weights = 0
    message = failure(replicas.deliver, payload(2), drawn=True)
    assert "R503 generate: replica 0: the server's log-probs" in message
    until(lambda: replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/1"] * 2


def test_servers_that_all_died_are_waited_for(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    for fake in fakes:
        fake.kill()
    sync = threading.Thread(target=replicas.deliver, args=(payload(1),))
    sync.start()
    fakes[1].revive()
    sync.join()
    assert fakes[1].label == f"{RUN}/1" and "1" in replicas.serving
    fakes[0].revive()
    until(lambda: replicas.serving == ["0", "1"])


def test_a_server_that_answers_and_is_being_repaired_is_waited_for_where_no_other_is_there(build):
    fakes, replicas = build(sync_timeout_s=3.0)
    replicas.deliver(payload(0))
    fakes[0].kill()
    until(lambda: replicas.serving == ["1"])
    with replicas.all[1].lock:
        replicas.all[1].repairing = True  # as its watch does
        sync = threading.Thread(target=replicas.deliver, args=(payload(1),))
        sync.start()
        time.sleep(0.3)  # the sync finds this one busy
        replicas.all[1].repairing = False
    sync.join()
    assert fakes[1].label == f"{RUN}/1" and replicas.serving == ["1"]


def test_a_small_change_is_found_once_the_replica_is_alone(build, monkeypatch):
    _, replicas = build()
    replicas.deliver(payload(0))
    delivery = replicas.all[1].delivery
    ask = delivery.ask_canary
    monkeypatch.setattr(delivery, "ask_canary", lambda *given: [value + 1e-4 for value in ask(*given)])
    assert replicas.moved(busy=True) == [] and replicas.moved(busy=False) == ["1"]
    assert "replica 1: the server's log-probs" in failure(replicas.deliver, payload(1), drawn=True)


def test_a_dead_replica_does_not_fail_the_proof_of_the_others(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    fakes[1].kill()
    assert replicas.moved(busy=False) == []
    replicas.check_alone(["0", "1"])
    until(lambda: replicas.serving == ["0"])


def test_a_replica_that_lost_its_label_is_out_and_does_not_fail_the_proof(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    with replicas.all[1].lock:  # its watch cannot do anything yet
        fakes[1].serve("somebody", 9)
        asking = threading.Thread(target=replicas.check_alone, args=(["0", "1"],))
        asking.start()
    asking.join()
    until(lambda: replicas.serving == ["0", "1"] and labels(fakes) == [f"{RUN}/0"] * 2)


def test_a_replica_whose_host_has_no_weights_waits_for_the_next_sync(build, caplog):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    gone = {"1": Finding("R505", "sync", "its host cannot be reached.")}
    some = Delivered(1, canary_logprobs(1, CANARY), updates={"0": {"version": 1}})
    replicas.deliver(some, lost=gone)
    assert replicas.serving == ["0"]
    until(lambda: "replica 1: its host did not get version 1; the next sync sends another." in caplog.text)
    replicas.deliver(payload(2))
    until(lambda: replicas.serving == ["0", "1"])
    assert labels(fakes) == [f"{RUN}/2"] * 2


@pytest.mark.parametrize(
    ("device", "devices", "batches"),
    [
        ("cuda", ["0", "1", "0", ""], [["0", "1", "3"], ["2"]]),
        ("cuda", ["", "", ""], [["0"], ["1"], ["2"]]),
        ("cpu", ["", "", ""], [["0", "1", "2"]]),
    ],
)
def test_servers_that_share_a_gpu_are_started_one_after_the_other(monkeypatch, device, devices, batches):
    chosen, served = VllmSettings(replicas=len(devices)), Served(Path("model"), "float32", device)
    servers = [VllmServer(chosen, served, Place(str(k), devices=each)) for k, each in enumerate(devices)]
    replicas = Replicas([Delivery(server, RUN, CANARY, 1e-3, CONFIG) for server in servers], 1.0)
    started: list[list[str]] = []
    monkeypatch.setattr(replicas, "_each", lambda some, action: started.append([r.name for r in some]) or {})
    replicas.start()
    assert started == batches


def test_nobody_repairs_a_replica_that_sleeps(build):
    fakes, replicas = build()
    replicas.deliver(payload(0))
    replicas.sleep()
    assert replicas.serving == []
    asked = [fake.calls.count("/update_weights") for fake in fakes]
    for _ in range(3):
        time.sleep(0.03)
    assert [fake.calls.count("/update_weights") for fake in fakes] == asked
    replicas.wake()
    replicas.deliver(payload(1))
    assert replicas.serving == ["0", "1"]


def test_versions_of_vllm_that_answer_differently_are_not_mixed(nothing_left):
    with FakeVllm(facts=FACTS) as new, FakeVllm(vllm="0.27.0", facts=FACTS) as old:
        message = failure(make([new, old]).identify)
    assert (
        "R506 rollout: the replicas run versions of vLLM that cannot be mixed (0: 0.32.0, 1: 0.27.0)"
        in message
    )


def test_before_vllm_0_32_the_pending_mark_comes_before_the_pause(build):
    for vllm, expected in (("0.31.0", f"{RUN}/1/pending"), ("0.32.0", f"{RUN}/0")):
        (fake,), replicas = build(1, vllm)
        replicas.deliver(payload(0))
        at_pause: list[str | None] = []
        control = fake._control

        def look(path: str, body: Any, fake=fake, control=control, at_pause=at_pause) -> Any:
            if path == "/pause":
                at_pause.append(fake.label)
            return control(path, body)

        fake._control = look
        replicas.deliver(payload(1))
        assert at_pause == [expected]


EXITS = """
import subprocess, sys, weakref
from pathlib import Path
from shardproof.config.vllm import VllmSettings
from shardproof.rollout.replicas import Replicas
from shardproof.rollout.sync import Delivery
from shardproof.rollout.vllm_places import places
from shardproof.rollout.vllm_server import Served, VllmServer

class Engine:
    pass

settings, engine = VllmSettings(replicas=2), Engine()
servers = [VllmServer(settings, Served(Path("model"), "float32", "cpu"), place) for place in places(settings)]
for server in servers:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server.process = subprocess.Popen(command, start_new_session=True)
replicas = Replicas([Delivery(server, "run", [1, 2], 1.0, {}) for server in servers], 5.0)
weakref.finalize(engine, replicas.stop)
print(*(server.process.pid for server in servers))
"""


def test_a_trainer_that_ends_without_closing_its_engine_leaves_no_server_and_says_nothing():
    said = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=100)
    assert said.returncode == 0 and said.stderr == ""
    pids = list(map(int, said.stdout.split()))
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
