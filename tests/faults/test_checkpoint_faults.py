"""Saves that are cut off, and checkpoints that cannot be resumed: the last complete one is always there and used."""

import errno
import json
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

import shardproof as sp
from shardproof.errors import ShardproofError
from shardproof.export import folders
from shardproof.export import state as checkpoint_state
from tests.distributed.test_checkpoints import Run
from tests.distributed.test_stream import collect, load, lora_config
from tests.faults.test_bad_checkpoints import assert_all_raise
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes

GOOD = "step-00000001"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def save_good(source, root):
    """One step and a checkpoint of it; the run, and the digest of its weights."""
    run = Run(source)
    run.step()
    run.save(root, extra={"good": True}, keep=2)
    return run, collect(run.policy)[2].digest


@pytest.fixture(scope="module")
def good(source, tmp_path_factory):
    """The folder of a run with one checkpoint, and the digest of its weights. Not to be changed."""
    root = tmp_path_factory.mktemp("good")
    return root, run_ranks(2, save_good_digest, source, root)[0]


def save_good_digest(source, root):
    return save_good(source, root)[1]


@pytest.fixture
def damaged(good, tmp_path):
    """A copy of a checkpoint's folder, to be damaged."""
    return Path(shutil.copytree(good[0] / GOOD, tmp_path / "run" / GOOD))


def resume_and_save(source, root):
    """What fresh ranks find: the checkpoints listed, which of them resume, and that saving goes on."""
    listed = [path.name for path in folders.list_checkpoints(root)]
    digests = {}
    for name in [*listed, "latest"]:
        run = Run(source)
        extra = run.resume(root, which=name)
        digests[name] = collect(run.policy)[2].digest, run.policy.version, extra
    dist.barrier()
    run.step()
    run.save(root, step=50, background=True).wait()
    after = sorted(path.name for path in root.iterdir())
    return listed, digests, after


# A rank that is killed.


class Kill:
    """A function that ends this process as `kill -9` does, before or after doing what it replaces."""

    def __init__(self, real, after=False):
        self.real, self.after = real, after

    def __call__(self, *args, **kwargs):
        if self.after:
            self.real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)


def at_publication(replacement):
    """os.rename, replaced where it gives a checkpoint its name."""
    real = os.rename

    def rename(source, target):
        return (replacement if Path(target).name.startswith("step-") else real)(source, target)

    return rename


def half_removed(folder, *args, **kwargs):
    """What a process leaves that is killed while it removes a folder."""
    victim = next(path for path in sorted(Path(folder).iterdir()) if path.suffix == ".distcp")
    victim.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(patch, where):
    if where == "before the write":
        patch.setattr(checkpoint_state, "_write", Kill(checkpoint_state._write))
    elif where == "while copying":
        patch.setattr(checkpoint_state, "_without_replicas", Kill(checkpoint_state._without_replicas))
    elif where in ("before its data", "after its data"):
        real = checkpoint_state.make_writer

        def make_writer(folder):
            writer = real(folder)
            writer.write_data = Kill(writer.write_data, after=where.startswith("after"))
            return writer

        patch.setattr(checkpoint_state, "make_writer", make_writer)
    elif where == "before publication":
        patch.setattr(checkpoint_state, "_publish", Kill(checkpoint_state._publish))
    elif where in ("before the rename", "after the rename"):
        patch.setattr(os, "rename", at_publication(Kill(os.rename, after=where.startswith("after"))))
    elif where == "while removing":
        patch.setattr(checkpoint_state.shutil, "rmtree", half_removed)


def save_and_die(source, root, where, victim, background, options):
    run, _ = save_good(source, root)
    for _ in range(options.get("good", 1) - 1):
        run.step()
        run.save(root, keep=2)
    run.step()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == victim:
            arrange_death(patch, where)
        save = {"keep": 2, **options.get("save", {})}
        try:
            run.save(root, background=background, **save).wait()
        except ShardproofError as error:
            return str(error)
        return "saved"


