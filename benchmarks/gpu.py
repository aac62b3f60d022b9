"""One GPU: engines, updates and whole GRPO steps, against vLLM, TRL and transformers, and against what the machine can do.

    pip install -c constraints.txt trl
    python benchmarks/gpu.py --parts rows tails prompts --json engines.json

Every contender runs alone in a fresh process of this one command, ours first; one that fails or takes longer than
--timeout is noted, what it measured until then counts, and the others go on. Where TRL or vLLM is not installed its rows
are left out. Each part fits ten minutes. To measure ours and the peers at different times, give --no-peers or
--peers-only, and --merge the other run's file: its rows, versions and commit are taken over.

rows, tails, prompts: the engine alone, the shape of Qwen3-1.7B in bfloat16, temperature 1, with the log-probs of the drawn
tokens. `rows`: prompts of 128 tokens and completions of equal lengths, milliseconds of a step. `tails`: geometric lengths,
the same for every engine, tokens per second until the last one has ended. `prompts`: seconds until every prompt has its
first token. No two prompts are alike.

dense, moe, long: updates; bfloat16 compute, float32 weights, one rank under NCCL; only their own tokens count, not padding.
TRL trains as it does by default, and tuned: with activations kept and batches of similar lengths. MFU is 6 N operations a
token over the rate of a large bfloat16 matmul measured in the same run; N counts the head once and, of experts, the active
ones. In `long` the operations of (causal) attention count too; the MFU that prime-rl would give (full attention, over the
maker's 989 TFLOP/s) stands beside it.

decode, decode-moe: one number of rows, with what each of our fast paths gives. The floor of a step is the time in which the
measured copy bandwidth moves once the weights that it reads, of experts those that are visited.

grpo, grpo-tails, exact, first, memory: whole steps, from prompts to an engine that holds the new weights.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_long, gpu_ours, gpu_peers, gpu_runs, gpu_vllm
from benchmarks.gpu_cases import ENGINE_PARTS
from benchmarks.gpu_merge import CannotMerge, take_over
from benchmarks.gpu_options import add_engine_options, add_step_options, add_update_options
from benchmarks.gpu_ours import OURS
from benchmarks.gpu_report import judge, print_results
from benchmarks.gpu_timing import Save, SavedRows, seconds_of
from benchmarks.gpu_workload import (
    DECODE,
    DECODE_MOE,
    DENSE,
    EXACT,
    FIRST,
    LONG,
    MEMORY,
    MOE,
    RL,
    RL_TAILS,
    ROWS,
    TINY,
    active_parameters,
    dense_config,
    moe_config,
)
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    write_json,
)


@dataclass(frozen=True)
class Contender:
    """Something that is measured, in one process for all of its parts that are asked for."""

    name: str
    parts: tuple[str, ...]
    measure: Callable[[argparse.Namespace, Sequence[str], Save], None]
    needs: tuple[str, ...] = ()  # libraries
    is_peer: bool = False
    cuda_only: bool = False

    def why_not(self, options: argparse.Namespace) -> str | None:
        """Why it cannot run here."""
        missing = [library for library in self.needs if importlib.util.find_spec(library) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        return "needs a CUDA device" if self.cuda_only and options.device != "cuda" else None


_TRL: dict[str, Any] = {"needs": ("trl",), "is_peer": True}
_TRL_VLLM: dict[str, Any] = {"needs": ("trl", "vllm"), "is_peer": True, "cuda_only": True}
_VLLM: dict[str, Any] = {"needs": ("vllm",), "is_peer": True, "cuda_only": True}
CONTENDERS = [
    Contender(OURS, ENGINE_PARTS, gpu_ours.engine_shardproof),
    Contender(gpu_ours.FP8, (ROWS,), gpu_ours.engine_fp8, cuda_only=True),
    Contender(gpu_vllm.VLLM, ENGINE_PARTS, gpu_vllm.engine_vllm, **_VLLM),
    Contender(gpu_vllm.VLLM_APART, ENGINE_PARTS, gpu_vllm.engine_vllm_apart, **_VLLM),
    Contender(OURS, (DECODE,), gpu_ours.decode_dense_shardproof),
    Contender(gpu_peers.BATCHING, (DECODE,), gpu_peers.decode_transformers, is_peer=True),
    Contender(OURS, (DECODE_MOE,), gpu_ours.decode_moe_shardproof),
    Contender(OURS, (DENSE,), gpu_ours.dense_shardproof),
    Contender(gpu_peers.SFT, (DENSE,), gpu_peers.sft_trl, **_TRL),
    Contender(gpu_peers.SFT_TUNED, (DENSE,), gpu_peers.sft_trl_tuned, **_TRL),
    Contender(OURS, (MOE,), gpu_ours.moe_shardproof),
    *(Contender(f"{OURS}, {name}", (LONG,), case.measure) for name, case in gpu_long.LONG_CASES.items()),
    Contender(OURS, (RL,), gpu_runs.grpo_shardproof),
    Contender(OURS, (RL_TAILS,), gpu_runs.grpo_tails_shardproof),
    Contender(gpu_peers.GRPO_VLLM, (RL, RL_TAILS), gpu_peers.grpo_trl_vllm, **_TRL_VLLM),
    Contender(gpu_peers.GRPO, (RL,), gpu_peers.grpo_trl, **_TRL),
    Contender(f"{OURS}, not exact", (EXACT,), gpu_runs.fast_shardproof),
    Contender(gpu_runs.EXACT_ROW, (EXACT,), gpu_runs.exact_shardproof),
    Contender(f"{OURS}, first run", (FIRST,), gpu_runs.first_shardproof),
    Contender(gpu_runs.AGAIN, (FIRST,), gpu_runs.first_again),
    *(Contender(f"{OURS}, {name}", (MEMORY,), case.measure) for name, case in gpu_long.LARGE_CASES.items()),
]
PARTS = list(dict.fromkeys(part for contender in CONTENDERS for part in contender.parts))
PEAK_RATE = 989e12  # operations per second, as the maker says, by which others publish MFU
_LAST_LINES = 12  # of a failed contender's output
_MIN_SECONDS = 10.0  # in less, no contender gets anywhere


def matmul_rate(device: str) -> float:
    """Operations per second of a bfloat16 matmul."""
    size = 8192 if device == "cuda" else 256
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, 20, device)


def copy_bandwidth(device: str) -> float:
    """Bytes per second that cross the memory bus in a device-to-device copy, which reads and writes."""
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
    """A contender ended before it had measured everything; `rows` are those that it has."""

    def __init__(self, message: str, rows: dict[str, Any] | None = None):
        super().__init__(message)
        self.rows = rows or {}


def run_contender(
    contender: Contender, parts: Sequence[str], options: argparse.Namespace, *others: str
) -> dict[str, Any]:
    """The rows that a fresh process measured, by part; raises a ContenderFailed with the end of what it printed."""
    left = options.ends - time.monotonic()
    if left < _MIN_SECONDS:
        raise ContenderFailed(f"not started: the {options.budget:g} s of --budget are used up")
    timeout = min(options.timeout, left)
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "rows.json", Path(folder) / "log"
        command = [sys.executable, __file__, *sys.argv[1:], *others]
        command += ["--child", contender.name, *parts, "--json", str(result)]
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
        rows = json.loads(result.read_text()) if result.exists() else {}
        lines = log.read_text(errors="replace").splitlines()
        if code == 0:
            if options.show_lines:
                print("\n".join(lines[-options.show_lines :]), flush=True)
            return rows
        raise ContenderFailed("\n".join([*lines[-_LAST_LINES:], f"exit code {code}"]), rows)


def run_where_it_fits(
    contender: Contender, parts: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """As `run_contender`; a peer that runs out of memory gets another try with half the micro-batch."""
    try:
        return run_contender(contender, parts, options)
    except ContenderFailed as error:
        if not contender.is_peer or "OutOfMemoryError" not in str(error):
            raise
    print(f"{contender.name} ran out of memory and tries again with half the micro-batch", flush=True)
    halves = {
        "--trl-batch": options.trl_batch // 2,
        "--trl-completions": options.trl_completions // 2,
        "--trl-tail-completions": options.trl_tail_completions // 2,
    }
    return run_contender(contender, parts, options, *(str(word) for pair in halves.items() for word in pair))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a contender and what it started, so that none of it holds memory of the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(options: argparse.Namespace) -> Iterator[tuple[Contender, list[str]]]:
    """The contenders that are asked for, each with its parts."""
    for contender in CONTENDERS:
        parts = [part for part in options.parts if part in contender.parts]
        if not parts or (options.contenders and contender.name not in options.contenders):
            continue
        if (contender.is_peer and not options.peers) or (options.peers_only and not contender.is_peer):
            continue
        if why := contender.why_not(options):
            print(f"{', '.join(parts)}: {contender.name} is left out: {why}", flush=True)
            continue
        yield contender, parts


def run(
    contender: Contender, parts: Sequence[str], results: dict[str, Any], options: argparse.Namespace
) -> None:
    """Put a contender's rows into the results, and what went wrong."""
    label, started = f"{', '.join(parts)}: {contender.name}", time.perf_counter()
    try:
        rows = run_where_it_fits(contender, parts, options)
    except ContenderFailed as error:
        rows = error.rows
        results["errors"][label] = str(error)
        print(f"{label} FAILED\n{error}", flush=True)
    for part, by_name in rows.items():
        for name, row in by_name.items():
            add_shares(part, row, results["machine"])
            results.setdefault(part, {}).setdefault(name, {}).update(row)  # other cases may be there already
    results["seconds"][label] = time.perf_counter() - started
    print(f"{label}, measured in {results['seconds'][label]:.0f} s", flush=True)


