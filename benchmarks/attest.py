"""How long attestation takes, on a model that shardproof loaded and on the same module as if anyone had.

    python benchmarks/attest.py --json attest.json                                       # 0.6B shape, two CPU ranks
    python benchmarks/attest.py --device cuda --ranks 1 --shape 4b --dtype bfloat16      # 8 GB of shards on one GPU

The shapes are those of Qwen3. Weights are random. The clock runs from a barrier to the slowest rank; the median of the
repeats counts. The optimizer is attested too. On a GPU every rank needs one of its own, because NCCL does.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_on_ranks
from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from transformers import Qwen3Config

import shardproof as sp

# hidden size, MLP size, layers, heads, key-value heads, tied embeddings
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, True),
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
}
BARS = {"cpu": 1.0, "cuda": 0.05}
LOADED, FOREIGN = "loaded by shardproof", "a module of anyone's"


def make_config(shape: str) -> Qwen3Config:
    hidden, mlp, layers, heads, key_values, tied = SHAPES[shape]
    return Qwen3Config(
        vocab_size=151936 if shape != "tiny" else 512,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def measure(shape: str, device: str, dtype: str, strategy: str, repeats: int) -> dict[str, Any]:
    """Seconds of every repeat on this rank, what it holds, and how many findings there were."""
    policy = sp.load(
        sp.RandomInit(make_config(shape)),
        strategy=strategy,
        device=device,
        param_dtype=getattr(torch, dtype),
        progress=False,
    )
    optimizer = sp.make_optimizer(policy)
    seconds: dict[str, list[float]] = {}
    num_findings = 0
    for kind, target in ((LOADED, policy), (FOREIGN, policy.module)):
        for repeat in range(repeats + 1):
            _wait(device)
            started = time.perf_counter()
            num_findings += len(sp.attest(target, optimizer))
            _wait(device)
            if repeat:  # the first one warms up
                seconds.setdefault(kind, []).append(time.perf_counter() - started)
    return {"seconds": seconds, "num_findings": num_findings, "shard_bytes": policy.receipt.shard_bytes}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()


def measure_alone(*args: Any) -> list[dict[str, Any]]:
    """The same in this process: a group of one, or the rank that torchrun started."""
    sp.init_distributed(args[1])
    try:
        return [measure(*args)]
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--device", choices=BARS, default="cpu")
    parser.add_argument(
        "--ranks", type=int, default=2, help="started here; under torchrun those that it started"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype that shards are stored in"
    )
    parser.add_argument("--strategy", choices=("fsdp2", "fsdp1"), default="fsdp2")
    parser.add_argument("--repeats", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    check_can_write(args.json)
    environment = describe_environment()
    settings = (args.shape, args.device, args.dtype, args.strategy, args.repeats)
    if "RANK" in os.environ or args.ranks == 1:
        replies = measure_alone(*settings)
        if int(os.environ.get("RANK", "0")):
            return
    else:
        replies = run_on_ranks(args.ranks, measure, *settings)
    slowest = {
        kind: median(max(times) for times in zip(*(r["seconds"][kind] for r in replies), strict=True))
        for kind in (LOADED, FOREIGN)
    }
    held = max(reply["shard_bytes"] for reply in replies)
    bar = BARS[args.device]
    print_environment(environment)
    rows = [
        [kind, f"{value * 1e3:.0f}", f"{held / value / 1e9:.1f}", "yes" if value < bar else "no"]
        for kind, value in slowest.items()
    ]
    title = (
        f"attest: {args.shape} shape, {args.dtype}, {args.strategy}, {args.ranks} ranks on {args.device}, "
    )
    title += f"{held / 1e9:.2f} GB of shards a rank, {replies[0]['num_findings']} findings"
    print_table(title, ["", "ms", "GB/s per rank", f"under {bar * 1e3:.0f} ms"], rows)
    if args.json:
        results = {"settings": vars(args) | {"json": str(args.json)}, "seconds": slowest, "shard_bytes": held}
        write_json(args.json, environment, results)


if __name__ == "__main__":
    main()