@pytest.mark.parametrize(
    ("where", "victim", "background"),
    [
        ("before the write", 1, False),
        ("before its data", 0, True),
        ("before its data", 1, False),
        ("before its data", 1, True),
        ("after its data", 0, False),
        ("after its data", 1, True),
        ("before publication", 0, True),
        ("before publication", 1, False),
        ("before the rename", 0, False),
        ("before the rename", 0, True),
    ],
)
def test_kill_during_a_save(source, good, tmp_path, where, victim, background):
    outcomes = run_ranks_outcomes(
        2, save_and_die, source, tmp_path, where, victim, background, {}, timeout=40
    )
    assert outcomes[victim] == ("died", -signal.SIGKILL)
    kind, message = outcomes[1 - victim]
    assert kind == "ok" and message.startswith("E408 save: "), outcomes[1 - victim]
    for listed, digests, after in run_ranks(2, resume_and_save, source, tmp_path):
        assert listed == [GOOD]
        assert digests["latest"] == digests[GOOD] == (good[1], 1, {"good": True})
        assert after == [GOOD, "step-00000050"]


def test_kill_right_after_publication(source, tmp_path):
    """The new checkpoint is there whole, so it is the one."""
    outcomes = run_ranks_outcomes(
        2, save_and_die, source, tmp_path, "after the rename", 0, False, {}, timeout=40
    )
    assert outcomes[0] == ("died", -signal.SIGKILL)
    for listed, digests, _ in run_ranks(2, resume_and_save, source, tmp_path):
        assert listed == [GOOD, "step-00000002"]
        assert digests["latest"][1] == 2


@pytest.mark.parametrize(
    "options",
    [{"good": 2}, {"save": {"step": 1, "keep": None}}],
    ids=["an old checkpoint", "the step that is saved again"],
)
def test_kill_while_a_folder_is_removed(source, tmp_path, options):
    """A folder that is half removed must not be listed as a checkpoint."""
    outcomes = run_ranks_outcomes(
        2, save_and_die, source, tmp_path, "while removing", 0, False, options, timeout=40
    )
    assert outcomes[0] == ("died", -signal.SIGKILL)
    for listed, digests, after in run_ranks(2, resume_and_save, source, tmp_path):
        # Each of the listed was resumed.
        assert listed and set(digests) == {*listed, "latest"}
        assert after == sorted([*listed, "step-00000050"])[-3:]


# A rank that cannot write.


def arrange_failure(patch, where):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def raise_full(*args, **kwargs):
        raise full

    def raise_memory(*args, **kwargs):
        raise MemoryError("cannot allocate 12345 bytes")

    if where == "data":
        real = checkpoint_state.make_writer

        def make_writer(folder):
            writer = real(folder)
            writer.write_data = raise_full
            return writer

        patch.setattr(checkpoint_state, "make_writer", make_writer)
    elif where == "metadata":
        real = checkpoint_state.make_writer

        def make_writer(folder):
            writer = real(folder)
            writer.finish = raise_full
            return writer

        patch.setattr(checkpoint_state, "make_writer", make_writer)
    elif where == "state":
        patch.setattr(checkpoint_state, "write_json", raise_full)
    elif where == "rename":
        patch.setattr(os, "rename", at_publication(raise_full))
    elif where == "copy":
        patch.setattr(checkpoint_state, "_staged", raise_memory)


