"""Checkpoints of a run: written beside training, published whole or not at all, read by any layout."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LRScheduler

from shardproof.dist.collectives import exchange, together
from shardproof.errors import ShardproofError, fail
from shardproof.export.dcp_private import (
    FlatLoadPlanner,
    FlatRange,
    FlatSavePlanner,
    SafeReader,
    make_writer,
    read_metadata,
)
from shardproof.export.folders import (
    PARTIAL,
    STATE_NAME,
    check_sums,
    find_checkpoint,
    needed_files,
    note_sums,
    publish,
    write_json,
)
from shardproof.export.run_state import (
    allocate_optimizer,
    describe,
    fingerprint,
    model_ranges,
    optimizer_ranges,
    restore,
)
from shardproof.shard.sharded_model import ShardedModel


class PendingSave:
    """A save under way. Training may go on; the next optimizer step waits until the tensors have been copied."""

    def __init__(self) -> None:
        self.blocked_seconds = 0.0  # of the training loop
        self.write_seconds = 0.0  # from the call to the published folder
        self.folder: Path | None = None
        self._staged = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False

    def settle(self) -> None:
        """Wait for the end, and raise what went wrong unless it has been raised before."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._told:
            self.wait()

    def wait(self) -> Path:
        """Block until the checkpoint is published; raises what went wrong, the same on every rank."""
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.blocked_seconds += time.perf_counter() - started
        if self._error is not None:
            self._told = True
            raise self._error
        assert self.folder is not None
        return self.folder

    def wait_until_staged(self, *_: Any) -> None:
        """Block until the snapshot is taken; called by the optimizer before it changes anything."""
        started = time.perf_counter()
        self._staged.wait()
        self.blocked_seconds += time.perf_counter() - started


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
    before anything is copied: the copy and the write run beside training, and only the next optimizer step waits for
    the copy. Call `wait()` on the result before the process ends.

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
        _check_target(root, extra or {})
    state = describe(policy, optimizer, scheduler, extra or {})
    nonce = exchange(secrets.token_hex(4))[0]
    partial = root / f"{PARTIAL}{number:08d}-{nonce}"
    ranges = model_ranges(policy) | (optimizer_ranges(policy, optimizer) if optimizer is not None else {})
    group = _group_of(policy)
    pending = PendingSave()

    def work() -> None:
        try:
            mine = _without_replicas(policy, _stage_together(ranges, group) if background else ranges)
            pending._staged.set()
            _write(partial, mine, state, group)
            pending.folder = _publish(root, partial, number, keep, group)
        except BaseException as error:
            pending._error = _explained(error, partial)
        finally:
            pending._staged.set()
            pending.write_seconds = time.perf_counter() - started

    if not background:
        work()
        pending.blocked_seconds = time.perf_counter() - started
        pending.wait()
        return pending
    hook = optimizer.register_step_pre_hook(pending.wait_until_staged) if optimizer is not None else None
    pending._thread = threading.Thread(target=_then(work, hook), name="shardproof-save")
    pending._thread.start()
    policy.pending_save = pending
    pending.blocked_seconds = time.perf_counter() - started
    return pending


def _check_target(root: Path, extra: dict[str, Any]) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(
            "E408", "save", f"{root} cannot be made: {error.strerror}.", rank=dist.get_rank()
        ) from error
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise fail(
            "E408", "save", f"extra is not JSON: {error}.", fix="pass plain numbers, text and lists"
        ) from error


def _then(work: Any, hook: Any) -> Any:
    def run() -> None:
        work()
        if hook is not None:
            hook.remove()

    return run


def _group_of(policy: ShardedModel) -> dist.ProcessGroup:
    """A gloo group for checkpoints alone, so that a save beside training cannot mix up its collectives.

    Collective: every rank, the first time.
    """
    if policy.checkpoint_group is None:
        policy.checkpoint_group = dist.new_group(backend="gloo")
    return policy.checkpoint_group


def _stage_together(ranges: dict[str, FlatRange], group: dist.ProcessGroup) -> dict[str, FlatRange]:
    """The host copies, if every rank could make them. Collective: every rank, on the checkpoint group."""
    problem: Exception | None = None
    copies: dict[str, FlatRange] = {}
    try:
        copies = _staged(ranges)
    except (MemoryError, RuntimeError) as error:
        problem = error
    _share_problem(problem, group)
    return copies


def _staged(ranges: dict[str, FlatRange]) -> dict[str, FlatRange]:
    return {
        name: FlatRange(item.local.detach().to("cpu", copy=True), item.start, item.numel)
        for name, item in ranges.items()
    }


def _without_replicas(policy: ShardedModel, ranges: dict[str, FlatRange]) -> dict[str, FlatRange]:
    """What this rank writes: replicas and other ranks' whole buffers are left to the first that holds them."""
    if policy.mesh.ndim == 2 and policy.mesh.get_local_rank(0) != 0:
        return {name: item.empty() for name, item in ranges.items()}
    whole = {f"model.{info.name}" for info in policy.inventory.persistent_buffers}
    if dist.get_rank() == 0:
        return ranges
    return {name: item.empty() if name in whole else item for name, item in ranges.items()}


def _write(
    partial: Path, ranges: dict[str, FlatRange], state: dict[str, Any], group: dist.ProcessGroup
) -> None:
    """Write the tensors through DCP and the rest as JSON. Collective: every rank, on the checkpoint group."""
    problem: OSError | None = None
    if dist.get_rank() == 0:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            write_json(partial / STATE_NAME, state)
        except OSError as error:
            problem = error
    _share_problem(problem, group)
    dcp.save(ranges, storage_writer=make_writer(partial), planner=FlatSavePlanner(), process_group=group)
    try:
        note_sums(partial, dist.get_rank())
    except OSError as error:
        problem = error
    _share_problem(problem, group)


