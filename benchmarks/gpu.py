"""One GPU: updates, decoding and whole GRPO steps, against TRL, and against what the machine can do.

    pip install -c constraints.txt trl
    python benchmarks/gpu.py --json gpu.json

Every contender runs alone in a fresh process of this one command, ours first; one that fails or takes longer than
--timeout is noted and the others go on. Where TRL is not installed its rows are left out.

Updates: bfloat16 compute, float32 weights, sequences of 128 to 2048 tokens drawn from a fixed seed, one rank under NCCL;
only their own tokens count, not padding. TRL trains as it does by default, and tuned: with activations kept and batches
of similar lengths. MFU is 6 N operations a token over the rate of a large bfloat16 matmul measured in the same run; N
counts the head once and, of experts, the active ones. Decoding: the floor of a step is the time in which the measured
copy bandwidth moves once the weights that it reads, of experts those that are visited. GRPO: a whole step, from prompts
to an engine that holds the new weights; all completions have the same length, and TRL samples with transformers'
generate.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_ours, gpu_peers
from benchmarks.gpu_ours import OURS
from benchmarks.gpu_timing import Row, seconds_of
from benchmarks.gpu_workload import TINY, active_parameters, dense_config, moe_config
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

DECODE, DECODE_MOE, DENSE, MOE, RL = "decode", "decode-moe", "dense", "moe", "grpo"
# By part: the first contender is ours, the others are its peers.
CONTENDERS: dict[str, dict[str, Callable[[argparse.Namespace], dict[str, Row]]]] = {
    DECODE: {OURS: gpu_ours.decode_dense_shardproof, gpu_peers.BATCHING: gpu_peers.decode_transformers},
    DECODE_MOE: {OURS: gpu_ours.decode_moe_shardproof},
    DENSE: {
        OURS: gpu_ours.dense_shardproof,
        gpu_peers.SFT: gpu_peers.sft_trl,
        gpu_peers.SFT_TUNED: gpu_peers.sft_trl_tuned,
    },
    MOE: {OURS: gpu_ours.moe_shardproof},
    RL: {OURS: gpu_ours.grpo_shardproof, gpu_peers.GRPO: gpu_peers.grpo_trl},
}
GIB = 2**30
MIN_UPDATE_RATIO, MIN_STEP_RATIO = 3.0, 5.0  # over the fastest of TRL's rows
MIN_DENSE_MFU, MIN_MOE_MFU, MIN_OF_FLOOR = 0.40, 0.20, 0.40
MAX_DENSE_PEAK = 80 * GIB
_LAST_LINES = 12  # of a failed contender's output
_MIN_SECONDS = 10.0  # in less, no contender gets anywhere


def matmul_rate(device: str) -> float:
    """Operations a second of a bfloat16 matmul."""
    size = 8192 if device == "cuda" else 256
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, 20, device)


def copy_bandwidth(device: str) -> float:
    """Bytes that cross the memory bus a second in a device-to-device copy, which reads and writes."""
    nbytes = 2**32 if device == "cuda" else 2**24
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source), 10, device)


def describe_machine(options: argparse.Namespace) -> dict[str, float]:
    """The rates that results are held against, and how many parameters a token meets."""
    machine = {
        "matmul_rate": matmul_rate(options.device),
        "bandwidth": copy_bandwidth(options.device),
        f"active_{DENSE}": active_parameters(dense_config(options.tiny)),
        f"active_{MOE}": active_parameters(moe_config(options.tiny)),
    }
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the contenders need it
    return machine


# -- running ---------------------------------------------------------------------------------------------------------


class ContenderFailed(Exception):
    """A contender ended without rows."""


def run_contender(part: str, name: str, options: argparse.Namespace, *others: str) -> dict[str, Any]:
    """The rows that a fresh process measured; raises a ContenderFailed with the end of what it printed."""
    left = options.ends - time.monotonic()
    if left < _MIN_SECONDS:
        raise ContenderFailed(f"not started: the {options.budget:g} s of --budget are used up")
    timeout = min(options.timeout, left)
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "rows.json", Path(folder) / "log"
        command = [sys.executable, __file__, *sys.argv[1:], *others]
        command += ["--child", part, name, "--json", str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **quiet},
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                code: int | str = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = f"none: it took longer than {timeout:.0f} s"
            finally:
                end_group(process)
        # Rows that were written count, whatever went wrong in taking the process down.
        if result.exists():
            return json.loads(result.read_text())
        lines = log.read_text(errors="replace").splitlines()
        raise ContenderFailed("\n".join([*lines[-_LAST_LINES:], f"exit code {code}"]))


def run_where_it_fits(part: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """As `run_contender`; a peer that runs out of memory gets another try with half the micro-batch."""
    try:
        return run_contender(part, name, options)
    except ContenderFailed as error:
        if name == OURS or "OutOfMemoryError" not in str(error):
            raise
    print(f"{part}: {name} ran out of memory and tries again with half the micro-batch", flush=True)
    halves = {"--trl-batch": options.trl_batch // 2, "--trl-completions": options.trl_completions // 2}
    return run_contender(part, name, options, *(str(word) for pair in halves.items() for word in pair))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a contender and what it started, so that none of it holds memory of the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_missing(name: str) -> bool:
    """Whether a peer cannot run here because its library is not installed."""
    return name.startswith("TRL") and importlib.util.find_spec("trl") is None


def run_part(part: str, results: dict[str, Any], options: argparse.Namespace) -> Iterator[None]:
    """Put the rows of a part's contenders into the results, and errors of those that failed; yields after each."""
    for name in CONTENDERS[part]:
        if name != OURS and (not options.peers or is_missing(name)):
            continue
        started = time.perf_counter()
        try:
            rows = run_where_it_fits(part, name, options)
        except ContenderFailed as error:
            results["errors"][f"{part}: {name}"] = str(error)
            print(f"{part}: {name} FAILED\n{error}", flush=True)
        else:
            for row in rows.values():
                add_shares(part, row, results["machine"])
            results.setdefault(part, {}).update(rows)
            print(f"{part}: {name}, measured in {time.perf_counter() - started:.0f} s", flush=True)
        yield


