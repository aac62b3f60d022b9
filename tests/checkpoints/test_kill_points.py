"""Saves that end at any of their file operations, by a kill or by the disk's error: what is there is whole, and labelled right.

A process is forked for each operation of a sequence of saves. In it the n-th operation below the run's folder ends the
process, as `kill -9` does, or fails as a full disk does.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof import files
from shardproof.checkpoints import folders
from shardproof.checkpoints.run_state import model_ranges, optimizer_ranges
from shardproof.checkpoints.saver import saver_of
from shardproof.digest import digest
from shardproof.errors import ShardproofError
from shardproof.export import payload, stream
from shardproof.files import current_folder
from tests.export.test_stream import load
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.fault

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree"}
# (step, label of the content): a second save, the same step with other content, and one that drops the oldest.
SAVES = [(1, "a"), (2, "b"), (2, "c"), (3, "d")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


# The n-th operation.


class Disk:
    """Counts what a process does to the files below a folder, and lets the n-th operation not return."""

    def __init__(self, root, at, ending):
        self.root, self.at, self.ending = str(root), at, ending
        self.count = 0
        self.is_on = False
        self.names = []  # of the operations

    def operation(self, name, half_done=None):
        if not self.is_on:
            return
        self.names.append(name)
        self.count += 1
        if self.count - 1 != self.at:
            return
        if self.ending == "kill":
            if half_done is not None:
                half_done()
            os.kill(os.getpid(), signal.SIGKILL)
        number = errno.ENOSPC if self.at % 2 else errno.EIO
        raise OSError(number, os.strerror(number))

    def is_below(self, path):
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.root)

    def audit(self, event, args):
        if event == "open" and self.is_below(args[0]) and isinstance(args[2], int) and args[2] & WRITE_FLAGS:
            self.operation("open")
        elif event in EVENTS and (self.is_below(args[0]) or event == "os.truncate"):
            self.operation(event)

    def install(self):
        """For good: this is a process of its own."""
        sys.addaudithook(self.audit)
        real_fsync, real_exchange, real_open, disk = os.fsync, files._exchange, io.open, self

        def fsync(descriptor):
            disk.operation("fsync")
            real_fsync(descriptor)

        def exchange(one, other):
            disk.operation("exchange")
            return real_exchange(one, other)

        class Writer(io.BufferedWriter):
            def write(self, data):
                def half():
                    super(Writer, self).write(memoryview(data).cast("B")[: len(data) // 2])
                    self.flush()

                disk.operation("write", half)
                return super().write(data)

        def open_counted(path, mode="r", *args, **kwargs):
            if mode in ("wb", "xb") and disk.is_below(path):
                return Writer(io.FileIO(path, mode[0]))
            return real_open(path, mode, *args, **kwargs)

        os.fsync, files._exchange, io.open = fsync, exchange, open_counted


def in_a_fork(work):
    """(the text that `work` returned in a process of its own, whether it was killed)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.write(writer, work(writer).encode())
        except BaseException:
            os.write(writer, f"\nfailed: {traceback.format_exc()}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode()
    _, status = os.waitpid(child, 0)
    assert "failed: " not in said, said
    return said, os.WIFSIGNALED(status)


# Checkpoints.


class State:
    """A policy with an optimizer that can be set to what a label means, without a collective."""

    def __init__(self, source):
        self.policy = load(source)
        self.optimizer = sp.make_optimizer(self.policy, lr=1e-2)
        for param in self.policy.trainable_parameters():
            moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            self.optimizer.state[param] = {"step": torch.tensor(0.0), **moments}

    def become(self, step, label):
        for name, item in self.tensors().items():
            generator = torch.Generator().manual_seed(ord(label) * 1000 + len(name))
            item.flat.copy_(torch.rand(item.flat.shape, generator=generator))
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(ord(label)))
        self.policy.version, self.policy.num_updates = step, ord(label)

    def tensors(self):
        return model_ranges(self.policy) | optimizer_ranges(self.policy, self.optimizer)

    def held(self):
        tensors = {name: digest(item.flat) for name, item in self.tensors().items()}
        steps = {float(state["step"]) for state in self.optimizer.state.values()}
        return tensors, steps, self.policy.version, self.policy.num_updates

    def save(self, root, step, label, **options):
        self.become(step, label)
        sp.save_checkpoint(
            root, self.policy, self.optimizer, extra={"label": label}, keep=2, **options
        ).wait()

    def resume(self, root, which="latest"):
        """The label in the checkpoint, which must name its content."""
        self.become(0, "z")
        label = sp.resume(root, self.policy, self.optimizer, which=which)["label"]
        found = self.held()
        self.become(self.policy.version, label)
        assert found == self.held(), label
        return label