def save_and_fail(source, root, where, victim, background):
    """What the failing save raises; then what is listed, whether training goes on, and what a second try gives."""
    run, digest_of_good = save_good(source, root)
    run.step()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == victim:
            arrange_failure(patch, where)
        try:
            run.save(root, background=background).wait()
            message = "saved"
        except ShardproofError as error:
            message = str(error)
    dist.barrier()
    left = sorted(path.name for path in root.iterdir())
    again = Run(source)
    again.resume(root)
    resumed = collect(again.policy)[2].digest == digest_of_good
    run.step()
    second = run.save(root, background=background).wait().name
    hooks = len(run.optimizer._optimizer_step_pre_hooks)
    return message, left, resumed, second, hooks


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(
    ("where", "victim"), [("data", 0), ("data", 1), ("metadata", 0), ("state", 0), ("rename", 0)]
)
def test_a_full_disk(source, tmp_path, where, victim, background):
    replies = run_ranks(2, save_and_fail, source, tmp_path, where, victim, background, timeout=40)
    for message, left, resumed, second, hooks in replies:
        assert message.startswith("E408 save: "), message
        assert "No space left on device" in message
        assert message == replies[0][0]
        assert left == [GOOD]
        assert resumed
        assert second == "step-00000003"
        assert hooks == 0


def test_no_memory_for_the_copy(source, tmp_path):
    for message, left, resumed, second, _ in run_ranks(
        2, save_and_fail, source, tmp_path, "copy", 1, True, timeout=40
    ):
        assert message.startswith("E408 save: ")
        assert "cannot allocate 12345 bytes" in message
        assert left == [GOOD]
        assert resumed
        assert second == "step-00000003"


def save_extra(source, root, extra):
    run = Run(source)
    run.save(root, extra=extra)


def test_extra_that_is_not_json(source, tmp_path):
    outcomes = run_ranks_outcomes(2, save_extra, source, tmp_path, {"when": {1, 2}})
    assert_all_raise(outcomes, "E408", "extra", "set", kind="ExportFault")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(source, tmp_path):
    (tmp_path / "taken").write_text("x")
    outcomes = run_ranks_outcomes(2, save_extra, source, tmp_path / "taken", {})
    assert_all_raise(outcomes, "E408", str(tmp_path / "taken"), kind="ExportFault")


# A checkpoint that cannot be resumed.


def resume(source, folder, options=None):
    run = Run(source, **(options or {}))
    run.resume(folder)
    return collect(run.policy)[2].digest


def resume_untouched(source, folder):
    """(the error, whether the policy is as it was before)."""
    run = Run(source)
    before = collect(run.policy)[2].digest
    try:
        run.resume(folder)
    except ShardproofError as error:
        return (
            str(error),
            collect(run.policy)[2].digest == before,
            len(run.optimizer.state),
            run.policy.version,
        )
    return "resumed"


def assert_refused(source, folder, code, *words):
    """Every rank raises the same error, and has not changed anything yet."""
    replies = run_ranks(2, resume_untouched, source, folder, timeout=40)
    assert replies[0] == replies[1]
    assert replies[0] != "resumed"
    message, *state = replies[0]
    assert message.startswith(f"{code} resume: "), message
    assert all(word in message for word in words), message
    assert state == [True, 0, 0]
    return message


def test_the_copies_are_whole(source, good, damaged):
    assert run_ranks(2, resume, source, damaged) == [good[1]] * 2


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        ("qwen3", {}, ["self_attn.k_norm.weight", "tensors differ"]),
        ("qwen3_moe", {}, ["mlp.", "tensors differ"]),
        (
            "llama",
            {"vocab_size": 103},
            ["'lm_head.weight' is [101, 32] there and [103, 32] here", "2 tensors differ"],
        ),
    ],
    ids=["another family", "experts", "another size"],
)
def test_another_model(good, tmp_path, other, options, words):
    another = make_checkpoint(tmp_path, other, **options)
    outcomes = run_ranks_outcomes(2, resume, another, good[0])
    assert_all_raise(outcomes, "E407", GOOD, *words, kind="ExportFault")


def test_without_the_adapters_it_was_saved_with(source, good):
    outcomes = run_ranks_outcomes(2, resume, source, good[0], {"lora": lora_config()})
    assert_all_raise(outcomes, "E407", "q_proj", kind="ExportFault")


