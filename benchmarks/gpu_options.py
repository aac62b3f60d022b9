"""The options of benchmarks/gpu.py that say what is measured, and how much of it."""

from __future__ import annotations

import argparse
from typing import Any


def checkpointing(text: str) -> bool | int | str:
    """What `sp.load` takes as checkpoint_activations."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def prompt_case(text: str) -> tuple[int, int]:
    """(prompts, tokens of each) from `32x2048`."""
    num, _, length = text.partition("x")
    return int(num), int(length)


def add_update_options(updates: Any) -> None:
    updates.add_argument("--sequences", type=int, default=64)
    updates.add_argument("--lengths", type=int, nargs=2, default=[128, 2048], help="shortest and longest")
    updates.add_argument("--micro-batch-tokens", type=int, default=16384)
    updates.add_argument(
        "--checkpoint-activations", nargs="?", const=True, type=checkpointing,
        help="true, false, auto or a number of blocks; by default the library's own choice",
    )  # fmt: skip
    updates.add_argument("--no-compile", action="store_true")
    updates.add_argument("--repeats", type=int, default=3)
    updates.add_argument(
        "--held", action=argparse.BooleanOptionalAction, default=True,
        help="measure also with parameters gathered once a step",
    )  # fmt: skip
    updates.add_argument("--trl-batch", type=int, default=8, help="sequences of a micro-batch of SFTTrainer")


def add_engine_options(engines: Any) -> None:
    engines.add_argument("--row-counts", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 512])
    engines.add_argument("--row-steps", type=int, default=256, help="tokens of a completion in `rows`")
    engines.add_argument("--engine-repeats", type=int, default=1)
    engines.add_argument("--tails", type=int, nargs="+", default=[64, 256], help="completions in `tails`")
    engines.add_argument("--tail-mean", type=int, default=300)
    engines.add_argument("--tail-longest", type=int, default=2048)
    engines.add_argument(
        "--prompt-cases", type=prompt_case, nargs="+", metavar="NxTOKENS",
        default=[(32, 128), (512, 128), (32, 2048), (32, 8192)],
    )  # fmt: skip
    engines.add_argument("--prompt-repeats", type=int, default=3)
    engines.add_argument("--kv-cache-gib", type=float, default=60.0, help="of our engine")
    engines.add_argument("--vllm-memory", type=float, default=0.5, help="vLLM's gpu_memory_utilization")
    engines.add_argument("--vllm-cache-gib", type=float, default=None, help="instead: vLLM's cache alone")


def add_step_options(sampling: Any) -> None:
    sampling.add_argument(
        "--rows", type=int, default=32, help="decoded at a time, where only decoding is measured"
    )
    sampling.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    sampling.add_argument("--steps", type=int, default=512, help="tokens of a completion")
    sampling.add_argument("--prompts", type=int, default=4, help="of a GRPO step")
    sampling.add_argument("--group", type=int, default=8, help="completions per prompt")
    sampling.add_argument("--grpo-steps", type=int, default=2, help="timed, after one that is not")
    sampling.add_argument(
        "--grpo-micro-batch-tokens",
        type=int,
        default=10240,
        help="of our GRPO step; as many as in one of TRL's",
    )
    sampling.add_argument("--tail-prompts", type=int, default=64, help="of a GRPO step with long tails")
    sampling.add_argument("--tail-steps", type=int, default=1, help="timed, after one that is not")
    sampling.add_argument("--trl-completions", type=int, default=16, help="of a micro-batch of GRPOTrainer")
    sampling.add_argument("--trl-tail-completions", type=int, default=4, help="the same, with long tails")
    sampling.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of our recipe, such as rollout.sleep=false"
    )  # fmt: skip
