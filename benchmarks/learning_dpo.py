"""DPO against TRL's DPOTrainer: how likely the right answers are after both have trained on the same pairs.

    pip install -c constraints.txt trl
    python benchmarks/learning_dpo.py --seeds 0 1 2

Both train the tiny model of recipes/tiny on recipes/tiny/pairs.jsonl in one process, with the same losses, batches,
learning rate and number of updates, each in an order of its own that the seed decides. What is compared is exact, not
sampled: the mean probability of the right answer and its end of sequence over held-out sums.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def train_trl(seed: int, steps: int = STEPS) -> float:
    """The probability of right answers after a run of TRL's, in this process."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (TINY / "pairs.jsonl").read_text().splitlines()]
    pairs = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
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


CONTENDERS: dict[str, Callable[[int, int], float]] = {OURS: train_shardproof, TRL: train_trl}


def first_probability() -> float:
    """That of the model before any training."""
    from transformers import AutoModelForCausalLM

    return right_probability(AutoModelForCausalLM.from_pretrained(TINY / "model", dtype="float32"))


def compare(seeds: list[int], steps: int = STEPS) -> dict[str, list[float]]:
    """The probability of right answers after each seed's run, of both."""
    return {name: [train(seed, steps) for seed in seeds] for name, train in CONTENDERS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = compare(options.seeds, options.steps)
    print(f"before training: {first_probability():.4f}")
    for name, values in found.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        print(
            f"{name}: {statistics.mean(values):.4f} ± {error:.4f} ({', '.join(f'{v:.4f}' for v in values)})"
        )


if __name__ == "__main__":
    main()
