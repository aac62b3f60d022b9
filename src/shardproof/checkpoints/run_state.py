"""Everything a run needs to go on, as flat tensor ranges and as JSON."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardproof.checkpoints.plain import from_plain, to_plain
from shardproof.dist.collectives import gather, together
from shardproof.errors import fail
from shardproof.shard.local import LocalShard
from shardproof.shard.optimizer_state import PerBlock, StateSpec, blocks_of, state_specs
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import local_tensor

FORMAT = 1  # of a checkpoint; a reader refuses any other


def model_ranges(policy: ShardedModel) -> dict[str, LocalShard]:
    """This rank's part of every parameter and persistent buffer."""
    ranges = {f"model.{shard.name}": shard for shard in policy.local_shards()}
    for name, buffer in policy.persistent_buffers().items():
        ranges[f"model.{name}"] = LocalShard.of_whole(name, buffer)
    return ranges


def optimizer_ranges(
    policy: ShardedModel, optimizer: torch.optim.Optimizer, *, owned: bool = True
) -> dict[str, LocalShard]:
    """This rank's part of the optimizer's per-element and per-block state.

    Ranks that share a block hold the same number for it; with `owned` it is that of the rank with its first element alone.
    """
    ranges = {}
    shards = {shard.name: shard for shard in policy.local_shards()}
    specs = state_specs(optimizer)
    for name, param in policy.named_parameters():
        shard = shards[name]
        for key, value in optimizer.state.get(param, {}).items():
            if _is_per_block(specs.get(param), key):
                ranges[f"optim.{name}.{key}"] = blocks_of(shard, value, owned=owned)
            elif _is_elementwise(value, param):
                flat = (value.to_local() if isinstance(value, DTensor) else value).view(-1)
                ranges[f"optim.{name}.{key}"] = replace(shard, flat=flat)
    return ranges


def _is_per_block(spec: StateSpec | None, key: str) -> bool:
    return spec is not None and isinstance(spec.get(key), PerBlock)


def _is_elementwise(value: Any, param: torch.Tensor) -> bool:
    """Whether state has one element for each of the parameter's, and is split over the ranks as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or value.ndim == 0:
        return False
    if isinstance(param, DTensor):
        return isinstance(value, DTensor) and value.placements == param.placements
    return not isinstance(value, DTensor)


def check_optimizer_state(policy: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Raise E408, with parameter and key, if this rank's optimizer has state that a checkpoint cannot hold."""
    names = {id(param): name for name, param in policy.named_parameters()}
    specs = state_specs(optimizer)
    for param, state in optimizer.state.items():
        if state and id(param) not in names:
            raise _unsavable("the optimizer has state for a parameter that is not in the model.")
        spec = specs.get(param)
        if state and spec is not None and state.keys() != spec.keys():
            name = names[id(param)]
            message = f"the optimizer has the state {sorted(map(str, state))} for {name!r} but declares {sorted(spec)}."
            raise _unsavable(message, name)
        for key, value in state.items():
            name = names[id(param)]
            if not isinstance(key, str) or "." in key:
                raise _unsavable(f"the optimizer's state of {name!r} has the unsupported key {key!r}.", name)
            if _is_per_block(spec, key):
                continue
            if not _is_elementwise(value, param) and not _fits_json(value):
                shape = f", shape {tuple(value.shape)}," if isinstance(value, torch.Tensor) else ""
                what = f"the optimizer's state {key!r} of {name!r}, a {type(value).__name__}{shape}"
                message = f"{what} is neither a tensor of the parameter's shape {tuple(param.shape)} nor one number."
                raise _unsavable(message, name)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and not callable(value) and not _fits_json(value):
                raise _unsavable(f"{key!r} of the optimizer's group {index} is a {type(value).__name__}.")


def _unsavable(message: str, name: str | None = None) -> Exception:
    fix = "save without optimizer=, or keep this state as numbers or as tensors of the parameter's shape"
    return fail("E408", "save", message, tensor=name, fix=fix)


def _fits_json(value: Any) -> bool:
    try:
        to_plain(value)
    except TypeError:
        return False
    return True


