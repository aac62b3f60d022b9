"""What the contenders of benchmarks/gpu.py work on: model shapes, sequences, prompts, a tokenizer and a reward.

torch is not imported here: the processes that score completions import this module and nothing else of the benchmark.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

# The parts of the benchmark.
DECODE, DECODE_MOE, DENSE, MOE, LONG = "decode", "decode-moe", "dense", "moe", "long"
ROWS, TAILS, PROMPTS = "rows", "tails", "prompts"
RL, RL_TAILS, EXACT, FIRST, MEMORY = "grpo", "grpo-tails", "exact", "first", "memory"

LR = 1e-6
# Everything small enough for a CPU, to try the script out; its numbers mean nothing.
TINY = {
    "device": "cpu",
    "sequences": 8,
    "lengths": [8, 64],
    "micro_batch_tokens": 256,
    "grpo_micro_batch_tokens": 256,
    "repeats": 1,
    "rows": 4,
    "prompt": 8,
    "steps": 8,
    "prompts": 2,
    "group": 4,
    "trl_batch": 4,
    "trl_completions": 4,
    "row_counts": [1, 3],
    "row_steps": 6,
    "tails": [5],
    "tail_mean": 6,
    "tail_longest": 20,
    "prompt_cases": [(2, 8), (2, 40)],
    "tail_prompts": 2,
    "trl_tail_completions": 4,
    "kv_cache_gib": 0.01,
}
_NUM_PROMPTS = 64
_NUM_SFT_IDS = 1000  # ids of the sequences that updates train on


def dense_config(tiny: bool = False, num_layers: int = 28) -> Any:
    """The shape of Qwen3-1.7B, with fewer layers if asked."""
    from transformers import Qwen3Config

    if tiny:
        return Qwen3Config(
            num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, vocab_size=1000, tie_word_embeddings=True,
        )  # fmt: skip
    return Qwen3Config(
        num_hidden_layers=num_layers, hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip


def moe_config(tiny: bool) -> Any:
    """Eight layers of Qwen3-30B-A3B's shape."""
    from transformers import Qwen3MoeConfig

    if tiny:
        return Qwen3MoeConfig(
            num_hidden_layers=2, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts=8,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=1000,
            tie_word_embeddings=False,
        )  # fmt: skip
    return Qwen3MoeConfig(
        num_hidden_layers=8, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip


def served_folder(options: argparse.Namespace) -> str:
    """A folder from which vLLM can serve the dense model with random weights: a config and a tokenizer.

    Always the same one: vLLM looks up what it has compiled by it.
    """
    folder = Path(tempfile.gettempdir()) / f"gpu-benchmark-model{'-tiny' if options.tiny else ''}"
    config = dense_config(options.tiny)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    return str(folder)


def active_parameters(config: Any) -> int:
    """Parameters that a token meets in a matmul: all but the embedding, the head once, of experts the active ones."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = 0
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            total += parameter.numel() * config.num_experts_per_tok // config.num_experts
        elif "embed_tokens" not in name or config.tie_word_embeddings:
            total += parameter.numel()
    return total


def sequences(options: argparse.Namespace) -> list[list[int]]:
    """What an update trains on."""
    draw = random.Random(0)
    lengths = [draw.randint(*options.lengths) for _ in range(options.sequences)]
    return [[draw.randrange(_NUM_SFT_IDS) for _ in range(length)] for length in lengths]


def decode_prompts(options: argparse.Namespace) -> list[list[int]]:
    """What decoding alone begins from, one per row."""
    return [list(range(7 + row, 7 + row + options.prompt)) for row in range(options.rows)]


def text_prompts(options: argparse.Namespace) -> list[str]:
    """Prompts of the RL step, each of options.prompt tokens of `make_tokenizer`."""
    draw = random.Random(0)
    vocabulary = dense_config(options.tiny).vocab_size
    return [
        " ".join(f"t{draw.randrange(1, vocabulary)}" for _ in range(options.prompt))
        for _ in range(_NUM_PROMPTS)
    ]


def make_tokenizer(vocabulary: int) -> Any:
    """One word an id. The end of a sequence is an id that the model has no logit for, so that nothing stops early."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0} | {f"t{index}": index for index in range(1, vocabulary)} | {"<eos>": vocabulary}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def characters(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """A reward that differs between completions, so that every group has something to learn from."""
    return len(completion) / 1000


def with_tails(options: argparse.Namespace) -> argparse.Namespace:
    """The options of a step with long tails: as many prompts, and completions as long as the longest."""
    return argparse.Namespace(
        **{
            **vars(options),
            "prompts": options.tail_prompts,
            "steps": options.tail_longest,
            "grpo_steps": options.tail_steps,
            "trl_completions": options.trl_tail_completions,
            "grpo_micro_batch_tokens": options.micro_batch_tokens,
        }
    )
