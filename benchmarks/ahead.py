"""What running ahead and more engines are worth, with engines and updates whose time is injected.

    python benchmarks/ahead.py --json ahead.json --before 1898d4a

Everything of the run is real: the loop, the buffer, the rollouts in the background, the dispatcher, weight syncs over
shared memory. Only the engines' decoding and the update are waits (benchmarks/slow_servers.py, and an optimizer that
sleeps), so two cores show what a cluster would. The tiny model, one rank.

With `--before COMMIT`, recipes/tiny.toml at ahead = 0 is also timed against that commit, by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from benchmarks.slow_servers import Timing, described

ROOT = Path(__file__).resolve().parent.parent
MIN_BALANCED, MIN_MANY = 1.7, 3.0
MAX_SLOWER = 1.03  # at ahead = 0: what two runs of the same code differ by on a quiet machine

PARTS = '''
import time

import torch


class Waiting(torch.optim.SGD):
    """An optimizer whose step takes as long as it is told."""

    def __init__(self, groups, lr, seconds=0.0):
        super().__init__(groups, lr=lr)
        self.seconds = seconds

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


def some(prompt, completion, row):
    """A reward that differs between the completions of a prompt."""
    return float(sum(map(ord, completion)) % 2)
'''

RECIPE = """
[model]
path = "{root}/recipes/tiny/model"
compute_dtype = "float32"
[data]
train = "{root}/recipes/tiny/train.jsonl"
[reward]
functions = [{{ name = "parts:some" }}]
[rollout]
engine = "vllm"
group_size = 8
max_new_tokens = 48
batch_size = 512
canary_tolerance = 1000.0
ahead = {ahead}
order = "{order}"
[rollout.vllm]
mode = "server"
url = {urls}
[algorithm]
name = "grpo"
[optimizer]
name = "parts:Waiting"
lr = 1e-6
options = {{ seconds = {update_s} }}
[train]
steps = {steps}
prompts_per_step = {prompts}
micro_batch_tokens = 16384
ranks = 1
[output]
folder = "{folder}/run"
save_model = false
save_every = 0
"""


@dataclass(frozen=True)
class Case:
    """A run to time."""

    name: str
    timing: Timing
    update_s: float
    ahead: int = 0
    order: str = "drawn"
    prompts: int = 8  # eight completions of each
    steps: int = 12
    warm_up: int = 4  # steps that are not counted


# Sampling and updating take the same time: 64 completions of 24 tokens, in two rounds of 32 slots.
BALANCED = Timing(num=1, slots=32, token_s=0.06, usual=24, longest=24)
# Most completions have 6 to 12 tokens, one in twelve 30 to 48: a server's slots are mostly empty at a batch's end.
LONG_TAIL = Timing(num=1, slots=8, token_s=0.06, usual=12, longest=48, long_share=1 / 12)
FOUR = replace(LONG_TAIL, num=4)
CASES = [
    Case("balanced, ahead 0", BALANCED, 2.9),
    Case("balanced, ahead 1", BALANCED, 2.9, ahead=1),
    Case("long tail, 1 replica, ahead 0", LONG_TAIL, 0.8),
    Case("long tail, 4 replicas, ahead 0", FOUR, 0.8),
    Case("long tail, 4 replicas, ahead 1", FOUR, 0.8, ahead=1, steps=20, warm_up=6),
    Case("long tail, 4 replicas, ahead 2", FOUR, 0.8, ahead=2, steps=20, warm_up=6),
    Case("long tail, 4 replicas, ahead 2, finished", FOUR, 0.8, 2, "finished", steps=20, warm_up=6),
]


@contextmanager
def servers(timing: Timing) -> Iterator[list[str]]:
    """The addresses of running servers."""
    command = [sys.executable, str(ROOT / "benchmarks/slow_servers.py"), described(timing)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield [process.stdout.readline().strip() for _ in range(timing.num)]
    finally:
        process.stdin.close()
        process.wait(30)


def busy_seconds(urls: list[str]) -> tuple[float, float]:
    """What all servers' slots have worked, and when that was."""
    rows = []
    for url in urls:
        with urllib.request.urlopen(f"{url}/stats", timeout=10) as reply:
            rows.append(json.load(reply))
    return sum(row["busy_s"] for row in rows), rows[0]["time"]


