"""What benchmarks/gpu.py measures of shardproof: updates and engines. Each function runs in a process of its own."""

from __future__ import annotations

import argparse
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import shardproof as sp
from benchmarks.gpu_cases import measure_engine, most_rows
from benchmarks.gpu_timing import Save, decode_row, seconds_of, update_row
from benchmarks.gpu_workload import (
    DECODE,
    DECODE_MOE,
    DENSE,
    LR,
    MOE,
    decode_prompts,
    dense_config,
    moe_config,
    sequences,
)
from shardproof.model import hf_private
from shardproof.shard import materialise

OURS = "shardproof"
HELD = "shardproof, parameters gathered once a step"
MODEL_STEP = "shardproof, graphs of the model as written"
EAGER = "shardproof, without graphs"
FP8 = "shardproof, FP8 weights"
_NUMBERS = 2**24
_EAGER_STEPS = 65  # enough for a step that takes long to launch
_FAST_WAYS = ("fused", "attention", "draws", "graphs")
_COUNTED_STEPS = 17  # in which visited experts are counted


def join_group() -> None:
    """Be the only rank of a group, as under torchrun, whose random weights are drawn quickly."""
    draw_quickly()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def draw_quickly() -> None:
    """Cut random weights out of one block of numbers: no result depends on them, and billions take minutes to draw."""
    block = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))
    draw = materialise.draw

    def quick(spec: Any, seed: int, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        num = stop - start
        if spec.kind != "normal" or spec.rows or num > len(block) // 2:
            return draw(spec, seed, shape, start, stop)
        place = zlib.crc32(f"{spec.name} {start}".encode()) % (len(block) - num)
        return block[place : place + num] * spec.b + spec.a

    materialise.draw = quick


def load_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `sp.load` that were asked for; the others stay the library's own."""
    given: dict[str, Any] = {}
    if options.checkpoint_activations is not None:
        given["checkpoint_activations"] = options.checkpoint_activations
    if options.no_compile:
        given["compile"] = False
    return given


def update_shardproof(part: str, config: Any, options: argparse.Namespace, save: Save) -> None:
    """Tokens per second of a whole train step."""
    join_group()
    policy = sp.load(sp.RandomInit(config), device=options.device, progress=False, **load_options(options))
    optimizer = sp.make_optimizer(policy, LR)
    rows = sequences(options)
    batch = sp.Batch(rows)

    def step() -> None:
        result = sp.train_step(policy, batch, optimizer, micro_batch_tokens=options.micro_batch_tokens)
        assert result.stepped, result

    tokens = sum(map(len, rows))
    save(part, OURS, update_row(seconds_of(step, options.repeats, options.device), tokens, options.device))
    if not options.held:
        return
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    policy.settings = replace(policy.settings, reshard_after_forward=False)
    save(part, HELD, update_row(seconds_of(step, options.repeats, options.device), tokens, options.device))


def dense_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    update_shardproof(DENSE, dense_config(options.tiny), options, save)


def moe_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    update_shardproof(MOE, moe_config(options.tiny), options, save)


def engine_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """The embedded engine, one for all cases."""
    _engine(OURS, options, parts, save)


def engine_fp8(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    """The embedded engine with `rollout.fp8 = "weights"`."""
    _engine(FP8, options, parts, save, fp8="weights")


def _engine(
    name: str, options: argparse.Namespace, parts: Sequence[str], save: Save, **settings: Any
) -> None:
    from shardproof.rollout import engine as rollout
    from shardproof.rollout.local import EmbeddedEngine
    from shardproof.rollout.trajectory import Trajectory

    join_group()
    config = dense_config(options.tiny)
    policy = sp.load(sp.RandomInit(config), param_dtype=torch.bfloat16, device=options.device, progress=False)
    if options.device == "cuda":
        settings["kv_cache_gib"] = options.kv_cache_gib
    engine = EmbeddedEngine(policy, most_rows(options), **settings)
    engine.load_weights(sp.WeightStream(policy, torch.bfloat16, digests=False))

    def generate(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
        requests = [
            rollout.Request(Trajectory.of_prompt(tuple(prompt)), row, max_new_tokens=limit)
            for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        found = rollout.generate(engine, requests, rollout.Sampling(max(limits)))
        return [trajectory.num_sampled for trajectory in found]

    measure_engine(generate, name, parts, options, save)


def decode_dense_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    decode_shardproof(DECODE, dense_config(options.tiny), options, save)


def decode_moe_shardproof(options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
    decode_shardproof(DECODE_MOE, moe_config(options.tiny), options, save)


def decode_shardproof(part: str, config: Any, options: argparse.Namespace, save: Save) -> None:
    """Through fused kernels in graphs, through graphs of the model's own kernels, and launching every kernel."""
    from shardproof.rollout import engine as rollout
    from shardproof.rollout.trajectory import Trajectory

    join_group()
    policy = sp.load(sp.RandomInit(config), param_dtype=torch.bfloat16, device=options.device, progress=False)
    prompts = [Trajectory.of_prompt(tuple(tokens)) for tokens in decode_prompts(options)]
    requests = [rollout.Request(prompt, row) for row, prompt in enumerate(prompts)]

    def generate(engine: Any, num: int) -> None:
        completions = rollout.generate(engine, requests, rollout.Sampling(num))
        assert {completion.num_sampled for completion in completions} == {num}, completions[0]

    plain = _engine_without(policy, options, *_FAST_WAYS)
    num_bytes = _bytes_read(plain, partial(generate, plain), options.rows)
    ways = {OURS: (), MODEL_STEP: ("fused", "draws"), EAGER: _FAST_WAYS}
    for name, without in ways.items() if options.device == "cuda" else [(OURS, ())]:
        engine = _engine_without(policy, options, *without)
        steps = min(options.steps, _EAGER_STEPS) if name == EAGER else options.steps
        save(part, name, decode_row(partial(generate, engine), steps, num_bytes, options.device))
        del engine


def _engine_without(policy: Any, options: argparse.Namespace, *ways: str) -> Any:
    """An engine that decodes without some of its fast ways; on the CPU it has none."""
    from shardproof.rollout.local import EmbeddedEngine

    engine = EmbeddedEngine(policy, batch_size=options.rows)
    engine.load_weights(sp.WeightStream(policy, torch.bfloat16, digests=False))
    for name in ways if engine.decoder is not None else ():
        setattr(engine.decoder.ways, name, False)
    return engine


def _bytes_read(engine: Any, generate: Callable[[int], None], rows: int) -> int:
    """Of the weights by a decoding step: rows of the embedding, the experts that are visited, and all the rest."""
    model = engine.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(each.nbytes for each in model.parameters() if each is head or each is not embedding)
    experts = hf_private.expert_modules(model)
    if not experts:
        return total
    of_experts = sum(each.nbytes for module in experts for each in module.parameters())
    return total - int(of_experts * (1 - _visited_share(generate, experts, rows)))


def _visited_share(generate: Callable[[int], None], experts: Sequence[torch.nn.Module], rows: int) -> float:
    """Of a layer's experts by the rows of a decoding step, on average."""
    shares: list[float] = []

    def note(module: Any, args: Any) -> None:
        if len(args[1]) == rows:  # prompts have more tokens
            shares.append(len(args[1].unique()) / module.num_experts)

    handles = [module.register_forward_pre_hook(note) for module in experts]
    generate(_COUNTED_STEPS)
    for handle in handles:
        handle.remove()
    return sum(shares) / len(shares)
