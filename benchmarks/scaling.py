"""Messages and bytes of a run's phases at 2 to 32 ranks, fitted and carried on to more ranks than a machine has.

    python benchmarks/scaling.py --json docs/data/scaling.json

Each size trains a tiny dense model and a tiny mixture of experts for three steps on real gloo ranks (`train` itself,
from a checkpoint, with the embedded engine), saves once, and attests a model. Every collective that shardproof issues is
counted on every rank, with the bytes that gloo's algorithm for it sends and receives there, and is put down to the
phase whose function issued it. The work of a rank stays the same: two prompts of four completions. Counts do not depend
on the machine, nor on what else it does.

Each size is run twice: as it is, and as 512 and more ranks do it, which gather only 16 bytes of each message at first.
The second counts are fitted by terms that do not fall (1, log2 n, n, n log2 n: what is gathered, and what goes down a
tree), and carried on. FSDP's own collectives are not counted: they are those of torch, whatever trains.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import run_on_ranks
from benchmarks.reporting import (
    add_json_option,
    check_can_write,
    describe_environment,
    print_environment,
    print_table,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "recipes" / "tiny.toml"
SIZES = (2, 4, 8, 16, 32)
FIRST_FITTED = 4  # fewer ranks use other algorithms
CARRIED_TO = (512, 2048)
MB = 10**6
MODELS = ("dense", "moe")
PROMPTS_PER_RANK, GROUP, STEPS = 2, 4, 3
PRELOAD = ("torch.distributed.fsdp", "transformers.models.auto.modeling_auto", "peft", "shardproof.rl.loop")

START, LOAD, ATTEST, ROLLOUT, STEP, METRICS, SYNC, SAVE = PHASES = (
    "start", "load", "attest", "rollout", "step", "metrics", "sync", "save",
)  # fmt: skip
# Whose collectives belong to which phase, by package and function; the innermost that is named here decides.
FUNCTIONS = {
    ("rl", "train"): START,
    ("rl", "proved_load"): LOAD,
    ("shard", "attest"): ATTEST,
    ("rl", "one_step"): METRICS,
    ("rl", "end_step"): METRICS,
    ("rl", "collect"): ROLLOUT,
    ("rl", "measure"): METRICS,
    ("rl", "update"): STEP,
    ("rl", "_sync"): SYNC,
    ("rl", "save"): SAVE,
    ("checkpoints", "save_checkpoint"): SAVE,
}
OTHER = "other"
REPEATED = (ROLLOUT, STEP, METRICS, SYNC)  # in every step


@dataclass
class Row:
    """What one rank took part in during a phase."""

    messages: int = 0
    collectives: int = 0
    control_sent: int = 0
    control_received: int = 0
    data_sent: int = 0
    data_received: int = 0
    places: dict[str, int] = field(default_factory=dict)  # control bytes by what asked for them

    @property
    def control(self) -> int:
        return self.control_sent + self.control_received

    @property
    def data(self) -> int:
        return self.data_sent + self.data_received


class Recorder:
    """Puts every collective that is counted down to a phase, and to a step where there is one."""

    def __init__(self) -> None:
        from shardproof.dist.traffic import traffic

        self.rows: dict[tuple[str, int | None], Row] = {}
        self._traffic, self._messages = traffic, traffic.messages
        count_control, count_data = traffic.count_control, traffic.count_data

        def control(kind: str, sent: int, received: int) -> None:
            count_control(kind, sent, received)
            row, place = self._row(sys._getframe(1))
            row.messages += traffic.messages - self._messages
            self._messages = traffic.messages
            row.collectives += 1
            row.control_sent += sent
            row.control_received += received
            row.places[place] = row.places.get(place, 0) + sent + received

        def data(what: str, sent: int, received: int) -> None:
            count_data(what, sent, received)
            row, _ = self._row(sys._getframe(1))
            row.collectives += 1
            row.data_sent += sent
            row.data_received += received

        self._counting = {"count_control": control, "count_data": data}

    def __enter__(self) -> Recorder:
        vars(self._traffic).update(self._counting)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._counting:
            vars(self._traffic).pop(name)

    def _row(self, frame: FrameType | None) -> tuple[Row, str]:
        phase, step, place, module_of_save = None, None, None, False
        while frame is not None:
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if (
                place is None
                and module.startswith("shardproof.")
                and not module.startswith("shardproof.dist.")
            ):
                place = f"{module.removeprefix('shardproof.')}.{name}"
            _, _, path = module.partition("shardproof.")
            phase = phase or FUNCTIONS.get((path.partition(".")[0], name))
            module_of_save |= path.startswith("checkpoints.")
            if name == "one_step":
                step = frame.f_locals["step"]
            frame = frame.f_back
        if phase is None and module_of_save:
            phase = SAVE  # it writes in a thread of its own
        return self.rows.setdefault((phase or OTHER, step), Row()), place or ""

    def phases(self) -> dict[str, dict[str, Any]]:
        """Each phase's counts; of what every step does, those of the last."""
        found = {}
        for (phase, step), row in self.rows.items():
            if step == (STEPS - 1 if phase in REPEATED else None):
                found[phase] = {**vars(row), "control": row.control, "data": row.data}
        return found


