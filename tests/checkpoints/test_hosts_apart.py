"""Checkpoints and models of hosts that share no folder: who keeps what, and what a resume makes of it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from shardproof.checkpoints import save as checkpoint_save
from shardproof.checkpoints.resume import resume
from shardproof.dist.launch import init_distributed
from shardproof.dist.sharing import Places, find_places
from shardproof.export import pretrained
from tests.checkpoints.test_checkpoints import Run, seed_rank
from tests.export.test_stream import differences, read_folder
from tests.models import make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.several_hosts import pretend_hosts
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

DESCRIPTION = {"checksums.txt", "hosts.json", "index.json", "state.json"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source"), "llama")


def places_of(folder: Path, letters: str) -> tuple[Path, Places]:
    """The folder of this rank's host, and all of them as the ranks find out."""
    init_distributed()
    mine = folder / letters[dist.get_rank()]
    return mine, find_places(mine, "output")


def steps(source, folder: Path, letters: str, number: int):
    """Resume where there is something, take steps up to `number`, each of them saved; what each step did."""
    with pretend_hosts(letters):
        mine, places = places_of(folder, letters)
        seed_rank()
        run, done = Run(source), []
        there = any(list((folder / letter).glob("step-*")) for letter in letters)
        dist.barrier()  # before anybody saves
        if there:
            _resume(run, mine, places)
        while run.policy.version < number:
            done.append(run.step())
            _save(run, mine, places)
        return done


def _save(run, mine: Path, places: Places) -> None:
    checkpoint_save.save_checkpoint(
        mine, run.policy, run.optimizer, run.scheduler, step=run.policy.version, keep=2, places=places
    )


def _resume(run, mine: Path, places: Places) -> None:
    resume(mine, run.policy, run.optimizer, run.scheduler, places=places)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_each_host_keeps_its_own_ranks_files(source, tmp_path):
    run_ranks(3, steps, source, tmp_path, "aab", 3)
    for step in (2, 3):
        name = f"step-{step:08d}"
        assert files(tmp_path / "a" / name) == DESCRIPTION | {"rank-0.bin", "rank-1.bin"}
        assert files(tmp_path / "b" / name) == DESCRIPTION | {"rank-2.bin"}
    assert not (tmp_path / "a" / "step-00000001").exists() and not (tmp_path / "b" / "step-00000001").exists()


def test_hosts_in_another_order_and_another_number_go_on_to_the_same_bits(source, tmp_path):
    """Of two ranks each time: on a and b, on b and a, on b alone with a's files copied, on b and a new host."""
    expected = run_ranks(2, steps, source, tmp_path / "together", "xx", 4)
    apart = tmp_path / "apart"
    done = [run_ranks(2, steps, source, apart, "ab", 1), run_ranks(2, steps, source, apart, "ba", 2)]
    shutil.copy(apart / "a" / "step-00000002" / "rank-1.bin", apart / "b" / "step-00000002")
    done += [run_ranks(2, steps, source, apart, "bb", 3), run_ranks(2, steps, source, apart, "cb", 4)]
    for rank in range(2):
        assert [step for part in done for step in part[rank]] == expected[rank]


def test_a_host_that_is_gone_is_named_with_what_it_kept(source, tmp_path):
    run_ranks(2, steps, source, tmp_path, "ab", 1)
    outcomes = run_ranks_outcomes(2, steps, source, tmp_path, "ac", 2)
    words = ("step-00000001 lacks rank-1.bin", "host host-b kept", "start the run with host-b again")
    assert_all_raise(outcomes, "E407", *words, kind="ExportFault")


def test_a_part_that_was_lost_on_a_host_that_is_there(source, tmp_path):
    run_ranks(2, steps, source, tmp_path, "ab", 2)
    (tmp_path / "b" / "step-00000002" / "rank-1.bin").unlink()
    outcomes = run_ranks_outcomes(2, steps, source, tmp_path, "ab", 3)
    words = ("step-00000002 lacks rank-1.bin", "host host-b", "--from 1")
    assert_all_raise(outcomes, "E407", *words, kind="ExportFault")


def test_a_save_that_one_host_did_not_finish_is_passed_over(source, tmp_path):
    """Host b was lost after a had given its part a name, before its own had one."""
    expected = run_ranks(2, steps, source, tmp_path / "together", "xx", 2)
    apart = tmp_path / "apart"
    run_ranks(2, steps, source, apart, "ab", 2)
    shutil.rmtree(apart / "b" / "step-00000002")
    again = run_ranks(2, steps, source, apart, "ab", 2)
    assert [each[0] for each in again] == [each[1] for each in expected]


def save_on_a_full_disk(source, folder: Path, letters: str, victim: int):
    with pretend_hosts(letters), pytest.MonkeyPatch.context() as patch:
        mine, places = places_of(folder, letters)
        run = Run(source)
        run.step()
        _save(run, mine, places)
        run.step()
        if dist.get_rank() == victim:

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(checkpoint_save, "write_ranges", full)
        _save(run, mine, places)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_full_disk_of_one_host_is_named_and_leaves_the_older_checkpoint(source, tmp_path, victim):
    outcomes = run_ranks_outcomes(3, save_on_a_full_disk, source, tmp_path, "aab", victim)
    host = "aab"[victim]
    words = (f"rank {victim}: host host-{host}: {tmp_path / host} cannot be written", "No space left", "free")
    assert_all_raise(outcomes, "E408", *words, kind="ExportFault")
    for letter in "ab":
        assert [path.name for path in tmp_path.joinpath(letter).glob("*step-*")] == ["step-00000001"]
        assert not list(tmp_path.joinpath(letter).glob(".partial-*"))
    assert run_ranks(3, steps, source, tmp_path, "aab", 1) == [[]] * 3


def save_model(source, folder: Path, letters: str) -> None:
    """Save a model of several files; hosts but the first do not see its folder."""
    with pretend_hosts(letters), pytest.MonkeyPatch.context() as patch:
        run = Run(source)
        if letters[dist.get_rank()] != letters[0]:
            patch.setattr(pretrained, "has_token", lambda *_: False)
            patch.setattr(pretrained, "FileWriter", _Checked)
        pretrained.save_pretrained(run.policy, folder, max_file_bytes=20_000)


class _Checked(pretrained.FileWriter):
    """Has nothing to write: its files would be where nobody looks for them."""

    def __init__(self, folder, files):
        assert not files
        super().__init__(folder, files)


@pytest.mark.parametrize("letters", ["aab", "ab"])
def test_a_model_of_several_files_is_whole_on_the_first_host(source, tmp_path, letters):
    run_ranks(len(letters), save_model, source, tmp_path / "model", letters)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert differences(read_folder(tmp_path / "model"), read_folder(source)) == []
    assert not [name for name in files(tmp_path / "model") if name.startswith(".")]
