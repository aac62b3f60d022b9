"""Checkpoints of a run: written beside training, published whole or not at all, read by any layout."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardproof.bounds import require_number
from shardproof.checkpoints.folders import (
    CHECKSUMS_NAME,
    STATE_NAME,
    Sum,
    check_sums,
    checkpoint_name,
    checksum,
    clear_leftovers,
    find_checkpoint,
    name_of,
    publish,
    read_checked,
    read_sums,
    sums_of,
    write_sums,
)
from shardproof.checkpoints.ranges import (
    INDEX_NAME,
    FlatRange,
    SavedTensor,
    check_index,
    data_name,
    merge_index,
    read_ranges,
    write_ranges,
)
from shardproof.checkpoints.run_state import (
    allocate_optimizer,
    check_optimizer_state,
    check_state,
    describe,
    fingerprint,
    model_ranges,
    optimizer_ranges,
    restore,
)
from shardproof.checkpoints.save_group import group_of, share
from shardproof.checkpoints.snapshot import PendingSave, Snapshot, copy_to_host
from shardproof.dist.collectives import exchange, together
from shardproof.dist.shared_folder import check_seen, claim_folder, disk_errors
from shardproof.errors import ShardproofError, fail
from shardproof.files import PARTIAL, FolderLock, write_atomic
from shardproof.foreign import parse_json
from shardproof.shard.sharded_model import ShardedModel


def save_checkpoint(
    folder: str | os.PathLike[str],
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    extra: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = 3,
    background: bool = False,
) -> PendingSave:
    """Save model, optimizer, schedule, random state and `extra` (JSON-able) as `folder`/step-N.

    The folder appears complete or not at all, and the newest `keep` are kept. With `background` the call returns
    before anything is copied: the copy and the write run beside training, and only what changes weights next waits for
    the copy: a step of any optimizer, `policy.offload`, or what calls `policy.before_change`. Call `wait()` on the
    result before the process ends. One process at a time saves into a folder.

    Collective: every rank. Memory: in the background, a host copy of this rank's state.
    """
    started = time.perf_counter()
    previous, policy.pending_save = policy.pending_save, None
    if previous is not None:
        previous.settle()
    root = Path(folder)
    number = policy.version if step is None else step
    with together("save"):
        if optimizer is not None:
            policy.check_resident("save")
            check_optimizer_state(policy, optimizer)
        _check_request(root, extra or {}, number, keep)
    lock = FolderLock(root)
    try:
        with together("save"):
            if dist.get_rank() == 0:
                _claim(root, lock)
        state = describe(policy, optimizer, scheduler, extra or {})
        partial = root / f"{PARTIAL}{number:08d}-{exchange(secrets.token_hex(4))[0]}"
        ranges = model_ranges(policy) | (optimizer_ranges(policy, optimizer) if optimizer is not None else {})
        save = _Save(policy, root, partial, number, keep, state, lock)
        snapshot = Snapshot(policy, ranges)
    except BaseException:
        lock.release()
        raise
    pending = PendingSave()
    if not background:
        _run(save, ranges, snapshot, pending, started, in_place=True)
        pending.blocked_seconds = time.perf_counter() - started
        pending.wait()
        return pending
    pending.begin_staging()
    work = threading.Thread(
        target=_run, args=(save, ranges, snapshot, pending, started), name="shardproof-save"
    )
    pending._thread = work
    policy.pending_save = pending
    work.start()
    pending.blocked_seconds = time.perf_counter() - started
    return pending


def _check_request(root: Path, extra: dict[str, Any], number: int, keep: int | None) -> None:
    require_number("save", "step", number, at_least=0)
    if keep is not None:
        require_number("save", "keep", keep, at_least=1)
    with disk_errors("save", f"{root} cannot be made"):
        root.mkdir(parents=True, exist_ok=True)
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise fail(
            "E408", "save", f"extra is not JSON: {error}.", fix="pass plain numbers, text and lists"
        ) from error


def _claim(root: Path, lock: FolderLock) -> None:
    """Keep other saves out of the folder, and remove what ended ones left in it. Rank 0 alone."""
    with disk_errors("save", f"{root} cannot be written"):
        claim_folder(lock, "save")
        try:
            clear_leftovers(root)
        except BaseException:
            lock.release()
            raise


class _Save:
    """One save on its way to disk. Every method but the first is collective, on the checkpoint group."""

    def __init__(
        self,
        policy: ShardedModel,
        root: Path,
        partial: Path,
        number: int,
        keep: int | None,
        state: dict[str, Any],
        lock: FolderLock,
    ):
        self.policy, self.root, self.partial, self.keep, self.state = policy, root, partial, keep, state
        self.final = root / checkpoint_name(number)
        self.group = group_of(policy)
        self.lock = lock

    def stage(self, ranges: dict[str, FlatRange], snapshot: Snapshot) -> dict[str, FlatRange]:
        """The host copies, if every rank could make them and nothing has changed since the call."""
        problem: Exception | None = None
        copies: dict[str, FlatRange] = {}
        try:
            copies = copy_to_host(ranges)
            snapshot.check(copies)
        except Exception as error:
            problem = error
        share(self.group, problem=problem)
        return copies

    def write(self, ranges: dict[str, FlatRange], snapshot: Snapshot | None) -> list[Sum]:
        """Write every rank's tensors, the index and the state; returns the sums of all files.

        With `snapshot` the ranges are the policy's own memory, which must still be what it was.
        """
        self._first_alone(self._write_state)
        mine, problem = None, None
        try:
            # A host that shares no folder is named when its files are missed.
            self.partial.mkdir(exist_ok=True)
            name = data_name(dist.get_rank())
            part, size, crc = write_ranges(self.partial / name, _without_replicas(self.policy, ranges))
            if snapshot is not None:
                snapshot.check(ranges)
            mine = [part, [name, size, crc]]
        except Exception as error:  # of the disk, memory or the device: the others wait for what it says
            problem = error
        parts = share(self.group, mine, problem)
        sums: list[Sum] = [(name, size, crc) for _, (name, size, crc) in parts]
        self._first_alone(lambda: self._write_index([part for part, _ in parts], sums))
        return sums

    def _write_index(self, parts: list[Any], sums: list[Sum]) -> None:
        """Say where everything lies, if it is everything."""
        index = merge_index(parts)
        sizes = {name: size for name, size, _ in sums}
        check_index(index, self.final.name, sizes, stage="save", code="E408")
        write_atomic(self.partial / INDEX_NAME, json.dumps(index))

    def _write_state(self) -> None:
        self.partial.mkdir()
        write_atomic(self.partial / STATE_NAME, json.dumps(self.state))

    def publish(self, sums: list[Sum]) -> Path:
        """Note the checksums of everything and give the folder its name, if rank 0 sees all that was written."""
        written = [(rank, name, size) for rank, (name, size, _) in enumerate(sums)]
        self._first_alone(lambda: check_seen(self.partial, written, "save"))
        self._first_alone(
            lambda: write_sums(self.partial, [*sums, *sums_of(self.partial, [STATE_NAME, INDEX_NAME])])
        )
        self._first_alone(lambda: publish(self.root, self.partial, self.final, self.keep))
        return self.final

    def _first_alone(self, work: Callable[[], None]) -> None:
        """Do something on rank 0; what fails there fails on all ranks."""
        problem: Exception | None = None
        if dist.get_rank() == 0:
            try:
                work()
            except Exception as error:
                problem = error
        share(self.group, problem=problem)

    def give_up(self, error: BaseException) -> BaseException:
        """Remove what was begun; the error as ours."""
        # Every rank: on hosts that share no folder each has a part. Names are random, so nobody else's is removed.
        shutil.rmtree(self.partial, ignore_errors=True)
        if isinstance(error, ShardproofError | KeyboardInterrupt | SystemExit):
            return error
        detail = " ".join(str(error).split())[-300:]
        message = f"{self.partial.name} was not published: {type(error).__name__}: {detail}"
        failure = fail("E408", "save", message)
        failure.__cause__ = error
        return failure


def _run(
    save: _Save,
    ranges: dict[str, FlatRange],
    snapshot: Snapshot,
    pending: PendingSave,
    started: float,
    in_place: bool = False,
) -> None:
    """Take a save from the policy's tensors to the published folder; `pending` tells how it ended."""
    try:
        held = ranges if in_place else save.stage(ranges, snapshot)
        pending.end_staging()
        sums = save.write(held, snapshot if in_place else None)
        pending.folder = save.publish(sums)
    except BaseException as error:
        pending._error = save.give_up(error)
    finally:
        pending.end_staging()
        save.lock.release()
        pending.write_seconds = time.perf_counter() - started


