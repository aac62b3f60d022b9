"""Loading a sharded model: shardproof, transformers' own FSDP2 loading, and rank 0 that reads and broadcasts.

    python benchmarks/load.py --ranks 2 4 --repeats 3 --json load.json

Every measurement has fresh ranks (gloo, CPU, one thread each), warm files, and a process that has loaded a tiny model
of the family in the same way, so that imports are nobody's cost. The clock runs from a barrier until each byte of each
local parameter has been read once, because memory maps put the work off until then; the slowest rank counts. Every
contender must come to the same float32 values, and to shards that together are the model once.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shardproof as sp
from benchmarks.checkpoints import CONFIGS, TINY_CONFIGS, make_checkpoint, tensor_shapes, warm_page_cache
from benchmarks.ranks import AnonymousRise, run_on_ranks, touch_memory
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

_MIB = 2**20


@dataclass
class Loaded:
    """A contender's result: its parameters by Hugging Face names, tied ones once, and what keeps them alive."""

    parameters: dict[str, nn.Parameter]
    owner: Any

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's part of each parameter."""
        return {
            name: (param.to_local() if isinstance(param, DTensor) else param).detach()
            for name, param in self.parameters.items()
        }


def load_shardproof(folder: str, strategy: str = "fsdp2") -> Loaded:
    """sp.load, attestation included."""
    policy = sp.load(
        folder,
        strategy=strategy,
        device="cpu",
        param_dtype=torch.float32,
        compute_dtype=torch.float32,
        progress=False,
    )
    return Loaded(dict(policy.named_parameters()), policy)


def load_shardproof_fsdp1(folder: str) -> Loaded:
    """sp.load with FSDP1."""
    return load_shardproof(folder, strategy="fsdp1")


def load_transformers(folder: str) -> Loaded:
    """from_pretrained with transformers' own FSDP2 sharding."""
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=sharding)
    return Loaded(dict(model.named_parameters()), model)


def load_broadcast(folder: str) -> Loaded:
    """Rank 0 reads the whole model and sends it to ranks that hold a meta model: the usual recipe.

    Memory: the whole model on rank 0.
    """
    full = {}
    if dist.get_rank() == 0:
        full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    # No state dict holds the rotary frequencies, and to_empty gave them memory that nobody wrote.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.tie_weights()
    return Loaded(dict(model.named_parameters()), model)


SHARDPROOF, TRANSFORMERS, BROADCAST = "shardproof", "transformers", "broadcast"
CONTENDERS: dict[str, Callable[[str], Loaded]] = {
    SHARDPROOF: load_shardproof,
    f"{SHARDPROOF} fsdp1": load_shardproof_fsdp1,
    TRANSFORMERS: load_transformers,
    BROADCAST: load_broadcast,
}


def measure_on_rank(contender: str, folder: str, tiny: str) -> dict[str, Any]:
    """One load on this rank, in numbers. Collective: every rank."""
    transformers_logging.disable_progress_bar()
    load = CONTENDERS[contender]
    load(tiny)
    gc.collect()
    dist.barrier()
    touch_memory(3 * sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")))
    dist.barrier()
    with AnonymousRise() as memory:
        started, cpu_started = time.perf_counter(), time.process_time()
        loaded = load(folder)
        local = loaded.local()
        for tensor in local.values():
            tensor.sum()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    outcome = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rise_bytes": memory.peak,
        "shard_bytes": sum(tensor.nbytes for tensor in local.values()),
        "digests": {name: bit_sum(tensor) for name, tensor in local.items()},
    }
    if isinstance(loaded.owner, sp.ShardedModel):
        outcome |= proof_costs(loaded.owner, outcome)
    return outcome


def bit_sum(tensor: torch.Tensor) -> int:
    """The sum of a float32 tensor's bit patterns: exact, and shards add up to the whole however they are cut."""
    assert tensor.dtype == torch.float32, tensor.dtype
    return int(tensor.reshape(-1).view(torch.int32).sum(dtype=torch.int64))


