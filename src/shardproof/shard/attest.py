"""Attestation: what every rank holds, compared with what it should hold and with what the others hold.

Each check is one function that returns findings. `attest` runs them all and shares the result; it never raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from shardproof.digest import digest
from shardproof.dist.collectives import broadcast, exchange, gather_rows, rows_on_first, share_findings
from shardproof.dist.launch import init_distributed
from shardproof.errors import ShardproofError
from shardproof.findings import Finding
from shardproof.model import hf_private
from shardproof.model.buffers import fresh_buffers
from shardproof.model.families import MOVING_ROPE
from shardproof.model.lora import base_name, is_adapter
from shardproof.model.roles import ROOT_PREFIX, RoleModule
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import (
    clean_name,
    fsdp1_parameters,
    fsdp1_replica_key,
    local_tensor,
    reshard,
)

_STAGE = "attest"
# No weight of a trained or initialised language model comes near this; memory that nobody wrote often does.
_ABSURD = 1e8


@dataclass(frozen=True)
class Held:
    """A tensor as this rank holds it."""

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]  # of the whole tensor
    shard: tuple[int, int]  # (index, count): ranks with the same index hold the same bytes
    is_buffer: bool = False
    is_volatile: bool = False  # legitimately different between ranks
    is_packed: bool = False  # bytes that are no numbers of its dtype


def attest(target: ShardedModel | nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Finding]:
    """A list of everything that is wrong with a sharded or replicated module, equal on every rank. Never raises.

    Collective: every rank. The module may be FSDP1, FSDP2, DDP or plain, and need not be loaded by shardproof.
    """
    init_distributed()
    offloaded = share_findings(_offloaded(target)) if isinstance(target, ShardedModel) else []
    if offloaded:
        return offloaded  # there are no values to check
    module = target.module if isinstance(target, ShardedModel) else target
    loaded = isinstance(target, ShardedModel)
    reshard(module)
    rank = dist.get_rank()
    findings: list[Finding] = []
    held: list[Held] = []
    try:
        held = held_tensors(module)
    except Exception as error:
        findings.append(_failed(error, rank))
    sound: set[str] = set()
    checks: list[Callable[[], list[Finding]]] = [
        lambda: check_meta(held, rank),
        lambda: check_ties(module, rank),
        lambda: check_fresh_buffers(
            module, rank, sound, target.computed_buffers if isinstance(target, ShardedModel) else None
        ),
        lambda: check_values([item for item in held if item.name not in sound], rank, written=loaded),
        lambda: check_optimizer(module, optimizer, rank),
    ]
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(_failed(error, rank))
    return share_findings(findings) + compare_ranks(held)


def _offloaded(policy: ShardedModel) -> list[Finding]:
    try:
        policy.check_resident(_STAGE)
    except ShardproofError as error:
        return error.findings
    return []


def _failed(error: Exception, rank: int) -> Finding:
    return Finding("L100", _STAGE, f"a check failed: {type(error).__name__}: {error}", rank=rank)


def held_tensors(module: nn.Module) -> list[Held]:
    """Every parameter and buffer that this rank holds, under clean names, tied parameters once."""
    fsdp1 = {
        param: (fsdp1_replica_key(unit), shape)
        for unit in FullyShardedDataParallel.fsdp_modules(module)
        for param, shape in fsdp1_parameters(unit)
    }
    clean = name_cleaner(module)
    packed = {f"{name}.weight" for name, each in module.named_modules() if hasattr(each, "packed_shape")}
    held = []
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            local, shape, shard = local_tensor(param), tuple(param.shape), _dtensor_shard(param)
        else:
            shard, shape = fsdp1.get(param, ((0, 1), tuple(param.shape)))
            local = param.detach()
        held.append(Held(clean(name), local, shape, shard, is_packed=name in packed))
    volatile = _volatile_buffers(module)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        held.append(Held(clean(name), buffer.detach(), tuple(buffer.shape), (0, 1), True, name in volatile))
    return sorted(held, key=lambda item: item.name)


def name_cleaner(module: nn.Module) -> Callable[[str], str]:
    """A function that strips the prefixes of FSDP, DDP, compile and our own root from a tensor's name."""
    ours = any(isinstance(inner, RoleModule) for inner in module.modules())
    prefix = "module." if isinstance(module, DistributedDataParallel) else ""
    root = ROOT_PREFIX if ours else ""
    return lambda name: clean_name(name).removeprefix(prefix).removeprefix(root)


