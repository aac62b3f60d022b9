"""`make setup` on a machine whose Python is too old, and what `make demo` calls."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.system import missing

ROOT = Path(__file__).parents[1]


def commands_of(target):
    """What make would run for a target, as if nothing had been made yet."""
    # Under `make test` this make would be one inside another, which says so and takes over its flags.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "-B", target]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    return result.stdout.splitlines()


def load_check():
    spec = importlib.util.spec_from_file_location("check_python", ROOT / "scripts" / "check_python.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_checked_before_anything_is_installed():
    first, second, *_ = commands_of("setup")
    assert first.endswith("scripts/check_python.py") and second.endswith("-m venv .venv")


def test_a_python_that_is_too_old_is_named():
    with pytest.raises(SystemExit) as caught:
        load_check().main((3, 10, 14))
    assert str(caught.value).startswith(f"shardproof needs Python 3.11 or newer; {sys.executable} is 3.10.")
    assert "Fix: make setup PYTHON=python3.11" in str(caught.value)
    load_check().main((3, 11, 0))
    load_check().main()


def test_make_demo_is_the_command_of_the_package():
    """It says itself, at its end, how to call the command."""
    assert commands_of("demo")[-1] == ".venv/bin/shardproof demo --output runs/shardproof-demo"


def test_the_hosts_stage_says_why_it_is_left_out(monkeypatch):
    """Without root nothing can be made of namespaces; `make test` goes on without that stage."""
    assert "tests/hosts" in "\n".join(commands_of("test"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "hosts made of namespaces need root: run `sudo make test-hosts`"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "ip" else f"/usr/bin/{tool}")
    assert missing() == "hosts made of namespaces need iproute2: run `apt-get install iproute2`"


def test_make_test_hosts_on_a_machine_without_the_tools(tmp_path):
    """It ends well, so that `make test` goes on, and says what to install."""
    for tool in ("make", "sh", "id"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "-o", ".venv/.stamp", "test-hosts"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**env, "PATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    if os.geteuid() == 0:
        wanted = "need iproute2 and util-linux: run `apt-get install iproute2 util-linux`"
    else:
        wanted = "need root: run `sudo make test-hosts`"
    assert done.stdout.splitlines()[-1] == f"make test-hosts: left out: hosts made of namespaces {wanted}"
