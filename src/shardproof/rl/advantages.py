"""Advantages as pure functions of rewards. Shapes: P prompts, G completions each; C conversations, T tokens or turns.

Means and deviations are taken in float64, in which the sum of equal float32 rewards is exact: in float32 their mean is off
by its last bit, and a deviation of as little would make an advantage of that.
"""

from __future__ import annotations

import torch


def group_normalised(
    rewards_PG: torch.Tensor,
    counted_PG: torch.Tensor | None = None,
    eps: float = 1e-4,
    *,
    sample: bool = False,
) -> torch.Tensor:
    """GRPO: (r - mean) / std inside each prompt's group, over its counted completions; 0 for the others."""
    centred_PG = group_centred(rewards_PG.double(), counted_PG)
    return (centred_PG / (deviation(rewards_PG, counted_PG, sample=sample) + eps)).to(rewards_PG.dtype)


def deviation(
    rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None = None, *, sample: bool = False
) -> torch.Tensor:
    """(P, 1), float64: of each group's counted completions, as a population or as a sample; 0 if the latter has only one."""
    num_P1 = _num_counted(_mask(rewards_PG, counted_PG))
    squares_P1 = group_centred(rewards_PG.double(), counted_PG).square().sum(dim=1, keepdim=True)
    return (squares_P1 / ((num_P1 - 1).clamp(min=1) if sample else num_P1)).sqrt()


def group_centred(rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None = None) -> torch.Tensor:
    """Dr. GRPO: r - mean. Dividing by the deviation would favour prompts that are nearly solved or nearly lost."""
    exact_PG, counted_PG = rewards_PG.double(), _mask(rewards_PG, counted_PG)
    mean_P1 = torch.where(counted_PG, exact_PG, 0.0).sum(dim=1, keepdim=True) / _num_counted(counted_PG)
    return torch.where(counted_PG, exact_PG - mean_P1, 0.0).to(rewards_PG.dtype)


def leave_one_out(rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None = None) -> torch.Tensor:
    """RLOO: r minus the mean of the group's other completions; 0 where there is no other."""
    num_P1 = _num_counted(_mask(rewards_PG, counted_PG))
    centred_PG = group_centred(rewards_PG.double(), counted_PG)
    return (centred_PG * num_P1 / (num_P1 - 1).clamp(min=1)).to(rewards_PG.dtype)


def _mask(rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(rewards_PG, dtype=torch.bool) if counted_PG is None else counted_PG


def _num_counted(counted_PG: torch.Tensor) -> torch.Tensor:
    return counted_PG.sum(dim=1, keepdim=True).clamp(min=1)


def gae(
    rewards_CT: torch.Tensor, values_CT: torch.Tensor, discounts_CT: torch.Tensor, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) by generalised advantage estimation; nothing follows the last token.

    `discounts_CT` lie between each token and the next.
    """
    following_CT = torch.zeros_like(values_CT)
    following_CT[:, :-1] = values_CT[:, 1:]
    deltas_CT = rewards_CT + discounts_CT.to(rewards_CT.dtype) * following_CT - values_CT
    advantages_CT = discounted(deltas_CT, discounts_CT * lam)
    return advantages_CT, advantages_CT + values_CT


def discounted(rewards_CT: torch.Tensor, discounts_CT: torch.Tensor) -> torch.Tensor:
    """The return from each place on: the reward there, and the discounted return of the next place."""
    discounts_CT = discounts_CT.to(rewards_CT.dtype)
    returns_CT = torch.zeros_like(rewards_CT)
    following_C = rewards_CT.new_zeros(rewards_CT.shape[0])  # there may be no token that counts
    for t in range(rewards_CT.shape[1] - 1, -1, -1):
        following_C = rewards_CT[:, t] + discounts_CT[:, t] * following_C
        returns_CT[:, t] = following_C
    return returns_CT


def overlong_penalty(length: int, start: int, limit: int) -> float:
    """DAPO: 0 up to `start` tokens, then linearly down to -1 at `limit`."""
    return -min(1.0, max(0.0, (length - start) / (limit - start)))