def allocate_optimizer(
    policy: ShardedModel, optimizer: torch.optim.Optimizer, saved: dict[str, torch.dtype]
) -> dict[str, LocalShard]:
    """Memory for the optimizer state that a checkpoint has, registered with the optimizer in place of what it had."""
    specs, shards = state_specs(optimizer), {shard.name: shard for shard in policy.local_shards()}
    for name, param in policy.named_parameters():
        optimizer.state.pop(param, None)
        prefix = f"optim.{name}."
        if _has_no_state(param):
            continue
        for key in [key for key in saved if key.startswith(prefix) and "." not in key[len(prefix) :]]:
            short = key[len(prefix) :]
            if _is_per_block(specs.get(param), short):
                ((first, last),) = blocks_of(shards[name]).boxes[0]
                made = local_tensor(param).new_zeros(last - first, dtype=saved[key])
            else:
                made = torch.zeros_like(param, dtype=saved[key])
            optimizer.state[param][short] = made
    return optimizer_ranges(policy, optimizer, owned=False)


def _has_no_state(param: torch.Tensor) -> bool:
    """FSDP1 gives no gradient, hence no state, to what a rank holds nothing of; FSDP2 does."""
    return param.numel() == 0


def describe(
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The state that is not tensors, of all ranks; empty on others than rank 0, which writes it. Collective: every rank."""
    rows = gather({"scalars": _scalars(policy, optimizer), "rng": _random_state(policy.device)})
    with together("save"):
        scalars = _agreed([row["scalars"] for row in rows or ()])
    if rows is None:
        return {}
    return {
        "format": FORMAT,
        "model": fingerprint(policy),
        "world_size": dist.get_world_size(),
        "strategy": policy.strategy,
        "version": policy.version,
        "num_updates": policy.num_updates,
        "groups": [_group(group) for group in optimizer.param_groups] if optimizer is not None else None,
        "scalars": scalars,
        "scheduler": _plain_part(scheduler.state_dict()) if scheduler is not None else None,
        "rng": [row["rng"] for row in rows],
        "extra": extra,
    }


def _agreed(rows: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The state that is one number per parameter, in which the ranks that have it must agree."""
    found: dict[str, dict[str, Any]] = {}
    for rank, row in enumerate(rows):
        for name, state in row.items():
            known = found.setdefault(name, state)
            for key in sorted(known.keys() | state.keys()):
                if repr(known.get(key)) != repr(state.get(key)):  # NaN is not equal to itself, its text is
                    values = f"{state.get(key)} here and {known.get(key)} on another rank"
                    message = f"the optimizer's state {key!r} of {name!r} is {values}."
                    raise fail("E408", "save", message, rank=rank, tensor=name)
    return found


def fingerprint(policy: ShardedModel) -> dict[str, list[int]]:
    """{name: shape} of everything stored: what makes two models the same for a checkpoint."""
    return {info.name: list(info.shape) for info in policy.inventory.stored}


def restore(
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    state: dict[str, Any],
    keep_settings: bool = False,
) -> dict[str, Any]:
    """Put the described state back, but for settings that are to be kept; returns `extra`."""
    policy.version = state["version"]
    policy.num_updates = state["num_updates"]
    if optimizer is not None and state["groups"] is not None:
        if not keep_settings:
            _restore_settings(optimizer, state["groups"])
        _restore_scalars(policy, optimizer, state["scalars"])
    if scheduler is not None and state["scheduler"] is not None:
        _restore_schedule(scheduler, state["scheduler"], keep_settings)
    if state["world_size"] == dist.get_world_size():
        _set_random_state(state["rng"][dist.get_rank()], policy.device)
    return state["extra"]


def _restore_settings(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = from_plain(value, _device_like(group.get(key)))


def _restore_scalars(
    policy: ShardedModel, optimizer: torch.optim.Optimizer, scalars: dict[str, dict[str, Any]]
) -> None:
    for name, param in policy.named_parameters():
        if _has_no_state(param):
            continue
        for key, value in scalars.get(name, {}).items():
            device = _scalar_device(optimizer, param, value["on_device"])
            optimizer.state[param][key] = from_plain(value["value"], device)


def _restore_schedule(scheduler: LRScheduler, state: dict[str, Any], keep_settings: bool) -> None:
    """Go on at the saved step: at the saved rates, or at those that the schedule here has for it."""
    ours = scheduler.state_dict()
    saved = {key: from_plain(value) for key, value in state.items()}
    if keep_settings:
        assert isinstance(scheduler, LambdaLR)
        ratios = [ratio(saved["last_epoch"]) for ratio in scheduler.lr_lambdas]
        rates = [base * ratio for base, ratio in zip(scheduler.base_lrs, ratios, strict=True)]
        saved |= {"base_lrs": scheduler.base_lrs, "_last_lr": rates}
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    scheduler.load_state_dict({**ours, **saved})


def _device_like(value: Any) -> torch.device:
    return value.device if isinstance(value, torch.Tensor) else torch.device("cpu")


def _scalar_device(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, was_on_device: bool
) -> torch.device:
    """Fused and capturable optimizers keep their step beside the parameter, most others on the host."""
    groups = [group for group in optimizer.param_groups if any(p is param for p in group["params"])]
    beside = was_on_device or any(group.get("fused") or group.get("capturable") for group in groups)
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.device if beside else torch.device("cpu")


def _scalars(policy: ShardedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """State that is one number per parameter, such as AdamW's step."""
    found: dict[str, dict[str, Any]] = {}
    for name, key, value in _other_state(policy, optimizer) if optimizer is not None else ():
        on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
        found.setdefault(name, {})[key] = {"value": to_plain(value), "on_device": on_device}
    return found


def _other_state(policy: ShardedModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    specs = state_specs(optimizer)
    for name, param in policy.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if not _is_elementwise(value, param) and not _is_per_block(specs.get(param), key):
                yield name, key, value


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings; functions among them come from whoever makes the optimizer."""
    return {key: to_plain(value) for key, value in group.items() if key != "params" and not callable(value)}


def _plain_part(values: dict[str, Any]) -> dict[str, Any]:
    """The entries that JSON can hold; the functions of a schedule come from whoever makes it."""
    return {key: to_plain(value) for key, value in values.items() if _fits_json(value)}


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"torch": bytes(torch.get_rng_state().numpy()).hex(), "python": _python_state()}
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).numpy()).hex()
    return state


def _python_state() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(_bytes(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def check_state(state: Any) -> None:
    """Raise KeyError, TypeError or ValueError unless `restore` can use a described state whole."""
    _want(state, dict, "it")
    if state.get("format") != FORMAT:
        raise ValueError(f"its format is {state.get('format')!r}, this version reads {FORMAT}")
    kinds = {
        "version": int,
        "num_updates": int,
        "world_size": int,
        "scalars": dict,
        "extra": dict,
        "model": dict,
    }
    for key, kind in kinds.items():
        _want(state[key], kind, key)
    for group in _want(state["groups"], list, "groups") if state["groups"] is not None else ():
        for value in _want(group, dict, "a group").values():
            from_plain(value)
    for scalars in state["scalars"].values():
        for value in _want(scalars, dict, "scalars").values():
            from_plain(_want(value, dict, "a scalar")["value"])
            _want(value["on_device"], bool, "on_device")
    for value in (
        _want(state["scheduler"], dict, "scheduler").values() if state["scheduler"] is not None else ()
    ):
        from_plain(value)
    if len(_want(state["rng"], list, "rng")) != state["world_size"]:
        raise ValueError(f"it has {len(state['rng'])} random states for {state['world_size']} ranks")
    for row in state["rng"]:
        _check_random_state(_want(row, dict, "rng"))


def _check_random_state(state: dict[str, Any]) -> None:
    """Try the state on generators of their own."""
    torch.Generator().set_state(_bytes(_want(state["torch"], str, "rng")))
    version, numbers, gauss = _want(state["python"], list, "rng")
    random.Random().setstate((version, tuple(numbers), gauss))
    if "cuda" in state:
        _bytes(_want(state["cuda"], str, "rng"))


def _want(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value
