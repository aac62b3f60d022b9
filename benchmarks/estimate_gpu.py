"""Compare `estimate` with the memory that a GPU's allocator reports, for two shapes on one GPU.

python benchmarks/estimate_gpu.py [--shapes 0.6B 1.7B] [--tokens 8192]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing

import torch
from transformers import AutoConfig

import shardproof as sp
from shardproof.rl.sizing.model import Sharding, estimate, shape_of

SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
}  # fmt: skip
COMMON = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.tokens} tokens per micro-batch"
    )
    context = multiprocessing.get_context("spawn")
    for name, recomputed, compiled in itertools.product(arguments.shapes, (False, True), (True, False)):
        # A process each: what one case leaves in memory must not be counted in the next.
        case = context.Process(target=compare, args=(name, arguments.tokens, recomputed, compiled))
        case.start()
        case.join()


def compare(name: str, num_tokens: int, recomputed: bool, compiled: bool) -> None:
    """Print estimated and measured GiB of one shape."""
    config = AutoConfig.for_model("qwen3", **SHAPES[name], **COMMON)
    layout = Sharding(checkpoint_activations=recomputed, on_gpu=True)
    expected = estimate(shape_of(config, "policy"), layout, 1, num_tokens)
    policy = sp.load(
        sp.RandomInit(config), device="cuda", checkpoint_activations=recomputed, compile=compiled
    )
    held = torch.cuda.memory_allocated()
    optimizer = sp.make_optimizer(policy)
    length = num_tokens // 8
    batch = sp.Batch([[(7 * i + j) % 1000 for j in range(length)] for i in range(8)])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        sp.train_step(policy, batch, optimizer, micro_batch_tokens=num_tokens)
    peak = torch.cuda.max_memory_allocated()
    blocks = "compiled blocks" if compiled else "blocks as written"
    title = f"{name}, {'recomputed' if recomputed else 'kept'} activations, {blocks}"
    for part, estimated, measured in (
        ("weights", expected.parameters, held),
        ("step", expected.step_peak, peak),
    ):
        print(
            f"{title}: {part} {estimated / GIB:.2f} GiB estimated, {measured / GIB:.2f} measured, "
            f"ratio {estimated / measured:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
