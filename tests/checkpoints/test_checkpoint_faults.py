"""Saves that are cut off, and checkpoints that cannot be resumed: the last complete one is always there and used."""

import errno
import io
import json
import os
import pickle
import random
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.checkpoints import folders
from shardproof.checkpoints import save as checkpoint_save
from shardproof.digest import digest
from shardproof.errors import ShardproofError
from shardproof.folder_lock import FolderLock
from tests.checkpoints.test_checkpoints import Run
from tests.export.test_stream import collect, load, lora_config
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

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


def visible(root):
    """What is in a run's folder beside the lock, which stays."""
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


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
    after = visible(root)
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
    victim = next(path for path in sorted(Path(folder).iterdir()) if path.suffix == ".bin")
    victim.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(patch, where):
    if where == "before the write":
        patch.setattr(checkpoint_save._Save, "write", Kill(checkpoint_save._Save.write))
    elif where == "while copying":
        patch.setattr(checkpoint_save, "_without_replicas", Kill(checkpoint_save._without_replicas))
    elif where in ("before its data", "after its data"):
        kill = Kill(checkpoint_save.write_ranges, after=where.startswith("after"))
        patch.setattr(checkpoint_save, "write_ranges", kill)
    elif where == "before publication":
        patch.setattr(checkpoint_save._Save, "publish", Kill(checkpoint_save._Save.publish))
    elif where in ("before the rename", "after the rename"):
        patch.setattr(os, "rename", at_publication(Kill(os.rename, after=where.startswith("after"))))
    elif where == "while removing":
        patch.setattr(checkpoint_save.shutil, "rmtree", half_removed)


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
        ("after its data", 1, True),
        ("before publication", 0, True),
        ("before publication", 1, False),
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
        patch.setattr(checkpoint_save, "write_ranges", raise_full)
    elif where == "index":
        patch.setattr(checkpoint_save._Save, "_write_index", raise_full)
    elif where == "state":
        patch.setattr(checkpoint_save, "write_atomic", raise_full)
    elif where == "rename":
        patch.setattr(os, "rename", at_publication(raise_full))
    elif where == "copy":
        patch.setattr(checkpoint_save, "copy_to_host", raise_memory)


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
    left = visible(root)
    again = Run(source)
    again.resume(root)
    resumed = collect(again.policy)[2].digest == digest_of_good
    run.step()
    second = run.save(root, background=background).wait().name
    hooks = len(run.optimizer._optimizer_step_pre_hooks)
    return message, left, resumed, second, hooks


@pytest.mark.parametrize(
    ("where", "victim", "background"),
    [
        ("data", 0, True),
        ("data", 1, False),
        ("index", 0, True),
        ("state", 0, False),
        ("rename", 0, False),
        ("rename", 0, True),
    ],
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
            [
                "'lm_head.weight' is [101, 32] in the checkpoint and [103, 32] in this model",
                "2 tensors differ",
            ],
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
    (damaged / f"rank-{rank}.bin").unlink()
    assert_refused(source, damaged.parent, "E407", GOOD, f"rank-{rank}.bin")


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_with_one_other_bit(source, damaged, rank):
    flip_one_bit(damaged / f"rank-{rank}.bin")
    assert_refused(source, damaged, "E407", GOOD, f"rank-{rank}.bin does not match its checksum")


def reseal(folder):
    """Make the checksums fit again: whoever forges a file forges its checksum."""
    names = [path.name for path in folder.iterdir() if path.name != folders.CHECKSUMS_NAME]
    folders.write_sums(folder, folders.sums_of(folder, names))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        (b"", "does not match its own checksum"),
        (b"\n", "does not match its own checksum"),
        (b"00000000 0 checksums.txt\n", "index.json has no recorded checksum"),
        (b"0 state.json\n5ce9c0ba 13 checksums.txt\n", "does not match its own checksum"),
    ],
    ids=["missing", "empty", "one line end", "of nothing", "of less"],
)
def test_a_folder_without_its_checksums(source, damaged, content, words):
    path = damaged / "checksums.txt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert_refused(source, damaged, "E407", GOOD, "checksum", words)