def _dtensor_shard(param: DTensor) -> tuple[int, int]:
    index, count = 0, 1
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard):
            index = index * param.device_mesh.size(axis) + param.device_mesh.get_local_rank(axis)
            count *= param.device_mesh.size(axis)
    return index, count


def _volatile_buffers(module: nn.Module) -> set[str]:
    """Rotary frequencies that forward recomputes from the longest position it met: ranks may legitimately differ."""
    names: set[str] = set()
    for module_name, owner in module.named_modules(remove_duplicate=False):
        kinds = getattr(owner, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & MOVING_ROPE:
            names.update(
                f"{module_name}.{n}" for n in owner._buffers if n.endswith("inv_freq") and "original" not in n
            )
    return names


def check_meta(held: list[Held], rank: int) -> list[Finding]:
    """Tensors without memory."""
    return [
        Finding("S210", _STAGE, f"{item.name!r} is on the meta device.", rank=rank, tensor=item.name)
        for item in held
        if item.local.is_meta
    ]


def check_values(held: list[Held], rank: int, *, written: bool) -> list[Finding]:
    """NaN, Inf and values no model has. A model of zeros is reported too, unless a ledger shows that zeros were `written`.

    One norm per tensor is computed first: it is as fast as a sum, and signs cannot cancel. Suspicious tensors are then
    inspected element by element.
    """
    real = [
        item
        for item in held
        if item.local.is_floating_point()
        and item.local.numel()
        and not item.local.is_meta
        and not item.is_packed
    ]
    totals = _fetch([_size_of(item.local) for item in real])
    findings = []
    zeros, weights = [], 0
    for item, total in zip(real, totals, strict=True):
        if not abs(total) <= _ABSURD:
            findings += _inspect_values(item, rank)
        is_weight = len(item.shape) > 1 or item.name.endswith("_flat_param")
        if not item.is_buffer and is_weight and not is_adapter(item.name):
            weights += item.local.numel()
            if total == 0 and not written and not item.local.any():
                zeros.append(item)
    if sum(item.local.numel() for item in zeros) * 2 > weights > 0:
        message = f"{len(zeros)} weights are all zero, the first is {zeros[0].name!r}: placeholders that were never filled."
        findings.append(Finding("S206", _STAGE, message, rank=rank, tensor=zeros[0].name))
    return findings


def _size_of(tensor: torch.Tensor) -> torch.Tensor:
    # torch computes little with 8-bit floats.
    return torch.linalg.vector_norm(tensor.float() if tensor.element_size() == 1 else tensor)


def _fetch(scalars: list[torch.Tensor]) -> list[float]:
    """Scalars on the host with one transfer."""
    if not scalars:
        return []
    return torch.stack([scalar.to(scalars[0].device, torch.float32) for scalar in scalars]).tolist()


def _inspect_values(item: Held, rank: int) -> list[Finding]:
    num_nan, num_inf = int(item.local.isnan().sum()), int(item.local.isinf().sum())
    where = {"rank": rank, "tensor": item.name}
    if num_nan or num_inf:
        message = f"{item.name!r} holds {num_nan} NaN and {num_inf} Inf among {item.local.numel()} elements."
        return [Finding("S205", _STAGE, message, **where)]  # type: ignore[arg-type]
    largest = float(item.local.abs().max())
    if largest > _ABSURD:
        message = f"{item.name!r} holds {largest:.3g}: this looks like uninitialised memory."
        return [Finding("S206", _STAGE, message, **where)]  # type: ignore[arg-type]
    return []


def check_ties(module: nn.Module, rank: int) -> list[Finding]:
    """Tied parameters that are no longer one."""
    findings = []
    for model in _outermost_models(module):
        params = {base_name(clean_name(n)): p for n, p in model.named_parameters(remove_duplicate=False)}
        ties = getattr(model, "all_tied_weights_keys", None)
        for name, tied_to in (hf_private.tied_names(model) if ties is None else ties).items():
            one, other = params.get(name), params.get(tied_to)
            if one is None or other is None or one is other:
                continue
            if not isinstance(one, DTensor) and one.numel() and one.data_ptr() == other.data_ptr():
                continue
            message = f"{name!r} does not share storage with {tied_to!r}, which config.json ties. Expected 1 tensor, found 2."
            findings.append(Finding("S203", _STAGE, message, rank=rank, tensor=name))
    return findings


def _outermost_models(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models in a module that are not inside another one."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in _outermost_models(child)]


def check_fresh_buffers(
    module: nn.Module, rank: int, sound: set[str], known: Mapping[str, torch.Tensor] | None = None
) -> list[Finding]:
    """Computed buffers that differ from what their module computes from its config: ranks can agree and be wrong.

    `known` is what was computed when the model was loaded; without it, a meta copy of the model computes it now.
    Names of buffers that do not differ are added to `sound`: a mask of -inf in one of them is then legitimate.
    """
    findings = []
    for model in _outermost_models(module):
        volatile = _volatile_buffers(model)
        actual = dict(model.named_buffers(remove_duplicate=False))
        if not actual:
            continue
        expected = fresh_buffers(model) if known is None else known
        for name, buffer in actual.items():
            fresh = expected.get(base_name(clean_name(name)))
            if fresh is None or name in volatile or buffer.is_meta:
                continue
            different = _compare_buffer(clean_name(name), buffer, fresh, rank)
            findings += different
            if not different:
                sound.add(clean_name(name))
    return findings


def _compare_buffer(name: str, buffer: torch.Tensor, fresh: torch.Tensor, rank: int) -> list[Finding]:
    if buffer.dtype != fresh.dtype or buffer.shape != fresh.shape:
        message = f"buffer {name!r} is {buffer.dtype} {tuple(buffer.shape)}; its module computes {fresh.dtype} {tuple(fresh.shape)}."
        return [Finding("S208", _STAGE, message, rank=rank, tensor=name)]
    held = buffer.detach().cpu()
    # Devices may round a power differently in the last place.
    same = (
        torch.allclose(held, fresh, rtol=1e-5, atol=0)
        if held.is_floating_point()
        else torch.equal(held, fresh)
    )
    if same:
        return []
    message = f"buffer {name!r} begins {_head(held)}; its module computes {_head(fresh)}."
    return [Finding("S209", _STAGE, message, rank=rank, tensor=name)]


def _head(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in tensor.reshape(-1)[:5].tolist()) + "]"


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int) -> list[Finding]:
    """Trainable parameters that no group holds, and group members that the module does not have."""
    if optimizer is None:
        return []
    clean = name_cleaner(module)
    params = {param: clean(name) for name, param in module.named_parameters()}
    grouped = {param for group in optimizer.param_groups for param in group["params"]}
    findings = []
    left_out = [name for param, name in params.items() if param.requires_grad and param not in grouped]
    if left_out:
        message = (
            f"{len(left_out)} trainable parameters are in no optimizer group; the first is {left_out[0]!r}."
        )
        findings.append(Finding("S211", _STAGE, message, rank=rank, tensor=left_out[0]))
    orphans = [param for param in grouped if param not in params]
    if orphans:
        message = f"the optimizer holds {len(orphans)} parameters that are not in the model; the first is {tuple(orphans[0].shape)}."
        findings.append(Finding("S212", _STAGE, message, rank=rank))
    return findings


def compare_ranks(held: list[Held]) -> list[Finding]:
    """Tensors that differ between ranks which should hold the same bytes.

    Every rank's fingerprints go to rank 0, in one packed message, and what it finds to all. Collective: every rank.
    """
    world_size = dist.get_world_size()
    names = [item.name for item in held]
    of_names = int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:7], "little")
    rows = gather_rows(torch.tensor([len(names), of_names]))
    if not bool((rows == rows[0]).all()):
        return _compare_names(names)
    mine = torch.tensor([_fingerprint(item, world_size) for item in held], dtype=torch.int64).view(-1)
    table = rows_on_first(mine)
    found = [] if table is None else [finding.to_json() for finding in _compare_tables(held, table)]
    return list(map(Finding.from_json, broadcast(found)))


