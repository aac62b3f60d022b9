"""What benchmarks/gpu.py prints of its results: tables, and whether each bar was met."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks import gpu_peers, gpu_runs, gpu_vllm
from benchmarks.gpu_ours import OURS
from benchmarks.gpu_workload import (
    DECODE,
    DECODE_MOE,
    DENSE,
    EXACT,
    FIRST,
    LONG,
    MEMORY,
    MOE,
    PROMPTS,
    RL,
    RL_TAILS,
    ROWS,
    TAILS,
)
from benchmarks.reporting import print_table

GIB = 2**30
MIN_UPDATE_RATIO, MIN_STEP_RATIO = 3.0, 5.0  # over the fastest of TRL's rows; its transformers engine
MIN_DENSE_MFU, MIN_MOE_MFU, MIN_OF_FLOOR = 0.60, 0.38, 0.40
MAX_DENSE_PEAK, MAX_RL_PEAK = 80 * GIB, 48 * GIB
MIN_OVER_VLLM = {ROWS: 1.2, TAILS: 1.2, PROMPTS: 1.0}
MIN_OVER_TRL_VLLM = {RL: 2.0, RL_TAILS: 1.5}
MAX_FIRST_STEP_S, MAX_EXACT_COST = 15.0, 1.5
VLLM_ROWS = (gpu_vllm.VLLM, gpu_vllm.VLLM_APART)
TRL_VLLM_ROWS = (gpu_peers.GRPO_VLLM, gpu_peers.GRPO_VLLM_PLAIN)
_SCALES = {ROWS: ("step_s", 1e3, "ms per step", "{:.2f}"), TAILS: ("tokens_per_s", 1, "tokens/s", "{:.0f}"),
           PROMPTS: ("whole_s", 1, "seconds to the first token", "{:.3f}")}  # fmt: skip


def print_results(results: dict[str, Any]) -> None:
    """The tables of all parts that were measured."""
    for part in (ROWS, TAILS, PROMPTS):
        if part in results:
            _print_cases(part, results[part])
    _print_updates(results)
    _print_decoding(results)
    for part, title in ((RL, "GRPO step"), (RL_TAILS, "GRPO step, long tails"), (EXACT, "exact mode")):
        if part in results:
            _print_steps(title, part, results)
    _print_others(results)


def _print_cases(part: str, rows: dict[str, Any]) -> None:
    """One line per engine, one column per case, and then how many times as fast as the fastest peer ours is."""
    key, scale, unit, form = _SCALES[part]
    cases = list(dict.fromkeys(case for row in rows.values() for case in row))
    lines = [
        [name, *(form.format(row[case][key] * scale) if case in row else "" for case in cases)]
        for name, row in rows.items()
    ]
    speedups = case_speedups(part, rows)
    if speedups:
        found = (speedups.get(case) for case in cases)
        lines.append(["times as fast as vLLM", *(f"{each:.2f}" if each else "" for each in found)])
    print_table(f"{part}: {unit}", ["", *cases], lines)


def case_speedups(part: str, rows: dict[str, Any]) -> dict[str, float]:
    """By case, how many times as fast as the faster of vLLM's rows ours is."""
    key = _SCALES[part][0]
    found = {}
    for case, ours in rows.get(OURS, {}).items():
        peers = [rows[name][case][key] for name in VLLM_ROWS if case in rows.get(name, {})]
        if peers:
            found[case] = ours[key] / max(peers) if part == TAILS else min(peers) / ours[key]
    return found