def test_a_file_that_no_save_wrote(source, damaged):
    (damaged / "rank-2.bin").write_bytes(b"x")
    assert_refused(source, damaged, "E407", GOOD, "rank-2.bin has no recorded checksum")


def flip_and_resume(source, folder, flips):
    """What resuming says about each flipped bit, and whether anything had changed by then."""
    run = Run(source)

    def held():
        weights = {shard.name: digest(shard.flat) for shard in run.policy.local_shards()}
        rates = [group["lr"] for group in run.optimizer.param_groups]
        rng = torch.get_rng_state().tolist(), random.getstate()
        return weights, rates, len(run.optimizer.state), run.policy.version, rng

    before, found = held(), []
    for name, position, bit in flips:
        dist.barrier()
        if dist.get_rank() == 0:
            with (folder / name).open("r+b") as file:
                file.seek(position)
                (byte,) = file.read(1)
                file.seek(position)
                file.write(bytes([byte ^ (1 << bit)]))
        dist.barrier()
        try:
            run.resume(folder)
            found.append((name, "resumed"))
        except ShardproofError as error:
            found.append((name, str(error)))
        assert held() == before, name
        dist.barrier()
        if dist.get_rank() == 0:
            with (folder / name).open("r+b") as file:
                file.seek(position)
                file.write(bytes([byte]))
    return found


def test_every_single_bit_is_under_the_checksums(source, damaged):
    """Of every file, in every run the same bits: each flip is found, with the file's name, before anything changes."""
    draw = random.Random(13)
    flips = [
        (path.name, draw.randrange(path.stat().st_size), draw.randrange(8))
        for path in sorted(damaged.iterdir())
        for _ in range(40)
    ]
    assert len(flips) == 5 * 40
    replies = run_ranks(2, flip_and_resume, source, damaged, flips)
    assert replies[0] == replies[1]
    for name, said in replies[0]:
        assert said.startswith("E407 resume: ") and f"{name} does not match its" in said, (name, said)


@pytest.mark.parametrize("keep", [0, 100, -1], ids=["empty", "short", "one byte"])
def test_a_truncated_shard(source, damaged, keep):
    path = damaged / "rank-1.bin"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(source, damaged, "E407", GOOD, "rank-1.bin", "bytes")


STATES = {
    "missing": None,
    "empty": b"",
    "cut": b'{"model": {"model.embed_tok',
    "not text": b"\xff\xfe\x00",
    "too deep": b"[" * 100_000,
    "a list": b"[]",
    "a number": b"3",
    "nothing in it": b"{}",
}


@pytest.mark.parametrize("content", STATES)
def test_a_corrupt_state(source, damaged, content):
    path = damaged / "state.json"
    if STATES[content] is None:
        path.unlink()
    else:
        path.write_bytes(STATES[content])
    reseal(damaged)
    assert_refused(source, damaged.parent, "E407", "state.json")


WRONG_PARTS = {
    "format": [..., None, 0, 2, "1"],
    "model": [..., []],
    "version": [..., "3", True, 1.5, None],
    "num_updates": [..., []],
    "groups": [..., 3, [3], [{"lr": {"tensor": "x", "dtype": "float32", "shape": []}}]],
    "scalars": [
        ...,
        [],
        {"a": 3},
        {"a": {"step": 3.0}},
        {"a": {"step": {"value": {"odd": 1}, "on_device": False}}},
    ],
    "scheduler": [..., 7, {"a": {"tensor": 1.0, "dtype": "Tensor", "shape": []}}],
    "rng": [
        ...,
        {},
        [],
        [3, 4],
        [{"torch": "00", "python": []}] * 2,
        [{"torch": "zz", "python": [3, [], None]}] * 2,
    ],
    "world_size": [..., "2", -1],
    "extra": [..., [], None],
}


def resume_each_state(source, folder, states):
    """What each of these contents of state.json gives, and whether anything has changed by then."""
    run = Run(source)
    before, found = collect(run.policy)[2].digest, []
    for state in states:
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "state.json").write_text(json.dumps(state))
            reseal(folder)
        dist.barrier()
        try:
            run.resume(folder)
            found.append("resumed")
        except ShardproofError as error:
            found.append(str(error))
        assert (len(run.optimizer.state), run.policy.version) == (0, 0)
    assert collect(run.policy)[2].digest == before
    return found


