"""Operations whose result for a row does not depend on the rows beside it, in plain torch: exact mode on a CPU.

What torch's CPU kernels do depends on the number of rows (a matmul of one row is another routine than one of many) and on
where an element lies (the last elements of a tensor are not computed with vector instructions). So matmuls here always
have the same number of rows, the last of them padding, and what is left to scalar instructions elsewhere is composed of
operations that are not.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

_ROWS = 32  # of every matmul
_QUERIES = 8  # of a tile of attention
BLOCK = 16  # keys that attention reads at a time, from position 0 on


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias for [rows, k] and [n, k]."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    weight = weight.contiguous()  # one kernel for all: a transposed one is another
    for at in range(0, len(x), _ROWS):
        part = x[at : at + _ROWS]
        filled = pad(part, (0, 0, 0, _ROWS - len(part))) if len(part) < _ROWS else part
        out[at : at + _ROWS] = nn.functional.linear(filled, weight, bias)[: len(part)]
    return out


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), rounded once."""
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """x / (1 + exp(-x)), rounded once."""
    states = x.float()
    return (states / (1.0 + torch.exp(-states))).to(x.dtype)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """torch's gelu; the approximate one from its formula."""
    if approximate != "tanh":
        return nn.functional.gelu(x, approximate=approximate)
    states = x.float()
    inner = 0.7978845608028654 * (states + 0.044715 * states * states * states)
    return (0.5 * states * (1.0 + torch.tanh(inner))).to(x.dtype)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x), computed in float32."""
    return torch.rsqrt(x.float()).to(x.dtype)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each row's token, log of the row's sum of exponentials) in float32, for [rows, vocabulary]."""
    scaled = logits.float() / temperature
    chosen = scaled.gather(1, tokens[:, None]).squeeze(1)
    logps = torch.log_softmax(scaled, dim=-1).gather(1, tokens[:, None]).squeeze(1)
    return logps, chosen - logps


def attention(
    query: torch.Tensor,  # [tokens, heads, width]
    key: torch.Tensor,  # [anything, key heads, width]
    value: torch.Tensor,
    places: torch.Tensor,  # [sequences, a multiple of the block]: where the key of each position is
    tiles: list[tuple[int, int]],  # (sequence, first of its queries)
    sequences: list[tuple[int, int, int]],  # (first query's row, queries, first query's position)
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's queries to its keys, [tokens, heads, value width].

    Every matmul is of one tile of queries and one block of keys; blocks are added up from position 0 on.
    """
    num_tokens, heads, width = query.shape
    key_heads, value_width = key.shape[1], value.shape[2]
    group = heads // key_heads
    of, row, position, here = _rows(tiles, sequences)
    num_blocks = position.masked_fill(~here, -1).amax(1) // BLOCK + 1
    order = torch.argsort(
        num_blocks, descending=True, stable=True
    )  # the tiles of a block are then the first ones
    of, row, position, here, num_blocks = (each[order] for each in (of, row, position, here, num_blocks))
    states = query[row].view(len(row), _QUERIES, key_heads, group, width).permute(0, 2, 3, 1, 4)
    states = states.reshape(len(row) * key_heads, group * _QUERIES, width).float()
    largest = torch.full((*states.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(largest)
    out = torch.zeros(*states.shape[:2], value_width)
    for block in range(int(num_blocks.max())):
        num = int((num_blocks > block).sum())
        at = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        held = places[of[:num, None], at[None, :]]
        keys, values = (each[held].transpose(1, 2).flatten(0, 1).float() for each in (key, value))
        seen = at[None, None, :] <= position[:num, :, None]
        if window is not None:
            seen &= at[None, None, :] > position[:num, :, None] - window
        seen = seen[:, None, None].expand(-1, key_heads, group, -1, -1).reshape(num * key_heads, -1, BLOCK)
        mine = slice(0, num * key_heads)
        scores = torch.bmm(states[mine], keys.transpose(1, 2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, float("-inf"))
        new = torch.maximum(largest[mine], scores.amax(-1, keepdim=True))
        base = new.masked_fill(new == float("-inf"), 0.0)  # before the window: nothing was seen yet
        weights, shrink = torch.exp(scores - base), torch.exp(largest[mine] - base)
        total[mine] = total[mine] * shrink + weights.sum(-1, keepdim=True)
        out[mine] = out[mine] * shrink + torch.bmm(weights, values)
        largest[mine] = new
    if sinks is not None:
        column = sinks.float().view(1, key_heads, group, 1).expand(len(row), -1, -1, _QUERIES)
        total += torch.exp(column.reshape(total.shape) - largest)
    out = (out / total).view(len(row), key_heads, group, _QUERIES, value_width).permute(0, 3, 1, 2, 4)
    result = torch.zeros(num_tokens, heads, value_width, dtype=query.dtype)
    result[row[here]] = out.reshape(len(row), _QUERIES, heads, value_width)[here].to(query.dtype)
    return result


def padded(length: int) -> int:
    """A number of keys that is a multiple of the block."""
    return -(-length // BLOCK) * BLOCK


def tiles_of(counts: list[int]) -> list[tuple[int, int]]:
    """(sequence, first query) of each tile, for sequences with so many queries."""
    return [(number, at) for number, count in enumerate(counts) for at in range(0, count, _QUERIES)]


def _rows(
    tiles: list[tuple[int, int]], sequences: list[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each tile its sequence [tiles]; of each of its queries the row, the position, and whether there is one."""
    of, first = torch.tensor(tiles).unbind(1)
    start, count, position = torch.tensor(sequences).unbind(1)
    number = first[:, None] + torch.arange(_QUERIES)
    here = number < count[of, None]
    number = torch.where(here, number, 0)
    return of, start[of, None] + number, position[of, None] + number, here