def proof_costs(policy: sp.ShardedModel, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What attestation costs, and how near the memory bound the load came. Collective: every rank."""
    dist.barrier()
    started = time.perf_counter()
    findings = sp.attest(policy)
    attest_seconds = time.perf_counter() - started
    assert not findings, findings
    bound = 1.15 * outcome["shard_bytes"] + 100 * _MIB
    if policy.strategy == "fsdp1":
        bound += largest_unit_bytes(policy)
    stages = dict(policy.receipt.stage_seconds)
    return {
        "attest_seconds": attest_seconds,
        "attest_share": attest_seconds / outcome["seconds"],
        "attest_stage_share": stages["attest"] / policy.receipt.seconds,
        "rise_over_bound": outcome["rise_bytes"] / bound,
        "stage_seconds": stages,
    }


def largest_unit_bytes(policy: sp.ShardedModel) -> int:
    """Bytes of the FSDP unit that is largest when it is gathered."""
    sizes: dict[str, int] = {}
    for info in policy.inventory.parameters:
        unit = next((unit for unit in policy.plan.units if info.name.startswith(f"{unit}.")), "")
        sizes[unit] = sizes.get(unit, 0) + info.numel * info.dtype.itemsize
    return max(sizes.values())


def summarise(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A contender's repeats, each a list of ranks, as one row: the median repeat of the worst rank."""
    seconds = [max(rank["seconds"] for rank in ranks) for ranks in runs]
    row: dict[str, Any] = {
        "seconds": median(seconds),
        "all_seconds": seconds,
        "cpu_seconds": median(max(rank["cpu_seconds"] for rank in ranks) for ranks in runs),
        "rise_bytes": median(max(rank["rise_bytes"] for rank in ranks) for ranks in runs),
        "rise_bytes_rank0": median(ranks[0]["rise_bytes"] for ranks in runs),
        "shard_bytes": max(rank["shard_bytes"] for rank in runs[0]),
    }
    for name in ("attest_seconds", "attest_share", "attest_stage_share", "rise_over_bound"):
        if name in runs[0][0]:
            row[name] = median(max(rank[name] for rank in ranks) for ranks in runs)
    if "stage_seconds" in runs[0][0]:
        row["stage_seconds"] = {
            stage: median(max(rank["stage_seconds"][stage] for rank in ranks) for ranks in runs)
            for stage in runs[0][0]["stage_seconds"]
        }
    return row


def check_same_values(case: str, by_contender: Mapping[str, list[list[dict[str, Any]]]]) -> None:
    """End the program if contenders hold different values, or shards that are not the model once."""
    expected: dict[str, int] = {}
    for contender, runs in by_contender.items():
        for ranks in runs:
            total = {name: sum(rank["digests"][name] for rank in ranks) for name in ranks[0]["digests"]}
            expected = expected or total
            wrong = sorted(name for name in expected.keys() | total if expected.get(name) != total.get(name))
            if wrong:
                raise SystemExit(f"{case}: {contender} holds other values, {wrong[0]!r} first; no result.")
            sizes = [rank["shard_bytes"] for rank in ranks]
            if max(sizes) > 1.1 * sum(sizes) / len(sizes):
                raise SystemExit(f"{case}: {contender} does not shard evenly: {sizes} bytes; no result.")


def measure_case(case: str, num_ranks: int, repeats: int, contenders: Iterable[str], work: Path) -> dict:
    """All contenders on one checkpoint and one number of ranks, turn by turn, so that drift hits all of them."""
    folder = make_checkpoint(work / case, CONFIGS[case]())
    tiny = make_checkpoint(work / f"{case}-tiny", TINY_CONFIGS[case]())
    runs: dict[str, list[list[dict[str, Any]]]] = {contender: [] for contender in contenders}
    for repeat in range(repeats):
        for contender, done in runs.items():
            warm_page_cache(folder)
            done.append(run_on_ranks(num_ranks, measure_on_rank, contender, str(folder), str(tiny)))
            slowest = max(rank["seconds"] for rank in done[-1])
            print(f"{case}, {num_ranks} ranks, repeat {repeat + 1}: {contender} {slowest:.2f} s", flush=True)
    check_same_values(case, runs)
    rows = {contender: summarise(done) for contender, done in runs.items()}
    for row in rows.values():
        for peer in (TRANSFORMERS, BROADCAST):
            if peer in rows:
                row[f"faster_than_{peer}"] = rows[peer]["seconds"] / row["seconds"]
    shapes = list(tensor_shapes(CONFIGS[case]()))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "case": case,
        "ranks": num_ranks,
        "num_tensors": len(shapes),
        "checkpoint_bytes": size,
        "rows": rows,
    }


def print_result(result: Mapping[str, Any]) -> None:
    rows = result["rows"]
    title = (
        f"{result['case']}: {result['num_tensors']} tensors, {result['checkpoint_bytes'] / 1e6:.0f} MB of bfloat16, "
        f"onto {result['ranks']} ranks as float32"
    )
    header = ["", "seconds", "min", "max", "cpu s", "rise MiB", "rank 0", "shard MiB"]
    header += ["x transformers", "x broadcast"]
    table = [
        [
            contender,
            *(f"{value:.2f}" for value in (row["seconds"], min(row["all_seconds"]), max(row["all_seconds"]))),
            f"{row['cpu_seconds']:.2f}",
            *(f"{row[key] / _MIB:.0f}" for key in ("rise_bytes", "rise_bytes_rank0", "shard_bytes")),
            *(
                f"{row[key]:.2f}" if key in row else "-"
                for key in ("faster_than_transformers", "faster_than_broadcast")
            ),
        ]
        for contender, row in rows.items()
    ]
    print_table(title, header, table)
    proofs = {contender: row for contender, row in rows.items() if "attest_share" in row}
    if not proofs:
        return
    stages = list(next(iter(proofs.values()))["stage_seconds"])
    header = [
        "",
        "rise / bound",
        "attest s",
        "of the load",
        "as a stage",
        *(f"{stage} s" for stage in stages),
    ]
    table = [
        [
            contender,
            f"{row['rise_over_bound']:.2f}",
            f"{row['attest_seconds']:.3f}",
            *(f"{100 * row[key]:.1f}%" for key in ("attest_share", "attest_stage_share")),
            *(f"{row['stage_seconds'][stage]:.2f}" for stage in stages),
        ]
        for contender, row in proofs.items()
    ]
    print_table("memory against its bound, the price of attestation, and where the time goes", header, table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=sorted(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "shardproof-benchmarks",
        help="where checkpoints are written and kept",
    )  # fmt: skip
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    results = [
        measure_case(case, num_ranks, options.repeats, options.contenders, options.work)
        for case in options.cases
        for num_ranks in options.ranks
    ]
    for result in results:
        print_result(result)
    print(
        "\nrise: peak of anonymous memory over its value before the load, worst rank;"
        "\nbound: 1.15 x shard + 100 MiB, for FSDP1 plus the largest unit;"
        "\ncpu s: processor time of the worst rank, which other work on the machine disturbs less;"
        "\nx: how many times faster than that contender."
    )
    if options.json is not None:
        write_json(options.json, environment, {"repeats": options.repeats, "load": results})


if __name__ == "__main__":
    main()
