"""Does it learn as TRL does? GRPO, RLOO and DPO by both, over many seeds, compared by exact probabilities.

    pip install -c constraints.txt trl
    python benchmarks/learning.py --seeds 20 --jobs 2 --json learning.json

Both train the tiny model of recipes/tiny in one process on one core, float32, with the same prompts or pairs, batches,
learning rate, coefficients and number of updates; ours with `preset = "trl"`. Each draws its own samples and order from the
seed, so single runs differ. What is compared is exact, not sampled: the mean probability of the right answer and its end of
sequence over held-out sums, after training. The bar: no difference of the means beyond two of its standard errors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import learning_dpo
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "recipes" / "tiny"
OURS, TRL = "shardproof", "TRL"
PROMPTS, GROUP, TOKENS, LR, KL = 48, 8, 4, 4e-4, 0.05
STEPS = {"grpo": 50, "rloo": 50, "dpo": learning_dpo.STEPS}  # longer, DPO makes right and wrong answers rarer
MAX_ERRORS = 2.0


def train_shardproof(case: str, seed: int, steps: int) -> float:
    """The probability of right answers after a run of ours, in this process."""
    if case == "dpo":
        return learning_dpo.train_shardproof(seed, steps)
    from transformers import AutoModelForCausalLM

    from shardproof.config.load import load_recipe
    from shardproof.rl.loop import train

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "train.ranks": 1,
            "train.steps": steps,
            "train.seed": seed,
            "train.prompts_per_step": PROMPTS,
            "rollout.group_size": GROUP,
            "rollout.max_new_tokens": TOKENS,
            "algorithm.name": case,
            "algorithm.preset": "trl",
            "algorithm.correction": "none",
            "algorithm.kl_coef": KL if case == "rloo" else 0.0,
            "optimizer.lr": LR,
            "optimizer.schedule": "constant",
            "output.folder": f"{folder}/run",
            "output.save_every": 0,
            "output.eval_every": 0,
            "output.trackers": "[]",
            "output.model_dtype": "float32",
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        train(load_recipe(TINY.parent / "tiny.toml", overrides))
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/run/model", dtype="float32")
        return learning_dpo.right_probability(model)


def train_trl(case: str, seed: int, steps: int) -> float:
    """The probability of right answers after a run of TRL's trainer, in this process."""
    if case == "dpo":
        return learning_dpo.train_trl(seed, steps)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]

    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": PROMPTS * GROUP,
            "num_generations": GROUP,
            "max_completion_length": TOKENS,
            "max_steps": steps,
            "learning_rate": LR,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "beta": KL if case == "rloo" else 0.0,
            "temperature": 1.0,
            "seed": seed,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32"},
            "logging_steps": 10**6,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        parts: dict[str, Any] = {
            "model": str(TINY / "model"),
            "reward_funcs": exact_match,
            "train_dataset": Dataset.from_list(rows),
        }
        if case == "grpo":
            trainer = GRPOTrainer(args=GRPOConfig(loss_type="grpo", **settings), **parts)
        else:
            trainer = RLOOTrainer(args=RLOOConfig(**settings), **parts)
        trainer.train()
        return learning_dpo.right_probability(trainer.model)


CONTENDERS = {OURS: train_shardproof, TRL: train_trl}


def measure(case: str, name: str, seed: int, steps: int | None) -> float:
    """One run in a fresh process."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", case, name, str(seed)]
    command += [] if steps is None else ["--steps", str(steps)]
    done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1])


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Means and standard errors of both, and their difference in its standard errors."""
    errors = [statistics.stdev(values) / len(values) ** 0.5 for values in (ours, theirs)]
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    error = (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    return {
        "ours": statistics.fmean(ours),
        "ours_se": errors[0],
        "theirs": statistics.fmean(theirs),
        "theirs_se": errors[1],
        "difference": difference,
        "difference_se": error,
        "in_errors": difference / error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates, instead of each case's own number")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "NAME", "SEED"), help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.child:
        case, name, seed = options.child
        print(CONTENDERS[name](case, int(seed), options.steps or STEPS[case]))
        return
    check_can_write(options.json)
    environment = describe_environment(("trl", "datasets", "accelerate"))
    print_environment(environment)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    plan = [(case, name, seed) for case in options.cases for seed in seeds for name in CONTENDERS]
    with ThreadPoolExecutor(options.jobs) as pool:
        values = list(pool.map(lambda each: measure(*each, options.steps), plan))
    runs: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in CONTENDERS} for case in options.cases
    }
    for (case, name, _), value in zip(plan, values, strict=True):
        runs[case][name].append(value)
    found = {case: compare(each[OURS], each[TRL]) for case, each in runs.items()}
    first = learning_dpo.first_probability()
    rows = [
        [
            case,
            f"{each['ours']:.4f} ± {each['ours_se']:.4f}",
            f"{each['theirs']:.4f} ± {each['theirs_se']:.4f}",
            f"{each['difference']:+.4f} ± {each['difference_se']:.4f}",
            f"{each['in_errors']:+.2f}",
            "met" if abs(each["in_errors"]) <= MAX_ERRORS else "MISSED",
        ]
        for case, each in found.items()
    ]
    header = ["", OURS, TRL, "difference", "in its errors", f"within {MAX_ERRORS:g}"]
    print_table(
        f"probability of right answers, {options.seeds} seeds; {first:.4f} before",
        header,
        rows,
    )
    if options.json is not None:
        settings = {
            "seeds": options.seeds,
            "first_seed": options.first_seed,
            "steps": options.steps or STEPS,
            "before": first,
        }
        write_json(options.json, environment, {**settings, "summary": found, "runs": runs})


if __name__ == "__main__":
    main()