def add_shares(part: str, row: dict[str, float], machine: dict[str, float]) -> None:
    """Add to a row what share of the machine's rates it reaches."""
    if part in (DENSE, MOE):
        row["mfu"] = 6 * machine[f"active_{part}"] * row["tokens_per_s"] / machine["matmul_rate"]
    elif part in (DECODE, DECODE_MOE):
        row["floor_s"] = row["weight_bytes"] / machine["bandwidth"]
        row["of_floor"] = row["floor_s"] / row["step_s"]


# -- printing --------------------------------------------------------------------------------------------------------


def print_results(results: dict[str, Any]) -> None:
    machine = results["machine"]
    updates = [(part, *item) for part in (DENSE, MOE) for item in results.get(part, {}).items()]
    if updates:
        rows = [
            [f"{part}: {name}", f"{row['tokens_per_s']:.0f}", f"{row['step_s']:.2f}", f"{100 * row['mfu']:.1f}%",
             f"{row['peak_bytes'] / GIB:.1f}", ratio(results, part, name)]
            for part, name, row in updates
        ]  # fmt: skip
        title = f"update; a bfloat16 matmul runs at {machine['matmul_rate'] / 1e12:.0f} TFLOP/s"
        print_table(title, ["", "tokens/s", "step s", "MFU", "peak GiB", "speedup"], rows)
    decoded = [(part, *item) for part in (DECODE, DECODE_MOE) for item in results.get(part, {}).items()]
    if decoded:
        rows = [
            [f"{part}: {name}", f"{row['step_s'] * 1e3:.2f}", f"{row['floor_s'] * 1e3:.2f}", f"{100 * row['of_floor']:.0f}%",
             f"{row['steps']}", f"{row['whole_s']:.2f}"]
            for part, name, row in decoded
        ]  # fmt: skip
        title = f"decoding; copies move {machine['bandwidth'] / 1e12:.2f} TB/s"
        print_table(title, ["", "ms per step", "floor ms", "of the floor", "tokens", "whole s"], rows)
    if RL in results:
        rows = [
            [name, *(f"{row[key]:.2f}" for key in ("step_s", "rollout_s", "update_s", "sync_s")),
             f"{row['peak_bytes'] / GIB:.1f}", ratio(results, RL, name)]
            for name, row in results[RL].items()
        ]  # fmt: skip
        header = ["", "step s", "rollout", "update", "sync", "peak GiB", "speedup"]
        print_table("GRPO step", header, rows)


def ratio(results: dict[str, Any], part: str, name: str) -> str:
    """How many times as fast as this row ours is."""
    found = speedup(results, part, name)
    return f"{found:.2f}" if found and not name.startswith(OURS) else ""


def speedup(results: dict[str, Any], part: str, name: str) -> float | None:
    """How many times as fast as the peer ours is; None where one of the two is not there."""
    ours, peer = (results.get(part, {}).get(each) for each in (OURS, name))
    return peer["step_s"] / ours["step_s"] if ours and peer else None