def _publish(root: Path, partial: Path, number: int, keep: int | None, group: dist.ProcessGroup) -> Path:
    """Give the complete folder its name, in one rename, and drop what is no longer kept.

    Collective: every rank, on the checkpoint group; what fails on rank 0 fails on all.
    """
    final = root / f"step-{number:08d}"
    problem = None
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        try:
            publish(root, partial, final, keep)
        except OSError as error:
            problem = error
    _share_problem(problem, group)
    return final


def _share_problem(problem: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise the first rank's error, if any has one, on every rank. Collective: every rank, on the checkpoint group."""
    text = f"{type(problem).__name__}: {problem}".encode()[:_TEXT_BYTES] if problem is not None else b""
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else mine[:0]
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine, group=group)
    for rank, row in enumerate(rows):
        if int(row[0]):
            said = bytes(row.numpy()).rstrip(b"\0").decode(errors="replace")
            raise fail("E408", "save", f"the checkpoint was not published: {said}", rank=rank)


_TEXT_BYTES = 256


def _explained(error: BaseException, partial: Path) -> BaseException:
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    if isinstance(error, ShardproofError):
        return error
    detail = " ".join(str(error).split())[-300:]
    failure = fail("E408", "save", f"{partial.name} was not published: {type(error).__name__}: {detail}")
    failure.__cause__ = error
    return failure


def resume(
    folder: str | os.PathLike[str],
    policy: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    which: str = "latest",
) -> dict[str, Any]:
    """Load a checkpoint into the policy, optimizer and schedule, whatever layout wrote it; returns its `extra`.

    `folder` is a run's folder, of which `which` names one ("latest", or "step-00000012"), or a checkpoint itself. At
    the world size that wrote it the run goes on bit for bit.

    Collective: every rank.
    """
    previous, policy.pending_save = policy.pending_save, None
    if previous is not None:
        previous.settle()  # what is loaded now must not be in what is being saved
    with together("resume"):
        policy.check_resident("resume")
        chosen = find_checkpoint(Path(folder), which)
        state = _read_state(chosen, policy)
        metadata = read_metadata(chosen)
        files = needed_files(chosen, metadata)
    if len(set(exchange(chosen.name))) > 1:
        raise fail(
            "E407", "resume", f"ranks see different checkpoints: {sorted(set(exchange(chosen.name)))}."
        )
    with together("resume"):
        check_sums(chosen, files, dist.get_rank(), dist.get_world_size())
    ranges = model_ranges(policy)
    described = metadata.state_dict_metadata
    with together("resume"):
        _check_names(chosen, described, ranges)
        if optimizer is not None:
            _check_optimizer(chosen, described, policy, optimizer, state["groups"])
    if optimizer is not None and state["groups"] is not None:
        saved = {name: info.properties.dtype for name, info in described.items()}
        ranges |= allocate_optimizer(policy, optimizer, saved)
    with torch.no_grad(), _explaining(chosen):
        dcp.load(
            ranges,
            storage_reader=SafeReader(chosen),
            planner=FlatLoadPlanner(),
            process_group=_group_of(policy),
        )
    return restore(policy, optimizer, scheduler, state)


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """DCP's errors, which every rank raises alike, as ours; it derives them from BaseException."""
    try:
        yield
    except CheckpointException as error:
        detail = " ".join(str(error).split())[-300:]
        raise fail("E407", "resume", f"{folder.name} cannot be read: {detail}") from error


def _read_state(folder: Path, policy: ShardedModel) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE_NAME).read_text())
        saved = dict(state["model"])
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise KeyError(f"it lacks {missing}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise fail("E407", "resume", f"{folder.name}: {STATE_NAME} cannot be read: {error}.") from error
    ours = fingerprint(policy)
    if saved != ours:
        odd = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
        message = f"{folder.name} is of another model: {odd[0]!r} is {saved.get(odd[0])} there and {ours.get(odd[0])} here"
        raise fail("E407", "resume", f"{message} ({len(odd)} tensors differ).", tensor=odd[0])
    return state


_STATE_KEYS = ("version", "num_updates", "groups", "scalars", "scheduler", "rng", "world_size", "extra")


def _check_names(folder: Path, described: Any, ranges: dict[str, FlatRange]) -> None:
    """Every tensor of the model is described, with its size."""
    for name, item in ranges.items():
        info = described.get(name)
        if info is None or info.size.numel() != item.numel:
            found = "is not there" if info is None else f"has {info.size.numel()} elements of {item.numel}"
            raise fail("E407", "resume", f"{folder.name}: {name!r} {found}.", tensor=name)


def _check_optimizer(
    folder: Path, described: Any, policy: ShardedModel, optimizer: torch.optim.Optimizer, groups: Any
) -> None:
    """The saved optimizer has as many groups as this one, and the same state for every trainable parameter."""
    if groups is not None and len(groups) != len(optimizer.param_groups):
        message = f"{folder.name}: its optimizer has {len(groups)} groups, this one has {len(optimizer.param_groups)}."
        raise fail("E407", "resume", message)
    states = {
        name: key for name in described if name.startswith("optim.") for key in [name.rpartition(".")[2]]
    }
    for name, param in policy.named_parameters():
        for key in set(states.values()) if param.requires_grad else ():
            if f"optim.{name}.{key}" not in states:
                raise fail(
                    "E407", "resume", f"{folder.name}: 'optim.{name}.{key}' is not there.", tensor=name
                )
