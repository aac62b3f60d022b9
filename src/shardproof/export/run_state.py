"""Everything a run needs to go on, as flat tensor ranges and as JSON."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from shardproof.dist.collectives import exchange
from shardproof.export.dcp_private import FlatRange
from shardproof.shard.holdings import local_shards, persistent_buffers
from shardproof.shard.sharded_model import ShardedModel


def model_ranges(policy: ShardedModel) -> dict[str, FlatRange]:
    """This rank's part of every parameter and persistent buffer."""
    ranges = {
        f"model.{shard.name}": FlatRange(shard.flat, shard.start, torch.Size(shard.shape).numel())
        for shard in local_shards(policy)
    }
    for name, buffer in persistent_buffers(policy).items():
        ranges[f"model.{name}"] = FlatRange(buffer.reshape(-1), 0, buffer.numel())
    return ranges


def optimizer_ranges(policy: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, FlatRange]:
    """This rank's part of the optimizer's per-element state."""
    ranges = {}
    shards = {shard.name: shard for shard in local_shards(policy)}
    for name, param in policy.named_parameters():
        shard = shards[name]
        for key, value in _elementwise(optimizer, param):
            flat = (value.to_local() if isinstance(value, DTensor) else value).view(-1)
            if policy.offloaded is not None:
                raise RuntimeError("an offloaded policy cannot be saved; call onload first")
            ranges[f"optim.{name}.{key}"] = FlatRange(flat, shard.start, torch.Size(shard.shape).numel())
    return ranges


def _elementwise(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and value.ndim > 0:
            yield key, value


def allocate_optimizer(
    policy: ShardedModel, optimizer: torch.optim.Optimizer, saved: dict[str, torch.dtype]
) -> dict[str, FlatRange]:
    """Memory for the optimizer state that a checkpoint has, registered with the optimizer."""
    for name, param in policy.named_parameters():
        prefix = f"optim.{name}."
        if (
            param.numel() == 0
        ):  # FSDP1 gives no gradient, hence no state, to what a rank holds nothing of; FSDP2 does
            continue
        for key in [key for key in saved if key.startswith(prefix) and "." not in key[len(prefix) :]]:
            optimizer.state[param][key[len(prefix) :]] = torch.zeros_like(param, dtype=saved[key])
    return optimizer_ranges(policy, optimizer)


def describe(
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The state that is not tensors, of all ranks. Collective: every rank."""
    mine = {"scalars": _scalars(policy, optimizer), "rng": _random_state(policy.device)}
    rows = exchange(mine)
    scalars: dict[str, Any] = {}
    for row in rows:
        scalars.update(row["scalars"])
    return {
        "model": fingerprint(policy),
        "world_size": dist.get_world_size(),
        "strategy": policy.strategy,
        "version": policy.version,
        "num_updates": policy.num_updates,
        "groups": [_plain(group) for group in optimizer.param_groups] if optimizer is not None else None,
        "scalars": scalars,
        "scheduler": _plain(scheduler.state_dict()) if scheduler is not None else None,
        "rng": [row["rng"] for row in rows],
        "extra": extra,
    }


def fingerprint(policy: ShardedModel) -> dict[str, list[int]]:
    """{name: shape} of everything stored: what makes two models the same for a checkpoint."""
    return {info.name: list(info.shape) for info in policy.inventory.stored}


def restore(
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Put the described state back; returns `extra`."""
    policy.version = state["version"]
    policy.num_updates = state["num_updates"]
    if optimizer is not None and state["groups"] is not None:
        for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update({key: _unplain(value) for key, value in saved.items()})
        for name, param in policy.named_parameters():
            for key, value in state["scalars"].get(name, {}).items():
                if optimizer.state.get(param):
                    optimizer.state[param][key] = torch.tensor(value, device=_scalar_device(optimizer, param))
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    if state["world_size"] == dist.get_world_size():
        _set_random_state(state["rng"][dist.get_rank()], policy.device)
    return state["extra"]


def _scalar_device(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.device:
    """Fused and capturable optimizers keep their step beside the parameter, the others on the host."""
    group = next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    beside = group.get("fused") or group.get("capturable")
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.device if beside else torch.device("cpu")


def _scalars(policy: ShardedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, float]]:
    """State that is one number a parameter, such as AdamW's step."""
    found: dict[str, dict[str, float]] = {}
    for name, param in policy.named_parameters() if optimizer is not None else []:
        for key, value in optimizer.state.get(param, {}).items():  # type: ignore[union-attr]
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.ndim == 0:
                found.setdefault(name, {})[key] = float(value)
    return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The entries that JSON can hold, nested ones included; functions and other objects are left out."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | bool | str | None)


def _unplain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"torch": bytes(torch.get_rng_state().numpy()).hex(), "python": _python_state()}
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).numpy()).hex()
    return state


def _python_state() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(
            torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8), device
        )
