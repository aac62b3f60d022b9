"""Which tokens drive the entropy down: those whose log-prob and advantage vary together the most.

The covariance of a token is (A - mean A) (logp - mean logp), with means over the counted tokens of an update's batch on
all ranks, and the log-probs of the policy at the beginning of the step. So neither ranks nor micro-batches matter.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from shardproof.config.schema import Algorithm as Settings
from shardproof.dist.collectives import exchange
from shardproof.train.batching import Batch

_Place = tuple[float, int, int]  # what decides, the sequence's digest, the place in it


def choose_tokens(batch: Batch, settings: Settings, share: int) -> Batch:
    """The batch with a column `chosen`: 1.0 for the tokens that Clip-Cov leaves out, or KL-Cov holds back.

    KL-Cov takes those of the largest covariance, Clip-Cov draws from those whose covariance is within `cov_bounds`: by a
    number that depends on a token's sequence and place alone. `share` ranks hold each sequence.

    Collective: every rank.
    """
    counted = [mask.bool().numpy() for mask in batch.masks()]
    advantages, logps = (
        [row.double().numpy() for row in batch.columns.get(name, [])] for name in ("advantages", "old_logps")
    )
    sums = [
        float(sum(row[mask].sum() for row, mask in zip(rows, counted, strict=True)))
        for rows in (advantages, logps)
    ]
    parts = exchange([*sums, sum(int(mask.sum()) for mask in counted)])[::share]
    number = sum(part[2] for part in parts)
    mean_advantage, mean_logp = (sum(part[k] for part in parts) / max(number, 1) for k in range(2))
    wanted = max(int(settings.cov_ratio * number), 1)
    mine = [
        (*place, row)
        for row, (sequence, a, logp, mask) in enumerate(
            zip(batch.sequences, advantages, logps, counted, strict=True)
        )
        for place in _candidates(sequence, (a - mean_advantage) * (logp - mean_logp), mask, settings)
    ]
    best = sorted(mine)[:wanted]
    # Equal completions have equal places: the first of them are taken, until there are as many as are wanted.
    held = enumerate(exchange(best)[::share])
    every = sorted((*place, group, row) for group, found in held for *place, row in found)[:wanted]
    column = [torch.zeros(len(mask)) for mask in counted]
    for _, _, place, group, row in every:
        if group == dist.get_rank() // share:
            column[row][place] = 1.0
    return batch.with_column("chosen", column)


def _candidates(
    sequence: list[int], covariance: np.ndarray, counted: np.ndarray, settings: Settings
) -> list[_Place]:
    """The tokens that may be chosen, each with what decides on it: the smallest are."""
    digest = int.from_bytes(hashlib.sha256(str(sequence).encode()).digest()[:8], "little")
    if settings.surrogate == "kl_cov":
        (places,) = np.nonzero(counted)
        return [(-float(covariance[place]), digest, int(place)) for place in places]
    low, high = settings.cov_bounds
    (places,) = np.nonzero(counted & (covariance > low) & (covariance < high))
    drawn = np.random.default_rng(digest).random(len(counted))
    return [(float(drawn[place]), digest, int(place)) for place in places]