def _compare_tables(held: list[Held], table: torch.Tensor) -> list[Finding]:
    """What differs in the fingerprints of all ranks."""
    world_size = len(table)
    columns = table.view(world_size, len(held), _FIELDS).transpose(0, 1)
    # Only the shard's index may differ between ranks; tensors with any other difference are compared one by one.
    same = (columns == columns[:, :1]).all(dim=1)
    same[:, _SHARD_INDEX] = True
    odd = torch.nonzero(~same.all(dim=1)).flatten().tolist()
    return [finding for i in odd for finding in _compare_tensor(held[i], columns[i])]


_FIELDS = 6
_SHARD_INDEX = 2


def _fingerprint(item: Held, world_size: int) -> list[int]:
    """Type, whole shape, shard index, number of shards, and the digest where another rank holds the same bytes."""
    kind = int.from_bytes(hashlib.sha256(str(item.local.dtype).encode()).digest()[:7], "little")
    shape = int.from_bytes(hashlib.sha256(str(item.shape).encode()).digest()[:7], "little")
    index, count = item.shard
    replicated = count < world_size and not item.is_volatile and not item.local.is_meta
    return [kind, shape, index, count, digest(item.local) if replicated else 0, int(item.local.is_meta)]


def _compare_tensor(item: Held, ranks: torch.Tensor) -> list[Finding]:
    kinds = _groups({rank: tuple(row[:2].tolist()) for rank, row in enumerate(ranks)})
    if len(kinds) > 1:
        message = (
            f"{item.name!r} has a different dtype or shape on ranks {kinds[1]} than on ranks {kinds[0]}."
        )
        return [Finding("S208", _STAGE, message, rank=kinds[-1][0], tensor=item.name)]
    findings = []
    for index in sorted({int(row[2]) for row in ranks}):
        holders = {
            rank: int(row[4]) for rank, row in enumerate(ranks) if int(row[2]) == index and not int(row[5])
        }
        groups = _groups(holders)
        if len(groups) > 1:
            message = f"{item.name!r} holds different bytes on ranks {groups[1]} than on ranks {groups[0]}."
            findings.append(Finding("S207", _STAGE, message, rank=groups[-1][0], tensor=item.name))
    return findings


def _groups(values: Mapping[int, object]) -> list[list[int]]:
    """Ranks with equal values, the largest group first; of equal groups, the one with the lowest rank."""
    by_value: dict[object, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _compare_names(names: list[str]) -> list[Finding]:
    """Which tensors some rank does not have. Collective: every rank."""
    per_rank = exchange(names)
    findings = []
    for rank, others in enumerate(per_rank):
        missing = [name for name in per_rank[0] if name not in set(others)]
        extra = [name for name in others if name not in set(per_rank[0])]
        if missing or extra:
            message = f"compared with rank 0, it lacks {missing[:3]} and has the extra tensors {extra[:3]}."
            findings.append(Finding("S213", _STAGE, message, rank=rank, tensor=(missing + extra)[0]))
    return findings