def run_rank(model: str, folder: str, meeting_bytes: int | None) -> dict[str, Any]:
    """One rank: a run of a few steps, and an attested model."""
    import torch.distributed as dist

    import shardproof as sp
    from shardproof.config.load import load_recipe
    from shardproof.dist import messages
    from shardproof.rl.loop import train

    settings = {
        "model.path": f"{folder}/{model}",
        "train.steps": STEPS,
        "train.prompts_per_step": PROMPTS_PER_RANK * dist.get_world_size(),
        "rollout.group_size": GROUP,
        "output.folder": f"{folder}/run-{model}-{dist.get_world_size()}-{meeting_bytes}",
        "output.save_every": STEPS,
        "output.eval_every": 0,
        "output.save_model": "false",
        "output.trackers": "[]",
    }
    usual = messages.MEETING_BYTES
    messages.MEETING_BYTES = usual if meeting_bytes is None else meeting_bytes
    try:
        with Recorder() as recorder:
            train(load_recipe(TINY, [f"{key}={value}" for key, value in settings.items()]))
            sp.attest(sp.load(f"{folder}/{model}", progress=False))
    finally:
        messages.MEETING_BYTES = usual
    return {"phases": recorder.phases(), "sockets": count_sockets()}


def count_sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") for link in links)


def make_models(folder: Path) -> None:
    """The tiny recipe's model, and a mixture of experts with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = TINY.parent / "tiny" / "model"
    shutil.copytree(source, folder / "dense")
    shutil.copytree(source, folder / "moe", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    known = json.loads((source / "config.json").read_text())
    sizes = {
        key: known[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    tokens = {key: value for key, value in known.items() if key.endswith("token_id")}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **tokens, **experts, intermediate_size=64)
    config.num_key_value_heads, config.head_dim = 2, 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "moe")


def measure(sizes: Sequence[int], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{model: {ranks: {"phases": {phase: counts}, "as many": the same as many ranks do it, "sockets": of a rank}}}."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shardproof-scaling-") as name:
        make_models(Path(name))
        for model in models:
            for size in sizes:
                ranks = run_on_ranks(size, run_rank, model, name, None, preload=PRELOAD)
                row = found.setdefault(model, {})[str(size)] = summary(ranks)
                if size >= FIRST_FITTED:
                    ranks = run_on_ranks(size, run_rank, model, name, 0, preload=PRELOAD)
                    row["as many"] = summary(ranks)["phases"]
                print(f"{model}: {size} ranks", flush=True)
    return found


def summary(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over the ranks, and rank 0's, which other ranks send to."""
    phases = {}
    for phase in PHASES:
        rows = [rank["phases"].get(phase, vars(Row()) | {"control": 0, "data": 0}) for rank in ranks]
        phases[phase] = {
            "messages": rows[0]["messages"],
            "collectives": rows[0]["collectives"],
            "mean": {key: sum(row[key] for row in rows) / len(rows) for key in ("control", "data")},
            "rank 0": {key: rows[0][key] for key in ("control", "data")},
            "most": {key: max(row[key] for row in rows) for key in ("control", "data")},
            "places": dict(sorted(rows[0]["places"].items(), key=lambda item: -item[1])),
        }
    return {"phases": phases, "sockets": max(rank["sockets"] for rank in ranks)}


# Of what n ranks gather or send down a tree, one rank's part goes nowhere: all terms are taken (n - 1) / n times.
TERMS: dict[str, Callable[[float], float]] = {
    "1": lambda n: 1.0,
    "log2 n": math.log2,
    "n": lambda n: n,
    "n log2 n": lambda n: n * math.log2(n),
}