def test_a_state_with_wrong_parts(source, damaged):
    """Whoever can write a checkpoint can write its checksums too; it is refused by name all the same."""
    state = json.loads((damaged / "state.json").read_text())
    states = []
    for key, values in WRONG_PARTS.items():
        rest = {other: value for other, value in state.items() if other != key}
        states += [rest if value is ... else {**rest, key: value} for value in values]
    for said in run_ranks(2, resume_each_state, source, damaged, states):
        assert [
            text for text in said if not text.startswith("E407 resume: ") or "state.json" not in text
        ] == []


def test_another_format_is_refused_by_its_number(source, damaged):
    state = json.loads((damaged / "state.json").read_text())
    (damaged / "state.json").write_text(json.dumps({**state, "format": 7}))
    reseal(damaged)
    assert_refused(source, damaged, "E407", GOOD, "its format is 7, this version reads 1")


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


def read_index(folder):
    return json.loads((folder / "index.json").read_text())


def write_index(folder, index):
    (folder / "index.json").write_text(json.dumps(index))
    reseal(folder)


class Call:
    """Pickles to a call of a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def test_a_pickle_in_the_folder_is_not_read(source, damaged, tmp_path):
    """Even one that a checkpoint of torch would have, under a checksum of its own."""
    marker = tmp_path / "ran"
    (damaged / ".metadata").write_bytes(pickle.dumps(Call(os.system, f"touch {marker}")))
    assert_refused(source, damaged, "E409", GOOD, ".metadata", "do not use this checkpoint")
    reseal(damaged)
    assert_refused(source, damaged, "E409", GOOD, ".metadata", "do not use this checkpoint")
    assert not marker.exists()


def test_a_shard_that_would_run_code(source, good, damaged, tmp_path):
    """A tensor's bytes are a pickle: they are elements, whatever they spell."""
    marker = tmp_path / "ran"
    stream = io.BytesIO()
    torch.save(Call(os.system, f"touch {marker}"), stream)
    _, count, file, offset = read_index(damaged)[f"model.{DOWN}"]["chunks"][0]
    assert len(stream.getvalue()) < 4 * count
    with (damaged / file).open("r+b") as shard:
        shard.seek(offset)
        shard.write(stream.getvalue())
    reseal(damaged)
    found = run_ranks(2, resume, source, damaged)
    assert found[0] == found[1] != good[1]
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["../other.bin", "/etc/passwd", "sub/x.bin", "..", "rank-7.bin", "state.json"]
)
def test_an_index_that_names_another_file(source, damaged, name):
    index = read_index(damaged)
    index[f"model.{DOWN}"]["chunks"][0][2] = name
    write_index(damaged, index)
    assert_refused(source, damaged, "E407", GOOD, name, DOWN)


def test_a_file_that_is_a_link_elsewhere(source, damaged, tmp_path):
    path = damaged / "rank-0.bin"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "rank-0.bin links to a place outside" in run_ranks(2, resume_untouched, source, damaged)[0][0]


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"{}", b"[]", b"3"],
    ids=["missing", "empty", "cut", "nothing", "list", "number"],
)
def test_a_broken_index(source, damaged, content):
    path = damaged / "index.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    reseal(damaged)
    assert_refused(source, damaged, "E407", "index.json")


@pytest.mark.parametrize("name", [f"model.{DOWN}", f"optim.{DOWN}.exp_avg"])
def test_an_index_that_lacks_a_tensor(source, damaged, name):
    index = read_index(damaged)
    del index[name]
    write_index(damaged, index)
    assert_refused(source, damaged, "E407", DOWN)


# What another save left, and what another save is doing.


def test_a_checkpoint_that_was_left_aside(source, good, damaged):
    """A replacement that was cut short between two renames hides nothing, and the next save brings it back."""
    root = damaged.parent
    damaged.rename(root / f".replaced-{GOOD}")
    assert [path.name for path in folders.list_checkpoints(root)] == [GOOD]
    assert run_ranks(2, resume, source, damaged) == [good[1]] * 2
    for listed, digests, after in run_ranks(2, resume_and_save, source, root):
        assert listed == [GOOD]
        assert digests[GOOD] == digests["latest"] == (good[1], 1, {"good": True})
        assert after == [GOOD, "step-00000050"]


