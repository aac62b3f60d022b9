"""vLLM as a rollout engine: one server or several, which rank 0 starts, watches and brings weights to."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.config.vllm import VllmSettings
from shardproof.dist.collectives import broadcast, exchange, together
from shardproof.dist.deadline import deadline, mesh_groups
from shardproof.dist.region import ranks_apart
from shardproof.errors import fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.pretrained import described_config
from shardproof.export.stream import WeightStream
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.queue import BatchEngine
from shardproof.rollout.replicas import Replicas
from shardproof.rollout.sync import CANARY_TOKENS, GENERATE, TOLERANCE, Delivered, Delivery, Proof
from shardproof.rollout.trajectory import Trajectory
from shardproof.rollout.vllm_client import Deadline, Refused, Unreachable
from shardproof.rollout.vllm_payload import AdapterPayload, SharedPayload
from shardproof.rollout.vllm_places import Gpus, check_reach, check_sleep, places, visible_gpus
from shardproof.rollout.vllm_plugin import BACKEND
from shardproof.rollout.vllm_senders import Sender, SyncClient, make_sender
from shardproof.rollout.vllm_server import Served, VllmServer
from shardproof.rollout.vllm_versions import check_sender
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.score import logprobs

_MARGIN_S = 60.0
_PRIME = 7919


class VllmEngine(BatchEngine):
    """vLLM servers that sample from the policy's weights. Collective: every rank makes it."""

    version = -1

    def __init__(
        self,
        policy: ShardedModel,
        settings: VllmSettings | None = None,
        tolerance: float | None = None,
        batch_size: int = 256,
        sleeps: bool = False,
    ):
        super().__init__(batch_size)
        self.policy = policy
        self.settings = settings or VllmSettings()
        self.proof: Proof | None = None
        self._adapter = policy.has_lora and self.settings.lora == "adapter"
        self._sleeps = sleeps
        self._dtype = str(policy.settings.compute_dtype).removeprefix("torch.")
        self._tokens = canary_tokens(policy.model.config.get_text_config().vocab_size)
        self._folder: Path | None = None
        self._sender: Sender | None = None  # for vLLM's own transports
        self.replicas: Replicas | None = None  # on rank 0
        apart = check_one_host(self.settings, self._adapter)
        with self._deadline(self.settings.start_timeout_s), together("rollout"):
            if dist.get_rank() == 0:
                self.replicas = self._connect(tolerance or TOLERANCE[self._dtype], apart)
        self._payload = AdapterPayload(policy, self._folder) if self._adapter else SharedPayload(policy)

    def _connect(self, tolerance: float, apart: Sequence[int]) -> Replicas:
        """Start or find the servers. Rank 0 alone."""
        if self._sleeps:
            check_sleep(self.settings, self.policy.device.type, self._adapter)
        if self.settings.transport in ("nccl", "ipc"):
            check_sender(self.settings.transport)
        self._folder = Path(tempfile.mkdtemp(prefix="shardproof-"))
        served, run = self._served(), f"shardproof-{secrets.token_hex(4)}"
        backend = BACKEND if self.settings.transport in ("shared", "network") else self.settings.transport
        config = self.policy.model.config.get_text_config().to_dict()
        config |= {"dtype": self._dtype, "backend": backend}
        servers = [
            VllmServer(self.settings, served, place)
            for place in places(self.settings, served.device, find_gpus(served.device))
        ]
        deliveries = [Delivery(server, run, self._tokens, tolerance, config) for server in servers]
        replicas = Replicas(deliveries, self.settings.sync_timeout_s)
        # A run that fails before it closes its engine leaves no server behind.
        weakref.finalize(self, replicas.stop)
        replicas.start()
        check_reach([server.client.url for server in servers], apart)
        replicas.identify()
        return replicas

    def _served(self) -> Served:
        folder, rank = self.policy.folder, None
        if self._adapter:
            if folder is None:
                raise fail(
                    "C001",
                    "rollout",
                    "rollout.vllm.lora='adapter' needs a checkpoint that vLLM can load the base from.",
                )
            rank = max(getattr(config, "r", 0) for config in self.policy.model.peft_config.values())
        elif folder is None:
            assert self._folder is not None
            folder = self._folder / "config"
            described_config(self.policy).save_pretrained(folder)
        return Served(folder, self._dtype, self.policy.device.type, rank, self._sleeps)

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
        self.check_awake("load_weights")
        if stream.policy is not self.policy:
            raise fail("C001", "rollout", "the stream belongs to another policy than the engine.")
        if self.settings.transport in ("nccl", "ipc") and not self._adapter:
            return self._send_by_vllm(stream)
        started = time.perf_counter()
        receipt, payload = self._payload.pack()
        written = time.perf_counter() - started
        (expected,) = logprobs(self.policy, [self._tokens])
        scored = time.perf_counter() - started - written
        with self._deadline(self._sync_deadline_s), together("sync") as message:
            if self.replicas is not None:
                delivered = Delivered(receipt.version, expected.tolist(), **payload)
                proof = self.replicas.deliver(delivered)
                message.mine = [proof.gap, {"write": written, "canary/trainer": scored, **proof.seconds}]
        gap, seconds = message.rows[0]
        self.proof = Proof(receipt.version, gap, seconds)
        self.version = receipt.version
        self._payload.keep()
        return receipt

    def _send_by_vllm(self, stream: WeightStream) -> ExportReceipt:
        """Bring the weights by vLLM's own NCCL or IPC engine; the canary is the proof, and nothing can be brought back.

        Experimental. Collective: every rank.
        """
        limit = self.settings.sync_timeout_s
        seconds, started = {}, time.perf_counter()
        (expected,) = logprobs(self.policy, [self._tokens])
        payload = Delivered(self.policy.version, expected.tolist())
        seconds["canary/trainer"] = time.perf_counter() - started
        with self._deadline(self._sync_deadline_s), together("sync"):
            if self.delivery is not None:
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
            if self.delivery is not None:
                self.delivery.verify_canary(payload, Deadline(limit))
                self.delivery.commit(payload, Deadline(limit))
                message.mine = [self.delivery.gap(payload), self.delivery.seconds["canary"]]
        assert stream.receipt is not None
        gap, seconds["canary"] = message.rows[0]
        self.proof = Proof(self.policy.version, gap, seconds | {"total": time.perf_counter() - started})
        self.version = self.policy.version
        return stream.receipt

    def complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
        """Answer every rank's requests, each under its own seed. Collective: every rank, possibly with no request."""
        rows = exchange([[list(request.tokens), request.seed] for request in requests])
        # Ranks of one sequence-parallel group ask for the same; what is asked twice is sampled once.
        index = {(tuple(tokens), seed): None for row in rows for tokens, seed in row}
        written: list[Any] = []
        with self._deadline(self._sync_deadline_s + self.settings.request_timeout_s), together("generate"):
            if self.delivery is not None:
                written = self._sample(list(index), sampling)
        found = dict(zip(index, broadcast(written), strict=True))
        return [request.answered(*found[request.tokens, request.seed]) for request in requests]

    def _sample(self, asked: list[tuple[tuple[int, ...], int]], sampling: Sampling) -> list[list[Any]]:
        """[tokens, log-probs, finished, version] for each request. Rank 0 alone."""
        assert self.replicas is not None
        committed, limit = self.replicas.committed, Deadline(self._sync_deadline_s)
        assert committed is not None and self.delivery is not None
        while not self.replicas.serving or not self.delivery.is_current(committed, limit.left):
            time.sleep(0.1)
            if limit.over:
                raise fail("R505", "generate", "no replica serves the current weights.")
        bodies = [_body(tokens, seed, sampling) for tokens, seed in asked]
        if committed.adapter is not None:
            bodies = [body | {"model": self.delivery.label(committed)} for body in bodies]
        limit = Deadline(self.settings.request_timeout_s)
        try:
            replies = self.server.client.post_all(GENERATE, bodies, limit)
            self.replicas.check_alone(self.replicas.moved())
            version = self.delivery.version_between(limit)
        except Unreachable as error:
            raise fail(
                "R505", "generate", f"the server stopped or did not answer in time: {error}."
            ) from error
        except Refused as error:
            raise fail("R506", "generate", f"the server refused a request: {error}.") from error
        return [self._read(reply, sampling, version) for reply in replies]

    def _read(self, reply: dict[str, Any], sampling: Sampling, version: int | None) -> list[Any]:
        assert self.delivery is not None
        (choice,) = reply["choices"]
        tokens = choice["token_ids"]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if choice["finish_reason"] not in ("stop", "length") or len(values) != len(tokens) or not tokens:
            message = (
                f"the server ended a request with {choice['finish_reason']!r} after {len(tokens)} tokens."
            )
            raise fail("R505", "generate", message)
        if version is None:
            # The oldest weights that any of its tokens came from.
            version = min(self.delivery.version_of(span["version"]) for span in choice["weight_versions"])
        return [tokens, values, tokens[-1] in sampling.stop_ids, version]

    @property
    def _sync_deadline_s(self) -> float:
        """How long rank 0 may need to bring a version, or to find that it cannot and bring the last one back."""
        return 2 * (self.settings.sync_timeout_s + self.settings.start_timeout_s)

    def _deadline(self, seconds: float) -> Any:
        return deadline("sync", "R505", seconds + _MARGIN_S, mesh_groups(self.policy.mesh))

    def sleep(self) -> None:
        """Have the servers give up weights and KV cache. Collective: every rank."""
        self.check_idle("sleep")
        if not self._sleeps:
            fix = "make it with sleeps=True; in a recipe, set rollout.sleep=true"
            raise fail("C001", "sleep", "the server was not started with vLLM's sleep mode.", fix=fix)
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
        if self.replicas is not None:
            self.replicas.stop()
        self._payload.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def check_one_host(settings: VllmSettings, adapter: bool) -> list[int]:
    """The ranks on other hosts than rank 0; raises on every rank if they had to write to memory of rank 0.

    Collective: every rank.
    """
    apart = ranks_apart()
    if apart and settings.transport == "shared" and not adapter:
        message = (
            f"rollout.vllm.transport='shared' needs every rank on rank 0's host, but ranks {apart} "
            "share no memory with rank 0."
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


def _body(tokens: Sequence[int], seed: int, sampling: Sampling) -> dict[str, Any]:
    params = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        "logprobs": 0,
        # The run says where completions end, and has read the checkpoint's generation config for that itself.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_ids),
        "detokenize": False,
    }
    return {"token_ids": list(tokens), "sampling_params": params}
