"""Comparisons of the kernels of paged attention and of drawing with plain torch: interpreted here, and on a GPU there.

As a module it runs all of them and prints what is wrong with each, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardproof.rollout.decode import choose
from shardproof.rollout.engine import Sampling
from shardproof.rollout.paged.blocks import BLOCK
from shardproof.rollout.paged.model_step import attend_plain
from shardproof.rollout.paged.slots import Slots
from shardproof.rollout.shaping import sorted_threshold


@dataclass
class Case:
    """Rows at these positions, with random blocks; behind each row's last token its block holds no numbers."""

    positions: list[int]
    heads: int = 4
    key_heads: int = 2
    width: int = 64
    shares: int = 2
    has_norms: bool = True
    rotated: bool = False  # queries and keys come normed and rotated
    options: dict[str, Any] = field(default_factory=dict)
    has_sinks: bool = False
    steps: int = 1
    as_many: bool = False  # programs work as if there were many rows


CASES = {
    "two rows, one in its first block": Case([5, 130]),
    "first token, and the first of a block": Case([0, 64]),
    "a context in pieces, token by token": Case([318], steps=3),
    "eight queries per key": Case([300], heads=8, key_heads=1, width=128),
    "three queries per key": Case([127, 70], heads=6),
    "one query per key, no norms, one share": Case([63, 191], heads=2, shares=1, has_norms=False),
    "window": Case([30, 400], options={"window": 100}),
    "soft cap": Case([130], options={"softcap": 3.0}),
    "sinks, in pieces": Case([5, 300], has_sinks=True),
    "rotated, in pieces": Case([5, 300], rotated=True),
    "rotated, a width that is no power of two, window, sinks": Case(
        [5, 200], width=96, rotated=True, has_sinks=True, options={"window": 70}
    ),
    "as many rows": Case([1, 65, 190], heads=2, key_heads=1, as_many=True),
    "as many rows, in pieces, rotated": Case([5, 270], rotated=True, as_many=True),
}


def attention_problem(case: Case, dtype: torch.dtype, device: torch.device, tolerance: float) -> str | None:
    """What is wrong with the kernels' attention in a case; None if nothing is."""
    from shardproof.rollout.paged import attention_kernels as kernels

    tuning = kernels.TUNING
    if case.as_many:
        kernels.TUNING = (tuning[-1]._replace(chunk=64),)
    try:
        return _attention_problem(case, dtype, device, tolerance)
    finally:
        kernels.TUNING = tuning


