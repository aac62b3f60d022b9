"""The loss that a reward model learns from: of two texts, the better one shall have the higher score (Bradley-Terry).

A pair is a conversation of two sequences in one micro-batch, each with one counted prediction: where its score is read.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from shardproof.bounds import require_number
from shardproof.train.loss import Columns, Loss, Scored

METRICS = {
    "loss/policy": "mean",
    "reward/chosen": "mean",
    "reward/rejected": "mean",
    "reward/margin": "mean",
    "reward/accuracy": "mean",
    "reward/max": "max",
    "reward/min": "min",
}


def bradley_terry(center_coef: float = 0.0) -> Loss:
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2 of each pair.

    The batch's column `side` is 1 on the better sequence and -1 on the worse one; `margin`, if it is there, has the
    pair's on both.
    """
    require_number("loss", "center_coef", center_coef, at_least=0)

    def function(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        counted, side, pair = columns["mask"], columns["side"], columns["conversation"].long()
        values = torch.where(counted > 0, scored.values, 0.0)

        def of_pair(row: torch.Tensor) -> torch.Tensor:
            """The sum of a row over a pair's two scores, at every prediction of the pair."""
            return torch.zeros_like(row).index_add(0, pair, row)[pair]

        difference = of_pair(values * side)
        loss = -logsigmoid(difference - columns.get("margin", torch.zeros_like(values)))
        if center_coef:
            loss = loss + center_coef * of_pair(values) ** 2
        told, apart = values.detach(), difference.detach()
        better, worse = (counted * (side > 0)).float(), (counted * (side < 0)).float()
        return loss, {
            "loss/policy": loss.detach(),
            "reward/chosen": torch.stack([told, better]),
            "reward/rejected": torch.stack([told, worse]),
            "reward/margin": apart,
            "reward/accuracy": (apart > 0).float(),
            "reward/max": told,
            "reward/min": told,
        }

    return Loss("reward_model", function, ("side", "mask"), METRICS, role="reward")
