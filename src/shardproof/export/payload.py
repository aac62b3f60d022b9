"""What a policy exports: checkpoint tensors as boxes of model tensors, and this rank's values of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shardproof.dist.collectives import exchange, gather_rows, together
from shardproof.errors import error_for
from shardproof.findings import Finding
from shardproof.model.delta import Delta, find_deltas
from shardproof.model.initial import InitSpec
from shardproof.model.inventory import TensorInfo
from shardproof.model.lora import ADAPTER
from shardproof.shard.local import LocalShard
from shardproof.shard.packed import as_weight, values_of
from shardproof.shard.plan import ShardPlan
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import clean_name, copy_all
from shardproof.weights.box_tensor import BoxTensor
from shardproof.weights.boxes import Box, cut, enclosing_range
from shardproof.weights.mapping import ExportEntry, map_export

_ADAPTER_PREFIX = "base_model.model."
_NO_RANGE = (-1, -1)
_ALIGNMENT = 64  # bytes at whose multiples tensors begin that lie side by side


@dataclass(frozen=True)
class Layout:
    """Which boxes of each tensor every rank of the shard axis holds."""

    boxes: Mapping[str, Sequence[Sequence[Box]]]
    rank: int
    group: dist.ProcessGroup | None


class Payload:
    """The tensors to export and where this rank's part of them lies. Nothing is moved until `local_values`."""

    def __init__(self, policy: ShardedModel, dtype: torch.dtype | str | None, merge_lora: bool):
        self.policy = policy
        self._known: tuple[list[Any], Layout] | None = None  # this rank's boxes and the layout they belong to
        self.refresh()
        self.adapter_only = policy.has_lora and not merge_lora
        self.infos = {_export_name(info): info for info in policy.inventory.stored if self._belongs(info)}
        self.deltas = find_deltas(policy.model, clean_name) if policy.has_lora and merge_lora else {}
        self.dtypes = {name: _export_dtype(info, policy.plan, dtype) for name, info in self.infos.items()}
        state = {name: (info.weight_shape, self.dtypes[name]) for name, info in self.infos.items()}
        if self.adapter_only:
            self.entries = [
                ExportEntry((name,), {_adapter_name(name): BoxTensor.of_source(name, *state[name])})
                for name in state
            ]
        else:
            self.entries = map_export(policy.model, state, policy.plan.used_rules)

    def refresh(self) -> None:
        """Look up where the shards lie now: offloading moves them between exports."""
        packed = self.policy.plan.packed
        self.shards = {
            shard.name: as_weight(shard, packed[shard.name]) if shard.name in packed else shard
            for shard in self.policy.local_shards()
        }
        self.buffers = self.policy.persistent_buffers()

    def _belongs(self, info: TensorInfo) -> bool:
        # The head of a critic or a reward model is trained in full: an adapter without it says nothing.
        return info.is_adapter or info.trainable if self.adapter_only else not info.is_adapter

    def layout(self) -> Layout:
        """Every rank's boxes. Raises on every rank if someone moved the module.

        Boxes are exchanged only if some rank's are not those of the last call. Collective: every rank.
        """
        mine = [shard.flat_range or shard.boxes for shard in self.shards.values()]
        with together("export") as message:
            wrong = _moved(self.policy) if self.policy.offloaded is None else []
            wrong = wrong or self.policy.changed_base("export")
            if wrong:
                raise error_for(wrong)
            message.mine = self._known is not None and self._known[0] == mine
        if self._known is None or not all(message.rows):
            self._known = mine, self._find_layout()
        return self._known[1]

    def _find_layout(self) -> Layout:
        """Every rank's boxes: one exchange if they are ranges, as FSDP's are, else two. Collective: every rank."""
        mesh = self.policy.mesh
        if mesh.size() == 1:
            return Layout({name: [shard.boxes] for name, shard in self.shards.items()}, 0, None)
        group = mesh.get_group(mesh.ndim - 1)
        ranks = dist.get_process_group_ranks(group)
        mine = [shard.flat_range or _NO_RANGE for shard in self.shards.values()]
        table = gather_rows(torch.tensor(mine, dtype=torch.int64).view(-1)).view(mesh.size(), len(mine), 2)
        rows = table[ranks].tolist()
        boxes: dict[str, list[Sequence[Box]]] = {
            name: [(((row[i][0], row[i][1]),),) for row in rows] for i, name in enumerate(self.shards)
        }
        if bool((table < 0).any()):
            others = {name: shard.boxes for name, shard in self.shards.items() if shard.flat_range is None}
            every = exchange(others)
            for position, rank in enumerate(ranks):
                for name, found in every[rank].items():
                    boxes[name][position] = [tuple((a, b) for a, b in box) for box in found]
        return Layout(boxes, dist.get_rank(group), group)

    def adapters_needed(self, names: Sequence[str]) -> list[str]:
        """Adapter tensors that the merged values of `names` need whole."""
        deltas = [self.deltas[self.infos[n].name] for n in names if self.infos[n].name in self.deltas]
        return [name for delta in deltas for name in (delta.a, delta.b)]

    def local_values(self, name: str, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's elements of a tensor in the exported dtype, flat, merged out of place."""
        return self._unrounded(name, adapters).to(self.dtypes[name])

    def _unrounded(self, name: str, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same before they are cast."""
        info = self.infos[name]
        shard = self.shards[info.name]
        values = shard.flat.to(self.policy.device, non_blocking=True)
        if info.packed is not None:  # rounded as the trainer computes with it
            values = values_of(values, info.packed, self.policy.settings.compute_dtype)
        delta = self.deltas.get(info.name)
        if delta is not None and values.numel():
            values = _merged(shard, values, delta, adapters[delta.a], adapters[delta.b])
        return values

    def bucket_values(
        self, names: Sequence[str], adapters: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """(`local_values` of several tensors, memory that together holds just them, if it is less to look through).

        On a GPU they are written side by side by one operation instead of one each.
        """
        dtypes = {self.dtypes[name] for name in names}
        if self.policy.device.type != "cuda" or len(names) < 2 or len(dtypes) > 1:
            return {name: self.local_values(name, adapters) for name in names}, []
        (dtype,) = dtypes
        sources = [self._unrounded(name, adapters) for name in names]
        step = _ALIGNMENT // dtype.itemsize
        room = [-(-source.numel() // step) * step for source in sources]
        buffer = torch.zeros(sum(room), dtype=dtype, device=self.policy.device)
        places = [part[: source.numel()] for part, source in zip(buffer.split(room), sources, strict=True)]
        copy_all(places, sources)
        return dict(zip(names, places, strict=True)), [buffer]

    def held(self, name: str, adapters: Mapping[str, torch.Tensor]) -> LocalShard:
        """This rank's values of a parameter or buffer, as they are exported."""
        info = self.infos[name]
        if info.is_buffer:
            return LocalShard.of_whole(info.name, self.buffers[info.name])
        return replace(self.shards[info.name], flat=self.local_values(name, adapters))


def _merged(
    shard: LocalShard, values: torch.Tensor, delta: Delta, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """base + delta on the elements that a rank holds, in float32."""
    row = torch.Size(shard.shape[1:]).numel()
    a, b = a.to(values.device), b.to(values.device)
    added = []
    for box in shard.boxes:
        start, stop = enclosing_range(box, shard.shape)
        first, last = start // row, -(-stop // row)
        (low, high), *columns = box
        skipped = first if columns else first * row
        part: Box = ((low - skipped, high - skipped), *columns)
        added.append(cut(delta.rows(a, b, first, last), part).reshape(-1))
    return values.float() + (added[0] if len(added) == 1 else torch.cat(added))


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
                f"{name!r} is on {param.device} but was loaded to {expected}: module.to(...) moved it, and FSDP's "
                "bookkeeping did not follow."
            )
            return [Finding("E401", "export", message, rank=dist.get_rank(), tensor=name)]
    return []


def first_not_finite(values: Mapping[str, torch.Tensor], wholes: Sequence[torch.Tensor] = ()) -> str | None:
    """The name of the first tensor with a NaN or Inf. One sum each, and one wait for all of them.

    `wholes`, if given, are looked through instead: memory that holds all the values, and nothing else but zeros.
    """
    real = {name: value for name, value in values.items() if value.is_floating_point() and value.numel()}
    looked_at = [each for each in wholes if each.is_floating_point()] or list(real.values())
    if not real:
        return None
    if bool(torch.isfinite(torch.stack([value.sum().float() for value in looked_at])).all()):
        return None
    # A sum can overflow where no element does.
    return next((name for name, value in real.items() if not bool(torch.isfinite(value).all())), None)


def check_entries(entries: Sequence[ExportEntry]) -> None:
    """Raise if two model tensors would be exported under one name."""
    seen: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        for name in entry.boxes:
            if name in seen:
                message = f"{name!r} would be exported twice: from {seen[name]} and from {entry.sources}."
                raise error_for([Finding("E404", "export", message, tensor=name)])
            seen[name] = entry.sources
