"""The engine of a run with several servers, on two ranks: all ranks hold, go on and fail together.

The servers are stand-ins in rank 0's process; tests/rollout/vllm has real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.config.vllm import VllmSettings
from shardproof.dist.collectives import broadcast
from shardproof.errors import ShardproofError
from shardproof.rollout import replicas as replicas_module
from shardproof.rollout.engine import BackgroundEngine, Request, Sampling, generate
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_engine import VllmEngine
from tests.models import make_checkpoint
from tests.ranks import run_ranks
from tests.rollout.fake_vllm import FakeVllm

pytestmark = pytest.mark.distributed

FACTS = {"dtype": "float32", "backend": "shardproof", "logprobs_mode": "processed_logprobs"}
SAMPLING = Sampling(6)
LIMIT_S = 20.0


class Run:
    """An engine of two servers on each rank. What a stand-in says of the canary is far from what the trainer says."""

    def __init__(self, folder: str, stack: ExitStack, vllm: str = "0.32.0", lora: Any = None):
        self.policy = sp.load(folder, device="cpu", compute_dtype=torch.float32, lora=lora)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(replicas_module, "_LOOK_S", 0.02)
        patch.setattr(replicas_module, "_MOST_WAIT_S", 0.05)
        self.fakes: list[FakeVllm] = []
        if dist.get_rank() == 0:
            facts = {**FACTS, "lora": lora is not None}
            self.fakes = [stack.enter_context(FakeVllm(vllm=vllm, facts=facts)) for _ in range(2)]
        urls = broadcast([fake.url for fake in self.fakes])
        settings = VllmSettings(
            mode="server",
            url=urls,
            sync_timeout_s=10.0,
            start_timeout_s=10.0,
            lora="merge" if lora is None else "adapter",
        )
        self.engine = VllmEngine(self.policy, settings, tolerance=60.0)
        stack.callback(self.engine.close)

    def sync(self) -> None:
        self.engine.load_weights(sp.WeightStream(self.policy, torch.float32))

    def update(self) -> None:
        self.policy.version += 1
        self.policy.num_updates += 1
        self.sync()

    def on_rank_0(self, action: Callable[[], object]) -> None:
        if self.fakes:
            action()
        dist.barrier()

    def requests(self, num: int = 4) -> list[Request]:
        first = 10 * dist.get_rank()
        return [Request(Trajectory.of_prompt((1, 2, 3)), first + k) for k in range(num)]

    def versions(self) -> set[int]:
        return {t.version for t in generate(self.engine, self.requests(), SAMPLING)}


def failure(action: Callable[[], object]) -> str:
    try:
        action()
    except ShardproofError as error:
        return str(error)
    raise AssertionError("no error was raised")


def several(folder: str, vllm: str) -> dict[str, Any]:
    with ExitStack() as stack:
        run = Run(folder, stack, vllm)
        engine, found = run.engine, dict[str, Any]()
        found["kind"] = isinstance(engine, BackgroundEngine)
        found["before"] = failure(lambda: engine.start(run.requests(1)[0], SAMPLING))
        run.sync()
        found["first"] = run.versions()
        run.on_rank_0(lambda: [fake.hold_back() for fake in run.fakes])
        started = [engine.start(request, SAMPLING) for request in run.requests()]
        run.on_rank_0(lambda: [fake.until_at(4) or fake.draw(2) for fake in run.fakes])
        run.on_rank_0(lambda: run.fakes[1].refuses.update({"/update_weights": (500, "no room")}))
        run.update()
        run.on_rank_0(lambda: [fake.go_on() for fake in run.fakes])
        answers = [each.future.result(LIMIT_S) for each in started]
        found["interrupted"] = {t.segments[-1].parts for t in answers}
        found["by"] = {t.facts["replica"] for t in answers}
        run.on_rank_0(lambda: run.fakes[0].refuses.update({"/update_weights": (500, "no room either")}))
        found["refused"] = failure(run.update)
        found["version"] = engine.version
        run.on_rank_0(lambda: [fake.refuses.clear() for fake in run.fakes])
        found["after"] = run.versions()
        run.sync()
        found["last"] = run.versions()
        found["activity"] = sorted(engine.activity())
        return found


@pytest.mark.parametrize("vllm", ["0.32.0", "0.26.0"])
def test_ranks_hold_and_go_on_together(tmp_path, vllm):
    folder = make_checkpoint(tmp_path, "qwen3_tied")
    first, second = run_ranks(2, several, str(folder), vllm)
    assert first == second
    assert first["kind"] and "R501 generate: the engine has no weights yet" in first["before"]
    assert first["first"] == {0}
    # Two tokens of the old version, and the rest of the new one, from the replica that took it.
    assert first["interrupted"] == {((2, 0), (4, 1))} and first["by"] == {"0"}
    assert first["refused"].startswith(
        "R505 sync: rank 0: no replica took the weights. replica 0: the server"
    )
    assert "no room either. replica 1: the server refused a request: no room." in first["refused"]
    assert "Version 2 was not committed" in first["refused"]
    assert first["version"] == 1 and first["after"] == {1} and first["last"] == {2}
    assert first["activity"] == ["ahead/in_flight", "time/engine_idle"]


def replaced(folder: str) -> dict[str, Any]:
    with ExitStack() as stack:
        run = Run(folder, stack)
        engine, found = run.engine, dict[str, Any]()
        run.sync()
        run.update()
        run.versions()
        # The label stays: only the canary tells.
        run.on_rank_0(lambda: setattr(run.fakes[1], "weights", 0))
        found["asked"] = failure(run.versions)
        found["then"] = run.versions()
        run.on_rank_0(lambda: setattr(run.fakes[0], "weights", 0))
        started = [engine.start(request, SAMPLING) for request in run.requests()]
        [each.future.result(LIMIT_S) for each in started]
        found["at a sync"] = failure(run.update)
        found["version"] = engine.version
        run.sync()
        found["last"] = run.versions()
        found["asleep"] = failure(engine.sleep)
        return found


def test_old_weights_under_a_new_label_end_in_one_error_on_every_rank(tmp_path):
    first, second = run_ranks(2, replaced, str(make_checkpoint(tmp_path, "qwen3_tied")))
    assert first == second
    assert (
        "R503 generate: rank 0: replica 1: the server's log-probs of the canary moved by 1" in first["asked"]
    )
    assert "R503 generate: rank 0: replica 0: the server's log-probs" in first["at a sync"]
    assert first["then"] == {1} and first["version"] == 1 and first["last"] == {2}
    assert "C001 sleep: the server was not started with vLLM's sleep mode" in first["asleep"]


def adapters(folder: str) -> dict[str, Any]:
    from peft import LoraConfig

    with ExitStack() as stack:
        run = Run(folder, stack, lora=LoraConfig(r=4, target_modules=["q_proj"]))
        found: dict[str, Any] = {"versions": [], "loaded": []}
        run.sync()
        for _ in range(2):
            run.update()
            found["versions"].append(run.versions())
            found["loaded"].append([sorted(fake.adapters.values()) for fake in run.fakes])
        # One that is started again has no adapter.
        run.on_rank_0(lambda: [run.fakes[1].kill(), run.fakes[1].revive()])
        run.on_rank_0(lambda: run.fakes[1].until(lambda: str(run.fakes[1].label).endswith("/2")))
        run.update()
        found["versions"].append(run.versions())
        found["loaded"].append([sorted(fake.adapters.values()) for fake in run.fakes])
        return found


def test_adapters_reach_all_servers_and_the_one_before_is_unloaded(tmp_path):
    first, second = run_ranks(2, adapters, str(make_checkpoint(tmp_path, "qwen3_tied")))
    assert first["versions"] == second["versions"] == [{1}, {2}, {3}]
    assert first["loaded"] == [[[1], [1]], [[2], [2]], [[3], [3]]]
