"""Weights out of a sharded policy, and its checkpoints: shardproof beside torch's full state dict and `full_tensor`.

    python benchmarks/export.py --json export.json

Every way gives whole bfloat16 tensors under the names of the Hugging Face checkpoint, from the same float32 policy on
two ranks (gloo, CPU, one thread each). Ways take turns in the same ranks, the clock runs from a barrier to the slowest
rank, and the median counts; all ways must come to the same bits. Memory is measured apart, in fresh ranks for each way:
by how much anonymous memory rises, on the worst rank. The shared memory itself is not anonymous; it is the payload once.

The last table is a checkpoint with optimizer state that is written beside a training step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import dense_config, make_checkpoint, moe_config, warm_page_cache
from ranks import AnonymousRise, run_on_ranks
from reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardproof as sp
from shardproof.export.stream import BUCKET_BYTES
from shardproof.model.roles import ROOT_PREFIX

_MIB = 2**20
CONFIGS = {"dense": dense_config, "moe": moe_config}
DENSE, MOE, SAVE = "dense", "moe", "save"
FULL, EACH = "full state dict", "per parameter"
STREAM, STREAM_PLAIN = "stream", "stream, no digests"
SHARED, SHARED_PLAIN = "shared memory", "shared memory, no digests"
# (case, way, peer): how many times faster the way has to be.
BARS = {
    (DENSE, STREAM, FULL): 4.0,
    (DENSE, STREAM, EACH): 1.4,
    (MOE, STREAM, EACH): 2.0,
    (DENSE, SHARED, EACH): 5.0,
    (MOE, SHARED, EACH): 5.0,
}
MAX_BUCKETS = 2
MAX_BLOCKED = 0.1

Tensors = Iterator[tuple[str, torch.Tensor]]


# The ways.


def by_full_state_dict(policy: sp.ShardedModel, _: Any) -> Tensors:
    """torch's own: the whole model on rank 0, as it is stored, then cast. Memory: the whole model."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(policy.module, options=options)
    tied = policy.model.config.tie_word_embeddings
    for name in list(state):
        clean = name.removeprefix(ROOT_PREFIX)
        tensor = state.pop(name)
        if not (tied and clean == "lm_head.weight"):
            yield from unfused(clean, tensor.to(torch.bfloat16))


def by_parameter(policy: sp.ShardedModel, _: Any) -> Tensors:
    """Each parameter gathered by itself on every rank, then cast: the usual loop of a weight sync."""
    for name, param in policy.named_parameters():
        yield from unfused(name, param.full_tensor().detach().to(torch.bfloat16))


def unfused(name: str, tensor: torch.Tensor) -> Tensors:
    """The tensors of the hub's checkpoint: one per expert. Views, so that it costs the peers next to nothing."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, tensor
        return
    prefix, _, kind = name.rpartition(".")
    for index, expert in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{index}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{prefix}.{index}.gate_proj.weight", gate
            yield f"{prefix}.{index}.up_proj.weight", up


def by_stream(policy: sp.ShardedModel, stream: sp.WeightStream) -> Tensors:
    yield from stream


def by_shared_memory(policy: sp.ShardedModel, weights: sp.SharedWeights) -> Tensors:
    from shardproof.export.shared import read_shared

    weights.write()
    if dist.get_rank() == 0:
        yield from read_shared(weights.address)


def make_stream(policy: sp.ShardedModel, digests: bool) -> sp.WeightStream:
    return sp.WeightStream(policy, dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES, digests=digests)


def make_shared(policy: sp.ShardedModel, digests: bool) -> sp.SharedWeights:
    return sp.SharedWeights(policy, dtype=torch.bfloat16, digests=digests)


# name -> (what a run makes once, what it does every time)
WAYS: dict[str, tuple[Callable[[sp.ShardedModel], Any], Callable[[sp.ShardedModel, Any], Tensors]]] = {
    FULL: (lambda policy: None, by_full_state_dict),
    EACH: (lambda policy: None, by_parameter),
    STREAM: (lambda policy: make_stream(policy, True), by_stream),
    STREAM_PLAIN: (lambda policy: make_stream(policy, False), by_stream),
    SHARED: (lambda policy: make_shared(policy, True), by_shared_memory),
    SHARED_PLAIN: (lambda policy: make_shared(policy, False), by_shared_memory),
}


def export(policy: sp.ShardedModel, way: str, prepared: Any) -> tuple[int, int]:
    """(tensors, bytes) that this rank's consumer got; it does nothing with them. Collective: every rank."""
    count = size = 0
    for _, tensor in WAYS[way][1](policy, prepared):
        count += 1
        size += tensor.nbytes
    return count, size


