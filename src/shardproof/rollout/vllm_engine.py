"""vLLM as a rollout engine: one server or several, which rank 0 starts, watches and brings weights to."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.config.vllm import VllmSettings
from shardproof.dist.collectives import exchange, raise_together, together
from shardproof.dist.deadline import deadline, mesh_groups
from shardproof.dist.hosts import hosts
from shardproof.errors import ShardproofError, fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.pretrained import described_config
from shardproof.export.stream import WeightStream
from shardproof.findings import Finding
from shardproof.rollout.asking import CollectiveRequests
from shardproof.rollout.dispatcher import Dispatcher
from shardproof.rollout.engine import Answering, Request, Sampling
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.replica_link import ReplicaAddress
from shardproof.rollout.replicas import Replicas
from shardproof.rollout.returned_experts import check_returns
from shardproof.rollout.sync import CANARY_TOKENS, TOLERANCE, Delivered, Delivery, Proof
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_client import Deadline
from shardproof.rollout.vllm_payload import make_payload
from shardproof.rollout.vllm_places import Gpus, check_reach, check_sleep, places, visible_gpus
from shardproof.rollout.vllm_plugin import BACKEND
from shardproof.rollout.vllm_senders import Sender, SyncClient, make_sender
from shardproof.rollout.vllm_server import Served, VllmServer
from shardproof.rollout.vllm_versions import check_sender, interface_of
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.score import logprobs

_MARGIN_S = 60.0
_UNSERVED_S = 30.0  # how long requests wait for a server that nobody can repair
_PRIME = 7919


class VllmEngine:
    """vLLM servers that sample from the policy's weights. Collective: every rank makes it.

    With `experts`, the policy's `expert_shape`, answers have the experts of their tokens. With `finds_strings` servers that
    the run starts end completions at stop strings; without, stop strings are cut from completions that are longer.
    """

    version = -1
    asleep = False

    def __init__(
        self,
        policy: ShardedModel,
        settings: VllmSettings | None = None,
        tolerance: float | None = None,
        batch_size: int = 256,
        sleeps: bool = False,
        experts: ExpertShape | None = None,
        finds_strings: bool = False,
    ):
        self.policy = policy
        self._experts, self._finds_strings = experts, finds_strings
        self.settings = settings or VllmSettings()
        self.proof: Proof | None = None
        self._adapter = policy.has_lora and self.settings.lora == "adapter"
        self._sleeps = sleeps
        self._dtype = str(policy.settings.compute_dtype).removeprefix("torch.")
        self._tokens = canary_tokens(policy.model.config.get_text_config().vocab_size)
        self._folder: Path | None = None
        self._sender: Sender | None = None  # for vLLM's own transports
        self._unproved = False  # something was drawn, or is being drawn, since the weights were last proved
        self.replicas: Replicas | None = None  # on rank 0
        apart = check_one_host(self.settings, self._adapter)
        with self._deadline(self.settings.start_timeout_s), together("rollout") as message:
            if dist.get_rank() == 0:
                self.replicas, run = self._connect(tolerance or TOLERANCE[self._dtype])
                message.mine = [run, self.replicas.addresses, self.replicas.identify().version]
        run, addresses, vllm = message.rows[0]
        check_reach([url for _, url in addresses], apart)
        self._payload = make_payload(policy, self.settings, self._adapter, self._folder)
        with together("rollout"):  # a thread, or a package, may not be had on one rank
            self.dispatcher = Dispatcher(
                [ReplicaAddress(name, url) for name, url in addresses],
                run,
                interface_of(vllm),
                in_flight=2 * batch_size,  # while a server answers one batch, it has the next
                request_timeout_s=self.settings.request_timeout_s,
                adapter=self._adapter,
                experts=experts,
                unserved_s=self._sync_deadline_s if self._can_repair else _UNSERVED_S,
            )
        self._requests = CollectiveRequests(
            self.start,
            lambda: self._deadline(self._sync_deadline_s + self.settings.request_timeout_s),
            policy.sequence_parallel,
        )

    @property
    def _can_repair(self) -> bool:
        """Whether the committed weights are kept, for a server that comes back; vLLM's own transports keep nothing."""
        return self._adapter or self.settings.transport not in ("nccl", "ipc")

    def _connect(self, tolerance: float) -> tuple[Replicas, str]:
        """Start or find the servers; returns them and the name of the run in their labels. Rank 0 alone."""
        if self._sleeps:
            check_sleep(self.settings, self.policy.device.type, self._adapter)
        if not self._can_repair:
            check_sender(self.settings.transport)
        self._folder = Path(tempfile.mkdtemp(prefix="shardproof-"))
        served, run = self._served(), f"shardproof-{secrets.token_hex(4)}"
        backend = BACKEND if self._can_repair else self.settings.transport
        config = self.policy.model.config.get_text_config().to_dict()
        config |= {"dtype": self._dtype, "backend": backend}
        servers = [
            VllmServer(self.settings, served, place)
            for place in places(self.settings, served.device, find_gpus(served.device))
        ]
        deliveries = [Delivery(server, run, self._tokens, tolerance, config) for server in servers]
        replicas = Replicas(deliveries, self.settings.sync_timeout_s)
        # A run that fails before it closes its engine leaves no server behind.
        self._stop = weakref.finalize(self, replicas.stop)
        replicas.start()
        return replicas, run

    def _served(self) -> Served:
        folder, rank = self.policy.folder, None
        if self._adapter:
            held = self.policy.settings.lora_base
            if folder is None or held is not None:
                needed = "a checkpoint that vLLM can load the base from"
                needed = needed if held is None else f"a base that vLLM has too, not one in {held}"
                raise fail("C001", "rollout", f"rollout.vllm.lora='adapter' needs {needed}.")
            rank = max(getattr(config, "r", 0) for config in self.policy.model.peft_config.values())
        elif folder is None:
            assert self._folder is not None
            folder = self._folder / "config"
            described_config(self.policy).save_pretrained(folder)
        records = self._experts is not None
        if records and not self.settings.urls:
            check_returns(self.policy.device.type)
        device = self.policy.device.type
        strings = self._finds_strings and self.policy.folder is not None  # which has the tokenizer
        return Served(folder, self._dtype, device, rank, self._sleeps, records, strings)

    @property
    def delivery(self) -> Delivery | None:
        """The way to the first server; None on other ranks than rank 0."""
        return self.replicas.all[0].delivery if self.replicas is not None else None

    @property
    def server(self) -> VllmServer:
        """The first server. Rank 0 alone."""
        assert self.delivery is not None
        return self.delivery.server

    @property
    def canary_gap(self) -> float | None:
        """What the last sync's canary measured."""
        return self.proof.gap if self.proof is not None else None

    def load_weights(self, stream: WeightStream) -> ExportReceipt:
        """Bring the policy's weights to all servers and prove that they arrived, or leave them with those they had.

        A server that does not take them is taken out while the others serve them. Collective: every rank.
        """
        self._check_awake("load_weights")
        if stream.policy is not self.policy:
            raise fail("C001", "rollout", "the stream belongs to another policy than the engine.")
        if not self._can_repair:
            return self._send_by_vllm(stream)
        started = time.perf_counter()
        packed = self._payload.pack()  # the servers go on answering
        written = time.perf_counter() - started
        (expected,) = logprobs(self.policy, [self._tokens])
        scored = time.perf_counter() - started - written
        receipt = packed.receipt
        payload = Delivered(receipt.version, expected.tolist(), **packed.delivered)

        def deliver(replicas: Replicas, drawn: bool) -> list[Any]:
            proof = replicas.deliver(payload, packed.lost, drawn)
            return [proof.gap, {"write": written, "canary/trainer": scored, **proof.seconds}]

        gap, seconds = self._while_held(deliver)
        self.proof = Proof(receipt.version, gap, seconds)
        self.version = receipt.version
        self._payload.keep()
        return receipt

    def _while_held(self, act: Callable[[Replicas, bool], Any]) -> Any:
        """What rank 0 does to the servers while no rank sends them anything; then all go on with those that serve.

        `act` learns whether anything was drawn since the weights were last proved. An error of it is raised on every rank.
        Collective: every rank.
        """
        self.dispatcher.hold()
        drawn = any(exchange(self._unproved))  # and no rank sends anything any more
        findings: list[Finding] = []
        with self._deadline(self._sync_deadline_s), together("sync") as message:
            if self.replicas is not None:
                found = None
                try:
                    found = act(self.replicas, drawn)
                except ShardproofError as error:
                    findings = error.findings
                message.mine = [found, bool(findings), self.replicas.version, self.replicas.serving]
        found, failed, version, serving = message.rows[0]
        self._unproved = self.dispatcher.num_unanswered > 0
        if version >= 0:
            self.dispatcher.release(version, serving)
        if failed:
            raise_together(findings)
        return found

    def _send_by_vllm(self, stream: WeightStream) -> ExportReceipt:
        """Bring the weights by vLLM's own NCCL or IPC engine; the canary is the proof, and nothing can be brought back.

        Experimental. Collective: every rank.
        """
        limit = self.settings.sync_timeout_s
        seconds, started = {}, time.perf_counter()
        (expected,) = logprobs(self.policy, [self._tokens])
        payload = Delivered(self.policy.version, expected.tolist())
        seconds["canary/trainer"] = time.perf_counter() - started
        self.dispatcher.hold()
        exchange(None)  # no rank sends anything any more
        with self._deadline(self._sync_deadline_s), together("sync"):
            if self.replicas is not None and self.delivery is not None:
                self.replicas.adopt(None)
                self.delivery.committed = None
                self.server.ensure_up()
                self.delivery.prepare(payload, Deadline(limit))
        if self._sender is None:
            client = SyncClient(self.server, limit) if self.delivery is not None else None
            interface = self.delivery.interface if self.delivery is not None else None
            num_workers = self.settings.tensor_parallel_size
            self._sender = make_sender(self.settings.transport, client, num_workers, interface)
        seconds["prepare"] = time.perf_counter() - started - seconds["canary/trainer"]
        self._sender.send(stream)
        seconds["transfer"] = time.perf_counter() - started - sum(seconds.values())
        with self._deadline(limit), together("sync") as message:
            if self.replicas is not None and self.delivery is not None:
                self.delivery.verify_canary(payload, Deadline(limit))
                self.delivery.commit(payload, Deadline(limit))
                self.replicas.adopt(payload)
                message.mine = [self.delivery.gap(payload), self.delivery.seconds["canary"]]
        assert stream.receipt is not None
        gap, seconds["canary"] = message.rows[0]
        self.proof = Proof(self.policy.version, gap, seconds | {"total": time.perf_counter() - started})
        self.version = self.policy.version
        self._unproved = self.dispatcher.num_unanswered > 0
        self.dispatcher.release(self.version, ["0"])
        return stream.receipt

    @property
    def busy(self) -> bool:
        """Whether requests of any rank are unanswered. The same on every rank."""
        return self._requests.busy

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Take this rank's requests; returns a ticket for each. Collective: every rank, possibly with no request."""
        self._check_can_draw()
        return self._requests.submit(requests, sampling)

    def poll(self) -> list[tuple[int, Trajectory]]:
        """Wait for answers; returns (ticket, trajectory) for those that are ready on this rank, possibly none.

        With the last ones, the servers prove that their weights are still those that they were given. A request that
        cannot be answered raises on every rank, and no request is left then. Collective: every rank.
        """
        if not self.busy:
            return []
        found = self._requests.poll()
        if not self.busy:
            self.check_drawn()
        return found

    def start(self, request: Request, sampling: Sampling) -> Answering:
        """Take a request of this rank; returns at once. From any thread. Not collective."""
        self._check_can_draw()
        self._unproved = True
        asked = self.dispatcher.start(request, sampling)
        self._unproved = True  # again: the main thread may just have seen that nothing is unanswered
        return asked

    def _check_can_draw(self) -> None:
        self._check_awake("generate")
        if self.version < 0:
            raise fail("R501", "generate", "the engine has no weights yet.")

    def _check_awake(self, stage: str) -> None:
        if self.asleep:
            fix = "call wake, then load_weights"
            raise fail("R501", stage, "the engine is asleep: its weights and memory were freed.", fix=fix)

    def check_drawn(self) -> None:
        """Raise on every rank if a server's weights are not those that were proved when it got them.

        Servers that are busy are not interrupted for it: a small change is found at the next sync, which pauses them.
        Collective: every rank.
        """
        busy = any(exchange(self.dispatcher.num_unanswered > 0))
        with self._deadline(self.settings.sync_timeout_s), together("generate") as message:
            if self.replicas is not None:
                message.mine = self.replicas.moved(busy)
        moved = message.rows[0]
        if moved:
            self._while_held(lambda replicas, drawn: replicas.check_alone(moved))
        self._unproved = busy

    def activity(self) -> dict[str, float]:
        """How busy this rank kept the servers since the last call: metrics by name."""
        return self.dispatcher.activity()

    def events(self) -> list[str]:
        """What happened to servers since the last call; rank 0 alone knows."""
        return self.replicas.events() if self.replicas is not None else []

    @property
    def _sync_deadline_s(self) -> float:
        """How long rank 0 may need to bring a version, or to find that it cannot and bring the last one back."""
        return 2 * (self.settings.sync_timeout_s + self.settings.start_timeout_s)

    def _deadline(self, seconds: float) -> Any:
        return deadline("sync", "R505", seconds + _MARGIN_S, mesh_groups(self.policy.mesh))

    def sleep(self) -> None:
        """Have the servers give up weights and KV cache. Collective: every rank."""
        if not self._sleeps:
            fix = "make it with sleeps=True; in a recipe, set rollout.sleep=true"
            raise fail("C001", "sleep", "the server was not started with vLLM's sleep mode.", fix=fix)
        if any(exchange(self.busy or self.dispatcher.num_unanswered > 0)):
            fix = "poll it until it is not busy"
            raise fail("R501", "sleep", "the engine still has requests to answer.", fix=fix)
        self.dispatcher.hold()
        with self._deadline(self.settings.sync_timeout_s), together("sync"):
            if self.replicas is not None:
                self.replicas.sleep()
        self.version, self.asleep = -1, True

    def wake(self) -> None:
        """Have the servers take their memory back; the next sync proves what is in it. Collective: every rank."""
        if self.asleep:
            with self._deadline(self.settings.sync_timeout_s), together("sync"):
                if self.replicas is not None:
                    self.replicas.wake()
            self.asleep = False

    def close(self) -> None:
        """Stop the servers that the run started, and give the memory back."""
        self.dispatcher.close()
        if self.replicas is not None:
            self._stop()  # once
        self._payload.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def check_one_host(settings: VllmSettings, adapter: bool) -> list[int]:
    """The ranks on other hosts than rank 0; raises on every rank if they had to write to memory of rank 0.

    Collective: every rank.
    """
    apart = [rank for rank, host in enumerate(hosts().of_rank) if host]
    if apart and settings.transport == "shared" and not adapter:
        message = (
            f"rollout.vllm.transport='shared' needs every rank on rank 0's host, but {hosts().describe(apart)} "
            f"share{'s' * (len(apart) == 1)} no memory with rank 0."
        )
        fix = "train on one host, or set rollout.engine=embedded, which needs no shared memory"
        raise fail("C001", "rollout", message, fix=fix)
    return apart


def find_gpus(device: str) -> Gpus:
    """The GPUs that servers can get, and how many of them the ranks of this host train on."""
    if device == "cpu":
        return Gpus()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return Gpus(visible_gpus(torch.cuda.device_count()), num_ranks)


def canary_tokens(vocab_size: int) -> list[int]:
    """Tokens from all over the vocabulary, the same in every run."""
    return [(17 + k * _PRIME) % vocab_size for k in range(CANARY_TOKENS)]
