"""An algorithm: advantages against the median of the group, and a soft gate where others clip."""

import torch

from shardproof.config.algorithms import AlgorithmSpec
from shardproof.rl.algorithms.grouped import GroupAlgorithm


def soft_gate(logps, old, columns, low, high):
    """(loss per token, which tokens a clip changed): -(4 / t) sigmoid(t (r - 1)) A, whose slope at r = 1 is -A."""
    ratio, advantages = torch.exp(logps - old), columns["advantages"]
    t = torch.where(advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(t * (ratio - 1.0)) * 4.0 / t * advantages, torch.zeros_like(ratio)


class SoftMedian(GroupAlgorithm):
    spec = AlgorithmSpec(compares_group=True, weights="token_mean")
    surrogate = staticmethod(soft_gate)

    def compare(self, rewards_PG, counted_PG):
        """Advantages of G completions of P prompts; 0 for those that are not counted, because their rewards failed."""
        scale = self.settings.options.get("scale", 1.0)
        known_PG = rewards_PG.masked_fill(~counted_PG, torch.nan)
        median_P1 = known_PG.nanmedian(dim=1, keepdim=True).values
        return scale * torch.nan_to_num(known_PG - median_P1)