def bit_sums(policy: sp.ShardedModel, way: str, prepared: Any) -> dict[str, int]:
    """{name: sum of the tensor's bit patterns} of what rank 0 gets. Collective: every rank."""
    return {
        name: int(tensor.contiguous().view(torch.int16).sum(dtype=torch.int64))
        for name, tensor in WAYS[way][1](policy, prepared)
    }


# On the ranks.


def load(folder: str, **options: Any) -> sp.ShardedModel:
    return sp.load(folder, device="cpu", param_dtype=torch.float32, progress=False, **options)


def time_ways(folder: str, ways: list[str], repeats: int) -> dict[str, Any]:
    """Seconds of each way by turns, and of a consumer in another process. Collective: every rank."""
    policy = load(folder)
    prepared = {way: WAYS[way][0](policy) for way in ways}
    rows: dict[str, Any] = {way: {"seconds": [], "cpu_seconds": []} for way in ways}
    for repeat in range(repeats):
        for way in ways:
            gc.collect()
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            count, size = export(policy, way, prepared[way])
            rows[way]["seconds"].append(time.perf_counter() - started)
            rows[way]["cpu_seconds"].append(time.process_time() - cpu_started)
            if dist.get_rank() == 0:
                rows[way] |= {"num_tensors": count, "num_bytes": size}
                print(f"  repeat {repeat + 1}: {way} {rows[way]['seconds'][-1]:.2f} s", flush=True)
    for way in ways:
        rows[way]["bit_sums"] = bit_sums(policy, way, prepared[way])
    outcome = {"rows": rows, "consumer": None}
    shared = [prepared[way] for way in ways if way in (SHARED, SHARED_PLAIN)]
    if shared:
        manifest = (
            make_shared(policy, True).write().manifest
            if SHARED not in ways
            else prepared[SHARED].receipt.manifest
        )
        if dist.get_rank() == 0:
            outcome["consumer"] = time_consumer(shared[0], manifest)
        dist.barrier()
        for weights in shared:
            weights.close()
    if dist.get_rank() == 0 and STREAM in ways:
        outcome["receipt"] = str(prepared[STREAM].receipt)
    return outcome


_CONSUMER = """
import json, pickle, sys, time
from shardproof.export.shared import SharedAddress, read_shared
data = pickle.loads(sys.stdin.buffer.read())
address, manifest = SharedAddress.from_json(data["address"]), data["manifest"]
started = time.perf_counter()
tensors = list(read_shared(address))
mapped = time.perf_counter() - started
started = time.perf_counter()
for _, tensor in tensors:
    tensor.view(-1).view(dtype=__import__("torch").int16).sum()
read = time.perf_counter() - started
started = time.perf_counter()
findings = manifest.compare(tensors)
compared = time.perf_counter() - started
assert not findings, findings[0]
print(json.dumps({"map": mapped, "read": read, "verify": compared}))
"""


def time_consumer(weights: sp.SharedWeights, manifest: Any) -> dict[str, float]:
    """Seconds in which another process maps the memory, reads it once, and compares it with the manifest."""
    data = pickle.dumps({"address": weights.address.to_json(), "manifest": manifest})
    command = [sys.executable, "-c", _CONSUMER]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    return json.loads(done.stdout)


def measure_rise(folder: str, way: str) -> dict[str, Any]:
    """By how much one export raises anonymous memory in ranks that have done nothing else. Collective: every rank."""
    policy = load(folder)
    prepared = WAYS[way][0](policy)
    gc.collect()
    dist.barrier()
    with AnonymousRise() as memory:
        export(policy, way, prepared)
    dist.barrier()
    return {"rise_bytes": memory.peak}


