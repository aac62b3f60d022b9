"""torch's flash attention over packed sequences in its two halves, which its public function does not give apart.

Operators of ours call them: inside an operator nothing can be differentiated.
"""

from __future__ import annotations

import torch


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of [tokens, heads, width] inside each sequence, and the scores' log-sum-exp [tokens, heads]."""
    places = (borders, borders, longest, longest)
    found = torch.ops.aten._flash_attention_forward(query, key, value, *places, 0.0, True, False, scale=scale)
    return found[0], found[1].t().contiguous()


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    states = (grad, query, key, value, out, stats.t().contiguous())
    draws = (query.new_empty(2, dtype=torch.uint64), query.new_empty(0))  # of dropout, which there is none of
    places = (borders, borders, longest, longest)
    return torch.ops.aten._flash_attention_backward(*states, *places, 0.0, True, *draws, scale=scale)
