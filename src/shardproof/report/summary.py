"""What a run is and what came of it: status, key numbers, where the time went, the machine and the settings."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from shardproof.report.ledger import cut
from shardproof.report.read import HEADLINES, OF_SET, Record, Run, dig, finite

STATUSES = ("running", "finished", "stopped", "failed")
STALE_S = 600.0  # a run that says it is running and has written nothing for this long may be gone
_IGNORED = ("output.folder",)  # settings that always differ between runs


def header_of(run: Run) -> dict[str, Any]:
    """The first lines of the page: what was trained, how far it is, and how long it took."""
    planned = finite(dig(run.config, "train", "steps"))
    last = run.steps[-1] if run.steps else finite(run.facts.get("step"))
    keys = (("algorithm", "name"), ("model", "path"), ("model", "strategy"))
    words = [cut(value, 300) for value in (dig(run.config, *path) for path in keys) if value]
    ranks = finite(run.facts.get("ranks")) or finite(dig(run.config, "train", "ranks"))
    if ranks:
        words.append(f"{ranks:.0f} rank{'s' * (ranks > 1)}")
    status = run.facts.get("status")
    if status not in STATUSES:
        status = "finished" if planned and last is not None and last >= planned else "unknown"
    elif status == "running" and run.was_killed:
        status = "killed"
    return {
        "name": run.name,
        "words": words,
        "status": status,
        "stale_s": run.age_s if status == "running" and run.age_s and run.age_s > STALE_S else None,
        "step": last,
        "steps": planned,
        "seconds": _duration(run),
        "left_s": _left(run, planned) if status == "running" else None,
        "started": cut(run.facts.get("started") or "", 100),
    }


def numbers_of(run: Run) -> list[dict[str, str]]:
    """The key numbers, each as a label, a value, and a remark."""
    numbers = [
        _change(run, "Reward", "reward/mean"),
        _change(run, "Solved", "reward/solved") if not _points(run, "reward/mean") else None,
        _change(run, "Accuracy", "reward/accuracy"),
        _change(run, "KL to the teacher", "teacher/kl"),
        *_held_out(run),
        _change(run, "Loss", "loss/total") if not _points(run, "reward/mean") else None,
        _change(run, "Held-out loss", "eval/loss"),
    ]
    speeds = [value for _, value in _points(run, "tokens_per_s")]
    if speeds:
        numbers.append(
            {
                "label": "Tokens per second",
                "value": f"{statistics.median(speeds):,.0f}",
                "more": "median over steps",
            }
        )
    seconds = [value for _, value in _points(run, "time/step")]
    if seconds:
        more = f"median; longest {duration(max(seconds))}"
        numbers.append(
            {"label": "Time per step", "value": duration(statistics.median(seconds)), "more": more}
        )
    numbers += _ahead_numbers(run)
    return [number for number in numbers if number is not None]


def _held_out(run: Run) -> list[dict[str, str] | None]:
    """The first headline that the run has of `data.evaluation`, and that of each named set."""
    names = {name: None for metrics in run.metrics for name in metrics}
    sets = dict.fromkeys(found[1] for name in names if (found := OF_SET.fullmatch(name)))
    prefixes = {"eval/": "Held-out", **{f"eval/{each}/": cut(each, 100) for each in sets}}
    numbers = []
    for prefix, label in prefixes.items():
        headlines = {prefix + name.removeprefix("eval/"): called for name, called in HEADLINES.items()}
        first = next((name for name in headlines if name in names), None)
        numbers.append(_change(run, f"{label} {headlines[first]}", first) if first else None)
    return numbers


def _ahead_numbers(run: Run) -> list[dict[str, str]]:
    """What runs say whose engines run ahead: how old the tokens were, who waited, and what the correction left."""
    lags = [value for _, value in _points(run, "lag/mean")]
    if not lags:
        return []
    largest = max((value for _, value in _points(run, "lag/max")), default=max(lags))
    more = f"weight updates, mean over steps; largest {largest:.0f}"
    numbers = [{"label": "Lag of the tokens", "value": f"{statistics.fmean(lags):.2g}", "more": more}]
    seconds = sum(value for _, value in _points(run, "time/step"))
    idle = {
        name: sum(value for _, value in points)
        for name in ("trainer", "engine")
        if (points := _points(run, f"time/{name}_idle"))
    }
    if idle and seconds:
        shares = [f"{name}{'s' * (name == 'engine')} {share / seconds:.0%}" for name, share in idle.items()]
        numbers.append({"label": "Idle", "value": ", ".join(shares), "more": "of the time of all steps"})
    sizes = [value for _, value in _points(run, "correction/ess")]
    if sizes:
        lost = [(name, _points(run, f"correction/{name}")) for name in ("clipped", "masked")]
        shares = [f"{statistics.fmean(v for _, v in points):.2%} {name}" for name, points in lost if points]
        more = ", ".join(["median over steps", *shares])
        value = f"{statistics.median(sizes):.0%}"
        numbers.append({"label": "Effective sample size", "value": value, "more": more})
    return numbers


def time_split(run: Run) -> list[dict[str, Any]]:
    """Where the seconds of a run went: the parts of a step in their order, then what stands between steps."""
    total = {
        name: sum(value for _, value in _points(run, f"time/{name}"))
        for name in (
            "step",
            "rollout",
            "environment",
            "reward",
            "trainer_idle",
            "update",
            "sync",
            "evaluation",
        )
    }
    if not total["step"]:
        return []
    # Waiting for environments, rewards and trajectories is part of a rollout's time.
    inside = max(0.0, total["rollout"] - total["environment"] - total["reward"] - total["trainer_idle"])
    parts = [
        ("Rollout", inside),
        ("Waiting for the environment", total["environment"]),
        ("Waiting for rewards", total["reward"]),
        ("Waiting for trajectories", total["trainer_idle"]),
        ("Update", total["update"]),
        ("Weight sync", total["sync"]),
    ]
    saving = sum(
        finite(event.get("seconds")) or 0.0 for event in run.events if event.get("proof") == "checkpoint"
    )
    outside = (_duration(run) or 0.0) - total["step"] - total["evaluation"] - saving
    parts += [
        ("Other parts of steps", total["step"] - sum(seconds for _, seconds in parts)),
        ("Evaluation", total["evaluation"]),
        ("Checkpoints", saving),
        ("Between steps", outside),
    ]
    return [{"name": name, "seconds": round(seconds, 3)} for name, seconds in parts if seconds > 0]


def facts_of(run: Run) -> dict[str, Any]:
    """The machine, the versions, the command and the settings of a run, as texts."""
    facts, hardware = run.facts, dig(run.facts, "hardware") or {}
    rows = [
        ("Command", facts.get("command")),
        ("Commit", facts.get("commit")),
        ("Started", facts.get("started")),
        ("Hosts", hosts) if (hosts := _hosts(facts)) else ("Host", facts.get("host")),
        ("Ranks", _ranks(facts)),
        ("GPUs", _gpus(dig(hardware, "gpus"))),
        ("CPU", _cpu(hardware)),
        ("shardproof", facts.get("shardproof")),
        ("Python", facts.get("python")),
    ]
    packages = facts.get("packages")
    rows += list(packages.items()) if isinstance(packages, dict) else []
    changed = facts.get("changed")
    return {
        "rows": [[cut(label, 100), cut(value, 2000)] for label, value in rows if value],
        "changed": [
            [cut(key, 200), _plain(dig(pair, "value")), _plain(dig(pair, "default"))]
            for key, pair in (changed.items() if isinstance(changed, dict) else ())
        ],
        "config": _as_json(run.config, indent=2) if run.config else "",
    }


def differing_settings(runs: Sequence[Run]) -> list[list[str]]:
    """[name, value of each run ...] of every setting, version and digest that is not the same in all runs."""
    flat = [_comparable(run) for run in runs]
    names = sorted({name for each in flat for name in each})
    rows = [[name, *(each.get(name, "-") for each in flat)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds >= 1e9:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _duration(run: Run) -> float | None:
    return max((time for time in run.times if time is not None), default=None)


def _left(run: Run, planned: float | None) -> float | None:
    """The seconds that the steps to come will take, if they take as long as the last ones."""
    seconds = [value for _, value in _points(run, "time/step")][-50:]
    if not planned or not seconds or run.steps[-1] >= planned:
        return None
    return statistics.median(seconds) * (planned - run.steps[-1])


def _points(run: Run, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric where it is finite."""
    pairs = ((step, metrics.get(name)) for step, metrics in zip(run.steps, run.metrics))
    return [(step, value) for step, value in pairs if value is not None]


