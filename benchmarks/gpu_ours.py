"""What benchmarks/gpu.py measures of shardproof. Each function runs in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from benchmarks.gpu_timing import Row, decode_row, peak_bytes, seconds_of, update_row
from benchmarks.gpu_workload import (
    LR,
    decode_prompts,
    dense_config,
    make_tokenizer,
    moe_config,
    sequences,
    text_prompts,
)
from shardproof.model import hf_private

OURS = "shardproof"
HELD = "shardproof, parameters gathered once a step"
MODEL_STEP = "shardproof, graphs of the model as written"
EAGER = "shardproof, without graphs"
_EAGER_STEPS = 65  # enough for a step that takes long to launch
_COUNTED_STEPS = 17  # in which visited experts are counted


def join_group() -> None:
    """Be the only rank of a group, as under torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def load_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `sp.load` that were asked for; the others stay the library's own."""
    given: dict[str, Any] = {}
    if options.checkpoint_activations is not None:
        given["checkpoint_activations"] = options.checkpoint_activations
    if options.no_compile:
        given["compile"] = False
    return given


def update_shardproof(config: Any, options: argparse.Namespace) -> dict[str, Row]:
    """Tokens a second of a whole train step."""
    join_group()
    policy = sp.load(sp.RandomInit(config), device=options.device, progress=False, **load_options(options))
    optimizer = sp.make_optimizer(policy, LR)
    rows = sequences(options)
    batch = sp.Batch(rows)

    def step() -> None:
        result = sp.train_step(policy, batch, optimizer, micro_batch_tokens=options.micro_batch_tokens)
        assert result.stepped, result

    tokens = sum(map(len, rows))
    found = {OURS: update_row(seconds_of(step, options.repeats, options.device), tokens, options.device)}
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    policy.settings = replace(policy.settings, reshard_after_forward=False)
    found[HELD] = update_row(seconds_of(step, options.repeats, options.device), tokens, options.device)
    return found


def dense_shardproof(options: argparse.Namespace) -> dict[str, Row]:
    return update_shardproof(dense_config(options.tiny), options)


def moe_shardproof(options: argparse.Namespace) -> dict[str, Row]:
    return update_shardproof(moe_config(options.tiny), options)


def decode_dense_shardproof(options: argparse.Namespace) -> dict[str, Row]:
    return decode_shardproof(dense_config(options.tiny), options)


def decode_moe_shardproof(options: argparse.Namespace) -> dict[str, Row]:
    return decode_shardproof(moe_config(options.tiny), options)


def decode_shardproof(config: Any, options: argparse.Namespace) -> dict[str, Row]:
    """Through fused kernels in graphs, through graphs of the model's own kernels, and launching every kernel."""
    from shardproof.rollout import engine as rollout
    from shardproof.rollout.local import EmbeddedEngine
    from shardproof.rollout.trajectory import Trajectory

    join_group()
    policy = sp.load(sp.RandomInit(config), param_dtype=torch.bfloat16, device=options.device, progress=False)
    engine = EmbeddedEngine(policy, batch_size=options.rows)
    engine.load_weights(sp.WeightStream(policy, torch.bfloat16, digests=False))
    prompts = [Trajectory.of_prompt(tuple(tokens)) for tokens in decode_prompts(options)]
    requests = [rollout.Request(prompt, row) for row, prompt in enumerate(prompts)]

    def generate(num: int) -> None:
        completions = rollout.generate(engine, requests, rollout.Sampling(num))
        assert {completion.num_sampled for completion in completions} == {num}, completions[0]

    num_bytes = _bytes_read(engine, generate)
    found = {OURS: decode_row(generate, options.steps, num_bytes, options.device)}
    if engine._fixed is not None:
        if engine._fixed._fuses:
            engine._fixed._fuses = False
            engine._fixed._loops.clear()
            found[MODEL_STEP] = decode_row(generate, options.steps, num_bytes, options.device)
        engine._fixed = None
        steps = min(options.steps, _EAGER_STEPS)
        found[EAGER] = decode_row(generate, steps, num_bytes, options.device)
    return found


def _bytes_read(engine: Any, generate: Callable[[int], None]) -> int:
    """Of the weights by a decoding step: rows of the embedding, the experts that are visited, and all the rest."""
    model = engine.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(each.nbytes for each in model.parameters() if each is head or each is not embedding)
    experts = hf_private.expert_modules(model)
    if not experts:
        return total
    of_experts = sum(each.nbytes for module in experts for each in module.parameters())
    return total - int(of_experts * (1 - _visited_share(engine, generate, experts)))


def _visited_share(engine: Any, generate: Callable[[int], None], experts: list[Any]) -> float:
    """Of a layer's experts by the rows of a decoding step, on average."""
    shares: list[float] = []

    def note(module: Any, args: Any) -> None:
        shares.append(len(args[1].unique()) / module.num_experts)

    fixed, engine._fixed = engine._fixed, None
    handles = [module.register_forward_pre_hook(note) for module in experts]
    generate(_COUNTED_STEPS)
    for handle in handles:
        handle.remove()
    engine._fixed = fixed
    decoded = shares[len(experts) :]  # the prompts come first
    return sum(decoded) / len(decoded)


def grpo_shardproof(options: argparse.Namespace) -> dict[str, Row]:
    """A run of the project's own loop; each step samples, scores, updates, and sends the engine the new weights."""
    from shardproof.config.load import parse_recipe
    from shardproof.rl.loop import train

    join_group()
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        train(parse_recipe(_write_recipe(Path(folder), options), "benchmark"), [clock])
    for metrics in clock.metrics:
        assert metrics["completion/length"] == options.steps, metrics
        assert metrics["reward/group_std"] > 0 and not metrics["reward/errors"], metrics
        assert metrics["updates"] == 1 and not metrics["skipped"], metrics
    timed = clock.metrics[1:]
    row = {
        "step_s": (clock.ended[-1] - clock.ended[0]) / len(timed),
        "peak_bytes": peak_bytes(options.device),
    }
    for phase, name in (("rollout_s", "rollout"), ("update_s", "update"), ("sync_s", "sync")):
        row[phase] = sum(metrics[f"time/{name}"] for metrics in timed) / len(timed)
    return {OURS: row}


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


def _write_recipe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A recipe in a folder that holds a config, a tokenizer and prompts; the weights are random."""
    config = dense_config(options.tiny)
    model = folder / "model"
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(model)
    make_tokenizer(config.vocab_size).save_pretrained(model)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in text_prompts(options)))
    return {
        "model": {"path": str(model), "random_init": True, **load_options(options)},
        "data": {"train": str(data), "answer_column": "none", "max_prompt_tokens": options.prompt},
        "reward": {"functions": [{"name": "benchmarks.gpu_workload:characters"}]},
        "rollout": {"group_size": options.group, "max_new_tokens": options.steps},
        "algorithm": {"name": "grpo"},
        "optimizer": {"lr": LR},
        "train": {
            "steps": 1 + options.grpo_steps,
            "prompts_per_step": options.prompts,
            "micro_batch_tokens": options.micro_batch_tokens,
            "ranks": 1,
        },
        "output": {
            "folder": str(folder / "run"),
            "save_every": 0,
            "save_model": False,
            "tensorboard": False,
        },
    }
