"""Whether running ahead costs reward: the demo's recipe with rollout.ahead = 0, 1 and 2, over ten seeds.

    python benchmarks/learning_ahead.py --json learning_ahead.json

Every run trains recipes/tiny.toml from the same model on one rank and evaluates on the 400 held-out sums at the end. The
mean reward with `ahead` must be within one standard error of the mean of ahead = 0: that of the difference between two
means of ten seeds each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
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

ROOT = Path(__file__).resolve().parent.parent
AHEAD = (0, 1, 2)
METRIC = "eval/reward"


def train(ahead: int, seed: int, steps: int, options: list[str]) -> dict[str, float]:
    """The last evaluation's reward of one run, and how long the run took."""
    # On the CPU, wherever this runs: the model is tiny.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="shardproof-learning-") as folder:
        settings = [f"rollout.ahead={ahead}", f"train.seed={seed}", f"train.steps={steps}", "train.ranks=1"]
        settings += [f"output.folder={folder}/run", "output.save_every=0", f"output.eval_every={steps}"]
        command = [sys.executable, "-m", "shardproof", "train", "recipes/tiny.toml", *settings, *options]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["metrics"] for line in lines]
    found = [row[METRIC] for row in rows if METRIC in row]
    lags = [row["lag/max"] for row in rows if "lag/max" in row]
    return {
        "reward": found[-1],
        "seconds": time.perf_counter() - started,
        "largest lag": max(lags, default=0.0),
    }


def summarise(runs: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """Means, standard errors and differences to ahead = 0."""
    found: dict[str, Any] = {}
    base = [run["reward"] for run in runs[0]]
    for ahead, rows in runs.items():
        rewards = [row["reward"] for row in rows]
        error = stdev(rewards) / math.sqrt(len(rewards))
        difference = mean(rewards) - mean(base)
        base_error = stdev(base) / math.sqrt(len(base))
        found[str(ahead)] = {
            "rewards": rewards,
            "mean": mean(rewards),
            "standard error": error,
            "difference": difference,
            "standard error of the difference": math.hypot(error, base_error),
            "largest lag": max(row["largest lag"] for row in rows),
            "holds": difference >= -math.hypot(error, base_error),
        }
    return found


def report(found: dict[str, Any]) -> bool:
    """Print the table; whether the bar holds."""
    rows = [
        [
            f"ahead = {ahead}",
            f"{row['mean']:.4f}",
            f"{row['standard error']:.4f}",
            f"{row['difference']:+.4f}" if ahead != "0" else "",
            f"{row['standard error of the difference']:.4f}" if ahead != "0" else "",
            f"{row['largest lag']:.0f}",
        ]
        for ahead, row in found.items()
    ]
    header = ["", "held-out reward", "standard error", "difference", "its standard error", "largest lag"]
    print_table(f"{len(found['0']['rewards'])} seeds each", header, rows)
    return all(row["holds"] for row in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one core each")
    parser.add_argument(
        "settings", nargs="*", help="further settings of the recipe, such as algorithm.name=rloo"
    )
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)

    def one(asked: tuple[int, int]) -> dict[str, float]:
        seed, ahead = asked
        found = train(ahead, seed, options.steps, options.settings)
        print(f"  seed {seed}, ahead {ahead}: {found['reward']:.4f} in {found['seconds']:.0f} s", flush=True)
        return found

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    asked = [(seed, ahead) for seed in seeds for ahead in AHEAD]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(one, asked))
    runs = {ahead: [row for (_, a), row in zip(asked, rows, strict=True) if a == ahead] for ahead in AHEAD}
    found = summarise(runs)
    good = report(found)
    if options.json is not None:
        write_json(options.json, environment, {"steps": options.steps, "seeds": [*seeds], "learning": found})
    if not good:
        raise SystemExit("a bar was missed")


if __name__ == "__main__":
    main()
