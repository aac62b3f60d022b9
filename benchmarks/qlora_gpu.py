"""One GPU: LoRA on a base in 16 bits and in 4 (QLoRA), and what AdamW's means take and cost in 32, 16 and 8 bits.

    python benchmarks/qlora_gpu.py --json qlora.json

The shape of Qwen3-8B with random weights, rank 16, bfloat16, sequences of 2,048 tokens in micro-batches of 8,192: bytes per
parameter of the base, seconds and GiB of a load, of scoring, of an update, of an export of all merged weights, and of the
proof that the base has not changed. Then a step of each optimizer over a number of parameters in matrices, alone. Every
case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_long import LARGE
from benchmarks.gpu_ours import join_group
from benchmarks.gpu_timing import peak_bytes, seconds_of
from benchmarks.reporting import describe_environment, write_json

BASES = {"LoRA, 16 bits": None, "QLoRA, 4 bits": "nf4"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw, moments in bfloat16": {"name": "adamw", "moments": "bfloat16"},
    "adamw_8bit": {"name": "adamw_8bit"},
}
GIB = 2**30


def measure_base(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A load, and what is done with the model in a step."""
    from peft import LoraConfig

    import shardproof as sp

    join_group()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    config = LARGE.config(options.tiny)
    started = time.perf_counter()
    policy = sp.load(
        sp.RandomInit(config),
        device=options.device,
        progress=False,
        lora=lora,
        lora_base=BASES[name],
        param_dtype=torch.bfloat16,
        checkpoint_activations="auto",
    )
    loaded = time.perf_counter() - started
    shards = [shard for shard in policy.local_shards() if ".lora_" not in shard.name]
    weights = {info.name: info.num_weights for info in policy.inventory.parameters}
    inside = [shard for shard in shards if ".layers." in shard.name]
    optimizer = sp.make_optimizer(policy, 1e-5)
    length = 2048 // (32 if options.tiny else 1)
    rows = [[(7 * row + at) % 1000 for at in range(length)] for row in range(options.sequences)]
    micro = 4 * length

    def score() -> None:
        sp.logprobs(policy, rows, micro_batch_tokens=micro)

    def update() -> None:
        assert sp.train_step(policy, sp.Batch(rows), optimizer, micro_batch_tokens=micro).stepped

    def export() -> None:
        for _ in sp.WeightStream(policy, torch.bfloat16):
            pass

    def prove() -> None:
        assert policy.changed_base("benchmark") == []

    found: dict[str, Any] = {
        "load_s": loaded,
        "held_gib": sum(shard.nbytes for shard in shards) / GIB,
        "bytes_per_parameter": sum(s.nbytes for s in shards) / sum(weights[s.name] for s in shards),
        "bytes_per_parameter_of_blocks": sum(s.nbytes for s in inside) / sum(weights[s.name] for s in inside),
        "load_peak_gib": peak_bytes(options.device) / GIB,
    }
    for key, work in (("score", score), ("update", update), ("export", export), ("proof", prove)):
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        work()  # compiles, and finds out how much memory there is
        if key == "update":
            work()
        found[f"{key}_s"] = seconds_of(work, 2, options.device)
        found[f"{key}_peak_gib"] = peak_bytes(options.device) / GIB
    found["tokens_per_s"] = len(rows) * length / found["update_s"]
    return found


def measure_optimizer(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps over matrices of one size, and the bytes of what is kept."""
    from shardproof.shard.optimizer_state import state_bytes
    from shardproof.train.optim import Trainable, build_optimizer

    device = torch.device(options.device)
    side, count = (64, 4) if options.tiny else (4096, 64)
    params = [torch.nn.Parameter(torch.zeros(side, side, device=device)) for _ in range(count)]
    trained = [Trainable(param, tuple(param.shape), 0, True) for param in params]
    settings = dict(OPTIMIZERS[name])
    optimizer = build_optimizer(settings.pop("name"), trained, None, device, lr=1e-4, **settings)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    total = side * side * count
    seconds = seconds_of(optimizer.step, 3, options.device)
    return {
        "step_ms": 1000 * seconds,
        "parameters": total,
        "bytes_per_parameter": state_bytes(optimizer) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script on a CPU")
    parser.add_argument(
        "--parts", nargs="+", choices=["bases", "optimizers"], default=["bases", "optimizers"]
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        measure = measure_base if options.case in BASES else measure_optimizer
        print("RESULT " + json.dumps(measure(options.case, options)))
        return
    results: dict[str, Any] = {}
    parts = {"bases": BASES, "optimizers": OPTIMIZERS}
    for case in (case for part in options.parts for case in parts[part]):
        command = [sys.executable, __file__, "--case", case, "--device", options.device]
        command += ["--sequences", str(options.sequences), *(["--tiny"] if options.tiny else [])]
        with tempfile.TemporaryFile("w+") as said:
            code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT).returncode
            said.seek(0)
            lines = said.read().splitlines()
        rows = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
        results[case] = json.loads(rows[-1]) if rows else {"failed": code, "said": lines[-15:]}
        print(case, json.dumps(results[case], indent=1), flush=True)
        if options.json is not None:
            write_json(options.json, describe_environment(["transformers", "peft"]), results)


if __name__ == "__main__":
    main()
