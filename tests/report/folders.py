"""Run folders made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u2028<!--"
)


def write_lines(path: Path, records: list[dict]) -> None:
    # Not ASCII: U+2028 must reach the reader as it is.
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def proof(kind: str, step: int, passed: bool = True, **more: Any) -> dict[str, Any]:
    """A line of events.jsonl as a run writes it."""
    line = {"step": step, "kind": "proof", "proof": kind, "passed": passed, "role": "policy"}
    line |= {"text": f"{kind} at step {step}", "compared": f"what a {kind} compares", "seconds": 0.25}
    return line | more


def sync(step: int, gap: float = 1e-6, passed: bool = True, **more: Any) -> dict[str, Any]:
    details = {"version": step, "tensors": 29, "bytes": 4096, "gap": gap, "tolerance": 1e-4}
    return proof("sync", step, passed, details=details, **more)


def make_metrics(num_steps: int, scale: float = 1.0) -> list[dict]:
    records = []
    for step in range(1, num_steps + 1):
        metrics = {
            "lr": 1e-4,
            "entropy/mean": 1.0 / step,
            "tokens_per_s": 15000.0 + step,
            "grad_norm": float("inf") if step == 5 else 0.5 * step,
            "loss/policy": float("nan") if step == 5 else -0.01 * step,
            "kl/mean": 0.001 * step,
            "kl/max": 0.1 * step,
            "reward/std": 0.25 + 0.01 * step,
            "reward/mean": (0.3 + 0.05 * step) * scale,
            "reward/exact_match": (0.3 + 0.05 * step) * scale,
            "canary/gap": 1e-6 * step,
            "memory/peak": 1e9 + step,
            "time/step": 20.0,
            "time/rollout": 12.0,
            "time/reward": 2.0,
            "time/update": 6.0,
            "my_own": step % 3,
        }
        if step % 4 == 0:
            metrics |= {"eval/reward": 0.5 + 0.03125 * step, "eval/reward_se": 0.25 / step}
        records.append({"step": step, "time": 20.0 * step, "metrics": metrics})
    return records


def make_samples(num_steps: int) -> list[dict]:
    return [
        {
            "step": step,
            "group": 0,
            "sample": index,
            "prompt": f"{step}+1=",
            "completion": f"{step + 1 + index}",
            "reward": float(index == 0),
            "rewards": {"exact_match": float(index == 0), "length": 0.5},
            "answer": str(step + 1),
            "advantage": 1.5 if index == 0 else -0.5,
            **({"group_rewards": [1.0, 0.0, 0.0, 0.0]} if index == 0 else {}),
        }
        for step in range(1, num_steps + 1)
        for index in range(2)
    ]


def make_config(steps: int = 8, lr: float = 1e-4) -> dict:
    return {
        "shardproof": {"format": 1, "digests": {"data.train": {"sha256": "93330ab7"}}},
        "algorithm": {"name": "grpo"},
        "model": {"path": "models/tiny", "strategy": "fsdp2"},
        "optimizer": {"lr": lr},
        "train": {"steps": steps, "ranks": 2},
        "output": {"folder": "anywhere"},
    }


def make_facts(status: str = "finished", **more: Any) -> dict:
    return {
        "shardproof": "0.1.0",
        "commit": "abc123",
        "command": "shardproof train tiny.toml",
        "started": "2026-01-01T00:00:00+00:00",
        "host": "somewhere",
        "python": "3.12.3",
        "packages": {"torch": "2.13.0"},
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 8 * 2**30, "gpus": []},
        "ranks": 2,
        "nodes": 1,
        "changed": {"optimizer.lr": {"value": 1e-4, "default": 1e-6}},
        "status": status,
        "step": 8,
    } | more


def make_run(folder: Path, num_steps: int = 8, **settings: Any) -> Path:
    """A run in which everything went well."""
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", make_metrics(num_steps, settings.get("scale", 1.0)))
    (folder / "config.json").write_text(json.dumps(make_config(lr=settings.get("lr", 1e-4))))
    (folder / "run.json").write_text(json.dumps(make_facts()))
    write_lines(folder / "samples.jsonl", make_samples(num_steps))
    loads = [proof("load", 0, role=role, rank=rank) for role in ("policy", "reference") for rank in range(2)]
    syncs = [sync(step, gap=1e-6 * step) for step in range(num_steps + 1)]
    ends = [proof("checkpoint", 4), proof("checkpoint", 8), proof("export", 8)]
    write_lines(folder / "events.jsonl", [*loads, *syncs, *ends])
    return folder


def add_events(folder: Path, *events: dict) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
