"""One GPU: the update and the decoding, against what the machine's matrix units and memory can do.

    python benchmarks/gpu.py --json gpu.json

Updates: bfloat16 compute, float32 weights, sequences of 128 to 2048 tokens drawn from a fixed seed, one rank under NCCL.
MFU is 6 N operations a token over the rate of a large bfloat16 matmul measured in the same run; N counts the head once
and, of experts, the active ones. Decoding: the floor of a step is the time in which the measured copy bandwidth moves
the weights once.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shardproof as sp
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.local import EmbeddedEngine

DENSE, MOE, DECODE = "dense", "moe", "decode"


def dense_config() -> Qwen3Config:
    """The shape of Qwen3-1.7B."""
    return Qwen3Config(
        num_hidden_layers=28, hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip


def moe_config() -> Qwen3MoeConfig:
    """Eight layers of Qwen3-30B-A3B's shape."""
    return Qwen3MoeConfig(
        num_hidden_layers=8, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip


def active_parameters(policy: sp.ShardedModel, config: PretrainedConfig) -> int:
    """Parameters that a token meets in a matmul: all but the embedding, the head once, of experts the active ones."""
    total = 0
    for info in policy.inventory.parameters:
        if ".experts." in info.name:
            total += info.numel * config.num_experts_per_tok // config.num_experts
        elif "embed_tokens" not in info.name or len(info.names) > 1:
            total += info.numel
    return total


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of one call, after one that does not count."""
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def matmul_rate(size: int = 8192) -> float:
    """Operations a second of a bfloat16 matmul."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, 20)


def read_bandwidth(nbytes: int = 2**32) -> float:
    """Bytes that cross the memory bus a second in a device-to-device copy, which reads and writes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source), 10)


def measure_update(config: PretrainedConfig, options: argparse.Namespace, rate: float) -> dict[str, float]:
    """Tokens a second of a whole train step."""
    policy = sp.load(
        sp.RandomInit(config),
        device="cuda",
        checkpoint_activations=options.checkpoint_activations,
        progress=False,
    )
    optimizer = sp.make_optimizer(policy, 1e-6)
    draw = random.Random(0)
    lengths = [draw.randint(128, 2048) for _ in range(options.sequences)]
    batch = sp.Batch([[draw.randrange(1000) for _ in range(length)] for length in lengths])
    torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        result = sp.train_step(policy, batch, optimizer, micro_batch_tokens=options.micro_batch_tokens)
        assert result.stepped, result

    seconds = seconds_of(step, options.repeats)
    active = active_parameters(policy, config)
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "mfu": 6 * active * sum(lengths) / seconds / rate,
        "active": active,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def measure_decoding(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Through graphs, and launching every kernel: seconds of a step, and its share of the floor."""
    policy = sp.load(sp.RandomInit(dense_config()), param_dtype=torch.bfloat16, device="cuda", progress=False)
    engine = EmbeddedEngine(policy)
    receipt = engine.load_weights(sp.WeightStream(policy, torch.bfloat16, digests=False))
    floor = receipt.num_bytes / read_bandwidth()
    requests = [Request(tuple(range(7 + i, 7 + i + options.prompt)), i) for i in range(options.rows)]
    found = {}
    for name, steps in (("graphs", options.steps), ("launches", min(options.steps, 65))):
        if name == "launches":
            engine._fixed = None
        whole = seconds_of(lambda steps=steps: engine.generate(requests, Sampling(steps)), 1)
        prefill = seconds_of(lambda: engine.generate(requests, Sampling(1)), 1)
        step = (whole - prefill) / (steps - 1)
        found[name] = {"step": step, "of_floor": floor / step, "whole": whole, "floor": floor}
    return found


def print_results(results: dict[str, Any]) -> None:
    updates = {name: results[name] for name in (DENSE, MOE) if name in results}
    if updates:
        rows = [
            [name, f"{row['tokens_per_s']:.0f}", f"{100 * row['mfu']:.1f}%", f"{row['active'] / 1e9:.2f}",
             f"{row['peak_bytes'] / 2**30:.1f}"]
            for name, row in updates.items()
        ]  # fmt: skip
        title = f"update; a bfloat16 matmul runs at {results['matmul_rate'] / 1e12:.0f} TFLOP/s"
        print_table(title, ["", "tokens/s", "MFU", "active 1e9", "peak GiB"], rows)
    if DECODE in results:
        rows = [
            [name, f"{row['step'] * 1e3:.2f}", f"{row['floor'] * 1e3:.2f}", f"{100 * row['of_floor']:.0f}%",
             f"{row['whole']:.2f}"]
            for name, row in results[DECODE].items()
        ]  # fmt: skip
        print_table("decoding, 1.7B shape", ["", "ms a step", "floor ms", "of the floor", "whole s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=[DENSE, MOE, DECODE], default=[DECODE, DENSE, MOE])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=512)
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    results: dict[str, Any] = {"matmul_rate": matmul_rate()}
    for part in options.parts:
        if part == DECODE:
            results[part] = measure_decoding(options)
        else:
            config = dense_config() if part == DENSE else moe_config()
            results[part] = measure_update(config, options, results["matmul_rate"])
        torch.cuda.empty_cache()
        print_results({"matmul_rate": results["matmul_rate"], part: results[part]})
    if options.json is not None:
        write_json(options.json, environment, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
