"""Data of algorithms that do not sample: a step's batch from given rows, and what held-out rows say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardproof.dist.collectives import exchange
from shardproof.rl.data import Prompt, Share
from shardproof.rl.experience import Experience
from shardproof.train.batching import Batch
from shardproof.train.loss import Loss, Scored
from shardproof.train.metrics import MetricSums, reduce_metrics
from shardproof.train.passes import columns_of


class OfflineData(Protocol):
    """What an algorithm that does not sample trains on."""

    def take(self, rows: Sequence[Prompt]) -> Experience:
        """This rank's part of a step's rows, of which every rank has all, ready to be weighed. Collective: every rank."""
        ...

    def held_out(self, rows: Sequence[Prompt]) -> dict[str, float]:
        """What held-out rows say, by metrics without a prefix: `loss` and others. Collective: every rank."""
        ...


def measured(loss: Loss, batch: Batch, rows: Sequence[torch.Tensor], share: Share) -> dict[str, float]:
    """`loss` and the metrics of a batch with `weights`, of which `rows` are the policy's log-probs or scores, over all ranks.

    Collective: every rank.
    """
    sums, total = MetricSums(loss.metrics), 0.0
    if len(batch):
        columns, counted = columns_of(batch, torch.device("cpu"))
        empty = torch.empty(0)
        row = torch.cat(list(rows))
        scored = Scored(empty, empty, row) if loss.role == "reward" else Scored(row, empty, empty)
        token_loss, metrics = loss.function(scored, columns)
        total = float(torch.where(counted, columns["weights"] * token_loss, 0.0).sum())
        sums.add(metrics, counted)
    else:
        sums.add({name: torch.zeros(1) for name in loss.metrics}, torch.zeros(1, dtype=torch.bool))
    mine = {name: part.tolist() for name, part in sums.rows().items()}
    parts = share.once(exchange([total, mine]))
    found = reduce_metrics([part[1] for part in parts], loss.metrics)
    return {"loss": sum(part[0] for part in parts), **{k: v for k, v in found.items() if k != "loss/policy"}}


def mean_length(lengths: Sequence[int], share: Share) -> dict[str, float]:
    """The mean number of tokens of completions, of all ranks. Collective: every rank."""
    every = [length for row in share.once(exchange(list(lengths))) for length in row]
    return {"completion/length": sum(every) / len(every)}