def resume_groups(source, folder, one_group):
    policy = load(source)
    optimizer = torch.optim.AdamW(policy.trainable_parameters()) if one_group else sp.make_optimizer(policy)
    sp.resume(folder, policy, optimizer)


def test_an_optimizer_with_other_groups(source, good):
    run_ranks(2, resume_groups, source, good[0], False)
    outcomes = run_ranks_outcomes(2, resume_groups, source, good[0], True)
    assert_all_raise(outcomes, "E407", "group", kind="ExportFault")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_shard(source, damaged, rank):
    (damaged / f"__{rank}_0.distcp").unlink()
    assert_refused(source, damaged.parent, "E407", GOOD, f"__{rank}_0.distcp")


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_with_one_other_bit(source, damaged, rank):
    flip_one_bit(damaged / f"__{rank}_0.distcp")
    assert_refused(source, damaged, "E407", GOOD, f"__{rank}_0.distcp", "other bytes")


@pytest.mark.parametrize("content", [None, "{", "{}"], ids=["missing", "broken", "empty"])
def test_a_shard_without_its_checksum(source, damaged, content):
    (damaged / "sums-1.json").unlink()
    if content is not None:
        (damaged / "sums-1.json").write_text(content)
    assert_refused(source, damaged, "E407", GOOD, "checksum")


@pytest.mark.parametrize("keep", [0, 100, -1], ids=["empty", "short", "one byte"])
def test_a_truncated_shard(source, damaged, keep):
    path = damaged / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(source, damaged, "E407", GOOD, "__1_0.distcp", "bytes")


STATES = {
    "missing": None,
    "empty": b"",
    "cut": b'{"model": {"model.embed_tok',
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"3",
    "nothing in it": b"{}",
    "a model that is a list": b'{"model": []}',
}


@pytest.mark.parametrize("content", STATES)
def test_a_corrupt_state(source, damaged, content):
    path = damaged / "state.json"
    if STATES[content] is None:
        path.unlink()
    else:
        path.write_bytes(STATES[content])
    assert_refused(source, damaged.parent, "E407", GOOD, "state.json")


@pytest.mark.parametrize("key", ["version", "groups", "scalars", "rng", "world_size", "extra"])
def test_a_state_without_one_of_its_parts(source, damaged, key):
    path = damaged / "state.json"
    state = json.loads(path.read_text())
    del state[key]
    path.write_text(json.dumps(state))
    assert_refused(source, damaged.parent, "E407", GOOD, "state.json")


def test_an_empty_folder(source, tmp_path):
    assert_refused(source, tmp_path, "E407", str(tmp_path), "no complete checkpoint")


def test_no_folder(source, tmp_path):
    assert_refused(source, tmp_path / "nowhere", "E407", "nowhere", "no complete checkpoint")


def test_only_half_written_folders(source, damaged):
    damaged.rename(damaged.parent / ".partial-00000001-beef")
    assert_refused(source, damaged.parent, "E407", "no complete checkpoint")


def resume_named(source, folder, which):
    Run(source).resume(folder, which=which)


def test_a_name_that_is_not_there(source, good):
    outcomes = run_ranks_outcomes(2, resume_named, source, good[0], "step-00000007")
    assert_all_raise(outcomes, "E407", "'step-00000007'", f"it has {GOOD}", kind="ExportFault")


def resume_apart(source, folders):
    Run(source).resume(folders[dist.get_rank()])


def test_ranks_that_see_different_folders(source, good, damaged):
    other = damaged.parent / "step-00000009"
    shutil.copytree(damaged, other)
    outcomes = run_ranks_outcomes(2, resume_apart, source, [good[0], damaged.parent])
    assert_all_raise(outcomes, "E407", GOOD, "step-00000009", kind="ExportFault")


# A checkpoint that is hostile.


