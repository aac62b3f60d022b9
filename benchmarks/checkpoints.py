"""Checkpoints to measure with, in the layout of the hub, written once and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

_BYTES_A_FILE = 300 * 10**6
_FINISHED = "finished"
_STD = 0.02

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def dense_config(num_layers: int = 28, vocab_size: int = 151936) -> Qwen3Config:
    """The shape of Qwen3-0.6B: 1.2 GB of bfloat16, embeddings tied."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        num_hidden_layers=num_layers,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
    )


def moe_config(num_layers: int = 48, num_experts: int = 128) -> Qwen3MoeConfig:
    """The layers and experts of Qwen3-30B-A3B, each of them small: 18,867 tensors, 315 MB of bfloat16."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=min(8, num_experts),
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1024,
        tie_word_embeddings=False,
    )


CONFIGS = {"dense": dense_config, "moe": moe_config}
# The same families with next to nothing in them, for what a process does only once.
TINY_CONFIGS = {
    "dense": lambda: dense_config(num_layers=2, vocab_size=256),
    "moe": lambda: moe_config(num_layers=2, num_experts=4),
}


def make_checkpoint(folder: Path, config: PretrainedConfig) -> Path:
    """Fill `folder` with a random checkpoint of `config`, unless an earlier run has; returns it."""
    mark = folder / _FINISHED
    described = config.to_json_string()
    if mark.exists() and mark.read_text() == described:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    config.save_pretrained(folder)
    files = _split(list(tensor_shapes(config)))
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for index, shapes in enumerate(files, start=1):
        file = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _random(shape, generator) for name, shape in shapes}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(_nbytes(shape) for shapes in files for _, shape in shapes)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))
    mark.write_text(described)
    return folder


def tensor_shapes(config: PretrainedConfig) -> Shapes:
    """The tensors of a Qwen3 or Qwen3-MoE checkpoint as the hub names them, in the hub's order."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield from _mlp_shapes(config, f"{prefix}.mlp")
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from _attention_shapes(config, f"{prefix}.self_attn")
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _mlp_shapes(config: PretrainedConfig, prefix: str) -> Shapes:
    if config.model_type == "qwen3_moe":
        blocks = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        inner = config.moe_intermediate_size
        yield f"{prefix}.gate.weight", (config.num_experts, config.hidden_size)
    else:
        blocks, inner = [prefix], config.intermediate_size
    for block in blocks:
        yield f"{block}.down_proj.weight", (config.hidden_size, inner)
        yield f"{block}.gate_proj.weight", (inner, config.hidden_size)
        yield f"{block}.up_proj.weight", (inner, config.hidden_size)


def _attention_shapes(config: PretrainedConfig, prefix: str) -> Shapes:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield f"{prefix}.k_norm.weight", (config.head_dim,)
    yield f"{prefix}.k_proj.weight", (keys, config.hidden_size)
    yield f"{prefix}.o_proj.weight", (config.hidden_size, queries)
    yield f"{prefix}.q_norm.weight", (config.head_dim,)
    yield f"{prefix}.q_proj.weight", (queries, config.hidden_size)
    yield f"{prefix}.v_proj.weight", (keys, config.hidden_size)


def _split(shapes: list[tuple[str, tuple[int, ...]]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors by file: each file about as long as `_BYTES_A_FILE`, and at least four of them."""
    limit = min(_BYTES_A_FILE, -(-sum(_nbytes(shape) for _, shape in shapes) // 4))
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in shapes:
        if files[-1] and size + _nbytes(shape) > limit:
            files.append([])
            size = 0
        files[-1].append((name, shape))
        size += _nbytes(shape)
    return files


def _nbytes(shape: tuple[int, ...]) -> int:
    return prod(shape) * torch.bfloat16.itemsize


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, _STD, generator=generator)


def warm_page_cache(folder: Path) -> None:
    """Read every weight file of a checkpoint once, so that nobody measures the disk."""
    buffer = bytearray(16 * 2**20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
