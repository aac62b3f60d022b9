"""Bringing weights to one vLLM server in two phases, and proving that they arrived. All of it runs on rank 0.

Prepare, transfer, verify, commit: the server carries the mark of a pending version from the first to the last of them,
so that nothing it says meanwhile can pass for either version. `replicas.py` does it for all servers of a run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardproof.bounds import largest, within
from shardproof.errors import ShardproofError, error_for, fail
from shardproof.findings import Finding
from shardproof.rollout.labels import label_of, label_of_workers
from shardproof.rollout.vllm_client import GENERATE, Deadline, Refused, Unreachable
from shardproof.rollout.vllm_plugin import BACKEND, EXTENSION
from shardproof.rollout.vllm_server import VllmServer
from shardproof.rollout.vllm_versions import Interface, interface_of

CANARY_TOKENS = 16
# How far the log-probs of engine and trainer may be apart: kernels differ, and half precision rounds.
TOLERANCE = {"float32": 1e-3, "float16": 0.5, "bfloat16": 0.5}
# An engine repeats its own log-probs far better than it agrees with another implementation.
_REPEATS = 0.01
# Settings that decide what tensors a model has; the canary sees the others.
_CONFIG_KEYS = (
    *(
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
    ),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts"),
    *("n_routed_experts", "num_experts_per_tok", "tie_word_embeddings"),
)


@dataclass(frozen=True)
class Delivered:
    """A payload, and what the trainer says about the canary with the same weights."""

    version: int
    expected: Sequence[float]  # the trainer's log-probs of the canary
    update: Mapping[str, Any] = field(default_factory=dict)  # what vLLM's update_weights is told
    updates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by replica, where that differs
    adapter: str | None = None  # the folder of an adapter that is served beside the base


@dataclass(frozen=True)
class Proof:
    """What one sync proved, and what it cost."""

    version: int
    gap: float  # the largest difference between the engine's and the trainer's log-probs of the canary
    seconds: Mapping[str, float]  # by phase; "digests" is the receiver's part of "transfer"


class Delivery:
    """The way of a run's weights to one server."""

    def __init__(
        self, server: VllmServer, run: str, canary: Sequence[int], tolerance: float, config: Mapping[str, Any]
    ):
        self.server = server
        self.run = run
        self.canary = list(canary)
        self.tolerance = tolerance
        self.config = config
        self.interface: Interface | None = None  # of the server's version, as it said it itself
        self.committed: Delivered | None = None
        self.said: list[float] | None = None  # the engine's log-probs of the canary when it was committed
        self.said_at_start: list[float] | None = None  # and before anything was sent
        self._said_staged: list[float] | None = None  # and of what was verified last
        self.seconds: dict[str, float] = {}

    @property
    def name(self) -> str:
        """What the server is called among those of the run."""
        return self.server.place.name

    def identify(self, seconds: float) -> Interface:
        """What the server's version of vLLM has and takes; raises R506 for one that is not supported."""
        deadline = Deadline(seconds)
        try:
            self.interface = interface_of(str(self._facts(deadline)["vllm"]), "sync")
        except (Unreachable, Refused) as error:
            raise error_for([finding_of(error)]) from error
        return self.interface

    def is_current(self, payload: Delivered, seconds: float) -> bool:
        """Whether the server answers, and carries the label of this payload."""
        try:
            return not self.server.has_died and self._label_now(Deadline(seconds)) == self.label(payload)
        except (Unreachable, Refused):
            return False

    def is_unchanged(self, deadline: Deadline, busy: bool) -> bool:
        """Whether the engine still says what it said when its weights were committed.

        While it is `busy` with other requests, kernels that depend on the batch move what it says a little: then only a
        change beyond what the canary allows at a sync is one.
        """
        said = self.ask_canary(self.committed, deadline)
        assert self.said is not None
        return within(distance(said, self.said), self.tolerance if busy else self.tolerance * _REPEATS)

    def check_alone(self, deadline: Deadline) -> None:
        """Interrupt all requests, and raise if the engine then no longer says what it said at the commit.

        What was drawn of the requests goes back to those who sent them.
        """
        for path in ("/pause?mode=abort", "/resume"):
            self.server.client.post(path, None, deadline)
        said = self.ask_canary(self.committed, deadline)
        assert self.said is not None
        moved = distance(said, self.said)
        if within(moved, self.tolerance * _REPEATS):
            return
        who = "its weights were replaced after the sync"
        if self.said_at_start is not None and within(
            distance(said, self.said_at_start), self.tolerance * _REPEATS
        ):
            who = "it is back at the weights it was started with: reload_weights was called after the sync"
        assert self.committed is not None
        version = self.committed.version
        self._mark(f"{self.label(self.committed)}/replaced", deadline)  # so that it is brought again
        message = f"the server's log-probs of the canary moved by {moved:.3g} since version {version} was committed; {who}."
        fix = "do not call reload_weights or update_weights while the run uses the server"
        raise fail("R503", "generate", message, fix=fix)

    def label(self, payload: Delivered) -> str:
        """The weight version that vLLM puts on completions."""
        return label_of(self.run, payload.version)

    # The phases, in their order.

    def stage(self, payload: Delivered, seconds: float) -> None:
        """Bring a payload and prove it: all phases but the commit. A server that is ours and not running is started."""
        if payload.adapter is None and not self._update(payload):
            message = f"its host did not get version {payload.version}; the next sync sends another."
            raise fail("R505", "sync", message)
        self.server.ensure_up(seconds)
        deadline = Deadline(seconds)
        self.seconds = {}
        for phase in (self.prepare, self.transfer, self.verify):
            before = time.perf_counter()
            phase(payload, deadline)
            self.seconds[phase.__name__] = time.perf_counter() - before

    def bring(self, payload: Delivered, seconds: float) -> None:
        """Bring a payload through all phases."""
        self.stage(payload, seconds)
        self.commit(payload, Deadline(seconds))

    def gap(self, payload: Delivered) -> float:
        """The largest difference between what the engine said at the commit and what the trainer says."""
        assert self.said is not None
        return distance(self.said, payload.expected)

    def prepare(self, payload: Delivered, deadline: Deadline) -> None:
        """See that the server is there and fits, end what an earlier sync left, stop it, and mark it as pending."""
        client = self.server.client
        facts = self._facts(deadline)
        self.interface = interface_of(str(facts["vllm"]), "sync")
        check_fit(facts, self.config, payload.adapter is not None)
        client.rpc("shardproof_abandon", deadline)
        client.post("/resume", None, deadline)
        if self.said_at_start is None and self.committed is None:
            self.said_at_start = self.ask_canary(None, deadline)
        pending = f"{self.label(payload)}/pending"
        if not self.interface.weight_versions:
            # Its completions say nothing: one that is not interrupted in time must not find the label unchanged.
            self._mark(pending, deadline)
        client.post("/pause?mode=abort", None, deadline)
        if self.interface.weight_versions:
            self._mark(pending, deadline)

    def transfer(self, payload: Delivered, deadline: Deadline) -> None:
        """Have the workers read and load the payload. They load nothing that is not whole."""
        client = self.server.client
        if payload.adapter is not None:
            body = {"lora_name": self.label(payload), "lora_path": payload.adapter, "load_inplace": True}
            client.post("/v1/load_lora_adapter", body, deadline)
            return
        client.post("/start_weight_update", None, deadline)
        client.post("/update_weights", {"update_info": self._update(payload)}, deadline)
        self._check_reports(payload, deadline)
        client.post("/finish_weight_update", None, deadline)

    def _update(self, payload: Delivered) -> dict[str, Any]:
        """What this server's workers are told; empty if the payload did not get to their host."""
        return dict(payload.updates.get(self.name, payload.update))

    def verify(self, payload: Delivered, deadline: Deadline) -> None:
        """See that every worker has every byte, and that the engine computes what the trainer computes."""
        if payload.adapter is None:
            self._check_reports(payload, deadline)
        self.verify_canary(payload, deadline)

    def verify_canary(self, payload: Delivered, deadline: Deadline) -> None:
        """See that nothing is left of older weights, and that the engine computes what the trainer computes."""
        self._empty_cache(deadline)
        self.server.client.post("/resume", None, deadline)
        started = time.perf_counter()
        said = self.ask_canary(payload, deadline)
        self.seconds["canary"] = time.perf_counter() - started
        self._check_canary(payload, said)
        self._said_staged = said

    def commit(self, payload: Delivered, deadline: Deadline) -> None:
        """Give the server its version; from here on its completions count."""
        self._mark(self.label(payload), deadline)
        old, self.committed, self.said = self.committed, payload, self._said_staged
        if old is not None and old.adapter is not None and old.version != payload.version:
            with suppress(Refused):  # a server that was started again does not have it
                self.server.client.post("/v1/unload_lora_adapter", {"lora_name": self.label(old)}, deadline)

    # What the phases ask of the server.

    def ask_canary(self, payload: Delivered | None, deadline: Deadline) -> list[float]:
        """The engine's log-probs of the canary's tokens, from one forward."""
        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
        body: dict[str, Any] = {"token_ids": self.canary, "sampling_params": sampling}
        if payload is not None and payload.adapter is not None:
            body["model"] = self.label(payload)
        rows = self.server.client.post(GENERATE, body, deadline)["prompt_logprobs"]
        return [
            float(row[str(token)]["logprob"]) for token, row in zip(self.canary[1:], rows[1:], strict=True)
        ]

    def _empty_cache(self, deadline: Deadline) -> None:
        """Have the server forget keys and values of prompts: older weights computed them.

        To pause does that too, by a default that is deprecated. The canary would not notice: vLLM computes log-probs of
        prompts without the cache.
        """
        said = self.server.client.post("/reset_prefix_cache?reset_external=true", None, deadline)
        if not isinstance(said, dict) or said.get("success") is not True:
            message = (
                f"the server at {self.server.client.url} did not empty its prefix cache ({said!r}): it would answer "
                "from keys and values of older weights."
            )
            fix = "restart the server, or start it with --no-enable-prefix-caching"
            raise fail("R503", "sync", message, fix=fix)

    def _facts(self, deadline: Deadline) -> dict[str, Any]:
        try:
            return self.server.client.rpc("shardproof_facts", deadline)[0]
        except Refused as error:
            known = error.status == 404 or "shardproof_facts" in str(error)
            if not known:
                raise
            missing = (
                "VLLM_SERVER_DEV_MODE=1" if error.status == 404 else f"--worker-extension-cls {EXTENSION}"
            )
            message = f"the server at {self.server.client.url} was not started with {missing}."
            raise fail("R506", "sync", message) from error

    def _mark(self, label: str, deadline: Deadline) -> None:
        assert self.interface is not None
        if self.interface.weight_versions:
            self.server.client.post("/update_weight_version", {"new_version": label}, deadline)
        else:
            self.server.client.rpc("shardproof_mark", deadline, label)

    def _label_now(self, deadline: Deadline) -> str:
        """The label that the server has; an empty one if it has none, or its workers different ones."""
        assert self.interface is not None
        if self.interface.weight_versions:
            return self.server.client.get("/weight_info", deadline)["weight_version"]
        return label_of_workers(self.server.client.rpc("shardproof_label", deadline))[0]

    def _check_reports(self, payload: Delivered, deadline: Deadline) -> None:
        reports = self.server.client.rpc("shardproof_report", deadline)
        for worker, report in enumerate(reports):
            for tensor, problem in report["problems"]:
                what = repr(tensor) if tensor is not None else "the payload:"
                message = (
                    f"{what} {str(problem).rstrip('.')}, at worker {worker} of {self.server.client.url}."
                )
                raise fail("R502", "sync", message, tensor=tensor)
            if report["version"] != payload.version:
                message = f"worker {worker} of {self.server.client.url} loaded version {report['version']}, expected {payload.version}."
                raise fail("R502", "sync", message)
        slowest: dict[str, float] = {}
        for report in reports:
            for name, taken in report["seconds"].items():
                slowest[name] = max(slowest.get(name, 0.0), taken)
        self.seconds |= {f"worker/{name}": taken for name, taken in slowest.items()}

    def _check_canary(self, payload: Delivered, said: list[float]) -> None:
        gap = distance(said, payload.expected)
        if not within(gap, self.tolerance):
            what = (
                "the adapter is not applied as the trainer applies it"
                if payload.adapter is not None
                else "they do not hold the same weights"
            )
            message = (
                f"engine and trainer log-probs of the canary differ by {gap:.3g}, the tolerance is {self.tolerance:g}: "
                f"{what}, although every byte arrived."
            )
            raise fail("R503", "sync", message)
        old = self.committed
        if old is None or self.said is None or old.version == payload.version:
            return
        moved = distance(payload.expected, old.expected)
        if said == self.said and not within(moved, self.tolerance * _REPEATS):
            message = f"the trainer's log-probs of the canary moved by {moved:.3g}, the engine's did not: it still has version {old.version}."
            raise fail("R503", "sync", message)