def _change(run: Run, label: str, name: str) -> dict[str, str] | None:
    """A metric's first and last value, with standard errors where the run has them."""
    points, errors = _points(run, name), dict(_points(run, f"{name}_se"))
    if not points:
        return None
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return {
            "label": label,
            "value": _with_error(first, errors.get(first_step)),
            "more": f"at step {first_step}",
        }
    value = f"{_with_error(first, errors.get(first_step))} → {_with_error(last, errors.get(last_step))}"
    more = f"step {first_step} → {last_step}, change {last - first:+.3g}"
    if first_step in errors and last_step in errors:
        more += f"\u00a0±\u00a0{math.hypot(errors[first_step], errors[last_step]):.2g}"
    return {"label": label, "value": value, "more": more}


def _with_error(value: float, error: float | None) -> str:
    if error is None:
        return f"{value:.3g}"
    digits = ".3f" if error >= 1e-3 and abs(value) < 100 else ".3g"
    return f"{value:{digits}}\u00a0±\u00a0{error:{digits}}"


def _plain(value: Any) -> str:
    """A setting as a recipe writes it, with "none" for what is switched off."""
    if value is None:
        return "none"
    return cut(value if isinstance(value, str) else _as_json(value), 500)


def _as_json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    except RecursionError:
        return "(nested too deeply to show)"


