"""Reading a checkpoint back: every byte compared, everything parsed, and only then anything changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardproof.checkpoints.folders import (
    CHECKSUMS_NAME,
    STATE_NAME,
    check_sums,
    checksum,
    find_checkpoint,
    name_of,
    read_checked,
    read_sums,
)
from shardproof.checkpoints.ranges import (
    INDEX_NAME,
    SavedTensor,
    check_index,
    files_to_read,
    read_ranges,
)
from shardproof.checkpoints.run_state import (
    allocate_optimizer,
    check_state,
    fingerprint,
    model_ranges,
    restore,
)
from shardproof.checkpoints.saver import saver_of
from shardproof.checkpoints.spread import fetch, open_part
from shardproof.dist.collectives import exchange, together
from shardproof.dist.sharing import Places, one_place
from shardproof.errors import error_for, fail
from shardproof.foreign import parse_json
from shardproof.shard.local import LocalShard
from shardproof.shard.optimizer_state import PerBlock, num_blocks, state_specs
from shardproof.shard.sharded_model import ShardedModel

# What no other checkpoint of the same run can mend.
_SAME_OPTIMIZER = "set optimizer.name and optimizer.moments as the run that saved it had them"
_SAME_MODEL = "use the model that it was saved of, with the same adapters; a run with another one needs another output.folder"


def resume(
    folder: str | os.PathLike[str],
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    which: str = "latest",
    *,
    keep_settings: bool = False,
    places: Places | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of any layout into the policy, optimizer and schedule; returns its `extra`.

    `folder` is a checkpoint, or a run's folder, where `which` names the checkpoint ("latest", or "step-00000012").
    With the same number of ranks, the run continues bit for bit. Every byte is compared with its checksum
    before anything is parsed, and everything is parsed before anything changes.

    With `keep_settings`, learning rates, betas and other options of the optimizer keep their current values instead of
    the saved ones; the schedule, which must come from `make_schedule`, continues at the saved step.

    With `places`, which a run finds out when it starts, hosts need not share the folder: they send each other the files
    that their ranks need.

    Collective: every rank.
    """
    saver_of(policy).settle()  # what is loaded now must not be in what is being saved
    where = places or one_place()
    with together("resume"), _reading():
        policy.check_resident("resume")
        _check_schedule(scheduler, keep_settings)
        if where.are_shared:
            chosen = find_checkpoint(Path(folder), which)
            noted = read_sums(chosen)
    if where.are_shared:
        _check_same(chosen)
    else:
        chosen, noted = _open_part(Path(folder), which, where)
    with together("resume"), _reading():
        its = where.ranks_of(where.mine)
        check_sums(chosen, noted, its.index(dist.get_rank()), len(its))
    with together("resume"), _reading():
        state = _read_state(chosen, policy, noted)
        index = parse_json(read_checked(chosen, INDEX_NAME, noted), INDEX_NAME, "resume", code="E407")
        saved = check_index(index, name_of(chosen), {name: size for name, (size, _) in noted.items()})
    ranges = model_ranges(policy)
    with together("resume"):
        _check_names(chosen, saved, ranges)
        if optimizer is not None:
            _check_optimizer(chosen, saved, policy, optimizer, state["groups"])
    if not where.are_shared:
        with_state = {name: info for name, info in saved.items() if optimizer is not None or name in ranges}
        fetch(chosen, files_to_read(ranges, with_state), noted, where)
    if optimizer is not None and state["groups"] is not None:
        ranges |= allocate_optimizer(policy, optimizer, {name: info.dtype for name, info in saved.items()})
    with together("resume"), _reading(), torch.no_grad():
        read_ranges(chosen, ranges, saved)
        if wrong := policy.changed_base("resume"):
            raise error_for(wrong)  # another base lies under the adapters of the checkpoint
    return restore(policy, optimizer, scheduler, state, keep_settings)


def read_files(
    folder: str | os.PathLike[str], which: str, prefix: str, places: Places | None = None
) -> dict[str, bytes]:
    """The further files of a checkpoint whose names begin so, of all ranks, each compared with its checksum.

    Collective: every rank.
    """
    where, found = places or one_place(), {}
    if not where.are_shared:
        chosen, noted = _open_part(Path(folder), which, where)
        fetch(chosen, [name for name in noted if name.startswith(prefix)], noted, where)
    with together("resume"), _reading():
        if where.are_shared:
            chosen = find_checkpoint(Path(folder), which)
            noted = read_sums(chosen)
        for name in sorted(name for name in noted if name.startswith(prefix)):
            found[name] = read_checked(chosen, name, noted)
    return found


