"""examples/slurm/train.sbatch: what it asks SLURM for, what its tasks are started with, and when it is put back into the queue."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardproof.cli import app

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"


def asked():
    """The options of the script's #SBATCH lines."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", SCRIPT.read_text(), re.MULTILINE)
    return dict(lines)


@pytest.fixture
def job(tmp_path):
    """Runs the script as a job whose tasks end with a given exit code: (its own exit code, what srun and scontrol got)."""
    stub = f"""#!{sys.executable}
import json, os, sys
name = os.path.basename(sys.argv[0])
line = {{"program": name, "arguments": sys.argv[1:], "secret": os.environ.get("SHARDPROOF_RDZV_ID")}}
with open({str(tmp_path / "calls")!r}, "a") as file:
    print(json.dumps(line), file=file)
sys.exit(int(os.environ["TASKS_END_WITH"]) if name == "srun" else 0)
"""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)

    def run(code):
        settings = {"RECIPE": "recipe.toml", "RUN": "/shared/run", "SLURM_JOB_ID": "4711"}
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {**os.environ, **settings, "PATH": path, "TASKS_END_WITH": str(code)}
        found = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True)
        return found.returncode, [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def test_one_task_per_node_and_a_warning_before_the_time_limit():
    options = asked()
    assert options["ntasks-per-node"] == "1" and options["signal"].startswith("USR1@")
    assert int(options["signal"].partition("@")[2]) >= 300 and "requeue" in options


def test_the_page_shows_the_script():
    assert SCRIPT.read_text() in (ROOT / "docs" / "slurm.md").read_text()


def test_every_task_gets_the_command_and_the_secret(job):
    code, (srun,) = job(0)
    assert code == 0 and srun["program"] == "srun"
    assert srun["arguments"][:3] == ["shardproof", "train", "recipe.toml"]
    assert re.fullmatch("[0-9a-f]{32}", srun["secret"])
    told = CliRunner().invoke(app, [*srun["arguments"][1:], "--dry-run"])
    assert "recipe.toml" in told.output and told.exit_code == 2, (
        "the file is missing, and nothing else is wrong"
    )


def test_a_run_that_the_time_limit_stopped_is_queued_again(job):
    code, calls = job(138)
    assert code == 138 and calls[1]["program"] == "scontrol" and calls[1]["arguments"] == ["requeue", "4711"]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 143])
def test_a_run_that_ended_otherwise_is_left_to_slurm(job, code):
    assert job(code)[0] == code
    assert [call["program"] for call in job(code)[1]] == ["srun", "srun"]
