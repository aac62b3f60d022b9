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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardproof.bounds import require_number
from shardproof.checkpoints.folders import (
    CHECKSUMS_NAME,
    HOSTS_NAME,
    STATE_NAME,
    Sum,
    checkpoint_name,
    clear_leftovers,
    drop_old,
    holds,
    list_checkpoints,
    publish,
    step_of,
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
from shardproof.checkpoints.spread import DESCRIPTION, describe_hosts, folder_ids, mark_folder
from shardproof.dist.collectives import broadcast, gather, together
from shardproof.dist.deadline import deadline
from shardproof.dist.groups import timeout_of
from shardproof.dist.shared_folder import check_seen, disk_errors
from shardproof.dist.sharing import Places, one_place
from shardproof.errors import ShardproofError, error_for, fail
from shardproof.files import PARTIAL, remove_folder, write_atomic
from shardproof.folder_lock import FolderLock
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
    places: Places | None = None,
) -> PendingSave:
    """Save model, optimizer, schedule, random state and `extra` (anything that JSON can hold) as `folder`/step-N.

    The checkpoint appears complete or not at all; older ones than the newest `keep` are deleted. With `background` the
    call returns at once, and copying and writing run during training. Only the next change of the weights waits for
    the copy: a step of any optimizer, `policy.offload`, or code that calls `policy.before_change`. Call `wait()` on the
    result before the process ends. Only one process at a time can save into a folder. `files` are further files of this
    rank, under names that no other rank uses and the same checksums.

    All ranks must see the folder, or the save is refused (E408). With `places`, which a run finds out when it starts,
    hosts need not share it: each keeps the files of its own ranks, and what is needed to read them.

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
        if wrong := policy.changed_base("save"):
            raise error_for(wrong)
        _check_request(root, extra or {}, number, keep)
    lock, where = FolderLock(root), places or one_place()
    try:
        with together("save"):
            if where.is_leader:
                _claim(root, lock, where)
        state = describe(policy, optimizer, scheduler, extra or {})
        partial = root / f"{PARTIAL}{number:08d}-{broadcast(secrets.token_hex(4))}"
        ranges = model_ranges(policy) | (optimizer_ranges(policy, optimizer) if optimizer is not None else {})
        group = saver.join_group()
        save = _Save(policy, root, partial, number, keep, state, dict(files or {}), lock, group, where)
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


def _claim(root: Path, lock: FolderLock, places: Places) -> None:
    """Keep other saves out of the folder, and remove what interrupted ones left in it. One rank of each place."""
    with disk_errors("save", f"{root} cannot be written"):
        lock.acquire("save")
        try:
            clear_leftovers(root)
            if not places.are_shared:
                mark_folder(root)
        except BaseException:
            lock.release()
            raise


class Written(NamedTuple):
    """What one rank wrote."""

    part: dict[str, Any]  # of the index; rank 0 alone is told those of other ranks
    sums: list[Sum]
    folder: str  # the id of the folder that it wrote to, where hosts share none


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
    places: Places

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
                with deadline("save", "E408", timeout_of(self.group).total_seconds(), [self.group]):
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

    def write(self, ranges: dict[str, LocalShard], snapshot: Snapshot | None) -> list[Written]:
        """Write every rank's tensors and further files, and the state; returns what each rank wrote.

        With `snapshot` the ranges are the policy's own memory, which must still be what it was.
        """
        self._leaders_alone(self._write_state)
        mine, problem = None, None
        try:
            # A host that shares no folder is named when its files are missed.
            self.partial.mkdir(exist_ok=True)
            mine = self._write_mine(_without_replicas(self.policy, ranges))
            if snapshot is not None:
                snapshot.check(ranges)
        except Exception as error:  # of the disk, memory or the device: the others wait for what it says
            problem = error
        rows = share(self.group, mine and mine[1:], problem)
        parts = gather(mine.part if mine is not None else {}, self.group)  # only rank 0 writes the index
        return [
            Written(parts[rank] if parts else {}, [(name, size, crc) for name, size, crc in sums], folder)
            for rank, (sums, folder) in enumerate(rows)
        ]

    def _write_mine(self, ranges: dict[str, LocalShard]) -> Written:
        name = data_name(dist.get_rank())
        num_bytes = sum(item.flat.nbytes for item in ranges.values()) + sum(map(len, self.files.values()))
        with disk_errors("save", f"{self.root} cannot be written", num_bytes, self.root):
            part, size, crc = write_ranges(self.partial / name, ranges)
            further = [_write_file(self.partial / n, raw) for n, raw in self.files.items()]
        needs_id = self.places.is_leader and not self.places.are_shared
        return Written(part, [(name, size, crc), *further], folder_ids(self.root)[0] if needs_id else "")

    def _write_state(self) -> None:
        self.partial.mkdir()
        if dist.get_rank() == 0:
            write_atomic(self.partial / STATE_NAME, json.dumps(self.state))

    def publish(self, written: list[Written]) -> Path:
        """Note the checksums of everything and give the folder its name, once every file of all ranks is seen."""
        self._leaders_alone(lambda: self._check_files(written))
        if self.places.are_shared:
            self._leaders_alone(self._publish_alone)
        else:
            self._publish_everywhere()
        return self.final

    def _publish_alone(self) -> None:
        self._name_folder()
        if self.keep is not None:
            drop_old(self.root, [path.name for path in list_checkpoints(self.root)[-self.keep :]], self.final)

    def _name_folder(self) -> None:
        if self.lock.is_lost():
            message = f"{self.root} was removed, moved or taken over by another process during the save."
            raise fail("E408", "save", message, rank=dist.get_rank())
        with disk_errors("save", f"{self.final} cannot be published"):
            publish(self.partial, self.final)

    def _publish_everywhere(self) -> None:
        """The same on hosts that share no folder. Rank 0's is the last to get its name: where it has it, all have it."""
        sums = self._copy_description()
        is_first = dist.get_rank() == 0
        try:
            self._leaders_alone(lambda: None if is_first else self._name_folder())
            self._leaders_alone(lambda: self._name_folder() if is_first else None)
        except ShardproofError:  # all ranks know that it failed
            if self.places.is_leader and not is_first and holds(self.final, sums):
                remove_folder(self.final)
            raise
        if self.keep is not None:
            mine = [path.name for path in list_checkpoints(self.root)] if self.places.is_leader else []
            names = {name for row in share(self.group, mine) for name in row}
            kept = sorted(names, key=lambda name: step_of(Path(name)))[-self.keep :]
            self._leaders_alone(lambda: drop_old(self.root, kept, self.final))

    def _check_files(self, written: list[Written]) -> None:
        """Raise unless all files are there; rank 0 then describes them."""
        its = self.places.ranks_of(self.places.mine)
        check_seen(
            self.partial, [(rank, n, size) for rank in its for n, size, _ in written[rank].sums], "save"
        )
        if dist.get_rank() == 0:
            self._write_index(written)

    def _write_index(self, written: list[Written]) -> None:
        """Write the index of all tensors, if none is missing, and the checksums of all files. Rank 0 only."""
        sums = [each for row in written for each in row.sums]
        index = merge_index([row.part for row in written])
        check_index(index, self.final.name, {n: size for n, size, _ in sums}, stage="save", code="E408")
        texts = {INDEX_NAME: json.dumps(index)}
        if not self.places.are_shared:
            names = [[name for name, _, _ in row.sums] for row in written]
            texts[HOSTS_NAME] = describe_hosts(self.places, [row.folder for row in written], names)
        for name, text in texts.items():
            write_atomic(self.partial / name, text)
        write_sums(self.partial, [*sums, *sums_of(self.partial, [STATE_NAME, *texts])])

    def _copy_description(self) -> bytes:
        """Give every place the files that say what is in all of them; returns the checksums' text.

        Collective: every rank, on the checkpoint group.
        """
        is_first, mine, problem = dist.get_rank() == 0, {}, None
        try:
            mine = {name: (self.partial / name).read_text() for name in DESCRIPTION} if is_first else {}
        except OSError as error:  # the others wait for what it says
            problem = error
        told = broadcast(mine, 0, self.group)

        def write() -> None:
            if problem is not None:
                raise problem
            for name in () if is_first else told:
                with disk_errors("save", f"{self.root} cannot be written", len(told[name]), self.root):
                    write_atomic(self.partial / name, told[name])

        self._leaders_alone(write)
        return str(told[CHECKSUMS_NAME]).encode()

    def _leaders_alone(self, work: Callable[[], None]) -> None:
        """Run a function on one rank of each place; an error there is raised on all ranks."""
        problem: Exception | None = None
        if self.places.is_leader:
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