def _print_updates(results: dict[str, Any]) -> None:
    updates = [(part, *item) for part in (DENSE, MOE) for item in results.get(part, {}).items()]
    rows = [
        [f"{part}: {name}", f"{row['tokens_per_s']:.0f}", f"{row['step_s']:.2f}", f"{100 * row['mfu']:.1f}%",
         f"{row['peak_bytes'] / GIB:.1f}", ratio(results, part, name)]
        for part, name, row in updates
    ]  # fmt: skip
    rows += [
        [f"{LONG}: {case}", f"{row['tokens_per_s']:.0f}", f"{row['step_s']:.2f}", f"{100 * row['mfu']:.1f}%",
         f"{row['peak_bytes'] / GIB:.1f}", f"({100 * row['mfu_as_published']:.1f}% as prime-rl counts)"]
        for row_of_cases in results.get(LONG, {}).values() for case, row in row_of_cases.items()
    ]  # fmt: skip
    if rows:
        rate = results["machine"]["matmul_rate"] / 1e12
        header = ["", "tokens/s", "step s", "MFU", "peak GiB", "speedup"]
        print_table(f"update; a bfloat16 matmul runs at {rate:.0f} TFLOP/s", header, rows)


def _print_decoding(results: dict[str, Any]) -> None:
    decoded = [(part, *item) for part in (DECODE, DECODE_MOE) for item in results.get(part, {}).items()]
    rows = [
        [f"{part}: {name}", f"{row['step_s'] * 1e3:.2f}", f"{row['floor_s'] * 1e3:.2f}", f"{100 * row['of_floor']:.0f}%",
         f"{row['steps']}", f"{row['whole_s']:.2f}"]
        for part, name, row in decoded
    ]  # fmt: skip
    if rows:
        title = f"decoding; copies move {results['machine']['bandwidth'] / 1e12:.2f} TB/s"
        print_table(title, ["", "ms per step", "floor ms", "of the floor", "tokens", "whole s"], rows)


def _print_steps(title: str, part: str, results: dict[str, Any]) -> None:
    rows = [
        [name, *(f"{row[key]:.2f}" for key in ("step_s", "rollout_s", "update_s", "sync_s")),
         f"{row['peak_bytes'] / GIB:.1f}", ratio(results, part, name)]
        for name, row in results[part].items()
    ]  # fmt: skip
    print_table(title, ["", "step s", "rollout", "update", "sync", "peak GiB", "speedup"], rows)


def _print_others(results: dict[str, Any]) -> None:
    if FIRST in results:
        rows = [
            [name, f"{row['first_step_s']:.1f}", f"{row['step_s']:.2f}"]
            for name, row in results[FIRST].items()
        ]
        print_table("the first step of a run", ["", "first step s", "a later one s"], rows)
    for name, cases in results.get(MEMORY, {}).items():
        rows = [
            [case, f"{row['step_s']:.2f}", f"{row['peak_bytes'] / GIB:.1f}"] for case, row in cases.items()
        ]
        print_table(f"memory: a GRPO step, {name}", ["", "step s", "peak GiB"], rows)


def ratio(results: dict[str, Any], part: str, name: str) -> str:
    """How many times as fast as this row ours is."""
    found = speedup(results, part, name)
    return f"{found:.2f}" if found and name != OURS else ""


def speedup(results: dict[str, Any], part: str, name: str) -> float | None:
    """How many times as fast as the peer ours is; None where one of the two is not there."""
    ours, peer = (results.get(part, {}).get(each) for each in (OURS, name))
    return peer["step_s"] / ours["step_s"] if ours and peer else None


# -- bars ------------------------------------------------------------------------------------------------------------


def judge(results: dict[str, Any]) -> dict[str, str]:
    """Each bar, and whether it was met, with what was measured."""
    return {
        **_judge_engines(results),
        **_judge_updates(results),
        **_judge_steps(results),
    }


def _verdict(measured: Iterable[float | None], least: float | None = None, most: float | None = None) -> str:
    """Of all values that were measured the worst one counts."""
    found = [value for value in measured if value is not None]
    if not found:
        return "not measured"
    worst = min(found) if least is not None else max(found)
    is_met = worst >= least if least is not None else worst <= (most or 0.0)
    return f"{'met' if is_met else 'MISSED'} ({worst:.3g})"