def add_shares(part: str, row: dict[str, float], machine: dict[str, float]) -> None:
    """Add to a row what share of the machine's rates it reaches."""
    if part in (DENSE, MOE):
        row["mfu"] = 6 * machine[f"active_{part}"] * row["tokens_per_s"] / machine["matmul_rate"]
    elif part in (DECODE, DECODE_MOE):
        row["floor_s"] = row["weight_bytes"] / machine["bandwidth"]
        row["of_floor"] = row["floor_s"] / row["step_s"]
    elif part == LONG:
        for case in row.values():
            case["mfu"] = case["operations"] / case["step_s"] / machine["matmul_rate"]  # type: ignore[index]
            case["mfu_as_published"] = case["published_operations"] / case["step_s"] / PEAK_RATE  # type: ignore[index]


# -- command line ----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help="only these, by the names of their rows"
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers-only", action="store_true", help="measure the peers alone")
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="FILE",
        help="take over rows that are not measured here from files of other runs",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a contender may take")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds that all of them may take")
    parser.add_argument("--show-lines", type=int, default=0, help="last lines of each contender's own output")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try this out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    add_update_options(parser.add_argument_group("updates"))
    add_engine_options(parser.add_argument_group("engines"))
    add_step_options(parser.add_argument_group("decoding and GRPO"))
    parser.add_argument("--child", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    add_json_option(parser)
    return parser


def measure_as_child(options: argparse.Namespace) -> None:
    """Measure one contender and end the process."""
    name, *parts = options.child
    (contender,) = [each for each in CONTENDERS if each.name == name and set(parts) <= set(each.parts)]
    contender.measure(options, parts, SavedRows(options.json))
    sys.stdout.flush()
    # Nothing is left to do, and a library that hangs when it is taken down would cost the timeout.
    os._exit(0)


def main() -> None:
    parser = make_parser()
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
        # On some virtual machines whose processor reports AMX, a bfloat16 matmul is an illegal instruction.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    options = parser.parse_args()
    options.ends = time.monotonic() + options.budget
    if options.child:
        measure_as_child(options)
    check_can_write(options.json)
    environment = describe_environment(("trl", "accelerate", "datasets", "vllm"))
    print_environment(environment)
    hidden = ("json", "child", "ends", "merge")
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    settings = json.loads(json.dumps(settings))
    results: dict[str, Any] = {"settings": settings, "machine": describe_machine(options)}
    results |= {"errors": {}, "seconds": {}, "merged": []}
    for contender, parts in chosen(options):
        run(contender, parts, results, options)
        results["bars"] = judge(results)
        if options.json is not None:  # after every contender: a run that is cut short keeps what it has
            write_json(options.json, environment, results)
    try:
        for file in options.merge:
            take_over(json.loads(file.read_text()), results, file.name)
    except CannotMerge as error:
        print(f"\nnot merged: {error}")
    results["bars"] = judge(results)
    if options.json is not None:
        write_json(options.json, environment, results)
    print_results(results)
    print("\nbars")
    for bar, verdict in results["bars"].items():
        print(f"{verdict:>16}: {bar}")
    if results["errors"]:
        print("\nfailed:", "; ".join(results["errors"]))


if __name__ == "__main__":
    main()