def assert_sound(state, root, num_done, is_last_resumed):
    """The newest checkpoint is what its label says, no older than the last that was complete; and saving goes on."""
    listed = folders.list_checkpoints(root)
    labels = [label_of(path) for path in listed]
    for path, label in zip(listed, labels, strict=True):
        assert (int(path.name[5:]), label) in SAVES
    if num_done or listed:
        assert state.resume(root) == labels[-1]
        assert labels[-1] in [label for _, label in SAVES[max(num_done - 1, 0) :]]
    state.save(root, 9, "e")
    newest = root / "step-00000009"
    assert (state.resume(root) if is_last_resumed else label_of(newest)) == "e"
    kept = [*(path.name for path in listed), newest.name][-2:]
    assert sorted(os.listdir(root)) == [".lock", *kept]


def label_of(path):
    """The label in a checkpoint of which every byte is as it was written."""
    folder = current_folder(path)
    noted = folders.read_sums(folder)
    folders.check_sums(folder, noted, 0, 1)
    return json.loads(folders.read_checked(folder, folders.STATE_NAME, noted))["extra"]["label"]


class Saves:
    """The saves of the sequence one by one, each in a process of its own, from a copy of what those before it left."""

    def __init__(self, source, root, can_exchange):
        self.root, self.can_exchange = root, can_exchange
        self.state = State(source)
        self.before(0).mkdir()
        for index, save in enumerate(SAVES[:-1]):
            shutil.copytree(self.before(index), self.before(index + 1))
            self.state.save(self.before(index + 1), *save)

    def before(self, index):
        return self.root / f"before-{index}"

    def points(self, index):
        """The operations of a save at which to end it: all but for the writes into files, of which some."""
        disk = Disk(self.root / "count", -1, None)
        said, _ = in_a_fork(lambda _: self.save(index, disk) or " ".join(disk.names))
        shutil.rmtree(disk.root)
        return points_of(said.split(), 4)

    def save(self, index, disk):
        """Make one save with a disk that fails. In a process of its own."""
        shutil.copytree(self.before(index), disk.root)
        # It has none of its parent's threads, so it makes a group of its own.
        saver_of(self.state.policy).group = None
        if not self.can_exchange:
            files._exchange = lambda one, other: False
        disk.install()
        disk.is_on = True
        try:
            self.state.save(Path(disk.root), *SAVES[index], background=index % 2 == 1)
        finally:
            disk.is_on = False