def _judge_engines(results: dict[str, Any]) -> dict[str, str]:
    found = {}
    names = {
        ROWS: "equal lengths: at least {} times as fast as vLLM at {} rows",
        TAILS: "long tails: at least {} times vLLM's tokens/s with {} completions",
        PROMPTS: "prompts: at least {} times as fast as vLLM, {} tokens",
    }
    for part, least in MIN_OVER_VLLM.items():
        speedups = case_speedups(part, results.get(part, {}))
        for case, value in (speedups or {"all": None}).items():
            found[names[part].format(f"{least:g}", case)] = _verdict([value], least=least)
    decode = results.get(DECODE, {}).get(OURS)
    bar = f"decoding at least {MIN_OF_FLOOR:.0%} of the floor"
    found[bar] = _verdict([decode and decode["of_floor"]], least=MIN_OF_FLOOR)
    return found


def _judge_updates(results: dict[str, Any]) -> dict[str, str]:
    dense, moe = (results.get(part, {}).get(OURS) for part in (DENSE, MOE))
    found = {
        f"update at least {MIN_UPDATE_RATIO:g} times as fast as {name}": _verdict(
            [speedup(results, DENSE, name)], least=MIN_UPDATE_RATIO
        )
        for name in (gpu_peers.SFT, gpu_peers.SFT_TUNED)
    }
    found[f"dense MFU at least {MIN_DENSE_MFU:.0%}"] = _verdict([dense and dense["mfu"]], least=MIN_DENSE_MFU)
    found[f"dense peak at most {MAX_DENSE_PEAK // GIB} GiB"] = _verdict(
        [dense and dense["peak_bytes"] / GIB], most=MAX_DENSE_PEAK / GIB
    )
    found[f"MoE MFU at least {MIN_MOE_MFU:.0%}"] = _verdict([moe and moe["mfu"]], least=MIN_MOE_MFU)
    for case, row in results.get(LONG, {}).get(OURS, {}).items():
        if "published_mfu" in row:
            bar = f"long context, {case}: MFU at least prime-rl's {row['published_mfu']:.1%} on one H100"
            found[bar] = _verdict([row["mfu_as_published"]], least=row["published_mfu"])
    return found


def _judge_steps(results: dict[str, Any]) -> dict[str, str]:
    found = {
        f"GRPO step at least {MIN_STEP_RATIO:g} times as fast as TRL's, transformers engine": _verdict(
            [speedup(results, RL, gpu_peers.GRPO)], least=MIN_STEP_RATIO
        )
    }
    for part, least in MIN_OVER_TRL_VLLM.items():
        speedups = [speedup(results, part, name) for name in TRL_VLLM_ROWS]
        as_it_comes = [each for each in speedups if each is not None][:1]
        found[f"{part}: step at least {least:g} times as fast as TRL's, vLLM colocated"] = _verdict(
            as_it_comes, least=least
        )
    ours = results.get(RL, {}).get(OURS)
    found[f"GRPO step below {MAX_RL_PEAK // GIB} GiB"] = _verdict(
        [ours and ours["peak_bytes"] / GIB], most=MAX_RL_PEAK / GIB
    )
    first = results.get(FIRST, {}).get(OURS) or ours
    found[f"first step at most {MAX_FIRST_STEP_S:g} s"] = _verdict(
        [first and first["first_step_s"]], most=MAX_FIRST_STEP_S
    )
    fast, exact = (results.get(EXACT, {}).get(name) for name in (OURS, gpu_runs.EXACT_ROW))
    cost = exact["step_s"] / fast["step_s"] if fast and exact else None
    found[f"exact mode costs at most {MAX_EXACT_COST:g} times the fast one"] = _verdict(
        [cost], most=MAX_EXACT_COST
    )
    found["exact mode: log-probs of engine and trainer are equal"] = _verdict(
        [exact and exact["mismatch_max"]], most=0.0
    )
    return found