def fit(points: dict[int, float]) -> dict[str, float]:
    """{term: factor} of the sum of terms, none negative, that is nearest to the points, relative to their size."""
    best: tuple[float, dict[str, float]] = (math.inf, {})
    sizes, values = np.array(list(points)), np.array(list(points.values()))
    if not values.any():
        return {}
    for count in range(1, len(points)):
        for names in itertools.combinations(TERMS, count):
            columns = np.array([[at({name: 1.0}, size) for name in names] for size in sizes])
            factors = np.linalg.lstsq(columns / values[:, None], np.ones(len(values)), rcond=None)[0]
            error = float(np.abs(columns @ factors / values - 1).max())
            # A further term must be worth it.
            if (factors >= 0).all() and error < 0.8 * best[0]:
                best = error, dict(zip(names, factors.tolist(), strict=True))
    return best[1]


def at(factors: dict[str, float], size: int) -> float:
    """The value of a fit."""
    return (size - 1) / size * sum(factor * TERMS[name](size) for name, factor in factors.items())


def fit_all(rows: dict[str, Any]) -> dict[str, Any]:
    """{phase: {whose: {"factors": ..., "error": the largest, "carried": {ranks: bytes}}}} of control traffic."""
    found: dict[str, Any] = {}
    for phase in PHASES:
        for whose in ("mean", "rank 0"):
            points = {
                int(size): float(row["as many"][phase][whose]["control"])
                for size, row in rows.items()
                if "as many" in row
            }
            factors = fit(points)
            found.setdefault(phase, {})[whose] = {
                "factors": factors,
                "error": max((abs(at(factors, n) / v - 1) for n, v in points.items() if v), default=0.0),
                "carried": {str(size): round(at(factors, size)) for size in CARRIED_TO},
            }
    return found


def judge(found: dict[str, Any], fitted: dict[str, Any]) -> list[str]:
    """What does not hold: a phase grows faster than linearly, or a step's messages are 1 MB at 512 ranks."""
    problems = []
    for model, phases in fitted.items():
        for phase, whose in itertools.product(PHASES, ("mean", "rank 0")):
            first, last = (phases[phase][whose]["carried"][str(size)] for size in CARRIED_TO)
            # The tree's logarithm, on rank 0, is beside the point: 11 / 9 from 512 to 2,048.
            if last > 1.25 * first * CARRIED_TO[1] / CARRIED_TO[0]:
                problems.append(
                    f"{model}: {phase} ({whose}) grows faster than linearly: {first:,} to {last:,}"
                )
        for whose in ("mean", "rank 0"):
            total = sum(phases[phase][whose]["carried"]["512"] for phase in REPEATED)
            if total >= MB:
                problems.append(
                    f"{model}: a step at 512 ranks takes {total:,} bytes ({whose}); allowed {MB:,}"
                )
    return problems


def table(rows: dict[str, Any], fitted: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: messages, and bytes that a rank sends and receives, the mean and rank 0's."""
    header = ["phase", "messages", *rows, *(f"{size:,} (carried)" for size in CARRIED_TO)]
    lines = []
    for phase in (*PHASES, "a whole step"):
        parts = REPEATED if phase not in PHASES else (phase,)
        for whose in ("mean", "rank 0"):
            last = list(rows.values())[-1]["phases"]
            line = [f"{phase}, {whose}", str(sum(last[part]["messages"] for part in parts))]
            for row in rows.values():
                line.append(_kb(sum(row["phases"][part][whose]["control"] for part in parts)))
            for size in CARRIED_TO:
                line.append(_kb(sum(fitted[part][whose]["carried"][str(size)] for part in parts)))
            lines.append(line)
    return header, lines


def _kb(num_bytes: float) -> str:
    return f"{num_bytes / 1000:,.1f} KB" if num_bytes < MB else f"{num_bytes / MB:,.2f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="RANKS")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    add_json_option(parser)
    options = parser.parse_args()
    check_can_write(options.json)
    environment = describe_environment()
    print_environment(environment)
    found = measure(options.sizes, options.models)
    fitted = {model: fit_all(rows) for model, rows in found.items()}
    problems = judge(found, fitted)
    for model, rows in found.items():
        print_table(model, *table(rows, fitted[model]))
    if options.json is not None:
        write_json(options.json, environment, {"counts": found, "fitted": fitted, "problems": problems})
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