def points_of(names, num_writes):
    writes = [index for index, name in enumerate(names) if name == "write"]
    chosen = set(writes[:: max(1, len(writes) // num_writes)])
    return [index for index, name in enumerate(names) if name != "write" or index in chosen]


def kill_at_every_operation(source, root, can_exchange, indices):
    saves = Saves(source, root, can_exchange)
    points = [(index, point) for index in indices for point in saves.points(index)]
    for index, point in points:
        run = root / f"{index}-{point}"
        disk = Disk(run, point, "kill")
        _, was_killed = in_a_fork(lambda _, index=index, disk=disk: saves.save(index, disk) or "")
        assert was_killed, (index, point)
        assert_sound(saves.state, run, index, is_last_resumed=point % 8 == 0)
    return len(points)


@pytest.mark.slow
def test_a_kill_at_any_operation_of_a_save(source, tmp_path):
    """On a file system that cannot exchange two folders at once."""
    (num_points,) = run_ranks(1, kill_at_every_operation, source, tmp_path, False, range(4), timeout=300)
    assert num_points >= 100


def test_a_kill_at_any_operation_of_an_exchange(source, tmp_path):
    """The save that replaces a checkpoint, on one that can."""
    (num_points,) = run_ranks(1, kill_at_every_operation, source, tmp_path, True, [2], timeout=300)
    assert num_points >= 25


def fail_at_every_operation(source, root, can_exchange, indices):
    saves, outcomes = Saves(source, root, can_exchange), []
    points = [(index, point) for index in indices for point in saves.points(index)]
    for index, point in points:
        run = root / f"{index}-{point}"

        def work(_, index=index, disk=Disk(run, point, "error")):  # noqa: B008
            said, num_done = "saved", index + 1
            try:
                saves.save(index, disk)
            except ShardproofError as error:
                said, num_done = str(error), index
            assert_sound(saves.state, Path(disk.root), num_done, is_last_resumed=False)
            return said

        outcomes.append(in_a_fork(work)[0])
    return outcomes


def test_an_error_of_the_disk_at_any_operation_of_a_save(source, tmp_path):
    """In the process that goes on: one E408, everything older is there, and the next save is well."""
    (outcomes,) = run_ranks(1, fail_at_every_operation, source, tmp_path, False, [2], timeout=300)
    failed = [said for said in outcomes if said != "saved"]
    assert [said for said in failed if not said.startswith("E408 save: ")] == []
    assert len(outcomes) >= 25 and len(failed) >= 15


# Folders of models.


def set_up_export():
    """Streams of one rank need no collective; a forked process could issue none on its parent's group."""
    for module in (stream, payload):
        module.gather_rows = lambda row: row[None]
    stream.WeightStream._deadline = lambda self: contextlib.nullcontext()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def kill_at_every_operation_of_an_export(source, root, is_there, can_exchange):
    state = State(source)

    def export(run, label, limit):
        state.become(1, label)
        sp.save_pretrained(state.policy, run / "model", max_file_bytes=limit)

    def work(run, disk):
        set_up_export()
        if not can_exchange:
            files._exchange = lambda one, other: False
        disk.install()
        disk.is_on = True
        export(run, "b", 10**9)
        disk.is_on = False
        return " ".join(disk.names)

    export(root / "old", "a", 9_000)
    export(root / "new", "b", 10**9)
    new, old = contents(root / "new" / "model"), contents(root / "old" / "model") if is_there else {}
    count = root / "count"
    if is_there:
        shutil.copytree(root / "old", count)
    points = points_of(in_a_fork(lambda _: work(count, Disk(count, -1, None)))[0].split(), 4)
    for point in points:
        run = root / str(point)
        if is_there:
            shutil.copytree(root / "old", run)
        _, was_killed = in_a_fork(lambda _, run=run, point=point: work(run, Disk(run, point, "kill")))
        assert was_killed, point
        assert contents(current_folder(run / "model")) in (old, new), point
        export(run, "b", 10**9)
        assert contents(run / "model") == new
        assert [path.name for path in run.iterdir()] == ["model"], point
    return len(points)


@pytest.mark.parametrize(
    ("is_there", "can_exchange"),
    [(False, True), (True, True), (True, False)],
    ids=["a new folder", "an exchange", "two renames"],
)
def test_a_kill_at_any_operation_of_an_export(source, tmp_path, is_there, can_exchange):
    """The folder holds the old model or the new one, byte for byte."""
    work = kill_at_every_operation_of_an_export
    (num_points,) = run_ranks(1, work, source, tmp_path, is_there, can_exchange, timeout=300)
    assert num_points >= 12


# A run's small files.


def write_small_files(run, disk):
    disk.install()
    disk.is_on = True
    for index in range(3):
        files.write_atomic(run / "state.json", f"state {index}")
        files.append_line(run / "metrics.jsonl", {"step": index})


def kill_at_every_operation_of_small_files(root):
    for point in itertools.count():
        run = root / str(point)
        run.mkdir()
        _, was_killed = in_a_fork(
            lambda _, run=run, point=point: write_small_files(run, Disk(run, point, "kill")) or ""
        )
        path = run / "state.json"
        assert not path.exists() or path.read_text() in [f"state {index}" for index in range(3)]
        files.append_line(run / "metrics.jsonl", {"step": "end"})
        lines = (run / "metrics.jsonl").read_text().splitlines()
        assert lines[-1] == '{"step": "end"}'
        assert [line for line in lines[:-1] if line] == [
            f'{{"step": {index}}}' for index in range(len(lines) - 1)
        ]
        if not was_killed:
            return point


def test_a_kill_at_any_operation_on_a_runs_small_files(tmp_path):
    assert run_ranks(1, kill_at_every_operation_of_small_files, tmp_path, init_group=False)[0] >= 15
