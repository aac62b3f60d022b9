"""What benchmarks/gpu.py measures of shardproof with long sequences and with large models: a process for each case."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shardproof as sp
from benchmarks.gpu_ours import OURS, join_group
from benchmarks.gpu_runs import run_steps
from benchmarks.gpu_timing import Save, peak_bytes, seconds_of
from benchmarks.gpu_workload import LONG, LR, MEMORY

_VOCABULARY = 151936
_LORA_RANK = 16
_LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SHRINK = 256  # of lengths, with --tiny


@dataclass(frozen=True)
class Shape:
    """A model of the Qwen3 family with heads of 128, of the size of the one that it is named after."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    tied: bool = True

    @property
    def parameters(self) -> int:
        """Those that a token meets in a matmul, the head once."""
        attention = 2 * self.hidden * 128 * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + _VOCABULARY * self.hidden

    def config(self, tiny: bool) -> Any:
        from transformers import Qwen3Config

        sizes = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
        }
        sizes |= {"num_attention_heads": self.heads, "num_key_value_heads": self.key_heads, "head_dim": 128}
        sizes |= {"vocab_size": _VOCABULARY, "max_position_embeddings": 131072}
        if tiny:
            sizes |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
        return Qwen3Config(tie_word_embeddings=self.tied, **sizes)


SMALL = Shape(layers=28, hidden=1024, inner=3072, heads=16, key_heads=8)  # Qwen3-0.6B
MIDDLE = Shape(layers=36, hidden=2560, inner=9728, heads=32, key_heads=8)  # Qwen3-4B
BASE = Shape(layers=28, hidden=3584, inner=18944, heads=28, key_heads=4, tied=False)  # Qwen2.5-7B
LARGE = Shape(layers=36, hidden=4096, inner=12288, heads=32, key_heads=8, tied=False)  # Qwen3-8B


@dataclass(frozen=True)
class LongCase:
    """An update of some sequences of one length; `published_mfu` is prime-rl's for the shape on one H100."""

    shape: Shape
    length: int
    sequences: int
    micro_batch_tokens: int
    published_mfu: float
    lora: bool = False
    name: str = ""

    def measure(self, options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
        """A step of SFT; and of RL, which scores the sequences first and has the policy's loss."""
        join_group()
        length, micro = self.length, self.micro_batch_tokens
        if options.tiny:
            length, micro = length // _SHRINK, micro // _SHRINK
        config = self.shape.config(options.tiny)
        policy = sp.load(sp.RandomInit(config), device=options.device, progress=False, **self._settings())
        optimizer = sp.make_optimizer(policy, LR)
        draw = random.Random(0)
        rows = [[draw.randrange(1000) for _ in range(length)] for _ in range(self.sequences)]

        def sft() -> None:
            assert sp.train_step(policy, sp.Batch(rows), optimizer, micro_batch_tokens=micro).stepped

        def rl() -> None:
            old = sp.logprobs(policy, rows, micro_batch_tokens=micro)
            batch = sp.Batch(rows, advantages=[0.5] * len(rows), old_logps=old)
            assert sp.train_step(policy, batch, optimizer, loss="policy", micro_batch_tokens=micro).stepped

        for kind, step in (("SFT", sft), ("RL", rl)):
            step()  # compiles, and finds out how much memory there is
            seconds = seconds_of(step, 1, options.device)
            row = {"step_s": seconds, "tokens_per_s": self.sequences * length / seconds}
            row |= {"peak_bytes": peak_bytes(options.device), **self._operations(policy)}
            save(LONG, OURS, row, f"{self.name}, {kind}")

    def _settings(self) -> dict[str, Any]:
        """Keywords of `sp.load`."""
        settings: dict[str, Any] = {"checkpoint_activations": "auto"}
        if self.lora:
            from peft import LoraConfig

            settings["lora"] = LoraConfig(
                r=_LORA_RANK, lora_alpha=2 * _LORA_RANK, target_modules=_LORA_TARGETS
            )
            settings["param_dtype"] = torch.bfloat16
        return settings

    def _operations(self, policy: Any) -> dict[str, float]:
        """Of an update: with the half of attention that is computed, and as prime-rl counts, with all of it.

        With LoRA, the frozen weights have no gradient: 4 operations a parameter instead of 6.
        """
        shape, tokens = self.shape, self.sequences * self.length
        adapters = sum(param.numel() for name, param in policy.named_parameters() if "lora_" in name)
        base = 4 * shape.parameters + 6 * adapters if self.lora else 6 * shape.parameters
        causal = 6 * shape.layers * shape.heads * 128 * self.length
        whole = 12 * shape.layers * shape.hidden * self.length
        return {
            "operations": tokens * (base + causal),
            "published_operations": tokens * (base + whole),
            "published_mfu": self.published_mfu,
        }


LONG_CASES = {
    case.name: case
    for case in (
        LongCase(SMALL, 16384, 4, 32768, 0.111, name="0.6B at 16k"),
        LongCase(SMALL, 65536, 1, 65536, 0.268, name="0.6B at 64k"),
        LongCase(MIDDLE, 16384, 2, 16384, 0.217, lora=True, name="4B LoRA at 16k"),
    )
}


@dataclass(frozen=True)
class LargeCase:
    """GRPO steps of a large model on one GPU: what memory they need."""

    name: str
    shape: Shape
    settings: dict[str, dict[str, Any]]

    def measure(self, options: argparse.Namespace, parts: Sequence[str], save: Save) -> None:
        options = argparse.Namespace(
            **{**vars(options), "prompts": 2 if options.tiny else 8, "grpo_steps": 1}
        )
        config = self.shape.config(options.tiny)
        save(MEMORY, OURS, run_steps(options, self.settings, config=config), self.name)


_AUTO: dict[str, dict[str, Any]] = {
    "model": {"checkpoint_activations": "auto"},
    "train": {"micro_batch_tokens": 8192},
}
LARGE_CASES = {
    case.name: case
    for case in (
        LargeCase(
            "7B, all weights, AdamW with 16-bit moments",
            BASE,
            {**_AUTO, "optimizer": {"moments": "bfloat16"}},
        ),
        LargeCase(
            "8B with LoRA",
            LARGE,
            {**_AUTO, "model": {**_AUTO["model"], "lora": {"r": _LORA_RANK}, "param_dtype": "bfloat16"}},
        ),
        LargeCase(
            "8B with QLoRA",
            LARGE,
            {
                **_AUTO,
                "model": {
                    **_AUTO["model"],
                    "lora": {"r": _LORA_RANK, "base": "nf4"},
                    "param_dtype": "bfloat16",
                },
            },
        ),
        LargeCase("7B, all weights, 8-bit AdamW", BASE, {**_AUTO, "optimizer": {"name": "adamw_8bit"}}),
    )
}
