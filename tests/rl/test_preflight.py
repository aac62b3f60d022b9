"""What a machine lacks is said before anything starts, by the dry run and by the start alike."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardproof.cli import app
from shardproof.config.load import from_json
from shardproof.folder_lock import FolderLock
from shardproof.rl import preflight
from shardproof.rl.preflight import Start, look_ahead
from shardproof.rl.same_run import Resume
from tests.rl.runs import SMALL, TINY, small_recipe, write_rows

Usage = namedtuple("Usage", "total used free")


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    overrides = [*SMALL, f"output.folder={folder}", "output.eval_every=0"]
    result = CliRunner().invoke(app, ["train", str(TINY), *overrides, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def ahead(folder: Path, *overrides: str, num_ranks: int = 1, num_nodes: int = 1) -> list[str]:
    recipe = from_json(small_recipe(folder, *overrides))
    return [str(finding) for finding in look_ahead(Start(recipe, num_ranks, num_nodes, Resume()))]


@pytest.fixture
def without(monkeypatch):
    """Packages that seem not to be installed; vLLM seems to be, although these tests run without it."""
    names: set[str] = set()
    find = importlib.util.find_spec

    def find_spec(name, *rest):
        return None if name in names else find("torch" if name == "vllm" else name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(preflight, "installed_version", lambda: None if "vllm" in names else "0.32.0")
    return names


def test_nothing_is_said_where_nothing_is_wrong(tmp_path):
    assert ahead(tmp_path / "run") == []
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("start", [("--dry-run",), ()], ids=["dry run", "start"])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.ranks=100000"], "train.ranks"),
        (["train.ranks=1000"], "1000 ranks need at least"),
        (["output.folder=/proc/shardproof/run"], "/proc cannot be written"),
        (["output.folder="], "output.folder is empty"),
        ([r'output.folder="a\u0000b"'], "embedded null"),
        (["output.folder=" + "a" * 300], "File name too long"),
        (["model.path=no/such/model"], "L101"),
        (["rollout.engine=vllm", "rollout.vllm.mode=server", "rollout.vllm.port={port}"], "cannot be used"),
        (["rollout.engine=vllm", "rollout.vllm.url=ftp://127.0.0.1"], "rollout.vllm.url"),
        (["--allow", "optimiser.lr"], "--allow optimiser.lr"),
        (["--from", "3"], "--from 3"),
    ],
)
def test_the_dry_run_and_the_start_find_the_same(tmp_path, monkeypatch, start, overrides, said):
    monkeypatch.setattr(preflight, "available_memory", lambda: 8 * 2**30)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = command(tmp_path / "run", *(each.format(port=port) for each in overrides), *start)
    assert code == 2 and said in output and "nothing is wrong" not in output, output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vllm", ["rollout.engine=vllm"]),
        ("aiohttp", ["rollout.engine=vllm"]),
        ("peft", ["model.lora.r=4"]),
        ("tensorboard", ["output.trackers=['tensorboard']"]),
        ("wandb", ["output.trackers=['wandb']", "output.tracker_options.wandb.mode=offline"]),
        ("trackio", ["output.trackers=['trackio']"]),
        ("mlflow", ["output.trackers=['mlflow']"]),
        ("datasets", ["data.train=hf:openai/gsm8k:main"]),
        ("pyarrow", ["data.train=rows.parquet"]),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_setting(tmp_path, without, name, overrides):
    assert not [said for said in ahead(tmp_path / "run", *overrides) if "C007" in said]
    without.add(name)
    (said,) = ahead(tmp_path / "run", *overrides)
    assert "C007" in said and overrides[0].split("=")[0].removesuffix(".r") in said
    assert f"needs the package {name}, which is not installed" in said and "pip install" in said
    assert ahead(tmp_path / "run") == [], "other settings do without it"


def test_a_version_that_is_not_supported_is_named(tmp_path, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.99.0" if name == "torch" else version(name)
    )
    (said,) = ahead(tmp_path / "run")
    assert "torch is 2.99.0; supported versions are" in said and "<2.14" in said


def test_more_ranks_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ahead(tmp_path / "run", num_ranks=2) == []
    (said,) = ahead(tmp_path / "run", num_ranks=3)
    assert "needs 3 GPUs; this machine has 2" in said


def test_a_disk_must_hold_one_checkpoint_more_than_are_kept(tmp_path, monkeypatch):
    size = sum(tensor.numel() for tensor in _weights()) * 4 * 3
    free = 4 * size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    settings = ["output.save_every=1", "output.save_model=false"]
    assert ahead(tmp_path / "run", *settings, "output.keep=3") == []
    (said,) = ahead(tmp_path / "run", *settings, "output.keep=4")
    assert "GiB free; 5 checkpoints take" in said
    (said,) = ahead(tmp_path / "run", "output.save_every=1", "output.keep=3")
    assert "4 checkpoints and the model" in said
    for step in (1, 2, 3):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(small_recipe(tmp_path / "run"))
    assert ahead(tmp_path / "run", "output.save_every=1", "output.keep=3") == [], "three of them are there"


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        (["optimizer.moments=bfloat16"], 8.0),
        (["optimizer.name=adamw_8bit"], 6.1),
        (["model.lora.r=1", "model.lora.base=nf4", "model.compute_dtype=bfloat16"], 0.8),
    ],
    ids=["two moments in 16 bits", "in 8 bits", "a base in 4 bits"],
)
def test_a_disk_need_not_hold_what_a_checkpoint_has_not(tmp_path, monkeypatch, overrides, bytes_each):
    """A run with room for its checkpoints was refused: its moments, or its base, were counted in float32."""
    monkeypatch.setattr(preflight, "available_memory", lambda: None)
    size = sum(tensor.numel() for tensor in _weights()) * bytes_each
    settings = ["output.save_every=1", "output.save_model=false", "output.keep=1", *overrides]
    for free, num in ((2.2 * size, 0), (1.6 * size, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free, 0, free))
        assert len(ahead(tmp_path / "run", *settings)) == num


def _weights():
    from safetensors.torch import load_file

    return load_file(TINY.parent / "tiny" / "model" / "model.safetensors").values()


def test_memory_must_hold_what_ranks_hold_between_steps(tmp_path, monkeypatch):
    size = sum(tensor.numel() for tensor in _weights()) * 4
    recipe = from_json(small_recipe(tmp_path / "run"))
    held = preflight.held_in_host(recipe, 2, on_gpu=False)
    # Weights, gradients, two moments, and two replicas; a little more for buffers and rows that do not divide evenly.
    assert 6 * size <= held < 6.1 * size
    needed = 2 * preflight.PROCESS_BYTES + held
    monkeypatch.setattr(preflight, "available_memory", lambda: needed)
    assert ahead(tmp_path / "run", num_ranks=2) == []
    monkeypatch.setattr(preflight, "available_memory", lambda: needed - 1)
    (said,) = ahead(tmp_path / "run", num_ranks=2)
    assert "2 ranks need at least" in said
    assert ahead(tmp_path / "run", "rollout.engine=sharded", num_ranks=2) == []


def test_drawn_weights_are_counted_too(tmp_path):
    recipe = from_json(small_recipe(tmp_path / "run", "model.random_init=true"))
    tied = {tensor.data_ptr(): tensor for tensor in _weights()}
    assert Start(recipe, 1).num_elements == sum(tensor.numel() for tensor in tied.values())


def test_a_node_may_be_without_the_weights(tmp_path):
    assert ahead(tmp_path / "run", f"model.path={tmp_path / 'nowhere'}", num_nodes=2) == []


def test_a_folder_that_is_in_use_is_found_unless_another_node_may_have_begun_the_run(tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire("output")
    (said,) = ahead(tmp_path)
    assert "C006" in said and "is in use by process" in said
    assert ahead(tmp_path, num_nodes=2) == []
    lock.release()
    assert ahead(tmp_path) == []


def test_under_torchrun_the_first_rank_of_a_node_looks(tmp_path, monkeypatch):
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1000",
        "WORLD_SIZE": "1000",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight, "available_memory", lambda: 8 * 2**30)
    code, output = command(tmp_path / "run")
    assert code == 2 and "1000 ranks need at least" in output


def test_all_that_is_wrong_is_said_at_once(tmp_path, without):
    without.update({"peft", "tensorboard"})
    rows = write_rows(tmp_path / "empty.jsonl", [])
    settings = ["model.lora.r=4", "output.tensorboard=true", f"data.train={rows}", "--dry-run"]
    code, output = command(tmp_path / "run", *settings)
    assert code == 2
    for said in ("package peft", "package tensorboard", "empty.jsonl holds no rows"):
        assert said in output


def test_the_dry_run_knows_what_a_resume_would_refuse(tmp_path):
    """Also what the run's data hold, which takes reading them."""
    from tests.ranks import run_ranks
    from tests.rl.runs import lines, run_recipe

    folder = tmp_path / "run"
    run_ranks(1, run_recipe, small_recipe(folder, "train.steps=1", "output.eval_every=0"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    code, output = command(folder, "train.steps=2", "--dry-run")
    assert code == 0, output
    rows = lines(TINY.parent / "tiny" / "train.jsonl")[:-1]
    data = write_rows(tmp_path / "fewer.jsonl", rows)
    code, output = command(folder, f"data.train={data}", "--dry-run")
    changed = f"data.train[rows]={len(rows) + 1} (now {len(rows)})"
    assert code == 2 and changed in output and "--allow data.train" in output
    code, output = command(folder, f"data.train={data}", "--allow", "data.train", "--dry-run")
    assert code == 0, output
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"} == before
