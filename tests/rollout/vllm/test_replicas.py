"""Two real servers that a run of two ranks starts: one story of everything that happens to them, told once.

What each part of it must come to is a test of its own; starts of vLLM are what costs.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.dist.collectives import broadcast
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.replica_link import ReplicaAddress
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_client import Deadline
from shardproof.rollout.vllm_versions import interface_of
from tests.ranks import run_ranks
from tests.rollout.vllm.support import PROMPTS, change, connect, failure, load_policy, sync

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

FACTOR = 1.1  # of each update
SHORT, LONG = Sampling(6, temperature=0.7), Sampling(300, temperature=0.7)
LIMIT_S = 240.0


def requests(num: int) -> list[Request]:
    """Different ones on each rank."""
    first = 100 * dist.get_rank()
    return [Request(Trajectory.of_prompt(PROMPTS[k % 3]), seed=first + k) for k in range(num)]


def begin(engine: Any, num: int, sampling: Sampling) -> list[Any]:
    return [engine.start(request, sampling) for request in requests(num)]


def answers(started: list[Any]) -> list[Trajectory]:
    return [each.future.result(LIMIT_S) for each in started]


def drawn(trajectory: Trajectory) -> tuple[int, ...]:
    return trajectory.segments[-1].tokens


def versions(trajectories: list[Trajectory]) -> set[tuple[int, ...]]:
    """The versions that drew each answer, in their order."""
    parts = [t.segments[-1].parts or ((0, t.segments[-1].version),) for t in trajectories]
    return {tuple(version for _, version in some) for some in parts}


def by_replica(trajectories: list[Trajectory]) -> set[str]:
    return {str(t.facts["replica"]) for t in trajectories}


class Story:
    """What happens, on one rank. `on_rank_0` runs there alone; afterwards all ranks go on together."""

    def __init__(self, folder: str):
        self.policy = load_policy(folder)
        self.engine = connect(self.policy, replicas=2, max_model_len=512, args=["--block-size", "32"])
        self.found: dict[str, Any] = {}

    def on_rank_0(self, action: Callable[[], object]) -> None:
        if self.engine.replicas is not None:
            action()
        dist.barrier()

    def delivery(self, place: int) -> Any:
        return self.engine.replicas.all[place].delivery

    def kill(self, place: int) -> None:
        os.killpg(self.delivery(place).server.process.pid, signal.SIGKILL)

    def update(self) -> None:
        change(self.policy, FACTOR)
        sync(self.engine)

    def until_all_serve(self) -> None:
        def wait() -> None:
            end = time.monotonic() + LIMIT_S
            while self.engine.replicas.serving != ["0", "1"]:
                assert time.monotonic() < end
                time.sleep(0.1)

        self.on_rank_0(wait)

    def until_drawn(self, num: int) -> None:
        """Wait until both servers have drawn tokens for requests that were just begun."""

        def wait() -> None:
            for place in (0, 1):
                while self.counter(place) < self.counted[place] + num:
                    time.sleep(0.01)

        self.on_rank_0(wait)

    def count(self) -> None:
        self.on_rank_0(lambda: setattr(self, "counted", [self.counter(place) for place in (0, 1)]))

    def counter(self, place: int) -> float:
        said = self.delivery(place).server.client.get("/metrics", Deadline(30.0))
        return sum(map(float, re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", said, re.MULTILINE)))

    def gap(self, trajectories: list[Trajectory]) -> float:
        """How far log-probs are from those of the weights that the answer names, token by token."""
        worst = 0.0
        for version in range(self.policy.version + 1):
            weights = FACTOR ** (version - self.policy.version)
            scale(self.policy, weights)
            rows = sp.logprobs(self.policy, [list(t.tokens) for t in trajectories], SHORT.temperature)
            scale(self.policy, 1 / weights)
            for trajectory, row in zip(trajectories, rows, strict=True):
                segment = trajectory.segments[-1]
                at, start = len(trajectory.tokens) - len(segment.tokens), 0
                for num, drawn_by in segment.parts or ((len(segment.tokens), segment.version),):
                    said = torch.tensor(segment.logprobs[start : start + num])
                    if drawn_by == version:
                        worst = max(worst, float((row[at + start - 1 :][:num] - said).abs().max()))
                    start += num
        return worst

    # The parts, in their order.

    def either_replica(self) -> None:
        """The same requests to one replica and to the other."""
        sync(self.engine)
        asked = answers(begin(self.engine, 12, SHORT))
        apart = []
        run, addresses = run_and_addresses(self.engine)
        for name, url in addresses:
            where, interface = [ReplicaAddress(name, url)], interface_of("0.32.0")
            one = Dispatcher(where, run, interface, in_flight=64, request_timeout_s=60.0)
            one.release(0, [name])
            apart.append(answers([one.start(request, SHORT) for request in requests(12)]))
            one.close()
        self.found["either"] = [
            [list(map(drawn, some)) for some in (asked, *apart)],
            [by_replica(some) for some in (asked, *apart)],
        ]

    def slow_reader(self) -> None:
        """Answers that nobody reads for a while, and an update meanwhile."""
        started = begin(self.engine, 40, SHORT)
        while not all(each.future.done() for each in started):
            time.sleep(0.01)
        dist.barrier()
        self.update()
        found = answers(started)
        self.found["slow"] = [versions(found), len({drawn(t) for t in found}) > 20, self.gap(found)]

    def interrupted(self) -> None:
        """An update in the middle of long answers."""
        self.engine.check_drawn()
        started: list[Any] = []
        while_held = self.engine._while_held

        def with_requests(act: Any) -> Any:
            # The weights are packed, and the servers are about to be paused.
            del self.engine._while_held
            self.count()
            started.extend(begin(self.engine, 8, LONG))
            self.until_drawn(16)
            return while_held(act)

        self.engine._while_held = with_requests
        self.update()
        self.engine.check_drawn()
        found = answers(started)
        self.engine.check_drawn()
        lengths = {len(drawn(t)) for t in found}
        self.found["interrupted"] = [versions(found), lengths, self.gap(found)]

    def refused(self) -> None:
        """One replica does not find a tensor."""

        def spoil() -> None:
            delivery = self.delivery(1)
            transfer = delivery.transfer

            def spoiled(payload: Any, deadline: Deadline) -> None:
                del delivery.transfer
                address = payload.update["address"]
                kept = [t for t in address["tensors"] if t[0] != "model.layers.1.mlp.up_proj.weight"]
                update = {**payload.update, "address": {**address, "tensors": kept}}
                transfer(replace(payload, update=update), deadline)

            delivery.transfer = spoiled
            replicas = self.engine.replicas
            say_out = replicas._say_out

            def noted(replica: Any, finding: Any) -> Any:
                # Here, because a replica that is back has no problem, and that may be at once.
                self.found.setdefault("problem", finding.message)
                return say_out(replica, finding)

            replicas._say_out = noted

        self.on_rank_0(spoil)
        self.update()
        self.until_all_serve()
        found = answers(begin(self.engine, 12, SHORT))
        while by_replica(found) != {"0", "1"}:  # this rank looks at replicas that are out now and then
            found = answers(begin(self.engine, 12, SHORT))
        self.found["refused"] = [versions(found), by_replica(found), self.gap(found)]

    def old_weights(self) -> None:
        """A replica gets the weights of the version before, and keeps the label."""

        def swap() -> None:
            replica, client = self.engine.replicas.all[1], self.delivery(1).server.client
            with replica.lock:
                for route in ("/pause?mode=abort", "/start_weight_update"):
                    client.post(route, None, Deadline(30.0))
                update = self.before.update | {"renew": True}
                client.post("/update_weights", {"update_info": update}, Deadline(30.0))
                for route in ("/finish_weight_update", "/resume"):
                    client.post(route, None, Deadline(30.0))

        self.on_rank_0(lambda: setattr(self, "before", self.delivery(1).committed))
        self.update()
        self.on_rank_0(swap)
        answers(begin(self.engine, 12, SHORT))
        self.found["old"] = failure(self.engine.check_drawn)
        self.until_all_serve()
        found = answers(begin(self.engine, 12, SHORT))
        self.engine.check_drawn()
        self.found["old, then"] = [versions(found), self.gap(found)]

    def killed_in_generation(self) -> None:
        undisturbed = answers(begin(self.engine, 8, LONG))
        self.count()
        started = begin(self.engine, 8, LONG)
        self.until_drawn(16)
        self.on_rank_0(lambda: self.kill(1))
        found = answers(started)
        self.found["killed in generation"] = [
            list(map(drawn, found)) == list(map(drawn, undisturbed)),
            by_replica(found),
        ]

    def killed_in_a_sync(self, place: int, phase: str) -> None:
        """Kill a replica right before a phase."""
        self.until_all_serve()

        def arm() -> None:
            delivery = self.delivery(place)
            plain = getattr(delivery, phase)

            def doomed(*args: Any) -> None:
                delattr(delivery, phase)
                self.kill(place)
                plain(*args)

            setattr(delivery, phase, doomed)

        self.on_rank_0(arm)
        self.update()
        found = answers(begin(self.engine, 12, SHORT))
        self.found[f"killed before {phase}"] = [versions(found), by_replica(found), self.gap(found)]

    def tell(self) -> dict[str, Any]:
        self.either_replica()
        self.slow_reader()
        self.interrupted()
        self.refused()
        self.old_weights()
        self.killed_in_generation()
        self.killed_in_a_sync(0, "transfer")
        self.killed_in_a_sync(1, "commit")
        servers = [r.delivery.server for r in self.engine.replicas.all] if self.engine.replicas else []
        starts, pids = [s.num_starts for s in servers], [s.process.pid for s in servers if s.process]
        self.engine.close()
        return {**self.found, "starts": starts, "pids": pids}


@torch.no_grad()
def scale(policy: Any, factor: float) -> None:
    """Move every matrix as `change` does, without counting it as an update."""
    for _, param in policy.named_parameters():
        if param.ndim > 1 and param.requires_grad:
            param.mul_(factor)


def run_and_addresses(engine: Any) -> tuple[str, list[tuple[str, str]]]:
    if engine.replicas is None:
        return broadcast(None)
    return broadcast([engine.delivery.run, engine.replicas.addresses])


def tell(folder: str) -> dict[str, Any]:
    return Story(folder).tell()


@pytest.fixture(scope="module")
def story(models: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank found."""
    return run_ranks(2, tell, models["long"], timeout=550, group_timeout=LIMIT_S)


