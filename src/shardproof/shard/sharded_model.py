"""A model that is sharded, written and attested, and the receipt of how it came about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from shardproof.dist.sequence import SequenceGroup
from shardproof.errors import fail
from shardproof.findings import Finding
from shardproof.model.inventory import Inventory
from shardproof.model.roles import ROOT_PREFIX
from shardproof.shard.fsdp1 import fsdp1_shards
from shardproof.shard.fsdp2 import fsdp2_shards
from shardproof.shard.ledger import Writer
from shardproof.shard.local import LocalShard
from shardproof.shard.offload import HostCopy, OffloadReceipt, device_storages, optimizer_tensors
from shardproof.shard.packed import changed
from shardproof.shard.plan import ShardPlan
from shardproof.shard.settings import FSDP1, LoadSettings
from shardproof.shard.torch_private import clean_name, reshard


@dataclass(frozen=True)
class LoadReceipt:
    """What a load cost on this rank, and where its tensors came from."""

    seconds: float
    bytes_read: int
    peak_bytes: int  # rise of anonymous host memory (CPU) or of allocated device memory (CUDA)
    shard_bytes: int
    num_tensors: int
    num_by_writer: Mapping[str, int]
    stage_seconds: Mapping[str, float]
    served_by: int | None = None  # the rank that sent this rank's slices; None: read by itself

    def __str__(self) -> str:
        writers = ", ".join(f"{count} {kind}" for kind, count in sorted(self.num_by_writer.items()))
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.stage_seconds.items())
        reader = "" if self.served_by is None else f", served by rank {self.served_by}"
        return (
            f"loaded {self.num_tensors} tensors ({writers}) in {self.seconds:.2f} s ({stages})\n"
            f"  read {self.bytes_read / 2**20:.1f} MiB{reader}, hold {self.shard_bytes / 2**20:.1f} MiB, "
            f"peak {self.peak_bytes / 2**20:.1f} MiB"
        )


@dataclass(eq=False)
class ShardedModel:
    """A sharded model that `load` returned, and what this rank knows about it."""

    module: nn.Module  # the FSDP root
    model: PreTrainedModel  # the Hugging Face model inside it
    settings: LoadSettings
    plan: ShardPlan
    inventory: Inventory
    provenance: Mapping[str, Writer]
    receipt: LoadReceipt
    computed_buffers: Mapping[
        str, torch.Tensor
    ]  # what modules computed from the config, before anything was placed
    source: str
    folder: Path | None = None  # where the source's files lie on this node
    version: int = 0
    sequence_group: SequenceGroup | None = None
    num_updates: int = 0  # steps that changed something: the learning rate and the gradient were not zero
    offloaded: HostCopy | None = None  # the host copy of this rank's state while it is offloaded
    # Of the weights that this rank holds in 4 bits, as they were when they had been loaded.
    base_digests: Mapping[str, int] = field(default_factory=dict)
    before_change_hooks: list[Callable[[], None]] = field(default_factory=list)  # what `before_change` calls

    @property
    def mesh(self) -> torch.distributed.device_mesh.DeviceMesh:
        return self.settings.mesh

    @property
    def strategy(self) -> str:
        return self.settings.strategy

    @property
    def device(self) -> torch.device:
        return self.settings.device

    @property
    def role(self) -> str:
        return self.settings.role

    @property
    def has_lora(self) -> bool:
        return self.settings.lora is not None

    @property
    def sequence_parallel(self) -> int:
        return self.settings.sequence_parallel

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, without prefixes of wrappers; tied parameters appear once."""
        reshard(self.module)
        for name, param in self.module.named_parameters():
            yield clean_name(name).removeprefix(ROOT_PREFIX), param

    def parameters(self) -> Iterator[nn.Parameter]:
        return (param for _, param in self.named_parameters())

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [param for param in self.parameters() if param.requires_grad]

    def local_shards(self) -> list[LocalShard]:
        """This rank's shards of every parameter, in the model's order; while offloaded, the copies in host memory."""
        if self.offloaded is not None:
            return self.offloaded.shards
        shards = fsdp1_shards(self.module) if self.strategy == FSDP1 else fsdp2_shards(self.module)
        by_name = {shard.name: shard for shard in shards}
        return [by_name[info.name] for info in self.inventory.parameters]

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that are saved in checkpoints; every rank holds them whole."""
        buffers = {clean_name(name): buffer for name, buffer in self.model.named_buffers()}
        return {info.name: buffers[info.name].detach() for info in self.inventory.persistent_buffers}

    def before_change(self) -> None:
        """Call the hooks of those who still read the weights. Whatever writes, empties or moves weights calls it first.

        A save beside training waits there until it holds copies of its own. Otherwise the checkpoint of one version
        would hold some of the next, under valid checksums.
        """
        for hook in list(self.before_change_hooks):
            hook()

    def mark_updated(self, changed: bool) -> None:
        """Count a step that was taken; `changed` says whether it can have changed a weight."""
        self.version += 1
        self.num_updates += changed

    def check_resident(self, stage: str) -> None:
        """Raise while this rank's storages are empty, as they are between `offload` and `onload`."""
        if self.offloaded is not None:
            raise fail(
                "S215", stage, f"the {self.role} is offloaded: its storages on {self.device} are empty."
            )

    def changed_base(self, stage: str) -> list[Finding]:
        """A finding if a weight of the frozen base in 4 bits is not what was loaded."""
        if not self.base_digests:
            return []
        return changed(self.base_digests, {shard.name: shard for shard in self.local_shards()}, stage)

    def offload(self, optimizer: torch.optim.Optimizer | None = None) -> OffloadReceipt:
        """Move parameters and optimizer state to pinned host memory; the receipt says what moved, or why nothing did."""
        self.before_change()
        if self.offloaded is not None:
            return OffloadReceipt(0, "already offloaded")
        if self.settings.cpu_offload:
            note = "cpu_offload=True: parameters are in host memory already, and FSDP places them"
            return OffloadReceipt(0, note)
        if self.device.type == "cpu":
            return OffloadReceipt(0, "the policy lives on the CPU: there is no device memory to free")
        tensors = [param.detach() for param in self.parameters()]
        if optimizer is not None:
            tensors += optimizer_tensors(optimizer)
        self.offloaded = HostCopy(device_storages(tensors), self.local_shards())
        torch.cuda.empty_cache()
        return OffloadReceipt(self.offloaded.num_bytes, "moved to pinned host memory")

    def onload(self) -> OffloadReceipt:
        """Move everything that `offload` moved back to the device, bit for bit."""
        if self.offloaded is None:
            return OffloadReceipt(0, "not offloaded")
        num_bytes = self.offloaded.num_bytes
        self.offloaded.restore()
        self.offloaded = None
        return OffloadReceipt(num_bytes, "moved back to the device")

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.check_resident("forward")
        return self.module(*args, **kwargs)