def read_pickle(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def write_pickle(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class Call:
    """Pickles to a call of a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def hostile(kind, marker, metadata):
    """The bytes of a .metadata that would make `marker` if it were unpickled without care."""
    command = f"touch {marker}"
    if kind == "os.system":
        return pickle.dumps(Call(os.system, command))
    if kind == "an old protocol":
        return b"cposix\nsystem\n(S'" + command.encode() + b"'\ntR."
    if kind == "eval":
        return pickle.dumps(Call(eval, f"open({str(marker)!r}, 'w')"))
    if kind == "inside real metadata":
        return pickle.dumps(replace(metadata, planner_data=Call(os.system, command)))
    if kind == "a key of it":
        return pickle.dumps(replace(metadata, storage_data={Call(os.system, command): None}))
    if kind == "torch.load":
        return b"\x80\x04ctorch\nload\n(S'" + str(marker).encode() + b"'\ntR."
    if kind == "a dotted name":
        return (
            b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c"
            + bytes([len(command)])
            + command.encode()
            + b"\x85R."
        )
    raise ValueError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "os.system",
        "an old protocol",
        "eval",
        "inside real metadata",
        "a key of it",
        "torch.load",
        "a dotted name",
    ],
)
def test_metadata_that_would_run_code(source, damaged, tmp_path, kind):
    marker = tmp_path / "ran"
    raw = hostile(kind, marker, read_pickle(damaged))
    (damaged / ".metadata").write_bytes(raw)
    assert_refused(source, damaged.parent, "E409", "do not use this checkpoint")
    assert not marker.exists()


def test_the_hostile_bytes_do_run_where_nobody_takes_care(damaged, tmp_path):
    for kind in ("os.system", "an old protocol", "eval"):
        marker = tmp_path / f"ran {kind}".replace(" ", "-")
        pickle.loads(hostile(kind, marker, read_pickle(damaged)))
        assert marker.exists(), kind


def test_a_shard_that_would_run_code(source, damaged, tmp_path):
    """A tensor's place in the shard holds another pickle."""
    marker = tmp_path / "ran"
    metadata = read_pickle(damaged)
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == f"model.{DOWN}")
    path = damaged / info.relative_path
    size = path.stat().st_size
    with path.open("ab") as file:
        torch.save(Call(os.system, f"touch {marker}"), file)
    metadata.storage_data[index] = replace(info, offset=size, length=path.stat().st_size - size)
    write_pickle(damaged, metadata)
    for rank in range(2):
        folders.note_sums(damaged, rank)  # whoever forges a file forges its checksum
    outcomes = run_ranks_outcomes(2, resume, source, damaged, timeout=40)
    assert not marker.exists()
    assert {outcome[:2] for outcome in outcomes} == {("error", "ExportFault")}, outcomes
    assert {outcome[2][:4] for outcome in outcomes} <= {"E407", "E409"}


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/passwd", "sub/x.distcp", ".."])
def test_metadata_that_names_a_file_elsewhere(source, damaged, name):
    metadata = read_pickle(damaged)
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(info, relative_path=name)
    write_pickle(damaged, metadata)
    assert_refused(source, damaged, "E407", name)


BROKEN_METADATA = {
    "missing": None,
    "empty": b"",
    "garbage": b"\x80\x04garbage",
    "cut": ...,
    "a number": pickle.dumps(3),
    "without storage": pickle.dumps(Metadata({})),
}


@pytest.mark.parametrize("content", BROKEN_METADATA)
def test_broken_metadata(source, damaged, content):
    path = damaged / ".metadata"
    raw = BROKEN_METADATA[content]
    if raw is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-40] if raw is ... else raw)
    assert_refused(source, damaged, "E407", GOOD)


@pytest.mark.parametrize("name", [f"model.{DOWN}", f"optim.{DOWN}.exp_avg"])
def test_metadata_that_lacks_a_tensor(source, damaged, name):
    metadata = read_pickle(damaged)
    del metadata.state_dict_metadata[name]
    write_pickle(damaged, metadata)
    assert_refused(source, damaged, "E407", DOWN)
