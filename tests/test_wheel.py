"""The wheel: everything that the installed package needs is in it, and the demo runs from it without a clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEVER = ("tests/", "benchmarks/", "scripts/", "docs/")


def run(*command: str, cwd: Path, **variables: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the source: a build in place would take along what an earlier one left in build/."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "recipes", source / "recipes")
    # What Python leaves beside a recipe's modules is not shipped.
    compiled = source / "recipes" / "__pycache__" / "left.cpython-311.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.touch()
    (source / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "faults.md", source / "docs")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", str(built), ".", cwd=source)
    (path,) = built.glob("shardproof-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the wheel's package, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "-q", "--target", str(target))
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=target)
    return target


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "shardproof").rglob("*") if path.is_file()}
    files |= {
        f"shardproof/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*") if path.is_file()
    }
    wanted = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    assert {name for name in found if ".dist-info/" not in name} == wanted | {"shardproof/faults.md"}
    assert {"shardproof/recipes/tiny.toml", "shardproof/recipes/tiny/model/model.safetensors"} < found
    assert not [name for name in found if name.startswith(NEVER)]
    assert wheel.stat().st_size < 3_000_000


def test_the_wheel_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        facts = message_from_string(archive.read(name).decode())
    assert facts["Requires-Python"] == ">=3.11"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(facts.get_all("Provides-Extra")) == sorted(extras)
    everything = [each for each in facts.get_all("Requires-Dist") if 'extra == "all"' in each]
    assert len(everything) == 1 and everything[0].startswith("shardproof[cli,data,lora,mcp]")


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_in_an_empty_folder(installed, tmp_path):
    variables = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    where = run(
        sys.executable, "-c", "import shardproof; print(shardproof.__file__)", cwd=tmp_path, **variables
    )
    assert Path(where.strip()) == installed / "shardproof" / "__init__.py"
    listed = run(sys.executable, "-m", "shardproof", "recipes", "copies", cwd=tmp_path, **variables)
    assert (
        "copies/gsm8k_grpo.toml: " in listed and (tmp_path / "copies/tiny/model/model.safetensors").is_file()
    )
    shutil.rmtree(tmp_path / "copies")
    explained = run(sys.executable, "-m", "shardproof", "explain", "s207", cwd=tmp_path, **variables)
    assert explained.startswith("S207: ") and "Fix: " in explained
    shown = run(sys.executable, "-m", "shardproof", "demo", "--steps", "2", cwd=tmp_path, **variables)
    assert [path.name for path in tmp_path.iterdir()] == ["shardproof-demo"]
    run_folder = tmp_path / "shardproof-demo" / "run"
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (run_folder / "report.html").is_file() and (run_folder / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "shardproof-demo" / "faults").exists()
    for expected in (
        "rank 1: loaded",
        "0 findings",
        "S207 attest: rank 1: 'model.layers.1.mlp.down_proj.weight'",
        "E404",
        "E407",
        "3. Train: 2 steps of GRPO",
        "after 2 steps:",
        "-m shardproof train shardproof-demo/tiny.toml",
    ):
        assert expected in shown, shown
    assert "Traceback" not in shown and "MISSED" not in shown