def measure_save(folder: str, target: str, repeats: int) -> list[dict[str, float]]:
    """Saves of a policy with optimizer state, alone and beside a training step. Collective: every rank."""
    # Not every CPU has fast bfloat16; what a step computes in does not matter here.
    policy = load(folder, compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-6)
    batch = sp.Batch([[(7 * i + dist.get_rank()) % 1000 for i in range(16)]])
    sp.train_step(policy, batch, optimizer, deadline_s=600)
    rows = []
    for _ in range(repeats):
        row: dict[str, float] = {}
        dist.barrier()
        started = time.perf_counter()
        sp.train_step(policy, batch, optimizer, deadline_s=600)
        row["step alone"] = time.perf_counter() - started
        dist.barrier()
        started = time.perf_counter()
        sp.save_checkpoint(target, policy, optimizer, keep=1)
        row["save, waiting"] = time.perf_counter() - started
        dist.barrier()
        pending = sp.save_checkpoint(target, policy, optimizer, keep=1, background=True)
        started = time.perf_counter()
        num_steps, is_done = 0, False
        while not is_done:
            sp.train_step(policy, batch, optimizer, deadline_s=600)
            num_steps += 1
            # Ranks stop together: a step is collective.
            done = torch.tensor([int(pending.folder is not None or pending._error is not None)])
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            is_done = bool(done)
        row["step beside a save"] = (time.perf_counter() - started) / num_steps
        row["blocked"] = pending.blocked_seconds
        pending.wait()
        row["write"] = pending.write_seconds
        dist.barrier()
        started = time.perf_counter()
        sp.resume(target, policy, optimizer)
        row["resume"] = time.perf_counter() - started
        rows.append(row)
        if dist.get_rank() == 0:
            parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row.items())
            print(f"  {parts}", flush=True)
    return rows


# In the main process.


def measure_case(case: str, options: argparse.Namespace) -> dict[str, Any]:
    config = CONFIGS[case](**({"num_layers": options.layers} if options.layers else {}))
    folder = make_checkpoint(options.work / f"{case}-{config.num_hidden_layers}", config)
    warm_page_cache(folder)
    print(f"{case}: {config.num_hidden_layers} layers on {options.ranks} ranks", flush=True)
    ranks = run_on_ranks(options.ranks, time_ways, str(folder), options.ways, options.repeats)
    check_same_bits(case, ranks[0]["rows"])
    rows = {}
    for way in options.ways:
        done = ranks[0]["rows"][way]
        seconds = [max(turn) for turn in zip(*(rank["rows"][way]["seconds"] for rank in ranks), strict=True)]
        rises = run_on_ranks(options.ranks, measure_rise, str(folder), way)
        rows[way] = {
            "seconds": median(seconds),
            "all_seconds": seconds,
            "cpu_seconds": median(
                max(turn) for turn in zip(*(rank["rows"][way]["cpu_seconds"] for rank in ranks), strict=True)
            ),
            "rise_bytes": max(rise["rise_bytes"] for rise in rises),
            "num_tensors": done["num_tensors"],
            "num_bytes": done["num_bytes"],
        }
        print(f"  memory: {way} +{rows[way]['rise_bytes'] / _MIB:.0f} MiB", flush=True)
    return {
        "case": case,
        "layers": config.num_hidden_layers,
        "ranks": options.ranks,
        "bucket_bytes": max(BUCKET_BYTES, largest_tensor(config)),
        "rows": rows,
        "consumer": ranks[0]["consumer"],
        "receipt": ranks[0].get("receipt"),
    }


def largest_tensor(config: Any) -> int:
    """Bytes of the largest model tensor as bfloat16: a bucket holds at least that."""
    sizes = [config.vocab_size * config.hidden_size]
    if config.model_type == "qwen3_moe":
        sizes.append(2 * config.num_experts * config.moe_intermediate_size * config.hidden_size)
    return 2 * max(sizes)


def check_same_bits(case: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """End the program if two ways give different tensors."""
    (first, expected), *others = ((way, row["bit_sums"]) for way, row in rows.items())
    for way, found in others:
        wrong = sorted(name for name in expected.keys() | found if expected.get(name) != found.get(name))
        if wrong:
            raise SystemExit(
                f"{case}: {way} and {first} differ in {len(wrong)} tensors, {wrong[0]!r} first; no result."
            )


def print_case(result: Mapping[str, Any]) -> None:
    rows = result["rows"]
    any_row = next(iter(rows.values()))
    title = (
        f"{result['case']}: {any_row['num_tensors']} tensors, {any_row['num_bytes'] / 1e6:.0f} MB of bfloat16, "
        f"{result['layers']} layers, from {result['ranks']} ranks"
    )
    peers = [peer for peer in (FULL, EACH) if peer in rows]
    header = [
        "",
        "seconds",
        "min",
        "max",
        "CPU s",
        "GB/s",
        "rise MiB",
        "buckets",
        *(f"x {peer}" for peer in peers),
    ]
    table = [
        [
            way,
            *(f"{value:.2f}" for value in (row["seconds"], min(row["all_seconds"]), max(row["all_seconds"]))),
            f"{row['cpu_seconds']:.2f}",
            f"{row['num_bytes'] / 1e9 / row['seconds']:.2f}",
            f"{row['rise_bytes'] / _MIB:.0f}",
            f"{row['rise_bytes'] / result['bucket_bytes']:.2f}",
            *(f"{rows[peer]['seconds'] / row['seconds']:.2f}" for peer in peers),
        ]
        for way, row in rows.items()
    ]
    print_table(title, header, table)
    if result["consumer"] is not None:
        parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in result["consumer"].items())
        print(f"a consumer in another process: {parts}")
    if result["receipt"] is not None:
        print(result["receipt"])


