"""DPO against TRL's DPOTrainer on the same pairs in the same order: how likely the right answers are afterwards.

    pip install -c constraints.txt trl
    python benchmarks/learning_dpo.py --seeds 0 1 2 --json dpo.json

Both train the tiny model of recipes/tiny on recipes/tiny/pairs.jsonl in one process, with the same losses, batches,
learning rate and number of updates. The order is ours, from the seed, and TRL reads it as it is: nothing is random, so that
both must end at the same weights but for rounding. `benchmarks/learning.py` lets each draw an order of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
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
TINY = ROOT / "recipes" / "tiny"
OURS, TRL = "shardproof", "TRL DPOTrainer"
PAIRS, LR, BETA, STEPS, HELD_OUT = 32, 2e-4, 1.0, 60, 200


def train_shardproof(seed: int, steps: int = STEPS) -> float:
    """The probability of right answers after a run of ours, in this process."""
    from transformers import AutoModelForCausalLM

    from shardproof.config.load import load_recipe
    from shardproof.rl.loop import train

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "train.ranks": 1,
            "train.steps": steps,
            "train.seed": seed,
            "train.prompts_per_step": PAIRS,
            "algorithm.preference.beta": BETA,
            "optimizer.lr": LR,
            "optimizer.schedule": "constant",
            "optimizer.weight_decay": 0.0,
            "output.folder": f"{folder}/run",
            "output.eval_every": 0,
            "output.trackers": "[]",
            "output.model_dtype": "float32",
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        train(load_recipe(ROOT / "recipes" / "tiny-dpo.toml", overrides))
        return right_probability(AutoModelForCausalLM.from_pretrained(f"{folder}/run/model", dtype="float32"))


def train_trl(seed: int, steps: int = STEPS, order: Sequence[int] | None = None) -> float:
    """The probability of right answers after a run of TRL's, in this process. `order`: of the pairs, else its own."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (TINY / "pairs.jsonl").read_text().splitlines()]
    pairs = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
    if order is not None:
        pairs = [pairs[at] for at in order]
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PAIRS,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=BETA,
            seed=seed,
            train_sampling_strategy="random" if order is None else "sequential",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=10**6,
        )
        trainer = DPOTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer
        )
        trainer.train()
        return right_probability(trainer.model)


def right_probability(model: Any) -> float:
    """The mean probability that the model writes the right answer and ends there, over held-out sums."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    rows = [json.loads(line) for line in (TINY / "evaluation.jsonl").read_text().splitlines()][:HELD_OUT]
    found = []
    model = model.eval()
    with torch.no_grad():
        for row in rows:
            prompt = tokenizer(row["prompt"])["input_ids"]
            answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            logps = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
            found.append(float(logps.gather(1, ids[0, len(prompt) :, None]).sum().exp()))
    return statistics.mean(found)


def first_probability() -> float:
    """That of the model before any training."""
    from transformers import AutoModelForCausalLM

    return right_probability(AutoModelForCausalLM.from_pretrained(TINY / "model", dtype="float32"))


def order_of(seed: int, steps: int) -> list[int]:
    """The rows that a run of ours takes, in its order."""
    from shardproof.rl.data import PromptStream

    num_rows = len((TINY / "pairs.jsonl").read_text().splitlines())
    return PromptStream(num_rows, seed).take(PAIRS * steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    environment = describe_environment(("trl", "datasets", "accelerate"))
    print_environment(environment)
    runs: dict[str, list[float]] = {OURS: [], TRL: []}
    for seed in options.seeds:
        runs[OURS].append(train_shardproof(seed, options.steps))
        runs[TRL].append(train_trl(seed, options.steps, order_of(seed, options.steps)))
    rows = [
        [str(seed), f"{ours:.7f}", f"{theirs:.7f}", f"{ours - theirs:+.1e}"]
        for seed, ours, theirs in zip(options.seeds, *runs.values(), strict=True)
    ]
    first = first_probability()
    title = f"probability of right answers after {options.steps} updates; {first:.4f} before"
    print_table(title, ["seed", *runs, "difference"], rows)
    if options.json is not None:
        settings = {"seeds": options.seeds, "steps": options.steps, "before": first}
        write_json(options.json, environment, {**settings, "runs": runs})


if __name__ == "__main__":
    main()
