"""What every benchmark prints and writes besides its numbers: versions, hardware, commit, and a table."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("shardproof", "torch", "transformers", "safetensors", "numpy")
# Only a change to these can change a number; results that lie in the tree do not make it dirty.
_MEASURED_PATHS = ("src", "pyproject.toml", "constraints.txt", ":(glob)benchmarks/*.py")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")


def describe_environment(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, hardware, commit and date of this run; `packages` are named besides the usual ones."""
    environment: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "python": platform.python_version(),
    }
    for name in (*_PACKAGES, *packages):
        environment[name] = _version(name)
    environment |= {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": _accelerator(),
        "load_average": round(os.getloadavg()[0], 2),  # before the run: what others were doing
    }
    return environment


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from the source tree" if package == "shardproof" else "not installed"


def describe_commit() -> str | None:
    """The commit that is measured, '+dirty' appended where files that matter differ from it; None without one."""
    if told := os.environ.get("SHARDPROOF_COMMIT"):
        return told  # a copy of the tree without its history, on a machine that only measures, is told what it is
    commit = _git("rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    return f"{commit}+dirty" if _git("status", "--porcelain", "--", *_MEASURED_PATHS) else commit


def check_can_write(path: Path | None) -> None:
    """End the program if results are to be written that no commit explains; called before anything is measured."""
    if path is not None and describe_commit() is None:
        raise SystemExit(f"{path} will not be written: this tree has no commit. Fix: commit, or omit --json.")


def write_json(path: Path, environment: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write a run's environment and results."""
    check_can_write(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": dict(environment), **results}, indent=2) + "\n")


def print_environment(environment: Mapping[str, Any]) -> None:
    versions = ", ".join(f"{name} {environment[name]}" for name in ("python", *_PACKAGES[1:3]))
    hardware = f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gib']} GiB"
    accelerator = environment["accelerator"]
    print(f"commit {environment['commit'] or 'none'}, {environment['date']}")
    print(versions)
    print(hardware if accelerator is None else f"{hardware}, {accelerator}")
    if environment["load_average"] > 0.5 * environment["cores"]:
        print(f"the machine is busy (load average {environment['load_average']}): seconds will be too long")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: first column to the left, the others, which are numbers, to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
