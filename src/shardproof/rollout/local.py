"""Engines without a server: a replica of the policy in this process, or the sharded policy itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardproof.dist.collectives import exchange, raise_together, together
from shardproof.errors import ShardproofError, fail
from shardproof.export.manifest import ExportReceipt
from shardproof.export.stream import WeightStream
from shardproof.findings import Finding
from shardproof.model import hf_private
from shardproof.model.buffers import compute_buffers
from shardproof.model.exact import make_exact
from shardproof.model.replace import place_buffers, replace_parameters
from shardproof.model.routing import Routers
from shardproof.rollout.decode import decode, exact_logits, last_logits
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.experts import ExpertShape
from shardproof.rollout.fp8 import Float8Weights, rounding_cache
from shardproof.rollout.fused import can_fuse
from shardproof.rollout.joined import join_weights
from shardproof.rollout.kept import GIB, KeptTurns, why_not
from shardproof.rollout.paged.decoder import PagedDecoder
from shardproof.rollout.paged.model_step import why_not_paged
from shardproof.rollout.queue import BatchEngine, by_temperature
from shardproof.rollout.recording import Recorder
from shardproof.rollout.replica_memory import ReplicaMemory
from shardproof.rollout.trajectory import Trajectory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import copy_all
from shardproof.train.routing import routers_of
from shardproof.weights.boxes import Box, Piece, cut, put
from shardproof.weights.mapping import CheckpointMap, map_checkpoint
from shardproof.weights.reader import TensorEntry

logger = logging.getLogger(__name__)

CACHE_GIB = 4.0
_COPIED_BYTES = 256 * 2**20  # of weights that a stream has brought and that are not copied yet


class EmbeddedEngine(BatchEngine):
    """A whole replica of the policy in this process, in the policy's compute dtype. Every rank has its own.

    It keeps the keys and values of conversations between their turns, up to `cache_gib` GiB, until the weights change.
    On CUDA it decodes up to `batch_size` completions at a time with a paged cache of up to `kv_cache_gib` GiB.
    With `experts`, the policy's `expert_shape`, its answers have the experts of their tokens. With `fp8` its weights, or
    its weights and its cache, hold numbers of 8-bit floating point only; `float8` says what they were before.
    With `exact` its log-probs are bit for bit those of a policy that `make_exact` has prepared too. With `sleeps` it keeps
    its CUDA graphs while it sleeps, where the driver allows that.
    """

    canary_gap = None
    version = -1

    def __init__(
        self,
        policy: ShardedModel,
        batch_size: int = 256,
        cache_gib: float = CACHE_GIB,
        experts: ExpertShape | None = None,
        *,
        kv_cache_gib: float | None = None,
        fp8: str = "off",
        exact: bool = False,
        sleeps: bool = False,
    ):
        super().__init__(batch_size)
        self.device = policy.device
        self.model = _empty_replica(policy)
        if self.device.type == "cuda":
            join_weights(self.model)
        self._memory = ReplicaMemory(self.model, self.device, in_place=sleeps)
        self.float8 = Float8Weights(self.model, can_fuse(self.model, self.device)) if fp8 != "off" else None
        self._rounds_cache = fp8 == "weights_and_cache"
        if self._rounds_cache and self.device.type == "cuda":
            message = "rollout.fp8='weights_and_cache': the cache on CUDA has no 8-bit form yet."
            raise fail("C001", "rollout", message, fix="set rollout.fp8='weights'")
        self._exact = exact
        if exact:
            make_exact(self.model, self.device)
        self._recorder = Recorder(Routers(self.model), experts) if experts is not None else None
        self._inlet = _Inlet(self.model, WeightStream(policy, policy.settings.compute_dtype))
        self._rows = batch_size
        self.decoder = self._make_decoder(batch_size, kv_cache_gib)
        self.kept = KeptTurns(int(cache_gib * GIB))
        self._cannot_keep = why_not(self.model.config)

    def _make_decoder(self, batch_size: int, kv_cache_gib: float | None) -> PagedDecoder | None:
        """On CUDA, rows that finish make room for others, so that all requests of a call are one batch."""
        if self.device.type != "cuda":
            return None
        reason = why_not_paged(self.model)
        if reason is not None and self._exact:
            name = self.model.config.model_type
            message = f"rollout.exact=true does not work with {name!r} on CUDA, where it needs a paged cache: {reason}."
            raise fail("C001", "rollout", message, fix="set rollout.exact=false")
        if reason is not None:
            logger.info(
                "decoding batch by batch, without CUDA graphs: this model has no paged cache (%s)", reason
            )
            return None
        self.take_all_at_once()
        memory = self._memory.sleeping
        decoder = PagedDecoder(self.model, self.device, self._recorder, batch_size, kv_cache_gib, memory)
        decoder.start_compiling()
        return decoder

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Queue this rank's requests; returns a ticket for each. Collective: every rank, possibly with no request."""
        self.kept.begin_wave()
        if self._cannot_keep is not None and any(request.continues for request in requests):
            logger.info(
                "each turn of a conversation reads all of it again: the engine cannot keep this model's keys and "
                "values between turns (%s)",
                self._cannot_keep,
            )
            self._cannot_keep, self.kept.max_bytes = None, 0
        return super().submit(requests, sampling)

    def forget(self) -> None:
        """Give up what was kept of conversations."""
        self.kept.clear()

    @torch.no_grad()
    def complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
        """Answer a batch, each rank with its own replica; what fails on one rank fails on all. Collective: every rank."""
        with together("generate"):
            try:
                return self._decode(requests, sampling)
            except torch.OutOfMemoryError:
                if not len(self.kept):
                    raise
                logger.warning(
                    "out of memory with %.1f GiB of earlier turns kept: they are dropped and will be read again; "
                    "lower rollout.cache_gib",
                    self.kept.nbytes / GIB,
                )
                self.kept.clear()
                return self._decode(requests, sampling)

    def _decode(self, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
        kept = self.kept.at(self.version) if self.kept.max_bytes else None
        sampling = replace(sampling, exact=self._exact)
        found: dict[int, Trajectory] = {}
        for temperature, places in by_temperature(requests, sampling).items():
            part = [requests[place] for place in places]
            answered = self._decode_at(part, replace(sampling, temperature=temperature), kept)
            found |= zip(places, answered, strict=True)
        return [found[place] for place in range(len(requests))]

    def _decode_at(
        self, requests: Sequence[Request], sampling: Sampling, kept: KeptTurns | None
    ) -> list[Trajectory]:
        if self.decoder is not None:
            try:
                return self.decoder(requests, sampling, self.version, kept)
            except (torch.OutOfMemoryError, ShardproofError):
                raise
            except Exception as error:  # a family whose attention does more than it says
                said = f"{type(error).__name__}: {error}"
                if self._exact:  # nothing else is exact on CUDA
                    message = f"decoding with a paged cache failed ({said})."
                    raise fail("R500", "generate", message, fix="set rollout.exact=false") from error
                logger.warning("decoding without a paged cache, which failed (%s)", said)
                self.decoder.release()
                self.decoder = None
        size = self._rows
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [found for part in parts for found in self._decode_part(part, sampling, kept)]

    def _decode_part(
        self, requests: Sequence[Request], sampling: Sampling, kept: KeptTurns | None
    ) -> list[Trajectory]:
        forward = partial(exact_logits if self._exact else last_logits, self.model)
        return decode(
            partial(rounding_cache, forward) if self._rounds_cache else forward,
            requests,
            sampling,
            config=self.model.config,
            device=self.device,
            version=self.version,
            kept=kept,
            recorder=self._recorder,
        )

    def load_weights(self, stream: WeightStream) -> ExportReceipt:
        """Write a stream into the replica; every element must arrive exactly once. Collective: every rank."""
        self.check_awake("load_weights")
        self.kept.clear()
        with stream:
            self._inlet.take(stream)
        assert stream.receipt is not None
        if self.float8 is not None:
            self.float8.round()
        self.version = stream.receipt.version
        return stream.receipt

    def sleep(self) -> None:
        """Give up the memory of the replica's parameters, and what decoding keeps. Collective: every rank."""
        self.check_idle("sleep")
        self.version, self.asleep = -1, True
        self.kept.clear()
        if self.decoder is not None and (self._memory.sleeping is None or self.float8 is not None):
            self.decoder.release()  # weights, or their copies in 8 bits, will come back at other addresses
        if self.float8 is not None:
            self.float8.release()
        self._memory.sleep()

    def wake(self) -> None:
        """Take the memory back, unwritten. Collective: every rank."""
        with together("rollout"):  # there may be enough of it on some ranks and not on others
            if self.asleep:
                self._memory.wake()
                if self.decoder is not None:
                    self.decoder.wake()
        self.asleep = False

    def close(self) -> None:
        """Nothing was started."""


class ShardedEngine(BatchEngine):
    """Generation straight from the FSDP module, for a policy whose replica does not fit.

    Every token gathers the whole model once, so all ranks decode in step until the last one is done. It keeps nothing
    between the turns of a conversation: each turn reads all of it. With `experts`, the policy's `expert_shape`, its
    answers have the experts of their tokens.
    """

    canary_gap = None

    def __init__(self, policy: ShardedModel, batch_size: int = 256, experts: ExpertShape | None = None):
        super().__init__(batch_size)
        self.policy = policy
        self._recorder = Recorder(routers_of(policy), experts) if experts is not None else None

    @property
    def version(self) -> int:
        return self.policy.version

    @torch.no_grad()
    def complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
        """Answer a batch. Collective: every rank, with as many or as few requests as it has."""
        with together("generate"):
            self.policy.check_resident("generate")
        was_training = self.policy.module.training
        self.policy.module.eval()
        places, found = by_temperature(requests, sampling), dict[int, Trajectory]()
        try:
            for temperature in sorted({each for row in exchange(list(places)) for each in row}):
                mine = places.get(temperature, [])
                answered = decode(
                    partial(last_logits, partial(self.policy.module, task="logits")),
                    [requests[place] for place in mine],
                    replace(sampling, temperature=temperature),
                    config=self.policy.model.config,
                    device=self.policy.device,
                    version=self.version,
                    anyone_left=lambda left: any(exchange(left)),
                    idle=self._idle,
                    recorder=self._recorder,
                )
                found |= zip(mine, answered, strict=True)
        finally:
            self.policy.module.train(was_training)
        return [found[place] for place in range(len(requests))]

    def _idle(self) -> None:
        self.policy.module(
            task="logits", input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.policy.device)
        )

    def load_weights(self, stream: WeightStream) -> ExportReceipt:
        """Nothing to load: the engine samples from the policy itself. The receipt says what it holds."""
        for _ in stream:
            pass
        assert stream.receipt is not None
        return stream.receipt

    def sleep(self) -> None:
        """Nothing to give up: the memory is the policy's own."""

    def wake(self) -> None:
        """Nothing was given up."""

    def close(self) -> None:
        """Nothing was started."""