def print_save(result: Mapping[str, Any]) -> None:
    names = list(result["runs"][0])
    table = [[name, *(f"{run[name]:.2f}" for run in result["runs"])] for name in names]
    title = (
        f"save: {result['layers']} layers with optimizer state, {result['checkpoint_bytes'] / 1e9:.1f} GB, "
        f"{result['ranks']} ranks, seconds of the worst rank"
    )
    print_table(title, ["", *(f"run {index + 1}" for index in range(len(result["runs"])))], table)


def judge(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars that this run can judge."""
    verdicts = []
    for result in results:
        if result["case"] == SAVE:
            share = median(run["blocked"] / run["write"] for run in result["runs"])
            what = "training is blocked for this part of the write"
            verdicts.append({"bar": what, "found": share, "wanted": MAX_BLOCKED, "ok": share < MAX_BLOCKED})
            continue
        rows = result["rows"]
        for (case, way, peer), wanted in BARS.items():
            if case == result["case"] and way in rows and peer in rows:
                found = rows[peer]["seconds"] / rows[way]["seconds"]
                what = f"{case}: {way} faster than {peer}"
                verdicts.append({"bar": what, "found": found, "wanted": wanted, "ok": found >= wanted})
        if STREAM in rows:
            found = rows[STREAM]["rise_bytes"] / result["bucket_bytes"]
            what = f"{result['case']}: buckets that the stream holds"
            verdicts.append({"bar": what, "found": found, "wanted": MAX_BUCKETS, "ok": found <= MAX_BUCKETS})
    return verdicts


def measure_save_case(options: argparse.Namespace) -> dict[str, Any]:
    config = dense_config(**({"num_layers": options.layers} if options.layers else {}))
    folder = make_checkpoint(options.work / f"{DENSE}-{config.num_hidden_layers}", config)
    weights = 2 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))  # as float32
    # Weights, two moments, gradients, and a host copy of the first three.
    needed = 7 * weights + 2 * 2**30
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached_bytes()
    if needed > available:
        raise SystemExit(
            f"save: needs about {needed / 2**30:.0f} GiB of memory, {available / 2**30:.0f} are available. "
            "Fix: --layers, or --cases without save."
        )
    target = Path(tempfile.mkdtemp(prefix="save-", dir=options.work))
    print(f"save: {config.num_hidden_layers} layers on {options.ranks} ranks", flush=True)
    try:
        ranks = run_on_ranks(options.ranks, measure_save, str(folder), str(target), options.repeats)
        size = sum(path.stat().st_size for path in target.rglob("*.bin"))
    finally:
        shutil.rmtree(target, ignore_errors=True)
    runs = [{name: max(run[name] for run in turn) for name in turn[0]} for turn in zip(*ranks, strict=True)]
    return {
        "case": SAVE,
        "layers": config.num_hidden_layers,
        "ranks": options.ranks,
        "checkpoint_bytes": size,
        "runs": runs,
    }


def _cached_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[DENSE, MOE, SAVE], default=[DENSE, MOE, SAVE])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of each model; default: the real number")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "shardproof-benchmarks",
        help="where checkpoints are written and kept",
    )  # fmt: skip
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    options.work.mkdir(parents=True, exist_ok=True)
    environment = describe_environment()
    print_environment(environment)
    results = [
        measure_save_case(options) if case == SAVE else measure_case(case, options) for case in options.cases
    ]
    for result in results:
        print_save(result) if result["case"] == SAVE else print_case(result)
    verdicts = judge(results)
    table = [
        [v["bar"], f"{v['found']:.2f}", f"{v['wanted']:.2f}", "yes" if v["ok"] else "NO"] for v in verdicts
    ]
    print_table("bars", ["", "found", "wanted", "met"], table)
    if options.layers:
        print("(fewer layers than the models have: not the bars' size)")
    if options.json is not None:
        write_json(
            options.json, environment, {"repeats": options.repeats, "export": results, "bars": verdicts}
        )


if __name__ == "__main__":
    main()