@pytest.mark.slow
def test_completions_do_not_depend_on_the_replica(story):
    for found in story:
        (asked, one, other), names = found["either"]
        assert asked == one == other
        assert names == [{"0", "1"}, {"0"}, {"1"}]


@pytest.mark.slow
def test_answers_wait_for_a_client_that_is_slow(story):
    for found in story:
        said, differ, gap = found["slow"]
        assert said == {(0,)} and differ and gap < 1e-3


@pytest.mark.slow
def test_an_update_interrupts_long_answers_and_each_token_names_its_weights(story):
    assert any((1, 2) in found["interrupted"][0] for found in story)
    for found in story:
        said, lengths, gap = found["interrupted"]
        assert said <= {(1,), (1, 2), (2,)}  # some may have been complete, and some not begun
        assert lengths == {300}
        # Keys and values of the older weights were not read: the newer log-probs are exact.
        assert gap < 1e-3


@pytest.mark.slow
def test_a_replica_that_refuses_is_out_and_then_brought_back(story):
    assert story[0]["problem"].startswith("replica 1: 'model.layers.1.mlp.up_proj.weight' did not arrive")
    for found in story:
        said, names, gap = found["refused"]
        assert said == {(3,)} and names == {"0", "1"} and gap < 1e-3


@pytest.mark.slow
def test_old_weights_under_a_new_label_are_found_by_the_canary(story):
    first, second = story
    assert first["old"] == second["old"]
    assert "R503 generate: rank 0: replica 1: the server's log-probs of the canary moved by" in first["old"]
    for found in story:
        said, gap = found["old, then"]
        assert said == {(4,)} and gap < 1e-3


@pytest.mark.slow
def test_requests_of_a_killed_replica_are_answered_by_the_other_with_the_same_tokens(story):
    for found in story:
        same, names = found["killed in generation"]
        assert same and "0" in names


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "version", "other"), [("transfer", 5, "1"), ("commit", 6, "0")])
def test_a_replica_that_is_killed_in_a_sync_is_out_while_the_other_serves(story, phase, version, other):
    for found in story:
        said, names, gap = found[f"killed before {phase}"]
        assert said == {(version,)} and names == {other} and gap < 1e-3
    assert min(story[0]["starts"]) >= 1 and sum(story[0]["starts"]) >= 4


@pytest.mark.slow
def test_nothing_of_the_servers_is_left(story):
    pids = story[0]["pids"]
    assert len(pids) == 2
    # Each server and all that it starts are a session of its own. What was killed may take a moment to be gone.
    left = [process for process in psutil.process_iter() if session_of(process.pid) in pids]
    assert not psutil.wait_procs(left, timeout=LIMIT_S)[1]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