def _empty_replica(policy: ShardedModel) -> PreTrainedModel:
    """The policy's model without adapters, unwritten, in its compute dtype; buffers computed as their modules do."""
    config = deepcopy(policy.model.config)
    with torch.device("meta"), hf_private.no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    compute_buffers(model)
    dtype, device = policy.settings.compute_dtype, policy.device
    replace_parameters(
        model.modules(), lambda old: torch.full(old.shape, float("nan"), dtype=dtype, device=device)
    )
    place_buffers(model, device)
    return model.eval().requires_grad_(False)


class _Inlet:
    """Where each tensor of a stream belongs in a plain model, and proof that all of it was written."""

    def __init__(self, model: PreTrainedModel, stream: WeightStream):
        state = model.state_dict(keep_vars=True)
        entries = {meta.name: TensorEntry("", meta.dtype, meta.shape, 0, 0) for meta in stream.metadata()}
        self._model = model
        self._map: CheckpointMap = map_checkpoint(model, dict(state), entries)
        # Of each tensor of a stream: the parameters it belongs to, and where; None where it is the parameter.
        self._targets: dict[str, list[tuple[torch.Tensor, Piece | None]]] = {}
        self._wanted = {id(tensor): (name, tensor.numel()) for name, tensor in state.items()}
        self._state = state
        for name, boxes in self._map.boxes.items():
            for piece in boxes.pieces:
                target = state[name]
                is_whole = piece.shape == piece.source_shape == tuple(target.shape) and piece.dims == tuple(
                    range(target.ndim)
                )
                self._targets.setdefault(piece.source, []).append((target, None if is_whole else piece))

    @torch.no_grad()
    def take(self, stream: WeightStream) -> None:
        """Write the stream's tensors. Raises on every rank if an element was missed or written twice."""
        written: dict[int, int] = dict.fromkeys(self._wanted, 0)
        whole = {
            source
            for conversion in self._map.whole.values()
            for n in conversion.sources.values()
            for source in n
        }
        kept: dict[str, torch.Tensor] = {}
        copies = _Copies()
        for name, tensor in stream:
            if name in whole:
                kept[name] = tensor.clone()
            for target, piece in self._targets.get(name, []):
                if piece is None:
                    copies.add(target, tensor)
                    written[id(target)] += tensor.numel()
                else:
                    written[id(target)] += put(target, piece, cut(tensor, piece.source_box))
        copies.make()
        for name, conversion in self._map.whole.items():
            self._state[name].copy_(conversion.convert(_Kept(kept), self._model))
            written[id(self._state[name])] += self._state[name].numel()
        wrong = [(n, size, written[key]) for key, (n, size) in self._wanted.items() if written[key] != size]
        findings = [
            Finding("R502", "load_weights", f"{n!r}: {got} of {size} elements were written.", tensor=n)
            for n, size, got in wrong[:3]
        ]
        raise_together(findings)


class _Copies:
    """Copies of whole tensors. On a GPU they wait for each other, since many cost the host little more than one."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._nbytes = 0

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)
        self._nbytes += source.nbytes
        if not target.is_cuda or self._nbytes > _COPIED_BYTES:
            self.make()

    def make(self) -> None:
        if self._targets:
            copy_all(self._targets, self._sources)
        self._targets, self._sources, self._nbytes = [], [], 0


class _Kept:
    """Whole tensors by name, as a source of slices."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def view(self, name: str, box: Box) -> torch.Tensor:
        return cut(self._tensors[name], box)
