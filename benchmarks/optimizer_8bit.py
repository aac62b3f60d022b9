"""How the tiny model learns with AdamW's running means in 32, 16 and 8 bits, and how far 8-bit means are from bitsandbytes'.

    python benchmarks/optimizer_8bit.py --seeds 5 --jobs 2 --json optimizer.json

From random weights, sums are learned for some steps of supervised fine-tuning; the loss on held-out sums is reported, with
its standard error over seeds, and the difference from float32 in standard errors of the difference by seed. Where
bitsandbytes is installed (CPU is enough), its block-wise quantisation is compared with ours, number by number.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reporting import (
    add_json_option,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

MODEL = Path(__file__).resolve().parent.parent / "recipes" / "tiny" / "model"
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, moments in bfloat16": {"moments": "bfloat16"},
    "adamw_8bit": {"name": "adamw_8bit"},
}


def learn(kind: str, seed: int, steps: int) -> list[float]:
    """The loss on held-out sums every tenth of the way."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    import shardproof as sp

    torch.set_num_threads(1)
    policy = sp.load(
        sp.RandomInit(AutoConfig.from_pretrained(MODEL), seed=seed),
        device="cpu",
        compute_dtype=torch.float32,
        progress=False,
    )
    optimizer = sp.make_optimizer(policy, lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98), **KINDS[kind])
    schedule = sp.make_schedule(optimizer, "cosine", warmup_steps=20, total_steps=steps, final_ratio=0.05)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    pairs = [(a, b) for a in range(30) for b in range(30)]
    random.Random(1).shuffle(pairs)
    encoded = [tokenizer(f"{a}+{b}={a + b}")["input_ids"] + [tokenizer.eos_token_id] for a, b in pairs]
    held_out, training = encoded[:64], encoded[64:]
    draw, found = random.Random(seed), []
    for step in range(1, steps + 1):
        assert sp.train_step(policy, sp.Batch(draw.sample(training, 64)), optimizer, schedule).stepped
        if step % max(steps // 10, 1) == 0:
            rows = sp.logprobs(policy, held_out)
            found.append(-float(torch.cat(rows).mean()))
    return found


def compare_with_bitsandbytes() -> dict[str, Any] | None:
    """Differences of codes and values for random blocks; None where it is not installed."""
    try:
        from bitsandbytes import functional
    except ImportError:
        return None
    import torch

    from shardproof.model import nf4
    from shardproof.train.moments_8bit import BLOCK, codes_of, tables, values_of

    found: dict[str, Any] = {}
    draw = torch.Generator().manual_seed(0)
    for signed in (True, False):
        values = torch.randn(4096 * BLOCK, generator=draw) ** (3 if signed else 2)
        code = functional.create_dynamic_map(signed=signed)
        theirs, state = functional.quantize_blockwise(values, code=code, blocksize=BLOCK)
        scales = values.view(-1, BLOCK).abs().amax(1)
        ours = codes_of(values.view(-1, BLOCK) / scales[:, None], signed).view(-1)
        back = values_of(ours, scales, 0, signed)
        off = functional.dequantize_blockwise(theirs, state)
        found["signed" if signed else "unsigned"] = {
            "tables_equal": bool(torch.equal(code, tables(signed, torch.device("cpu"))[0])),
            "codes_that_differ": float((ours != theirs.view(-1)).float().mean()),
            "our_mean_error": float((back - values).abs().mean() / values.abs().mean()),
            "their_mean_error": float((off - values).abs().mean() / values.abs().mean()),
        }
    weight = torch.randn(512, 1024, generator=draw) * 0.02
    for dtype in (torch.float32, torch.bfloat16):
        theirs, state = functional.quantize_4bit(weight.to(dtype), blocksize=64, quant_type="nf4")
        packed = nf4.quantise(weight.to(dtype))
        off = functional.dequantize_4bit(theirs, state)
        found[f"nf4, {dtype}"] = {
            "codes_that_differ": float((packed[:, :512] != theirs.view(512, 512)).float().mean()),
            "values_that_differ": float((nf4.dequantise(packed, 1024, dtype) != off).float().mean()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time")
    add_json_option(parser)
    options = parser.parse_args()
    cases = [(kind, seed) for seed in range(options.seeds) for kind in KINDS]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {case: pool.submit(learn, *case, options.steps) for case in cases}
        curves = {case: future.result() for case, future in futures.items()}
    environment = describe_environment(["bitsandbytes"])
    results: dict[str, Any] = {
        "steps": options.steps,
        "losses": {},
        "bitsandbytes": compare_with_bitsandbytes(),
    }
    rows = []
    for kind in KINDS:
        mine = [curves[kind, seed] for seed in range(options.seeds)]
        last = [curve[-1] for curve in mine]
        apart = [curves[kind, seed][-1] - curves["adamw", seed][-1] for seed in range(options.seeds)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        row = {
            "mean": statistics.mean(last),
            "standard_error": statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else 0.0,
            "difference": statistics.mean(apart),
            "difference_in_standard_errors": statistics.mean(apart) / error if error else 0.0,
            "curve": [statistics.mean(each) for each in zip(*mine, strict=True)],
        }
        results["losses"][kind] = row
        shown = ("mean", "standard_error", "difference", "difference_in_standard_errors")
        rows.append([kind, *(f"{row[key]:.4f}" for key in shown)])
    print_environment(environment)
    print_table("loss on held-out sums", ["optimizer", "mean", "s.e.", "difference", "in s.e."], rows)
    print(results["bitsandbytes"])
    if options.json is not None:
        write_json(options.json, environment, results)


if __name__ == "__main__":
    main()