def check_fit(facts: Mapping[str, Any], config: Mapping[str, Any], adapter: bool) -> None:
    """Raise if a server cannot serve this run: another model, another dtype, other log-probs."""
    wanted = {
        "dtype": (config["dtype"], facts["dtype"], "--dtype"),
        "logprobs_mode": (
            "processed_logprobs",
            facts["logprobs_mode"].rpartition(".")[2].lower(),
            "--logprobs-mode",
        ),
    }
    if not adapter:
        wanted["backend"] = (config.get("backend", BACKEND), facts["backend"], "--weight-transfer-config")
    for key, (expected, found, option) in wanted.items():
        if expected != found:
            message = f"the server has {key} {found!r}, this run needs {expected!r}."
            raise fail("R506", "sync", message, fix=f"start it with {option} as docs/vllm.md shows")
    if adapter and not facts["lora"]:
        raise fail("R506", "sync", "the server was not started with --enable-lora.")
    for key in _CONFIG_KEYS:
        expected, found = config.get(key), facts["config"].get(key)
        if expected != found and None not in (expected, found):
            message = f"the server has another model: {key} is {found!r} there, {expected!r} here."
            raise fail("R506", "sync", message, fix="start it with this run's model folder")


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference; NaN if one of them is."""
    return largest(abs(a - b) for a, b in zip(some, others, strict=True))


def finding_of(error: Exception) -> Finding:
    """What went wrong with a server, as a finding."""
    if isinstance(error, ShardproofError):
        return error.findings[0]
    if isinstance(error, Refused):
        return Finding("R505", "sync", f"the server refused a request: {error}.")
    return Finding("R505", "sync", f"the server stopped or did not answer in time: {error}.")
