"""The whole RL loop against TRL's GRPOTrainer: samples per second, and the reward that both end with.

    pip install -c constraints.txt trl
    python benchmarks/rl.py --json rl.json

Each contender trains the tiny model of recipes/tiny with GRPO, in one fresh CPU process a seed, with as many threads,
the same prompts, group size, completion length, learning rate and number of updates, float32, one update a batch, no
KL. Samples a second
are those of whole steps (sampling, rewards, update, and what an engine needs to see the new weights), from the end of
the first steps, which compile and warm up, to the end of the last; samples a CPU second say the same on a machine that
does other work as well. The reward is the mean of sampled completions over the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "recipes" / "tiny"
OURS, TRL = "shardproof", "TRL GRPOTrainer"
PROMPTS, GROUP, TOKENS, LR = 48, 8, 4, 4e-4
NUM_WARM, NUM_LAST = 5, 10
MIN_RATIO = 1.5


def run_shardproof(seed: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """(end of the step, mean reward) of each step."""
    from shardproof.config.load import load_recipe
    from shardproof.rl.loop import train

    settings = {
        "train.ranks": 1,
        "train.steps": steps,
        "train.seed": seed,
        "train.prompts_per_step": PROMPTS,
        "rollout.group_size": GROUP,
        "rollout.max_new_tokens": TOKENS,
        "optimizer.lr": LR,
        "optimizer.schedule": "constant",
        "output.folder": folder,
        "output.save_every": 0,
        "output.eval_every": 0,
        "output.save_model": "false",
        "output.tensorboard": "false",
    }
    clock = _Clock()
    overrides = [f"{key}={value}" for key, value in settings.items()]
    train(load_recipe(TINY.parent / "tiny.toml", overrides), [clock])
    return clock.steps


def _now(reward: float) -> dict[str, float]:
    return {"time": time.perf_counter(), "cpu": time.process_time(), "reward": reward}


class _Clock:
    """A logger that notes when each step ended."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(_now(metrics["reward/mean"]))

    def close(self) -> None:
        pass


def run_trl(seed: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """(end of the step, mean reward) of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ended: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" in logs:
                ended.append(_now(float(logs["reward"])))

    def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]

    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(TINY / "model"),
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    return ended


CONTENDERS = {OURS: run_shardproof, TRL: run_trl}


def measure(name: str, seed: int, steps: int, threads: int) -> dict[str, float]:
    """One contender's run in a fresh process."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "steps.json"
        command = [sys.executable, __file__, "--child", name, "--steps", str(steps), "--seeds", str(seed)]
        done = subprocess.run(
            [*command, "--json", str(result)],
            env={**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        ended = json.loads(result.read_text())
    assert len(ended) == steps, (name, len(ended))
    seconds, cpu_seconds = (ended[-1][clock] - ended[NUM_WARM - 1][clock] for clock in ("time", "cpu"))
    rewards = [step["reward"] for step in ended]
    return {
        "seed": seed,
        "samples_per_s": (steps - NUM_WARM) * PROMPTS * GROUP / seconds,
        "samples_per_cpu_s": (steps - NUM_WARM) * PROMPTS * GROUP / cpu_seconds,
        "first_reward": statistics.mean(rewards[:NUM_WARM]),
        "final_reward": statistics.mean(rewards[-NUM_LAST:]),
    }


def summarise(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of the rates, and means and deviations of the rewards over seeds."""
    return {
        name: {
            "samples_per_s": statistics.median(run["samples_per_s"] for run in rows),
            "samples_per_cpu_s": statistics.median(run["samples_per_cpu_s"] for run in rows),
            "first_reward": statistics.mean(run["first_reward"] for run in rows),
            "final_reward": statistics.mean(run["final_reward"] for run in rows),
            "final_reward_std": statistics.stdev(run["final_reward"] for run in rows)
            if len(rows) > 1
            else 0.0,
        }
        for name, rows in runs.items()
    }


def print_results(summary: dict[str, dict[str, float]], runs: dict[str, list[dict[str, float]]]) -> None:
    rows = []
    for name, found in summary.items():
        each = ", ".join(f"{run['final_reward']:.3f}" for run in runs[name])
        spread = f"{found['final_reward']:.3f} ± {found['final_reward_std']:.3f}"
        row = [name]
        for rate in ("samples_per_s", "samples_per_cpu_s"):
            row += [f"{found[rate]:.0f}", f"{found[rate] / summary[TRL][rate]:.2f}"]
        rows.append([*row, f"{found['first_reward']:.3f}", spread, each])
    header = ["", "samples/s", "ratio", "samples/CPU s", "ratio", "first reward", "final reward", "by seed"]
    print_table(f"{PROMPTS} prompts x {GROUP} completions per step, one process, GRPO", header, rows)
    ours, theirs = summary[OURS], summary[TRL]
    gap = ours["final_reward"] - theirs["final_reward"]
    verdict = "met" if ours["samples_per_s"] >= MIN_RATIO * theirs["samples_per_s"] else "MISSED"
    print(
        f"\nbar of {MIN_RATIO} times the samples per second: {verdict}; difference of final rewards {gap:+.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            ended = CONTENDERS[options.child](options.seeds[0], options.steps, Path(folder) / "run")
        options.json.write_text(json.dumps(ended))
        return
    check_can_write(options.json)
    environment = describe_environment(("trl", "datasets", "accelerate"))
    print_environment(environment)
    # Seed by seed, so that a machine whose speed drifts is slow for both.
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for seed in options.seeds:
        for name in CONTENDERS:
            runs[name].append(measure(name, seed, options.steps, options.threads))
    summary = summarise(runs)
    print_results(summary, runs)
    settings = {"steps": options.steps, "threads": options.threads}
    if options.json is not None:
        write_json(options.json, environment, {**settings, "summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