def judge(results: dict[str, Any]) -> dict[str, str]:
    """Each bar, and whether it was met."""
    dense, moe, decode = (results.get(part, {}).get(OURS) for part in (DENSE, MOE, DECODE))
    step = speedup(results, RL, gpu_peers.GRPO)
    updates = {name: speedup(results, DENSE, name) for name in (gpu_peers.SFT, gpu_peers.SFT_TUNED)}
    met = {
        **{
            f"update at least {MIN_UPDATE_RATIO:g} times as fast as {name}": found
            and found >= MIN_UPDATE_RATIO
            for name, found in updates.items()
        },
        f"dense MFU at least {MIN_DENSE_MFU:.0%}, peak under {MAX_DENSE_PEAK // GIB} GiB": dense
        and (dense["mfu"] >= MIN_DENSE_MFU and dense["peak_bytes"] < MAX_DENSE_PEAK),
        f"MoE MFU at least {MIN_MOE_MFU:.0%}": moe and moe["mfu"] >= MIN_MOE_MFU,
        f"GRPO step at least {MIN_STEP_RATIO:g} times as fast as TRL's": step and step >= MIN_STEP_RATIO,
        f"decoding at least {MIN_OF_FLOOR:.0%} of the floor": decode and decode["of_floor"] >= MIN_OF_FLOOR,
    }
    return {bar: "not measured" if done is None else "met" if done else "MISSED" for bar, done in met.items()}


# -- command line ----------------------------------------------------------------------------------------------------


def checkpointing(text: str) -> bool | int | str:
    """What `sp.load` takes as checkpoint_activations."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds that a contender may take")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds that all of them may take")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try this out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    updates = parser.add_argument_group("updates")
    updates.add_argument("--sequences", type=int, default=64)
    updates.add_argument("--lengths", type=int, nargs=2, default=[128, 2048], help="shortest and longest")
    updates.add_argument("--micro-batch-tokens", type=int, default=16384)
    updates.add_argument(
        "--checkpoint-activations", nargs="?", const=True, type=checkpointing,
        help="true, false, auto or a number of blocks; by default the library's own choice",
    )  # fmt: skip
    updates.add_argument("--no-compile", action="store_true")
    updates.add_argument("--repeats", type=int, default=3)
    updates.add_argument("--trl-batch", type=int, default=8, help="sequences of a micro-batch of SFTTrainer")
    sampling = parser.add_argument_group("decoding and GRPO")
    sampling.add_argument(
        "--rows", type=int, default=32, help="decoded at a time, where only decoding is measured"
    )
    sampling.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    sampling.add_argument("--steps", type=int, default=512, help="tokens of a completion")
    sampling.add_argument("--prompts", type=int, default=4, help="of a GRPO step")
    sampling.add_argument("--group", type=int, default=8, help="completions per prompt")
    sampling.add_argument("--grpo-steps", type=int, default=2, help="timed, after one that is not")
    sampling.add_argument("--trl-completions", type=int, default=16, help="of a micro-batch of GRPOTrainer")
    parser.add_argument("--child", nargs=2, metavar=("PART", "NAME"), help=argparse.SUPPRESS)
    add_json_option(parser)
    return parser


def main() -> None:
    parser = make_parser()
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
        # On some virtual machines whose processor reports AMX, a bfloat16 matmul is an illegal instruction.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    options = parser.parse_args()
    options.ends = time.monotonic() + options.budget
    if options.child:
        part, name = options.child
        options.json.write_text(json.dumps(CONTENDERS[part][name](options)))
        os._exit(
            0
        )  # nothing is left to do, and a library that hangs when it is taken down would cost the timeout
    check_can_write(options.json)
    environment = describe_environment(("trl", "accelerate", "datasets"))
    print_environment(environment)
    if options.peers and is_missing("TRL"):
        print("TRL is not installed: its rows are left out")
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "child", "ends")}
    results: dict[str, Any] = {"settings": settings, "machine": describe_machine(options), "errors": {}}
    for part in options.parts:
        for _ in run_part(part, results, options):
            results["bars"] = judge(results)
            if options.json is not None:  # after every contender: a run that is cut short keeps what it has
                write_json(options.json, environment, results)
    print_results(results)
    print("\nbars")
    for bar, verdict in results["bars"].items():
        print(f"{verdict:>12}: {bar}")
    if results["errors"]:
        print("\nfailed:", "; ".join(results["errors"]))


if __name__ == "__main__":
    main()