def rank_environment(*folders: Path) -> dict[str, str]:
    """For a run on one core, with these folders to import from first."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def step_rows(metrics: Path) -> list[dict[str, float]]:
    """The metrics of the steps so far."""
    lines = metrics.read_text().splitlines(keepends=True)
    rows = [json.loads(line)["metrics"] for line in lines if line.endswith("\n")]
    return [row for row in rows if "time/step" in row]


def run(case: Case) -> dict[str, float]:
    """Completions per second of a case's counted steps, and who waited how long."""
    with tempfile.TemporaryDirectory(prefix="shardproof-ahead-") as folder, servers(case.timing) as urls:
        (Path(folder) / "parts.py").write_text(PARTS)
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE.format(**vars(case), root=ROOT, urls=json.dumps(urls), folder=folder))
        environment = rank_environment(ROOT / "src", Path(folder))
        command = [sys.executable, "-m", "shardproof", "train", str(recipe)]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        metrics = Path(folder) / "run/metrics.jsonl"
        marks: list[tuple[float, float]] = []  # busy seconds and the time when counting starts and ends
        while process.poll() is None:
            done = len(step_rows(metrics)) if metrics.exists() else 0
            # The last steps do not count: nothing is begun for the steps after them.
            wanted = (case.warm_up, case.steps - case.ahead)
            if len(marks) < 2 and done >= wanted[len(marks)]:
                marks.append(busy_seconds(urls))
            time.sleep(0.02)
        assert process.stdout is not None
        output = process.stdout.read()
        if process.returncode != 0:
            raise SystemExit(f"{case.name} failed:\n{output[-3000:]}")
        rows = step_rows(metrics)
    return _read(case, rows[case.warm_up : case.steps - case.ahead], marks)


def _read(case: Case, rows: list[dict[str, float]], marks: list[tuple[float, float]]) -> dict[str, float]:
    """The figures of the counted steps."""
    seconds = sum(row["time/step"] for row in rows)
    (busy_before, before), (busy_after, after) = marks
    slots = case.timing.num * case.timing.slots
    return {
        "step_s": seconds / len(rows),
        "completions_per_s": 8 * case.prompts * len(rows) / seconds,
        "trainer_idle": sum(row.get("time/trainer_idle", row["time/rollout"]) for row in rows) / seconds,
        "slots_idle": 1 - (busy_after - busy_before) / (slots * (after - before)),
        "engine_idle": sum(row.get("time/engine_idle", 0.0) for row in rows) / seconds,
        "sync": sum(row["time/sync"] for row in rows) / seconds,
        "lag_mean": sum(row.get("lag/mean", 0.0) for row in rows) / len(rows),
        "lag_max": max(row.get("lag/max", 0.0) for row in rows),
        "interrupted": sum(row.get("ahead/interrupted", 0.0) for row in rows) / len(rows),
    }


