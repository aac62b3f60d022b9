"""Load and export on one CUDA device: one NCCL rank, and two gloo ranks that share the device.

Run as `python benchmarks/one_gpu.py`. The checkpoint has the shape of Qwen3-1.7B; it is made on the device first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shardproof as sp
from benchmarks.gpu_workload import dense_config
from benchmarks.reporting import (
    add_json_option,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

GIB = 2**30


def run(rank: int, world: int, backend: str, port: int, work: str, num_layers: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    torch.empty(1, device="cuda")  # the context is not part of a load
    folder = Path(work) / "model"
    if not folder.exists():
        policy = sp.load(
            sp.RandomInit(dense_config(num_layers=num_layers)),
            device="cuda",
            param_dtype=torch.bfloat16,
            progress=False,
        )
        sp.save_pretrained(policy, folder)
        del policy
    rows = {}
    for strategy in ("fsdp2", "fsdp1"):
        dist.barrier()
        started = time.perf_counter()
        policy = sp.load(folder, device="cuda", strategy=strategy, progress=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        rows[f"load {strategy}"] = _load_row(policy, seconds)
        del policy
        torch.cuda.empty_cache()
    rows["stream, offloaded"] = _stream_row(folder)
    results[rank] = rows
    dist.destroy_process_group()


def _load_row(policy: Any, seconds: float) -> dict[str, float]:
    receipt = policy.receipt
    return {
        "seconds": seconds,
        "gib": receipt.shard_bytes / GIB,
        "gib_per_s": receipt.bytes_read / GIB / seconds,
        "peak_over_shard": receipt.peak_bytes / receipt.shard_bytes,
        "attest_share": receipt.stage_seconds["attest"] / receipt.seconds,
    }


def _stream_row(folder: Path) -> dict[str, float]:
    """The stream of a policy whose bf16 shards lie in host memory, against the host-to-device bandwidth."""
    policy = sp.load(folder, device="cuda", cpu_offload=True, param_dtype=torch.bfloat16, progress=False)
    best = float("inf")
    for _ in range(3):
        stream = sp.WeightStream(policy, digests=False)
        dist.barrier()
        started = time.perf_counter()
        for _name, _tensor in stream:
            pass
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    bandwidth = 4 / (time.perf_counter() - started)
    local = policy.receipt.shard_bytes / GIB
    rate = local / best
    return {
        "seconds": best,
        "gib": local,
        "gib_per_s": rate,
        "host_to_device": bandwidth,
        "share": rate / bandwidth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--work", type=Path, default=None, help="folder for the checkpoint")
    add_json_option(parser)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="shardproof-cuda-"))
    environment = describe_environment()
    print_environment(environment)
    results: dict[str, Any] = {}
    for index, (title, world, backend) in enumerate(
        [("one NCCL rank", 1, "cpu:gloo,cuda:nccl"), ("two gloo ranks on one device", 2, "gloo")]
    ):
        with mp.Manager() as manager:
            shared = manager.dict()
            arguments = (world, backend, 29500 + index, str(work), options.layers, shared)
            mp.spawn(run, args=arguments, nprocs=world)
            rows = dict(shared)[0]
        results[title] = rows
        keys = ["seconds", "gib", "gib_per_s", "peak_over_shard", "attest_share", "host_to_device", "share"]
        table = [
            [name, *(f"{row[key]:.2f}" if key in row else "" for key in keys)] for name, row in rows.items()
        ]
        print_table(f"{title}, Qwen3-1.7B shape", ["", *keys], table)
    if options.json:
        write_json(options.json, environment, {"cuda": results})


if __name__ == "__main__":
    main()