def save_into_a_claimed_folder(source, root):
    run = Run(source)
    lock = FolderLock(root)
    if dist.get_rank() == 0:
        lock.acquire("test")
    dist.barrier()
    try:
        run.save(root)
    except ShardproofError as error:
        said = str(error)
    dist.barrier()
    left = visible(root)
    lock.release()
    dist.barrier()
    return said, left, run.save(root).wait().name


def test_another_save_into_the_same_folder(source, tmp_path):
    (tmp_path / ".partial-00000009-beef").mkdir()
    for said, left, then in run_ranks(2, save_into_a_claimed_folder, source, tmp_path):
        assert said.startswith("C006 save: ") and f"in use by process {os.getpid()}" not in said
        assert "in use by process" in said
        assert left == [".partial-00000009-beef"]
        assert then == "step-00000000"
    assert visible(tmp_path) == ["step-00000000"]


def save_apart(source, roots):
    run = Run(source)
    run.step()
    run.save(roots[dist.get_rank()])


def test_ranks_that_share_no_folder(source, tmp_path):
    roots = [tmp_path / "host0", tmp_path / "host1"]
    outcomes = run_ranks_outcomes(2, save_apart, source, roots)
    assert_all_raise(outcomes, "E408", "rank 1", "rank-1.bin", "rank 0 does not see it", kind="ExportFault")
    assert [visible(root) for root in roots] == [[], []]


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}, {"step": -1}], ids=str)
def test_numbers_that_mean_nothing(source, tmp_path, options):
    outcomes = run_ranks_outcomes(1, save_with, source, tmp_path, options)
    assert outcomes[0][:2] == ("error", "ConfigError")
    assert next(iter(options)) in outcomes[0][2]


def save_with(source, root, options):
    Run(source).save(root, **options)


# Optimizer state of other shapes.


class Odd(torch.optim.SGD):
    """An optimizer whose state is not shaped like its parameters."""

    kind = "number"

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if self.kind == "number":
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = torch.tensor(0.1, dtype=torch.float64) * state["count"]
                    state["one"] = torch.full((1, 1), state["count"], dtype=torch.int64)
                    state["word"] = ("a", [None, {"b": True}])
                elif self.kind == "rows":
                    state["rows"] = torch.zeros(2, 3)
                elif self.kind == "object":
                    state["thing"] = {1, 2}
                elif self.kind == "key":
                    state["a.b"] = 1
                elif self.kind == "ranks":
                    state["count"] = dist.get_rank()


def make_odd(source, kind, strategy="fsdp2"):
    policy = load(source, strategy=strategy)
    optimizer = Odd(policy.trainable_parameters(), lr=1e-2)
    optimizer.kind = kind
    if kind == "group":
        optimizer.param_groups[0]["table"] = torch.zeros(3)
    if kind == "stranger":
        optimizer.state[torch.nn.Parameter(torch.zeros(1))] = {"step": 1}
    sp.train_step(policy, sp.Batch([[1, 2, 3]]), optimizer)
    return policy, optimizer


def save_odd(source, root, kind, strategy):
    policy, optimizer = make_odd(source, kind, strategy)
    sp.save_checkpoint(root, policy, optimizer)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rows", ["'rows'", "'lm_head.weight'", "(2, 3)"]),
        ("object", ["'thing'", "'lm_head.weight'", "set"]),
        ("key", ["'a.b'", "'lm_head.weight'"]),
        ("ranks", ["'count'", "'lm_head.weight'"]),
        ("group", ["'table'", "group 0", "Tensor"]),
        ("stranger", ["a parameter that is not in the model"]),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused_by_name(source, tmp_path, kind, words, strategy):
    """State of another shape than its parameter's used to be left out without a word."""
    outcomes = run_ranks_outcomes(2, save_odd, source, tmp_path, kind, strategy)
    for outcome in outcomes:
        assert outcome[:2] == ("error", "ExportFault") and outcome[2].startswith("E408 save: "), outcome
    for word in words:
        # Ranks of FSDP1 need not hold a part of the same parameter.
        assert word in outcomes[0][2] or (word.endswith("weight'") and ".weight'" in outcomes[0][2]), (
            outcomes[0]
        )
    assert visible(tmp_path) == []


