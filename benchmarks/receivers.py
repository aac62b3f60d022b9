"""One payload in shared memory, read by 1, 2 and 4 receivers at the same time.

    python benchmarks/receivers.py --json receivers.json

Two ranks (gloo, CPU, one thread each) write the bfloat16 weights of a float32 policy once. A receiver is a process that
does with them what a worker of vLLM does before it loads anything: it maps the memory, compares every digest, and copies
every tensor. All receivers start together and the slowest counts. Receivers share the machine's cores; the bytes that are
written, and the memory that holds them, stay the same whatever their number.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import dense_config, make_checkpoint, warm_page_cache
from ranks import run_on_ranks
from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

import shardproof as sp
from shardproof.digest import digest
from shardproof.export.shared import SharedAddress, SharedWeights, read_shared

COUNTS = (1, 2, 4)


def receive(jobs: Any, results: Any) -> None:
    """Read each payload that is announced, until None comes."""
    torch.set_num_threads(1)
    while True:
        job = jobs.get()
        if job is None:
            return
        address, digests = SharedAddress.from_json(job[0]), job[1]
        started = time.perf_counter()
        same = all(digest(tensor) == digests[name] for name, tensor in read_shared(address))
        copies = [tensor.clone() for _, tensor in read_shared(address)]
        results.put((time.perf_counter() - started, same and len(copies) == len(digests)))


def measure(folder: str, repeats: int) -> dict[str, Any]:
    """Seconds of the write, and of reading by each number of receivers. Collective: every rank."""
    policy = sp.load(folder, device="cpu", param_dtype=torch.float32, compute_dtype=torch.bfloat16)
    weights = SharedWeights(policy, torch.bfloat16)
    context = multiprocessing.get_context("spawn")
    receivers = []
    if dist.get_rank() == 0:
        for _ in range(max(COUNTS)):
            jobs, results = context.Queue(), context.Queue()
            process = context.Process(target=receive, args=(jobs, results), daemon=True)
            process.start()
            receivers.append((process, jobs, results))
    found: dict[str, list[float]] = {"write": [], **{str(count): [] for count in COUNTS}}
    for repeat in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        receipt = weights.write()
        taken = {"write": time.perf_counter() - started}
        for count in COUNTS if receivers else ():
            started = time.perf_counter()
            for _, jobs, _ in receivers[:count]:
                jobs.put((weights.address.to_json(), dict(receipt.manifest.digests)))
            answers = [results.get() for _, _, results in receivers[:count]]
            taken[str(count)] = time.perf_counter() - started
            assert all(same for _, same in answers)
        if repeat:  # the first touches every page
            for name, seconds in taken.items():
                found[name].append(seconds)
    for process, jobs, _ in receivers:
        jobs.put(None)
        process.join()
    size = sum(meta.nbytes for meta in receipt.manifest.tensors)
    weights.close()
    return {"bytes": size, **{name: median(times) for name, times in found.items() if times}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment([])
    print_environment(environment)
    config = dense_config(2, 4096) if options.small else dense_config()
    with tempfile.TemporaryDirectory(prefix="shardproof-model-") as folder:
        make_checkpoint(Path(folder), config)
        warm_page_cache(Path(folder))
        found = run_on_ranks(2, measure, folder, options.repeats)[0]
    rows = [[f"{count} receivers", f"{found['write']:.2f}", f"{found[str(count)]:.2f}"] for count in COUNTS]
    print_table(
        f"seconds, {found['bytes'] / 1e9:.2f} GB of payload", ["", "write, once", "read by all"], rows
    )
    if options.json is not None:
        write_json(options.json, environment, {"receivers": found})


if __name__ == "__main__":
    main()
