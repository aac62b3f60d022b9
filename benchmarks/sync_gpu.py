"""A weight sync to a vLLM server on the same GPU: shared memory beside CUDA IPC, with what the hardware moves.

    python benchmarks/sync_gpu.py --json sync_gpu.json

One rank (NCCL) holds float32 weights and brings them as bfloat16 to two running servers, one for each transport, by
turns; every sync ends with its canary. The median of the repeats counts. The bandwidths are measured in the same run: a
copy within the GPU (bytes read and written), and copies between the GPU and pinned host memory. In the end the server with
shared memory sleeps, wakes and takes the weights again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shardproof as sp
from benchmarks import checkpoints, gpu_workload
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from shardproof.config.vllm import VllmSettings
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_versions import installed_version

SHAPES = {
    "0.6B": checkpoints.dense_config,
    "1.7B": gpu_workload.dense_config,
}
TRANSPORTS = ("shared", "ipc")
# A cache of a fixed size: vLLM then need not find out how much memory is left, which fails if that changes meanwhile.
CACHE = ["--kv-cache-memory-bytes", str(4 * 2**30)]
_CANARY = ("canary", "canary/trainer")
GIB = 2**30


def seconds_of(action: Any, repeats: int = 10) -> float:
    """The median time of some work on the GPU, after two rounds of warm-up."""
    times = []
    for _ in range(repeats + 2):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        action()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[2:])


def bandwidths(num_bytes: int = 2 * GIB) -> dict[str, float]:
    """GB/s of the copies that a sync could be made of."""
    here = torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda")
    there, host = torch.empty_like(here), torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return {
        "within the GPU": 2 * num_bytes / seconds_of(lambda: there.copy_(here)) / 1e9,
        "GPU to host": num_bytes / seconds_of(lambda: host.copy_(here, non_blocking=True)) / 1e9,
        "host to GPU": num_bytes / seconds_of(lambda: there.copy_(host, non_blocking=True)) / 1e9,
    }


@torch.no_grad()
def update(policy: Any, step: int) -> None:
    """Change every weight a little, as an update does."""
    for _, param in policy.named_parameters():
        param.mul_(1.0 + 1e-3 * (step % 3 - 1))
    policy.version += 1
    policy.num_updates += 1


def measure(shape: str, repeats: int) -> dict[str, Any]:
    """The seconds of each transport's syncs, by turns."""
    policy = sp.load(
        sp.RandomInit(SHAPES[shape]()), device="cuda", compute_dtype=torch.bfloat16, progress=False
    )
    engines: dict[str, VllmEngine] = {}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in TRANSPORTS}
    try:
        for name in TRANSPORTS:
            settings = VllmSettings(
                transport=name, max_model_len=512, gpu_memory_utilization=0.15, enforce_eager=True, args=CACHE
            )
            engines[name] = VllmEngine(policy, settings, sleeps=name == "shared")
        for repeat in range(repeats + 2):  # the first two fill both buffers
            update(policy, repeat)
            for name, engine in engines.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                engine.load_weights(sp.WeightStream(policy, torch.bfloat16))
                total = time.perf_counter() - started
                assert engine.proof is not None
                parts = {**engine.proof.seconds, "gap": engine.proof.gap, "wall": total}
                parts["without canary"] = total - sum(parts.get(each, 0.0) for each in _CANARY)
                print(f"  {shape}, sync {repeat}: {name} {total:.3f} s", flush=True)
                if repeat >= 2:
                    rows[name].append(parts)
        slept = measure_sleep(policy, engines["shared"])
    finally:
        for engine in engines.values():
            engine.close()
    num_bytes = sum(meta.nbytes for meta in sp.WeightStream(policy, torch.bfloat16).metadata())
    medians = {name: {key: median(row[key] for row in rows[name]) for key in rows[name][0]} for name in rows}
    spread = {name: [min(r["wall"] for r in rows[name]), max(r["wall"] for r in rows[name])] for name in rows}
    return {"bytes": num_bytes, "seconds": medians, "least and most": spread, "sleep": slept}


def measure_sleep(policy: Any, engine: VllmEngine) -> dict[str, float]:
    """Seconds to sleep, to wake and to bring the weights again, and the bytes that sleeping sets free."""
    found: dict[str, float] = {}
    free = torch.cuda.mem_get_info()[0]
    for name, action in (
        ("sleep", engine.sleep),
        ("wake", engine.wake),
        ("sync", lambda: engine.load_weights(sp.WeightStream(policy, torch.bfloat16))),
    ):
        started = time.perf_counter()
        action()
        found[name] = time.perf_counter() - started
        if name == "sleep":
            found["freed"] = torch.cuda.mem_get_info()[0] - free
    return found


def on_one_rank(_: int, store: str, repeats: int, shapes: list[str], results: Any) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(store, 1), rank=0, world_size=1)
    results["bandwidths"] = bandwidths()
    for shape in shapes:
        results[shape] = measure(shape, repeats)
    dist.destroy_process_group()


def report(found: dict[str, Any]) -> None:
    """Print the tables."""
    rates = found["bandwidths"]
    print_table("what the hardware moves", ["copy", "GB/s"], [[k, f"{v:.0f}"] for k, v in rates.items()])
    rows = []
    for shape in SHAPES:
        if shape not in found:
            continue
        for name, parts in found[shape]["seconds"].items():
            sent = found[shape]["bytes"] / 1e9
            seconds = parts["without canary"]
            rows.append(
                [
                    f"{shape} ({sent:.2f} GB), {name}",
                    f"{parts['wall']:.3f}",
                    f"{seconds:.3f}",
                    f"{sent / seconds:.1f}",
                    f"{sent / seconds / rates['GPU to host']:.0%}",
                    f"{parts['gap']:.3g}",
                ]
            )
    header = ["weights and transport", "s", "without canary", "GB/s", "of GPU to host", "canary's gap"]
    print_table("a sync, one rank and one server on one GPU", header, rows)
    for shape in SHAPES:
        if slept := found.get(shape, {}).get("sleep"):
            freed = slept["freed"] / GIB
            print(
                f"{shape}: sleep {slept['sleep']:.2f} s, {freed:.1f} GiB free; wake {slept['wake']:.2f} s; "
                f"weights again {slept['sync']:.2f} s"
            )
        for name, parts in found.get(shape, {}).get("seconds", {}).items():
            print(f"{shape} {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in parts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    environment = {**describe_environment(), "vllm": installed_version()}
    print_environment(environment)
    print(f"vLLM {environment['vllm']}")
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(on_one_rank, (f"{folder}/store", options.repeats, options.shapes, results))
        found = dict(results)
    report(found)
    if options.json is not None:
        write_json(options.json, environment, {"sync": found})


if __name__ == "__main__":
    main()