def _without_replicas(policy: ShardedModel, ranges: dict[str, FlatRange]) -> dict[str, FlatRange]:
    """What this rank writes: replicas and other ranks' whole buffers are left to the first that holds them."""
    if policy.mesh.ndim == 2 and policy.mesh.get_local_rank(0) != 0:
        return {name: item.empty() for name, item in ranges.items()}
    whole = {f"model.{info.name}" for info in policy.inventory.persistent_buffers}
    if dist.get_rank() == 0:
        return ranges
    return {name: item.empty() if name in whole else item for name, item in ranges.items()}


def resume(
    folder: str | os.PathLike[str],
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    which: str = "latest",
) -> dict[str, Any]:
    """Load a checkpoint into the policy, optimizer and schedule, whatever layout wrote it; returns its `extra`.

    `folder` is a run's folder, of which `which` names one ("latest", or "step-00000012"), or a checkpoint itself. At
    the world size that wrote it the run goes on bit for bit. Every byte of it is compared with its checksum before
    anything is parsed, and everything is parsed before anything changes.

    Collective: every rank.
    """
    previous, policy.pending_save = policy.pending_save, None
    if previous is not None:
        previous.settle()  # what is loaded now must not be in what is being saved
    with together("resume"), _reading():
        policy.check_resident("resume")
        chosen = find_checkpoint(Path(folder), which)
        noted = read_sums(chosen)
    _check_same(chosen)
    with together("resume"), _reading():
        check_sums(chosen, noted, dist.get_rank(), dist.get_world_size())
    with together("resume"), _reading():
        state = _read_state(chosen, policy, noted)
        index = parse_json(read_checked(chosen, INDEX_NAME, noted), INDEX_NAME, "resume", code="E407")
        saved = check_index(index, name_of(chosen), {name: size for name, (size, _) in noted.items()})
    ranges = model_ranges(policy)
    with together("resume"):
        _check_names(chosen, saved, ranges)
        if optimizer is not None:
            _check_optimizer(chosen, saved, policy, optimizer, state["groups"])
    if optimizer is not None and state["groups"] is not None:
        ranges |= allocate_optimizer(policy, optimizer, {name: info.dtype for name, info in saved.items()})
    with together("resume"), _reading(), torch.no_grad():
        read_ranges(chosen, ranges, saved)
    return restore(policy, optimizer, scheduler, state)


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
        message = f"{label} is of another model: {odd[0]!r} is {saved.get(odd[0])} there and {ours.get(odd[0])} here"
        raise fail("E407", "resume", f"{message} ({len(odd)} tensors differ).", tensor=odd[0])
    return state


def _check_names(folder: Path, saved: Mapping[str, SavedTensor], ranges: dict[str, FlatRange]) -> None:
    """Every tensor of the model is described, with its size."""
    for name, item in ranges.items():
        info = saved.get(name)
        if info is None or info.numel != item.numel:
            found = "is not there" if info is None else f"has {info.numel} elements of {item.numel}"
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
        message = (
            f"{label}: its optimizer has {len(groups)} groups, this one has {len(optimizer.param_groups)}."
        )
        raise fail("E407", "resume", message)
    states = {name: key for name in saved if name.startswith("optim.") for key in [name.rpartition(".")[2]]}
    sizes = {info.name: torch.Size(info.shape).numel() for info in policy.inventory.parameters}
    for name, param in policy.named_parameters():
        for key in sorted(set(states.values())) if param.requires_grad else ():
            info = saved.get(f"optim.{name}.{key}")
            if info is None or info.numel != sizes[name]:
                found = "is not there" if info is None else "has another size"
                raise fail("E407", "resume", f"{label}: 'optim.{name}.{key}' {found}.", tensor=name)