def summarise(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The ratios that the bars are about."""
    rates = {name: row["completions_per_s"] for name, row in found.items()}
    one, four = rates["long tail, 1 replica, ahead 0"], rates["long tail, 4 replicas, ahead 0"]
    ratios = {"balanced, ahead 1": rates["balanced, ahead 1"] / rates["balanced, ahead 0"]}
    for name, rate in rates.items():
        if name.startswith("long tail, 4"):
            ratios[f"{name}, against 1 replica, ahead 0"] = rate / one
            ratios[f"{name}, against 4 replicas, ahead 0"] = rate / four
    return ratios


def report(found: dict[str, dict[str, float]], ratios: dict[str, float]) -> bool:
    """Print the tables; whether the bars hold."""
    header = ["", "s/step", "completions/s", "trainer idle", "slots idle", "sync", "lag", "interrupted"]
    rows = [
        [
            name,
            f"{row['step_s']:.2f}",
            f"{row['completions_per_s']:.1f}",
            f"{row['trainer_idle']:.0%}",
            f"{row['slots_idle']:.0%}",
            f"{row['sync']:.0%}",
            f"{row['lag_mean']:.2f}",
            f"{row['interrupted']:.0%}",
        ]
        for name, row in found.items()
    ]
    print_table("throughput, and who waits", header, rows)
    print_table("times faster", ["", "times"], [[name, f"{ratio:.2f}"] for name, ratio in ratios.items()])
    many = [
        ratio for name, ratio in ratios.items() if "ahead 2" in name and name.endswith("1 replica, ahead 0")
    ]
    print(f"\nbars: balanced at least {MIN_BALANCED:g}, 4 replicas with a long tail at least {MIN_MANY:g}")
    return ratios["balanced, ahead 1"] >= MIN_BALANCED and min(many) >= MIN_MANY


def step_seconds(source: Path, steps: int) -> float:
    """The median of a step of recipes/tiny.toml with the code in a folder, on one rank."""
    with tempfile.TemporaryDirectory(prefix="shardproof-before-") as folder:
        settings = [f"train.steps={steps}", "train.ranks=1", f"output.folder={folder}/run"]
        settings += ["output.save_every=0", "output.eval_every=0", "output.save_model=false"]
        command = [sys.executable, "-m", "shardproof", "train", "recipes/tiny.toml", *settings]
        subprocess.run(
            command, cwd=source, env=rank_environment(source / "src"), check=True, capture_output=True
        )
        rows = step_rows(Path(folder) / "run/metrics.jsonl")
    return median(row["time/step"] for row in rows[5:])


def against(commit: str, repeats: int, steps: int) -> dict[str, Any]:
    """Seconds per step at ahead = 0, of this tree and of a commit, by turns."""
    with tempfile.TemporaryDirectory(prefix="shardproof-commit-") as folder:
        before = Path(folder) / "tree"
        if Path(commit).is_dir():  # a tree without its history, on a machine that only measures
            before = Path(commit).resolve()
        else:
            add = ["git", "worktree", "add", "-q", "--detach", str(before), commit]
            subprocess.run(add, cwd=ROOT, check=True)
        try:
            rows: dict[str, list[float]] = {"before": [], "now": []}
            for repeat in range(repeats):
                pair = [("before", before), ("now", ROOT)]
                for name, source in pair if repeat % 2 == 0 else reversed(pair):
                    rows[name].append(step_seconds(source, steps))
                    print(f"  {name}: {rows[name][-1] * 1e3:.1f} ms per step", flush=True)
        finally:
            if not Path(commit).is_dir():
                subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)
    ratios = [now / then for now, then in zip(rows["now"], rows["before"], strict=True)]
    return {**rows, "ratio": median(ratios), "least and most": [min(ratios), max(ratios)]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="COMMIT", help="also time ahead = 0 against this commit or tree")
    parser.add_argument("--repeats", type=int, default=7, help="of that comparison")
    parser.add_argument("--only", help="cases with this in their name")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment(["aiohttp"])
    print_environment(environment)
    found: dict[str, dict[str, float]] = {}
    for case in CASES if options.only != "none" else []:
        if options.only is None or options.only in case.name:
            found[case.name] = run(case)
            print(f"  {case.name}: {found[case.name]['step_s']:.2f} s per step", flush=True)
    results: dict[str, Any] = {"cases": found}
    good = True
    if len(found) == len(CASES):
        results["ratios"] = summarise(found)
        good = report(found, results["ratios"])
    if options.before is not None:
        results["ahead = 0"] = pair = against(options.before, options.repeats, steps=60)
        print(
            f"\nahead = 0 takes {pair['ratio']:.3f} of the time of {options.before} (at most {MAX_SLOWER:g})"
        )
        good = good and pair["ratio"] <= MAX_SLOWER
    if options.json is not None:
        write_json(options.json, environment, results)
    if not good:
        raise SystemExit("a bar was missed")


if __name__ == "__main__":
    main()
