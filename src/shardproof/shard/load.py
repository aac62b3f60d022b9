"""`load`: source, skeleton, inventory, plan, shards, proof. Every stage ends with all ranks agreeing to go on."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.dist.collectives import raise_together, together
from shardproof.dist.launch import init_distributed
from shardproof.dist.sequence import make_sequence_group
from shardproof.errors import error_for
from shardproof.model.compiling import compile_blocks
from shardproof.model.experts import use_grouped_experts
from shardproof.model.families import check_sequence_parallel
from shardproof.model.inventory import Inventory, take_inventory
from shardproof.model.nf4 import hold_in_nf4
from shardproof.model.replace import place_buffers
from shardproof.model.roles import RoleModule
from shardproof.model.skeleton import Skeleton, build_skeleton, checkpoint_blocks
from shardproof.shard.attest import attest
from shardproof.shard.fsdp1 import check_fsdp1, shard_fsdp1
from shardproof.shard.fsdp2 import shard_fsdp2
from shardproof.shard.ledger import Ledger, Writer
from shardproof.shard.local import LocalShard
from shardproof.shard.materialise import Progress, check_tied_copies, materialise
from shardproof.shard.memory import PeakMemory
from shardproof.shard.packed import packed_shapes, take_digests
from shardproof.shard.plan import ShardPlan, plan_shards
from shardproof.shard.resolve import agree_on_settings, resolve_together
from shardproof.shard.serve import ServedSource, list_requests, serve
from shardproof.shard.settings import FSDP1, LoadSettings, parse_device
from shardproof.shard.sharded_model import LoadReceipt, ShardedModel
from shardproof.shard.staging import Staging
from shardproof.shard.torch_private import clean_name, sum_gradients
from shardproof.terminal import Bar
from shardproof.weights.reader import Checkpoint, SliceSource
from shardproof.weights.source import RandomInit, ResolvedSource

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 3.0
_MB = 10**6


def load(
    source: str | os.PathLike[str] | RandomInit,
    role: str = "policy",
    strategy: str = "fsdp2",
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    lora: Any = None,
    lora_base: str | None = None,
    sequence_parallel: int = 1,
    checkpoint_activations: bool | int | str = False,
    reshard_after_forward: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    compile: bool | None = None,
    new_head: bool = False,
    progress: bool = True,
) -> ShardedModel:
    """A sharded model: this rank has read its own shard, written each element exactly once, and checked the result.

    `source` is a folder or hub id with safetensors, or `RandomInit(config, seed)`. Raises the same error on every rank.
    With `reshard_after_forward=False` parameters are gathered once per step, and held until its last backward pass.
    `lora_base="nf4"` holds the frozen linear weights in 4 bits (QLoRA). `compile` compiles the transformer blocks; None does so on CUDA with 16-bit compute and FSDP2, where
    Triton is installed. With role="reward" the source is a sequence classifier with one label; `new_head=True` draws the
    head of a source that has none, for a reward model that is to be trained.

    Collective: every rank. Memory: this rank's shards; with FSDP1 also one unit.
    """
    settings = LoadSettings(
        role=role,
        strategy=strategy,
        mesh=mesh,
        device=parse_device(device),
        param_dtype=param_dtype,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
        lora=lora,
        lora_base=lora_base,
        sequence_parallel=sequence_parallel,
        checkpoint_activations=checkpoint_activations,
        reshard_after_forward=reshard_after_forward,
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
        compile=compile,
        new_head=new_head,
    )
    init_distributed(settings.device if isinstance(settings.device, torch.device) else None)
    with together("settings"):
        settings.check()
    with _without_gc():
        return _load(source, settings, progress)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Garbage collection is off in the block: a load makes tens of thousands of objects, none of which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(
    source: str | os.PathLike[str] | RandomInit, settings: LoadSettings, progress: bool
) -> ShardedModel:
    """The stages of a load, in order."""
    watch = _Stopwatch()
    with PeakMemory(settings.device) as memory:
        with watch.stage("source"):
            agree_on_settings(settings.described())
            settings = settings.with_mesh()
            resolved, servers = resolve_together(source, settings.revision, settings.trust_remote_code)
        with watch.stage("skeleton"), together("skeleton"):
            check_sequence_parallel(resolved.config, settings.sequence_parallel, settings.shard_size)
            skeleton = _skeleton(resolved, settings)
        with watch.stage("plan"), together("plan"):
            inventory = take_inventory(skeleton.model)
            plan = plan_shards(skeleton, inventory, resolved.checkpoint, resolved.seed, settings.new_head)
            if settings.lora_base is not None:
                hold_in_nf4(skeleton.model, plan.units, settings.compute_dtype)
                inventory = take_inventory(skeleton.model)
                plan = replace(plan, packed=packed_shapes(inventory))
        logger.info("loading the %s from %s, %s ...", settings.role, resolved.label, _size(inventory))
        with watch.stage("shard"):
            module, shards = _shard(skeleton, inventory, plan, settings)
        with watch.stage("write"):
            ledger, bytes_read = _write(
                plan, shards, resolved.checkpoint, servers, skeleton, settings, progress
            )
    frozen = {info.name for info in inventory.parameters if settings.lora_base and not info.trainable}
    base = take_digests({shard.name: shard for shard in shards if shard.name in frozen})
    _note_computed_and_tied(ledger, inventory, skeleton)
    for name, found in base.items():
        writer = ledger.writers[name]
        held = f"held in {settings.lora_base}" if name in plan.packed else "frozen"
        detail = f"{writer.detail}, {held}, digest {found % 2**64:016x}"
        ledger.name_writer(name, replace(writer, detail=detail))
    loaded = ShardedModel(
        module=module,
        model=skeleton.model,
        settings=settings,
        plan=plan,
        inventory=inventory,
        provenance=ledger.writers,
        computed_buffers=skeleton.computed_buffers,
        receipt=_receipt(ledger, shards, bytes_read, memory.rise, servers),
        source=resolved.label,
        folder=resolved.folder,
        sequence_group=make_sequence_group(settings.sequence_parallel),
        base_digests=base,
    )
    with watch.stage("attest"):
        findings = attest(loaded)
        if findings:
            raise error_for(findings)
    loaded.receipt = replace(loaded.receipt, seconds=watch.total, stage_seconds=watch.stages)
    return loaded


def _skeleton(resolved: ResolvedSource, settings: LoadSettings) -> Skeleton:
    skeleton = build_skeleton(
        resolved.config,
        role=settings.role,
        lora=settings.lora,
        param_dtype=settings.param_dtype,
        trust_remote_code=settings.trust_remote_code,
        attn_implementation=settings.attn_implementation,
        experts_implementation=settings.experts_implementation,
    )
    checkpoint_blocks(skeleton.model, settings.checkpoint_activations)
    if settings.compiles:
        compile_blocks(skeleton.model)
        if settings.experts_implementation is None:
            use_grouped_experts(skeleton.model)
    return skeleton


def _shard(
    skeleton: Skeleton, inventory: Inventory, plan: ShardPlan, settings: LoadSettings
) -> tuple[nn.Module, list[LocalShard]]:
    """The FSDP root and this rank's shards: unwritten parameters, and the buffers that the checkpoint holds."""
    place_buffers(skeleton.model, settings.device)
    root = RoleModule(skeleton.model, skeleton.role)
    root.train(skeleton.model.training)
    if settings.strategy == FSDP1:
        check_fsdp1(skeleton, inventory, settings)
        module, shards = shard_fsdp1(root, plan, settings)
    else:
        module, shards = root, shard_fsdp2(root, plan, settings)
    sum_gradients(module)
    buffers = {clean_name(name): buffer for name, buffer in skeleton.model.named_buffers()}
    for info in inventory.persistent_buffers:
        shards.append(LocalShard.of_whole(info.name, buffers[info.name]))
    return module, shards


