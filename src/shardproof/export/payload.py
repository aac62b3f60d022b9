"""What a policy exports: checkpoint tensors as boxes of model tensors, and this rank's values of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardproof.dist.collectives import gather_rows, raise_together
from shardproof.errors import error_for
from shardproof.findings import Finding
from shardproof.model.delta import Delta, find_deltas
from shardproof.model.initial import InitSpec
from shardproof.model.inventory import TensorInfo
from shardproof.model.lora import ADAPTER
from shardproof.shard.holdings import local_shards, persistent_buffers
from shardproof.shard.local import LocalShard
from shardproof.shard.plan import ShardPlan
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.mapping import ExportEntry, map_export

_ADAPTER_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Layout:
    """Which flat range of each tensor every rank of the shard axis holds."""

    ranges: Mapping[str, Sequence[tuple[int, int]]]
    rank: int
    group: dist.ProcessGroup | None


class Payload:
    """The tensors to export and where this rank's part of them lies. Nothing is moved until `local_values`."""

    def __init__(self, policy: ShardedModel, dtype: torch.dtype | str | None, merge_lora: bool):
        self.policy = policy
        self.refresh()
        self.adapter_only = policy.has_lora and not merge_lora
        self.infos = {_export_name(info): info for info in policy.inventory.stored if self._belongs(info)}
        self.deltas = find_deltas(policy.model, clean_name) if policy.has_lora and merge_lora else {}
        self.dtypes = {name: _export_dtype(info, policy.plan, dtype) for name, info in self.infos.items()}
        state = {name: (info.shape, self.dtypes[name]) for name, info in self.infos.items()}
        if self.adapter_only:
            self.entries = [
                ExportEntry((name,), {_adapter_name(name): BoxTensor.of_source(name, *state[name])})
                for name in state
            ]
        else:
            self.entries = map_export(policy.model, state, policy.plan.used_rules)

    def refresh(self) -> None:
        """Look up where the shards lie now: offloading moves them between exports."""
        self.shards = {shard.name: shard for shard in local_shards(self.policy)}
        self.buffers = persistent_buffers(self.policy)

    def _belongs(self, info: TensorInfo) -> bool:
        return info.is_adapter if self.adapter_only else not info.is_adapter

    def check(self) -> None:
        """Raise on every rank if someone moved the module. Collective: every rank."""
        raise_together(_moved(self.policy) if self.policy.offloaded is None else [])

    def layout(self) -> Layout:
        """Every rank's ranges, from one exchange. Collective: every rank."""
        mesh = self.policy.mesh
        names = list(self.shards)
        mine = torch.tensor(
            [[self.shards[name].start, self.shards[name].stop] for name in names], dtype=torch.int64
        )
        if mesh.size() == 1:
            return Layout(
                {name: [(int(a), int(b))] for name, (a, b) in zip(names, mine, strict=True)}, 0, None
            )
        group = mesh.get_group(mesh.ndim - 1)
        ranks = dist.get_process_group_ranks(group)
        table = gather_rows(mine.view(-1)).view(mesh.size(), len(names), 2)[ranks].tolist()
        ranges = {name: [tuple(table[r][i]) for r in range(len(ranks))] for i, name in enumerate(names)}
        return Layout(ranges, dist.get_rank(group), group)

    def adapters_needed(self, names: Sequence[str]) -> list[str]:
        """Adapter tensors that the merged values of `names` need whole."""
        deltas = [self.deltas[self.infos[n].name] for n in names if self.infos[n].name in self.deltas]
        return [name for delta in deltas for name in (delta.a, delta.b)]

    def local_values(self, name: str, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's elements of a tensor in the exported dtype, flat, merged out of place."""
        info = self.infos[name]
        shard = self.shards[info.name]
        values = shard.flat.to(self.policy.device, non_blocking=True)
        delta = self.deltas.get(info.name)
        if delta is not None and values.numel():
            values = _merged(shard, values, delta, adapters[delta.a], adapters[delta.b])
        return values.to(self.dtypes[name])

    def held(
        self, name: str, adapters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int, tuple[int, ...]]:
        """(this rank's values, their first flat position, the whole shape) of a parameter or buffer."""
        info = self.infos[name]
        if info.is_buffer:
            return self.buffers[info.name].reshape(-1), 0, info.shape
        return self.local_values(name, adapters), self.shards[info.name].start, info.shape


def _merged(
    shard: LocalShard, values: torch.Tensor, delta: Delta, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """base + delta on the elements that a rank holds, in float32."""
    row = torch.Size(shard.shape[1:]).numel()
    first, last = shard.start // row, -(-shard.stop // row)
    rows = delta.rows(a.to(values.device), b.to(values.device), first, last).reshape(-1)
    return values.float() + rows[shard.start - first * row :][: values.numel()]


def _export_name(info: TensorInfo) -> str:
    return info.name if info.is_adapter else info.base_names[0]


def _adapter_name(name: str) -> str:
    """The name that peft gives an adapter's tensor in its files."""
    return _ADAPTER_PREFIX + name.replace(f".{ADAPTER}", "")


def _export_dtype(info: TensorInfo, plan: ShardPlan, dtype: torch.dtype | str | None) -> torch.dtype:
    """Buffers and integers keep theirs; "checkpoint" is what the tensor had in the file it came from."""
    if info.is_buffer or dtype is None or not info.dtype.is_floating_point:
        return info.dtype
    if dtype == "checkpoint":
        origin = plan.origins[info.name]
        return info.dtype if isinstance(origin, InitSpec) else origin.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _moved(policy: ShardedModel) -> list[Finding]:
    """Parameters that are not on the device they were put on.

    After `module.to("cuda")` under CPUOffloadPolicy the parameter says cuda while its shard is on the CPU.
    """
    expected = policy.settings.storage_device
    for name, param in policy.named_parameters():
        if param.device.type != expected.type:
            message = (
                f"{name!r} is on {param.device}, it was loaded to {expected}; module.to(...) moved it, and FSDP's own "
                "bookkeeping did not follow."
            )
            return [Finding("E401", "export", message, rank=dist.get_rank(), tensor=name)]
    return []


def first_not_finite(values: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or Inf. One sum each, and one wait for all of them."""
    real = {name: value for name, value in values.items() if value.is_floating_point() and value.numel()}
    if not real:
        return None
    if bool(torch.isfinite(torch.stack([value.sum().float() for value in real.values()])).all()):
        return None
    # A sum can overflow where no element does.
    return next((name for name, value in real.items() if not bool(torch.isfinite(value).all())), None)


def check_entries(entries: Sequence[ExportEntry]) -> None:
    """Raise if two model tensors would be exported under one name."""
    seen: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        for name in entry.boxes:
            if name in seen:
                message = f"{name!r} would be made from {seen[name]} and from {entry.sources}."
                raise error_for([Finding("E404", "export", message, tensor=name)])
            seen[name] = entry.sources
