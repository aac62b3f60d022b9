"""Advantages as pure functions of rewards. Shapes: P prompts, G completions each, T tokens."""

from __future__ import annotations

import torch


def group_normalised(
    rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None = None, eps: float = 1e-4
) -> torch.Tensor:
    """GRPO: (r - mean) / std inside each prompt's group, over its counted completions; 0 for the others."""
    if counted_PG is None or bool(counted_PG.all()):
        mean_P1 = rewards_PG.mean(dim=1, keepdim=True)
        std_P1 = rewards_PG.std(dim=1, keepdim=True, unbiased=False)
        return (rewards_PG - mean_P1) / (std_P1 + eps)
    centred_PG = group_centred(rewards_PG, counted_PG)
    std_P1 = (centred_PG.square().sum(dim=1, keepdim=True) / _num_counted(counted_PG)).sqrt()
    return centred_PG / (std_P1 + eps)


def group_centred(rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None = None) -> torch.Tensor:
    """Dr. GRPO: r - mean. Dividing by the deviation would favour prompts that are nearly solved or nearly lost."""
    if counted_PG is None or bool(counted_PG.all()):
        return rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    mean_P1 = torch.where(counted_PG, rewards_PG, 0.0).sum(dim=1, keepdim=True) / _num_counted(counted_PG)
    return torch.where(counted_PG, rewards_PG - mean_P1, 0.0)


def leave_one_out(rewards_PG: torch.Tensor, counted_PG: torch.Tensor | None = None) -> torch.Tensor:
    """RLOO: r minus the mean of the group's other completions; 0 where there is no other."""
    if counted_PG is None:
        counted_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
    num_P1 = _num_counted(counted_PG)
    return group_centred(rewards_PG, counted_PG) * num_P1 / (num_P1 - 1).clamp(min=1)


def _num_counted(counted_PG: torch.Tensor) -> torch.Tensor:
    return counted_PG.sum(dim=1, keepdim=True).clamp(min=1)


def gae(
    rewards_T: torch.Tensor, values_T: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of one completion by generalised advantage estimation; nothing follows the last token."""
    advantages_T = torch.zeros_like(rewards_T)
    following = torch.zeros(())
    for t in range(len(rewards_T) - 1, -1, -1):
        next_value = values_T[t + 1] if t + 1 < len(values_T) else torch.zeros(())
        delta = rewards_T[t] + gamma * next_value - values_T[t]
        following = delta + gamma * lam * following
        advantages_T[t] = following
    return advantages_T, advantages_T + values_T


def discounted(rewards_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """The return from each token on."""
    returns_T = torch.zeros_like(rewards_T)
    following = torch.zeros(())
    for t in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[t] + gamma * following
        returns_T[t] = following
    return returns_T


def overlong_penalty(length: int, start: int, limit: int) -> float:
    """DAPO: 0 up to `start` tokens, then linearly down to -1 at `limit`."""
    return -min(1.0, max(0.0, (length - start) / (limit - start)))