def _ranks(facts: Record) -> str | None:
    ranks, nodes = finite(facts.get("ranks")), finite(facts.get("nodes"))
    if ranks is None:
        return None
    return f"{ranks:.0f}" + (f" on {nodes:.0f} nodes" if nodes and nodes > 1 else "")


def _hosts(facts: Record) -> str | None:
    """`a (2 ranks, 8 x NVIDIA H200), b (...)`, where a run had several."""
    hosts = facts.get("hosts")
    if not isinstance(hosts, list):
        return None
    shown = []
    for host in hosts:
        ranks, texts = dig(host, "ranks"), [dig(host, key) for key in ("name", "devices")]
        num = len(ranks) if isinstance(ranks, list) else 0
        name, devices = (text if isinstance(text, str) else "?" for text in texts)
        shown.append(f"{name} ({num} rank{'s' * (num != 1)}, {devices})")
    return ", ".join(shown) or None


def _gpus(gpus: Any) -> str | None:
    if not isinstance(gpus, list):
        return None
    names: dict[str, int] = {}
    for gpu in gpus:
        memory = finite(dig(gpu, "memory_bytes"))
        name = f"{dig(gpu, 'name')}" + (f" ({memory / 2**30:.0f} GiB)" if memory else "")
        names[name] = names.get(name, 0) + 1
    return ", ".join(f"{num} x {name}" for name, num in names.items())


def _cpu(hardware: Any) -> str | None:
    cores, memory = finite(dig(hardware, "cores")), finite(dig(hardware, "memory_bytes"))
    parts = [
        str(dig(hardware, "cpu") or ""),
        f"{cores:.0f} cores" if cores else "",
        f"{memory / 2**30:.0f} GiB memory" if memory else "",
    ]
    return ", ".join(part for part in parts if part) or None


def _comparable(run: Run) -> dict[str, str]:
    """Everything about a run that may explain a difference, under dotted names."""
    config = {key: value for key, value in run.config.items() if key != "shardproof"}
    facts = {
        key: run.facts.get(key) for key in ("shardproof", "commit", "python", "ranks", "nodes", "packages")
    }
    found = _flatten("", config) | _flatten(
        "", {key: value for key, value in facts.items() if value is not None}
    )
    digests = dig(run.config, "shardproof", "digests")
    found |= _flatten("digest of ", digests if isinstance(digests, dict) else {})
    gpus = _gpus(dig(run.facts, "hardware", "gpus"))
    return {
        name: value
        for name, value in (found | ({"GPUs": gpus} if gpus else {})).items()
        if name not in _IGNORED
    }


def _flatten(prefix: str, value: Record, depth: int = 8) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, each in value.items():
        name = f"{prefix}{key}"
        if isinstance(each, dict) and each and depth:
            flat |= _flatten(f"{name}.", each, depth - 1)
        else:
            flat[cut(name, 200)] = _plain(each)
    return flat