def _write(
    plan: ShardPlan,
    shards: Sequence[LocalShard],
    checkpoint: Checkpoint | None,
    servers: dict[int, int],
    skeleton: Skeleton,
    settings: LoadSettings,
    progress: bool,
) -> tuple[Ledger, int]:
    """Write the shards, from this rank's files or from the rank that serves it, and check the ledger.

    Collective: every rank.
    """
    source: SliceSource | None = checkpoint
    served: ServedSource | None = None
    if servers:
        with together("materialise"):
            if dist.get_rank() in servers:
                assert checkpoint is not None
                mine = list_requests(plan, shards)
                source = served = ServedSource(checkpoint, mine, servers[dist.get_rank()])
    with together("materialise"):
        try:
            with _progress_bar(shards, progress) as advance:
                staging = Staging(settings.storage_device)
                result = materialise(plan, shards, source, skeleton.model, staging, advance)
                if source is not None:
                    check_tied_copies(plan, shards, source)
        finally:
            if served is not None:
                served.drain()
            elif servers:
                assert checkpoint is not None
                serve(checkpoint, servers)
    raise_together(result[0].findings(dist.get_rank()))
    return result


def _note_computed_and_tied(ledger: Ledger, inventory: Inventory, skeleton: Skeleton) -> None:
    """Complete the provenance: buffers that modules computed, and names that are ties."""
    for name in inventory.computed_buffers:
        ledger.name_writer(name, Writer("computed", skeleton.buffer_writers[name]))
    for info in inventory.stored:
        for alias in info.names[1:]:
            ledger.name_writer(alias, Writer("tie", info.name))


def _receipt(
    ledger: Ledger, shards: Sequence[LocalShard], bytes_read: int, peak_bytes: int, servers: dict[int, int]
) -> LoadReceipt:
    return LoadReceipt(
        seconds=0.0,
        bytes_read=bytes_read,
        peak_bytes=peak_bytes,
        shard_bytes=sum(shard.nbytes for shard in shards),
        num_tensors=len(ledger.writers),
        num_by_writer=ledger.num_by_kind(),
        stage_seconds={},
        served_by=servers.get(dist.get_rank()),
    )


@contextmanager
def _progress_bar(shards: Sequence[LocalShard], wanted: bool) -> Iterator[Progress]:
    """A function that notes written bytes and reports them: on rank 0, for loads that take a while."""
    total, done = sum(shard.nbytes for shard in shards), 0
    reported, is_shown = time.monotonic(), False

    def advance(num_bytes: int) -> None:
        nonlocal done, reported, is_shown
        done += num_bytes
        if time.monotonic() - reported >= _PROGRESS_EVERY_S:
            reported, is_shown = time.monotonic(), True
            report(False)

    def report(ended: bool) -> None:
        if wanted and dist.get_rank() == 0:
            bar = Bar("MB", done // _MB, total // _MB, "rank 0's shards", ended)
            logger.info("%d of %d MB of rank 0's shards are written", bar.done, bar.total, extra={"bar": bar})

    yield advance
    if is_shown:
        report(True)


def _size(inventory: Inventory) -> str:
    """The number of a model's parameters, in words."""
    num = sum(info.num_weights for info in inventory.parameters)
    return f"{num / 1e9:.2f} billion parameters" if num >= 10**8 else f"{num / 1e6:.2f} million parameters"


class _Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.stages: dict[str, float] = {}

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - started