def _attention_problem(case: Case, dtype: torch.dtype, device: torch.device, tolerance: float) -> str | None:
    from shardproof.rollout.paged.attention_kernels import attend, attend_rotated

    torch.manual_seed(0)
    last = [position + case.steps for position in case.positions]
    tables, num_blocks = _tables(last)
    cache = [torch.randn(num_blocks, case.key_heads, BLOCK, case.width).to(dtype) for _ in range(2)]
    for row, position in enumerate(case.positions):
        for states in cache:
            states[tables[row, position // BLOCK], :, position % BLOCK :] = float("nan")
    found_cache, cache = [x.to(device) for x in cache], [x.double().to(device) for x in cache]
    tables, positions = tables.to(device), torch.tensor(case.positions, device=device)[:, None]
    angles = torch.outer(torch.arange(max(last) + 1.0), 100.0 ** -torch.linspace(0, 1, case.width // 2))
    rotary = (
        torch.cat([angles.cos()] * 2, 1).to(device, dtype),
        torch.cat([angles.sin()] * 2, 1).to(device, dtype),
    )
    norms = (torch.rand(case.width).to(device, dtype), torch.rand(case.width).to(device, dtype), 1e-6)
    options: dict[str, Any] = dict(case.options)
    if case.has_sinks:
        options["sinks"] = torch.randn(case.heads).to(device, dtype)
    for _ in range(case.steps):
        size = (case.heads + 2 * case.key_heads) * case.width
        sums = torch.randn(case.shares, len(case.positions), size).to(device)
        states = _heads(sums, rotary, norms if case.has_norms else None, positions, case)
        where = (tables, positions, case.width**-0.5)
        expected = attend_plain(*states, tuple(cache), *where, **options)
        if case.rotated:
            new = tuple(x.to(dtype) for x in states)
            found = attend_rotated(*new, tuple(found_cache), *where, **options)
        else:
            given = norms if case.has_norms else None
            found = attend(sums, rotary, given, tuple(found_cache), *where, **options)
        for name, one, other in zip(
            ("attention", "keys", "values"), (found, *found_cache), (expected, *cache), strict=True
        ):
            if not torch.equal(one.isnan(), other.isnan()):
                return f"{name}: not all was written, or too much"
            distance = float((one.double() - other).nan_to_num().norm() / other.nan_to_num().norm())
            if not distance < tolerance:
                return f"{name}: off by {distance:.1e}"
        positions += 1
    return None


def _tables(last: list[int]) -> tuple[torch.Tensor, int]:
    """Blocks for rows up to their last positions, at random, and how many blocks there are."""
    counts = [position // BLOCK + 1 for position in last]
    order = iter((torch.randperm(sum(counts) + 2) + 1).tolist())
    tables = torch.zeros(len(last), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)])
    return tables[:, :-1], sum(counts) + 3


def _heads(sums, rotary, norms, positions, case: Case) -> list[torch.Tensor]:
    """Queries, keys and values of new tokens, in float64."""
    states = sums.double().sum(0).view(sums.shape[1], -1, case.width)
    query, key, value = states.split([case.heads, case.key_heads, case.key_heads], 1)
    if norms is not None:
        query, key = (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norms[2]) * weight.double()
            for x, weight in ((query, norms[0]), (key, norms[1]))
        )
    cos, sin = (table.double()[positions[:, 0]][:, None] for table in rotary)
    half = case.width // 2
    query, key = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (query, key))
    return [query, key, value]


def draw_problem(
    rows: int,
    size: int,
    temperature: float,
    dtype: torch.dtype,
    device: torch.device,
    ruled_out: bool = False,
) -> str | None:
    """What is wrong with the kernels that draw: rows that end by a stop token or their limit, and one that had ended."""
    from shardproof.rollout.paged.draw_kernels import record

    torch.manual_seed(1)
    slots = Slots.make(rows + 1, 2, 4, 2, device)
    slots.outputs[:rows] = torch.randperm(rows, device=device)
    slots.uniform.copy_(torch.rand(slots.uniform.shape, dtype=torch.float64))
    slots.limits[:rows] = torch.tensor([2, 4], device=device).repeat(rows)[:rows]
    slots.done[0] = True
    slots.positions.copy_(torch.arange(rows + 1, device=device)[:, None] * 5)
    part = slots.part(0, rows)
    for step in range(4):
        logits = (3 * torch.randn(rows, size)).to(device, dtype)
        if ruled_out:
            logits[:, size // 3 :] = logits[:, :2] = float("-inf")
        tokens, logprobs = choose(
            logits, slots.uniform[part.outputs, part.steps.clamp(max=3)], Sampling(4, temperature=temperature)
        )
        if step == 0:
            slots.stops[0] = tokens[-1]
        expected = _recorded(slots, rows, tokens, logprobs)
        record(part, temperature, logits)
        for name, wanted in expected.items():
            if not torch.allclose(getattr(slots, name).double(), wanted.double(), atol=1e-4):
                return (
                    f"{name} after step {step}: {getattr(slots, name).tolist()} instead of {wanted.tolist()}"
                )
    return None


def _recorded(
    slots: Slots, rows: int, tokens: torch.Tensor, logprobs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The slots' memory after drawn tokens have been noted."""
    names = ("ids", "positions", "steps", "tokens", "logprobs", "done", "outputs", "limits")
    after = {name: getattr(slots, name).clone() for name in names}
    for row in range(rows):
        line, step = int(slots.outputs[row]), int(slots.steps[row])
        if slots.done[line]:
            continue
        after["tokens"][line, step], after["logprobs"][line, step] = tokens[row], logprobs[row]
        after["ids"][row], after["positions"][row], after["steps"][row] = (
            tokens[row],
            slots.positions[row] + 1,
            step + 1,
        )
        after["done"][line] = bool(tokens[row] in slots.stops) or step + 1 == int(slots.limits[line])
    return after


def threshold_problem(size: int, temperature: float, device: torch.device) -> str | None:
    """What is wrong with the lowest logits that top_k and top_p keep: equal ones, ruled out ones, a row that keeps all."""
    from shardproof.rollout.paged.truncation_kernels import threshold

    torch.manual_seed(2)
    scores = 3 * torch.randn(5, size)
    scores[1] = scores[1].bfloat16().float() - 40
    scores[4] = scores[4].round()  # many are equal at the border
    scores[1:3, size // 2 :] = float("-inf")
    top_k = torch.tensor([size // 3, 7, 2**30, 2**30, 9])
    top_p = torch.tensor([2.0, 0.6, 0.95, 2.0, 0.7])
    given = (scores.to(device), top_k.to(device), top_p.to(device), temperature)
    found, wanted = threshold(*given).cpu(), sorted_threshold(scores, top_k, top_p, temperature)
    kept = (scores >= wanted) & scores.isfinite()
    if not torch.equal((scores >= found) & scores.isfinite(), kept):
        return f"{found[:, 0].tolist()} instead of {wanted[:, 0].tolist()}"
    return None


DRAWS: dict[str, Callable[[torch.dtype, torch.device], str | None]] = {
    "a small vocabulary": lambda *on: draw_problem(3, 20, 1.0, *on),
    "several chunks of a vocabulary": lambda *on: draw_problem(4, 9001, 0.7, *on),
    "most tokens ruled out": lambda *on: draw_problem(2, 9001, 1.3, *on, ruled_out=True),
    "thresholds": lambda dtype, device: threshold_problem(5001, 1.3, device),
}


if __name__ == "__main__":
    cpu = torch.device("cpu")
    attention = {name: attention_problem(case, torch.float32, cpu, 1e-5) for name, case in CASES.items()}
    half = attention_problem(CASES["rotated, in pieces"], torch.float16, cpu, 2e-3)
    draws = {name: draw(torch.float32, cpu) for name, draw in DRAWS.items()}
    print(json.dumps({**attention, **draws, "float16": half}))
