"""What benchmarks/gpu.py measures of shardproof's own loop: whole runs. Each function runs in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import tail_lengths
from benchmarks.gpu_ours import OURS, join_group, load_options
from benchmarks.gpu_timing import Row, Save
from benchmarks.gpu_workload import (
    EXACT,
    FIRST,
    LR,
    RL,
    RL_TAILS,
    dense_config,
    make_tokenizer,
    text_prompts,
    with_tails,
)

EXACT_ROW = "shardproof, exact"
AGAIN = "shardproof, second run"


def grpo_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """Whole GRPO steps: sample, score, update, and send the engine the new weights."""
    save(RL, OURS, run_steps(options))


def grpo_tails_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """The same with many completions of very different lengths."""
    save(RL_TAILS, OURS, run_steps(with_tails(options), tails=True))


def exact_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """The same steps as the part `grpo`, with log-probs of engine and trainer that are equal bit for bit."""
    save(EXACT, EXACT_ROW, run_steps(options, {"rollout": {"exact": True}}))


def fast_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """What exact mode is compared with."""
    save(EXACT, OURS, run_steps(options))


def first_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """The first step of a run that finds no compiled code on disk."""
    _use_caches()
    save(FIRST, OURS, run_steps(argparse.Namespace(**{**vars(options), "grpo_steps": 1})))


def first_again(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """The first step of the run after that one."""
    _use_caches()
    save(FIRST, AGAIN, run_steps(argparse.Namespace(**{**vars(options), "grpo_steps": 1})))


def _use_caches() -> None:
    """Compiled code goes to a folder that only this benchmark's processes use. Empty for the first of them."""
    folder = Path(tempfile.gettempdir()) / f"gpu-first-step-{os.getppid()}"
    os.environ |= {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }


def run_steps(
    options: argparse.Namespace,
    settings: dict[str, dict[str, Any]] | None = None,
    tails: bool = False,
    config: Any = None,
) -> Row:
    """Mean seconds by phase of the steps after the first, the first one's own, and the most memory of all."""
    from shardproof.config.load import parse_recipe
    from shardproof.rl.loop import train
    from shardproof.shard import sleeping

    join_group()
    num = options.prompts * options.group
    lengths = tail_lengths(num, options.tail_mean, options.tail_longest) if tails else [options.steps] * num
    clock = _Clock()
    device = torch.device(options.device)
    if device.type == "cuda":
        sleeping.track_peak(device)
    with tempfile.TemporaryDirectory() as folder, _limited(lengths) if tails else nullcontext():
        recipe = make_recipe(Path(folder), options, config)
        for section, values in (settings or {}).items():
            recipe.setdefault(section, {}).update(values)
        for override in options.set:
            _apply(recipe, override)
        train(parse_recipe(recipe, "benchmark"), [clock])
    for metrics in clock.metrics:
        assert abs(metrics["completion/length"] - sum(lengths) / num) < 0.01, metrics
        assert metrics["reward/group_std"] > 0 and not metrics["reward/errors"], metrics
        assert metrics["updates"] == 1 and not metrics["skipped"], metrics
    timed = clock.metrics[1:]
    row = {
        "step_s": (clock.ended[-1] - clock.ended[0]) / len(timed),
        "peak_bytes": sleeping.peak_bytes(device) if device.type == "cuda" else 0,
        "first_step_s": clock.metrics[0]["time/step"],
        "mismatch_max": max(metrics.get("mismatch/max", float("nan")) for metrics in clock.metrics),
        "tokens": sum(lengths),
    }
    for name in ("rollout", "update", "sync"):
        row[f"{name}_s"] = sum(metrics[f"time/{name}"] for metrics in timed) / len(timed)
    return row


class _Clock:
    """A logger that notes when each step ended, and what was logged."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.ended.append(time.perf_counter())
        self.metrics.append(dict(metrics))

    def close(self) -> None:
        pass


@contextmanager
def _limited(lengths: Sequence[int]) -> Iterator[None]:
    """Inside the block, the completions of a step have these lengths: a random model would never end one by itself."""
    from shardproof.rollout.local import EmbeddedEngine

    submit = EmbeddedEngine.submit

    def limited(self: EmbeddedEngine, requests: Sequence[Any], sampling: Any) -> list[int]:
        if len(requests) == len(lengths):  # not the canary
            requests = [
                replace(request, max_new_tokens=length)
                for request, length in zip(requests, lengths, strict=True)
            ]
        return submit(self, requests, sampling)

    EmbeddedEngine.submit = limited  # type: ignore[method-assign]
    try:
        yield
    finally:
        EmbeddedEngine.submit = submit  # type: ignore[method-assign]


def make_recipe(folder: Path, options: argparse.Namespace, config: Any = None) -> dict[str, Any]:
    """A recipe in a folder that holds a config, a tokenizer and prompts; the weights are random."""
    config = config or dense_config(options.tiny)
    model = folder / "model"
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(model)
    make_tokenizer(config.vocab_size).save_pretrained(model)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in text_prompts(options)))
    num = options.prompts * options.group
    return {
        "model": {"path": str(model), "random_init": True, **load_options(options)},
        "data": {"train": str(data), "answer_column": "none", "max_prompt_tokens": options.prompt},
        "reward": {"functions": [{"name": "benchmarks.gpu_workload:characters"}]},
        "rollout": {"group_size": options.group, "max_new_tokens": options.steps, "batch_size": num},
        "algorithm": {"name": "grpo"},
        "optimizer": {"lr": LR},
        "train": {
            "steps": 1 + options.grpo_steps,
            "prompts_per_step": options.prompts,
            "micro_batch_tokens": options.grpo_micro_batch_tokens,
            "ranks": 1,
        },
        "output": {
            "folder": str(folder / "run"),
            "save_every": 0,
            "save_model": False,
            "tensorboard": False,
        },
    }


def _apply(recipe: dict[str, Any], override: str) -> None:
    """Put a setting such as `rollout.sleep=false` into a recipe."""
    key, _, text = override.partition("=")
    section, _, leaf = key.partition(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    recipe.setdefault(section, {})[leaf] = value
