"""How long a user waits: for the first line of a run, for `--help`, and for a dry run of the tiny recipe.

python benchmarks/first_line.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "tiny.toml"
BARS = {"first line of train": 2.0, "--help": 0.5, "train --dry-run": 10.0}  # seconds


def first_line(arguments: Sequence[str]) -> float:
    """Seconds from the start of a command to its first line; the command is then ended."""
    started = time.perf_counter()
    with _start(arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        process.kill()
    if not line.strip():
        raise SystemExit(f"shardproof {' '.join(arguments)} printed nothing")
    return seconds


def whole(arguments: Sequence[str]) -> float:
    """Seconds that a command takes; it must succeed."""
    started = time.perf_counter()
    with _start(arguments) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(output)
    return time.perf_counter() - started


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardproof", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        recipe = ["train", str(RECIPE), f"output.folder={folder}/run"]
        measured = {
            "first line of train": [first_line(recipe) for _ in range(repeats)],
            "--help": [whole(["--help"]) for _ in range(repeats)],
            "train --dry-run": [whole([*recipe, "--dry-run"]) for _ in range(repeats)],
        }
    print("| command | median s | least s | bar s |\n| --- | --- | --- | --- |")
    for name, seconds in measured.items():
        print(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {BARS[name]:g} |")
    if any(statistics.median(seconds) > BARS[name] for name, seconds in measured.items()):
        raise SystemExit("a bar is not met: measure on a quiet machine before you worry")


if __name__ == "__main__":
    main()
