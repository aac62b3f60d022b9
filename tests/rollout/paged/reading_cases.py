"""Kernels that read prompts, against float64, in Triton's interpreter. Prints how far each is off, as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from torch.nn.functional import silu

PAGE = 64
CASES = {
    "full": {"heads": 4, "key_heads": 2, "readings": [(0, 5), (0, 130), (70, 3), (1, 1)], "norm": True},
    "window": {"heads": 3, "key_heads": 1, "readings": [(0, 90), (100, 65)], "window": 37},
    "softcap": {"heads": 2, "key_heads": 1, "readings": [(0, 70), (100, 9)], "softcap": 5.0},
    "sinks": {"heads": 2, "key_heads": 2, "readings": [(0, 70), (100, 9)], "sinks": True, "window": 16},
}
OTHERS = ("norm", "gate", "visits")


def _chunk(readings, width):
    """A chunk in blocks of no order, and how many blocks there are; each reading is (tokens before, new tokens)."""
    from shardproof.rollout.paged.blocks import blocks_for
    from shardproof.rollout.paged.reading_chunks import Chunk, Reading, pack

    sizes = [blocks_for(start + num) for start, num in readings]
    numbers = list(range(sum(sizes), 0, -1))
    given = [
        Reading([0] * num, start, [numbers.pop(len(numbers) // 2) for _ in range(size)])
        for (start, num), size in zip(readings, sizes, strict=True)
    ]
    (pieces,) = pack(given, sum(num for _, num in readings))
    return Chunk(pieces, torch.device("cpu"), width), sum(sizes) + 1


def _rotated(x, heads, weight, angles, positions):
    x = x.double().view(len(x), heads, -1)
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    cos, sin = (each[positions.long()].double()[:, None] for each in angles)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _off(found, truth):
    return float((found.double() - truth).abs().max())


def attention(case, width=32):
    """How far off queries, stored keys and values, and attention are."""
    from shardproof.rollout.paged import reading_kernels as kernels
    from shardproof.rollout.paged.reading_ways import attend_plainly

    torch.manual_seed(0)
    heads, key_heads, readings = case["heads"], case["key_heads"], case["readings"]
    chunk, num_blocks = _chunk(readings, width)
    cache = [torch.full((num_blocks, key_heads, PAGE, width), float("nan")) for _ in range(2)]
    for piece in chunk.pieces:  # what was read before
        for at in range(piece.reading.start):
            for each in cache:
                each[piece.reading.blocks[at // PAGE], :, at % PAGE] = torch.randn(key_heads, width)
    states = [torch.randn(len(chunk.ids), num * width) for num in (heads, key_heads, key_heads)]
    angles = [torch.rand(300, width) for _ in range(2)]
    weights = [torch.rand(width) + 0.5 for _ in range(2)] if case.get("norm") else [None, None]
    norms = kernels.Norms(*weights, 1e-6) if case.get("norm") else None
    query, key = (
        _rotated(x, num, weight, angles, chunk.positions)
        for x, num, weight in zip(states, (heads, key_heads), weights, strict=False)
    )
    found = kernels.rotate_store([x.clone() for x in states], angles, norms, cache, chunk)
    block, offset = chunk.places.long() // PAGE, chunk.places.long() % PAGE
    errors = [_off(found.view_as(query), query), _off(cache[0][block, :, offset], key)]
    errors.append(_off(cache[1][block, :, offset], states[2].double().view_as(key)))
    for piece in chunk.pieces:
        last = cache[1][piece.reading.blocks[(piece.end - 1) // PAGE]]
        errors.append(float(last[:, (piece.end - 1) % PAGE + 1 :].abs().sum()))
    extras = {"window": case.get("window"), "softcap": case.get("softcap")}
    extras["sinks"] = torch.randn(heads) if case.get("sinks") else None
    out = kernels.attend(found, cache, chunk, width**-0.5, **extras)
    for row, (piece, (first, stop)) in enumerate(zip(chunk.pieces, chunk.spans, strict=True)):
        table = chunk.tables[row].long()
        held = [each[table].transpose(0, 1).flatten(1, 2)[:, : piece.end].double() for each in cache]
        new = found[first:stop].double().view(stop - first, heads, width).transpose(0, 1)
        truth = attend_plainly(new, *held, width**-0.5, **extras)
        errors.append(_off(out[first:stop].view(stop - first, heads, width).transpose(0, 1), truth))
    return max(errors)


def norm():
    from shardproof.rollout.paged import reading_kernels as kernels

    x, new, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    states = x.clone()
    found = kernels.add_norm(states, new, weight, 1e-6)
    total = x.double() + new.double()
    truth = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    return max(_off(states, total), _off(found, truth))


def gate():
    from shardproof.rollout.paged import reading_kernels as kernels

    one, other = torch.randn(5, 96), torch.randn(5, 96)
    return _off(kernels.gate(one.clone(), other), silu(one.double()) * other.double())


def visits():
    from shardproof.rollout.paged import reading_kernels as kernels

    inner, scores, rows = torch.randn(12, 40), torch.rand(12), torch.randn(12, 24)
    one, other = inner.double().chunk(2, -1)
    error = _off(kernels.gate_visits(inner, scores), silu(one) * other * scores.double()[:, None])
    places = torch.randperm(12).view(4, 3)
    return max(error, _off(kernels.add_visits(rows, places), rows.double()[places].sum(1)))


if __name__ == "__main__":
    others = SimpleNamespace(norm=norm, gate=gate, visits=visits)
    found = {name: attention(case) for name, case in CASES.items()}
    print(json.dumps(found | {name: getattr(others, name)() for name in OTHERS}))
