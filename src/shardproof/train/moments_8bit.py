"""A step of AdamW whose two running means are kept in 8 bits, with one float32 scale for each block of 256 elements.

An element is an index into a table of 256 numbers, dense near 0: exponent and fraction share the bits (Dettmers et
al., "8-bit Optimizers via Block-wise Quantization"). The first mean's table has both signs, the second's has none. A step
computes with float32 means and changes the weights by them; only what is kept for the next step is rounded, to the nearest.

Two things differ from bitsandbytes. Blocks are blocks of the whole tensor in its flat order, however it is sharded. And a
second mean above 0 is never rounded to 0: where the next gradients are 0, a first mean over nothing but eps would be
a huge step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from shardproof.shard.optimizer_state import BLOCK
from shardproof.train.moments import Factors

_BLOCKS_AT_A_TIME = 1024


@cache
def tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(the 256 numbers, the 255 borders between them: what lies above a border belongs to the next number)."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        # One bit of the eight says where the exponent ends, one is the sign; the rest divides [0.1, 1] of its decade.
        parts = 2 ** (exponent + (0 if signed else 1))
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float32)
        found = (10.0 ** (exponent - 6) * ((edges[1:] + edges[:-1]) / 2.0)).tolist()
        numbers += found + ([-each for each in found] if signed else [])
    code = torch.tensor(sorted(numbers), dtype=torch.float32)
    assert len(code) == 256
    return code.to(device), ((code[1:] + code[:-1]) / 2).to(device)


@dataclass(frozen=True)
class Part8:
    """What a step changes of one parameter: flat tensors of this rank's elements, of which the first is number `start`."""

    param: torch.Tensor
    grad: torch.Tensor
    mean: torch.Tensor  # uint8
    square: torch.Tensor  # uint8
    mean_scale: torch.Tensor  # of each block of which this rank holds something
    square_scale: torch.Tensor
    start: int
    factors: Factors

    @property
    def before(self) -> int:
        """Elements of the first block that lie on ranks before this one."""
        return self.start % BLOCK

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.param, self.grad, self.mean, self.square, self.mean_scale, self.square_scale


Given = dict[
    int, tuple[torch.Tensor, torch.Tensor]
]  # scales of blocks that ranks share, by their place on this rank


def plain_step(part: Part8, given: Given) -> None:
    """A step in plain torch, some blocks at a time."""
    for low, high in _ranges(len(part.mean_scale)):
        place, mean, square = new_means(part, low, high)
        weights = part.param[place]
        factors = part.factors
        changed = weights.float() * factors.decay
        changed -= mean * factors.rate / (square.sqrt() * factors.root + factors.eps)
        weights.copy_(changed)
        front = part.before if low == 0 else 0
        kinds = ((mean, part.mean, part.mean_scale, True), (square, part.square, part.square_scale, False))
        for number, (values, kept, scales, signed) in enumerate(kinds):
            rows = _in_blocks(values, front, high - low)
            found = rows.abs().amax(1)
            for at, maxima in given.items():
                if low <= at < high:
                    found[at - low] = maxima[number]
            scales[low:high] = found
            rows /= torch.where(found > 0, found, 1.0)[:, None]
            kept[place] = codes_of(rows, signed).view(-1)[front : front + len(values)]


def new_means(part: Part8, low: int, high: int) -> tuple[slice, torch.Tensor, torch.Tensor]:
    """(which elements blocks [low, high) have on this rank, their new first and second means in float32)."""
    place = slice(max(low * BLOCK - part.before, 0), min(high * BLOCK - part.before, len(part.param)))
    front = part.before if low == 0 else 0
    first, second = part.factors.betas
    grad = part.grad[place].float()
    mean = values_of(part.mean[place], part.mean_scale[low:high], front, True)
    mean += (grad - mean) * (1 - first)
    square = values_of(part.square[place], part.square_scale[low:high], front, False)
    square *= second
    square += grad * grad * (1 - second)
    return place, mean, square


def maxima(part: Part8, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitudes of a block's new means among this rank's elements of it."""
    _, mean, square = new_means(part, block, block + 1)
    return mean.abs().amax(), square.amax()


def num_blocks(start: int, stop: int) -> int:
    """Of how many blocks a range of elements holds something."""
    return -(-stop // BLOCK) - start // BLOCK if stop > start else 0


def _ranges(count: int) -> Iterator[tuple[int, int]]:
    for low in range(0, count, _BLOCKS_AT_A_TIME):
        yield low, min(low + _BLOCKS_AT_A_TIME, count)


def _in_blocks(values: torch.Tensor, front: int, count: int) -> torch.Tensor:
    """Values as rows of blocks, with zeros where other ranks hold elements, or none are."""
    if front == 0 and len(values) == count * BLOCK:
        return values.clone().view(count, BLOCK)
    rows = values.new_zeros(count * BLOCK)
    rows[front : front + len(values)] = values
    return rows.view(count, BLOCK)


def values_of(codes: torch.Tensor, scales: torch.Tensor, front: int, signed: bool) -> torch.Tensor:
    code, _ = tables(signed, codes.device)
    rows = _in_blocks(code.index_select(0, codes.int()), front, len(scales)) * scales[:, None]
    return rows.view(-1)[front : front + len(codes)]


def codes_of(rows: torch.Tensor, signed: bool) -> torch.Tensor:
    _, borders = tables(signed, rows.device)
    found = torch.bucketize(rows, borders, out_int32=True)
    if not signed:
        found = torch.maximum(found, (rows > 0).int())
    return found.to(torch.uint8)


def float_step(part: Part8) -> None:
    """A step of a small tensor, whose means are kept in float32."""
    factors, (first, second) = part.factors, part.factors.betas
    grad = part.grad.float()
    part.mean.add_((grad - part.mean) * (1 - first))
    part.square.mul_(second).add_(grad * grad * (1 - second))
    changed = part.param.float() * factors.decay
    changed -= part.mean * factors.rate / (part.square.sqrt() * factors.root + factors.eps)
    part.param.copy_(changed)


def plain_steps(parts: Sequence[Part8], given: Sequence[Given]) -> None:
    for part, known in zip(parts, given, strict=True):
        plain_step(part, known)