def own_state(policy, optimizer):
    """The state of what this rank holds a part of."""
    return {name: dict(optimizer.state[p]) for name, p in policy.named_parameters() if p.numel()}


def resume_odd(source, root, strategy):
    """(state that was saved, state after a resume) by name, beside a step's own."""
    policy, optimizer = make_odd(source, "number", strategy)
    sp.save_checkpoint(root, policy, optimizer)
    saved = own_state(policy, optimizer)
    again, other = make_odd(source, "number", strategy)
    sp.train_step(again, sp.Batch([[3, 2, 1]]), other)
    sp.resume(root, again, other)
    found = own_state(again, other)
    dtypes = {str(value.dtype) for row in found.values() for value in row.values() if hasattr(value, "dtype")}
    return repr(saved) == repr(found), any(saved.values()), dtypes


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_numbers_beside_the_parameters_are_saved(source, tmp_path, strategy):
    for same, any_state, dtypes in run_ranks(2, resume_odd, source, tmp_path, strategy):
        assert same and any_state
        assert dtypes == {"torch.float64", "torch.int64"}


def go_back_to_the_start(source, root):
    """The optimizer's state after going back to before the first step."""
    run = Run(source)
    run.save(root)
    run.step()
    assert run.optimizer.state
    run.resume(root)
    return sum(len(state) for state in run.optimizer.state.values())


def test_going_back_to_before_the_first_step_forgets_the_moments(source, tmp_path):
    assert run_ranks(2, go_back_to_the_start, source, tmp_path) == [0, 0]


# Weights that change while they are copied.


class Weights:
    """Ways to change a policy's weights that no step of this package takes."""

    def __init__(self, policy):
        self.policy = policy
        self.optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.5)

    def by_own_optimizer(self):
        for param in self.policy.trainable_parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()

    def past_every_hook(self):
        for param in self.policy.trainable_parameters():
            param.data.add_(1)


def save_and_change(source, root, how, with_optimizer, strategy):
    """What a save beside training gives if weights change as soon as the call has returned."""
    policy = load(source, strategy=strategy)
    weights = Weights(policy)
    before = collect(policy)[2].digest
    changed = threading.Event()
    real_copy, real_wait = checkpoint_save.copy_to_host, checkpoint_save.PendingSave.wait_until_staged

    def copy_late(ranges):
        changed.wait(30)  # until the change has happened, or waits for this copy
        return real_copy(ranges)

    def wait_until_staged(*args):
        changed.set()
        real_wait(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_save, "copy_to_host", copy_late)
        patch.setattr(checkpoint_save.PendingSave, "wait_until_staged", wait_until_staged)
        optimizer = weights.optimizer if with_optimizer else None
        pending = sp.save_checkpoint(root, policy, optimizer, background=True)
        getattr(weights, how)()
        changed.set()
        try:
            pending.wait()
        except ShardproofError as error:
            return str(error), None
    after = collect(policy)[2].digest
    again = load(source, strategy=strategy)
    sp.resume(root, again)
    return after != before, collect(again)[2].digest == before


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_any_optimizer_waits_for_the_copy(source, tmp_path, with_optimizer, strategy):
    """Also one that the save was not told of: the label would say version 0 of later weights."""
    replies = run_ranks(2, save_and_change, source, tmp_path, "by_own_optimizer", with_optimizer, strategy)
    assert replies == [(True, True)] * 2


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_change_past_every_hook_fails_the_save(source, tmp_path, strategy):
    replies = run_ranks(2, save_and_change, source, tmp_path, "past_every_hook", False, strategy)
    assert replies[0] == replies[1]
    assert (
        replies[0][0].startswith("E408 save: ")
        and "was changed while version 0 was being copied" in replies[0][0]
    )
    assert visible(tmp_path) == []
