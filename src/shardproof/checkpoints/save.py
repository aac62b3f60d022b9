"""Checkpoints of a run: written beside training, and published whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardproof.bounds import require_number
from shardproof.checkpoints.folders import (
    STATE_NAME,
    Sum,
    checkpoint_name,
    clear_leftovers,
    publish,
    sums_of,
    write_sums,
)
from shardproof.checkpoints.ranges import (
    INDEX_NAME,
    check_index,
    data_name,
    merge_index,
    write_ranges,
)
from shardproof.checkpoints.run_state import (
    check_optimizer_state,
    describe,
    model_ranges,
    optimizer_ranges,
)
from shardproof.checkpoints.save_group import share
from shardproof.checkpoints.saver import saver_of
from shardproof.checkpoints.snapshot import PendingSave, Snapshot, copy_to_host
from shardproof.dist.collectives import broadcast, together
from shardproof.dist.shared_folder import check_seen, claim_folder, disk_errors
from shardproof.errors import ShardproofError, fail
from shardproof.files import PARTIAL, FolderLock, write_atomic
from shardproof.shard.local import LocalShard
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
    files: Mapping[str, bytes] | None = None,
) -> PendingSave:
    """Save model, optimizer, schedule, random state and `extra` (anything that JSON can hold) as `folder`/step-N.

    The checkpoint appears complete or not at all; older ones than the newest `keep` are deleted. With `background` the
    call returns at once, and copying and writing run during training. Only the next change of the weights waits for
    the copy: a step of any optimizer, `policy.offload`, or code that calls `policy.before_change`. Call `wait()` on the
    result before the process ends. Only one process at a time can save into a folder. `files` are further files of this
    rank, under names that no other rank uses and the same checksums.

    Collective: every rank. Memory: in the background, a host copy of this rank's state.
    """
    pending, saver = PendingSave(), saver_of(policy)
    saver.settle()
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
        partial = root / f"{PARTIAL}{number:08d}-{broadcast(secrets.token_hex(4))}"
        ranges = model_ranges(policy) | (optimizer_ranges(policy, optimizer) if optimizer is not None else {})
        save = _Save(policy, root, partial, number, keep, state, dict(files or {}), lock, saver.join_group())
        snapshot = Snapshot(policy, ranges)
    except BaseException:
        lock.release()
        raise
    if background:
        saver.start(pending, lambda: save.run(ranges, snapshot, pending.end_staging))
        pending.note_blocked()
        return pending
    pending.run(lambda: save.run(ranges, snapshot, None))
    pending.note_blocked()
    pending.wait()
    return pending


def _check_request(root: Path, extra: dict[str, Any], number: int, keep: int | None) -> None:
    require_number("save", "step", number, at_least=0)
    if keep is not None:
        require_number("save", "keep", keep, at_least=1)
    with disk_errors("save", f"{root} cannot be created"):
        root.mkdir(parents=True, exist_ok=True)
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise fail(
            "E408",
            "save",
            f"extra cannot be written as JSON: {error}.",
            fix="pass plain numbers, text and lists",
        ) from error


def _claim(root: Path, lock: FolderLock) -> None:
    """Keep other saves out of the folder, and remove what interrupted ones left in it. Rank 0 only."""
    with disk_errors("save", f"{root} cannot be written"):
        claim_folder(lock, "save")
        try:
            clear_leftovers(root)
        except BaseException:
            lock.release()
            raise


@dataclass(frozen=True)
class _Save:
    """One save on its way to disk. Every method is collective, on the checkpoint group."""

    policy: ShardedModel
    root: Path
    partial: Path
    number: int
    keep: int | None
    state: dict[str, Any]
    files: dict[str, bytes]
    lock: FolderLock
    group: dist.ProcessGroup

    @property
    def final(self) -> Path:
        return self.root / checkpoint_name(self.number)

    def run(
        self, ranges: dict[str, LocalShard], snapshot: Snapshot, end_staging: Callable[[], None] | None
    ) -> Path:
        """Take the save from the policy's tensors to the published folder.

        With `end_staging`, which is called once that is done, copies are taken first; without, nothing changes
        meanwhile.
        """
        try:
            if end_staging is None:
                return self.publish(self.write(ranges, snapshot))
            copies = self.stage(ranges, snapshot)
            end_staging()
            return self.publish(self.write(copies, None))
        except BaseException as error:
            # Every rank: on hosts that share no folder each has a part. Names are random, so nobody else's is removed.
            shutil.rmtree(self.partial, ignore_errors=True)
            if isinstance(error, ShardproofError | KeyboardInterrupt | SystemExit):
                raise
            detail = " ".join(str(error).split())[-300:]
            message = f"{self.partial.name} was not published: {type(error).__name__}: {detail}"
            raise fail("E408", "save", message) from error
        finally:
            self.lock.release()

    def stage(self, ranges: dict[str, LocalShard], snapshot: Snapshot) -> dict[str, LocalShard]:
        """The host copies, if every rank could make them and nothing has changed since the call."""
        problem: Exception | None = None
        copies: dict[str, LocalShard] = {}
        try:
            copies = copy_to_host(ranges)
            snapshot.check(copies)
        except Exception as error:
            problem = error
        share(self.group, problem=problem)
        return copies

    def write(self, ranges: dict[str, LocalShard], snapshot: Snapshot | None) -> list[list[Sum]]:
        """Write every rank's tensors and further files, the index and the state; returns the sums of each rank's files.

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
            mine = [
                part,
                [(name, size, crc), *(_write_file(self.partial / n, raw) for n, raw in self.files.items())],
            ]
        except Exception as error:  # of the disk, memory or the device: the others wait for what it says
            problem = error
        parts = share(self.group, mine, problem)
        sums: list[list[Sum]] = [[(name, size, crc) for name, size, crc in rows] for _, rows in parts]
        self._first_alone(lambda: self._write_index([part for part, _ in parts], sums))
        return sums

    def _write_index(self, parts: list[Any], sums: list[list[Sum]]) -> None:
        """Write the index of all tensors, if none is missing."""
        index = merge_index(parts)
        sizes = {name: size for rows in sums for name, size, _ in rows}
        check_index(index, self.final.name, sizes, stage="save", code="E408")
        write_atomic(self.partial / INDEX_NAME, json.dumps(index))

    def _write_state(self) -> None:
        self.partial.mkdir()
        write_atomic(self.partial / STATE_NAME, json.dumps(self.state))

    def publish(self, sums: list[list[Sum]]) -> Path:
        """Note the checksums of everything and give the folder its name, if rank 0 sees all that was written."""
        written = [(rank, name, size) for rank, rows in enumerate(sums) for name, size, _ in rows]
        self._first_alone(lambda: check_seen(self.partial, written, "save"))
        every = [each for rows in sums for each in rows]
        self._first_alone(
            lambda: write_sums(self.partial, [*every, *sums_of(self.partial, [STATE_NAME, INDEX_NAME])])
        )
        self._first_alone(lambda: publish(self.root, self.partial, self.final, self.keep))
        return self.final

    def _first_alone(self, work: Callable[[], None]) -> None:
        """Run a function on rank 0; an error there is raised on all ranks."""
        problem: Exception | None = None
        if dist.get_rank() == 0:
            try:
                work()
            except Exception as error:
                problem = error
        share(self.group, problem=problem)


def _write_file(path: Path, content: bytes) -> Sum:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path.name, len(content), zlib.crc32(content)


def _without_replicas(policy: ShardedModel, ranges: dict[str, LocalShard]) -> dict[str, LocalShard]:
    """What this rank writes: replicas and other ranks' whole buffers are left to the first that holds them."""
    if policy.mesh.ndim == 2 and policy.mesh.get_local_rank(0) != 0:
        return {name: item.empty() for name, item in ranges.items()}
    whole = {f"model.{info.name}" for info in policy.inventory.persistent_buffers}
    if dist.get_rank() == 0:
        return ranges
    return {name: item.empty() if name in whole else item for name, item in ranges.items()}
