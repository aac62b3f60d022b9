"""Exact mode's kernels against plain torch, as a program for Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from shardproof.model import exact_cpu, hf_private
from shardproof.model.exact import make_exact
from shardproof.model.exact_attention import PACKED
from shardproof.model.packing import Packing
from tests.models import make_model

CPU = torch.device("cpu")


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def linear() -> float:
    """With tiles that are not full, and an inner dimension that is no multiple of the tile's."""
    from shardproof.model import exact_matmul

    x, weight, bias = torch.randn(37, 300), torch.randn(130, 300) / 17, torch.randn(130)
    tiles = (exact_matmul.Tile(16, 64, 32, 4, 2), exact_matmul.Tile(32, 64, 64, 4, 2))
    expected = x.double() @ weight.double().t() + bias.double()
    return max(gap(exact_matmul.linear(x, weight, bias, tile), expected) for tile in tiles)


def experts() -> float:
    from shardproof.model import exact_kernels

    hidden, gate_up, down = torch.randn(20, 40), torch.randn(8, 48, 40) / 6, torch.randn(8, 40, 24) / 5
    chosen = torch.stack([torch.randperm(8)[:2] for _ in range(20)])
    chosen[:15] = torch.tensor([3, 5])  # more than a tile of one expert, and experts without a token
    scores = torch.rand(20, 2)
    gated, up = torch.einsum("tk,tvnk->tvn", hidden.double(), gate_up.double()[chosen]).chunk(2, -1)
    inner = torch.nn.functional.silu(gated) * up * scores.double()[..., None]
    expected = torch.einsum("tvk,tvnk->tn", inner, down.double()[chosen])
    return gap(exact_kernels.experts(hidden, gate_up, down, chosen, scores), expected)


def attention(**extras: Any) -> float:
    """New tokens of two sequences behind others, in blocks that lie anywhere; the rest of the cache is NaN."""
    from shardproof.model import exact_kernels

    heads, key_heads, width = 6, 2, 24
    sequences = [(0, 30, 40), (30, 5, 0)]
    tables = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    cache = [torch.full((5, key_heads, 64, width), float("nan")) for _ in range(2)]
    for row, (_, count, position) in enumerate(sequences):
        for at in range(position + count):
            for held in cache:
                held[tables[row, at // 64], :, at % 64] = torch.randn(key_heads, width)
    query = torch.randn(35, heads, width)
    tiles = [(n, at) for n, (_, count, _) in enumerate(sequences) for at in range(0, 3 * count, 64)]
    of, first = torch.tensor(tiles, dtype=torch.int32).t().contiguous()
    rows = tuple(torch.tensor(sequences, dtype=torch.int32).t().contiguous())
    found, _ = exact_kernels.attention(query, *cache, tables, (of, first), rows, 0.3, **extras)  # type: ignore[arg-type]
    keys, values = (each.transpose(1, 2).flatten(0, 1).nan_to_num() for each in cache)
    places = (tables.long()[:, :, None] * 64 + torch.arange(64)).flatten(1)
    spans = exact_cpu.tiles_of([count for _, count, _ in sequences])
    return gap(found, exact_cpu.attention(query, keys, values, places, spans, sequences, 0.3, **extras))


def logprobs() -> float:
    from shardproof.model import exact_kernels

    logits, tokens = 4 * torch.randn(5, 20011), torch.randint(0, 20011, (5,))
    expected = torch.log_softmax(logits.double() / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    return gap(exact_kernels.token_logprobs(logits, tokens, 0.7)[0], expected)


def blocks(family: str) -> float:
    """Plain blocks with kernels between their matmuls: logits, and gradients relative to the largest of each parameter."""
    from shardproof.model.exact_blocks import use_exact_blocks

    lengths, found = [5, 9], []
    ids, positions = torch.randint(3, 100, (1, 14)), torch.cat([torch.arange(n) for n in lengths])[None]
    for fused in (False, True):
        model = make_model(family)
        make_exact(model, CPU)
        if fused:
            use_exact_blocks(model)
        with hf_private.attention_implementation(model, PACKED):
            given = {"input_ids": ids, "position_ids": positions, "packing": Packing(lengths, CPU)}
            logits = model(**given, use_cache=False).logits
            logits.pow(2).sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        found.append((logits.detach(), grads))
    (plain, grads), (logits, others) = found
    return max([gap(logits, plain), *(gap(others[n], grads[n]) / float(grads[n].abs().max()) for n in grads)])


CASES: dict[str, Callable[[], float]] = {
    "linear": linear,
    "experts": experts,
    "attention": attention,
    "attention with a window": lambda: attention(window=16),
    "attention with a soft cap": lambda: attention(softcap=2.0),
    "attention with sinks": lambda: attention(sinks=torch.linspace(-1, 2, 6)),
    "log-probs": logprobs,
    "qwen3": lambda: blocks("qwen3"),
    "qwen2": lambda: blocks("qwen2"),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({name: case() for name, case in CASES.items()}))