def _open_part(root: Path, which: str, places: Places) -> tuple[Path, dict[str, tuple[int, int]]]:
    """This place's folder of a checkpoint and what is noted of all its files. Collective: every rank."""
    chosen = open_part(root, which, places)
    with together("resume"), _reading():
        noted = read_sums(chosen, is_part=True)
    return chosen, noted


def _check_schedule(scheduler: LRScheduler | None, keep_settings: bool) -> None:
    if keep_settings and scheduler is not None and not isinstance(scheduler, LambdaLR):
        message = f"keep_settings=True cannot compute the learning rate of a {type(scheduler).__name__}."
        raise fail(
            "C001", "resume", message, fix="use make_schedule or another LambdaLR, or keep_settings=False"
        )


@contextmanager
def _reading() -> Iterator[None]:
    """The disk's errors as E407."""
    try:
        yield
    except OSError as error:
        raise fail("E407", "resume", f"{error.filename or 'the checkpoint'}: {error.strerror}.") from error


def _check_same(chosen: Path) -> None:
    """Raise unless all ranks found one checkpoint. Collective: every rank."""
    with together("resume"), _reading():
        mine = [name_of(chosen), checksum(chosen / CHECKSUMS_NAME)]
    rows = exchange(mine)
    if len({name for name, _ in rows}) > 1:
        raise fail(
            "E407", "resume", f"ranks see different checkpoints: {sorted({name for name, _ in rows})}."
        )
    if len({crc for _, crc in rows}) > 1:
        raise fail("E407", "resume", f"{name_of(chosen)}: ranks see different files under this name.")


def _read_state(folder: Path, policy: ShardedModel, noted: dict[str, tuple[int, int]]) -> dict[str, Any]:
    label = name_of(folder)
    state = parse_json(read_checked(folder, STATE_NAME, noted), STATE_NAME, "resume", code="E407")
    try:
        check_state(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise fail("E407", "resume", f"{label}: {STATE_NAME} cannot be used: {what}.") from error
    saved, ours = state["model"], fingerprint(policy)
    if saved != ours:
        odd = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
        message = f"{label} belongs to another model: {odd[0]!r} is {saved.get(odd[0])} in the checkpoint and {ours.get(odd[0])} in this model"
        raise fail(
            "E407", "resume", f"{message} ({len(odd)} tensors differ).", tensor=odd[0], fix=_SAME_MODEL
        )
    return state


def _check_names(folder: Path, saved: Mapping[str, SavedTensor], ranges: dict[str, LocalShard]) -> None:
    """Every tensor of the model is described, with its size."""
    for name, item in ranges.items():
        info = saved.get(name)
        if info is None or info.numel != item.numel:
            found = "is not there" if info is None else f"has {info.numel} elements, expected {item.numel}"
            raise fail("E407", "resume", f"{name_of(folder)}: {name!r} {found}.", tensor=name)


def _check_optimizer(
    folder: Path,
    saved: Mapping[str, SavedTensor],
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer,
    groups: Any,
) -> None:
    """The saved optimizer has as many groups as this one, and the same state for every trainable parameter."""
    label = name_of(folder)
    if groups is not None and len(groups) != len(optimizer.param_groups):
        message = f"{label}: the saved optimizer has {len(groups)} groups, the current one has {len(optimizer.param_groups)}."
        raise fail("E407", "resume", message, fix=_SAME_OPTIMIZER)
    kept: dict[str, set[str]] = {}
    for name in saved:
        if name.startswith("optim."):
            parameter, _, key = name.removeprefix("optim.").rpartition(".")
            kept.setdefault(parameter, set()).add(key)
    if not kept:
        return  # it was saved before its first step
    everywhere = set().union(*kept.values())
    specs = state_specs(optimizer)
    sizes = {info.name: info.numel for info in policy.inventory.parameters}
    for name, param in policy.named_parameters():
        if not param.requires_grad:
            continue
        spec = specs.get(param)
        wanted = everywhere if spec is None else {key for key, dtype in spec.items() if dtype is not None}
        for key in sorted(wanted | kept.get(name, set())):
            info = saved.get(f"optim.{name}.{key}")
            kind = None if spec is None else spec.get(key)
            per_block = isinstance(kind, PerBlock)
            size = num_blocks(sizes[name]) if per_block else sizes[name]
            problem = "is not there" if info is None else "" if info.numel == size else "has another size"
            dtype = kind.dtype if isinstance(kind, PerBlock) else kind
            if key not in wanted:
                problem = "is in the checkpoint, but this optimizer has no such state"
            elif info is not None and spec is not None and info.dtype != dtype:
                problem = f"is {info.dtype} in the checkpoint, and this optimizer keeps it in {dtype}"
            if problem:
                message = f"{label}: 'optim.{name}.{key}' {problem}."
                raise fail("E407", "resume", message, tensor=name, fix=_SAME_OPTIMIZER)
