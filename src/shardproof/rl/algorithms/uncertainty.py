"""Which tokens the policy was least sure of: those with the highest entropy among all of an update's batch.

The entropies are those of the policy at the beginning of the step, and the rank that divides the tokens is found over the
batches of all ranks. So neither ranks nor micro-batches matter.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from shardproof.dist.collectives import exchange
from shardproof.train.batching import Batch
from shardproof.train.loss import UNCERTAIN

OLD_ENTROPY = "old_entropy"  # a column: each token's entropy under the policy at the beginning of the step


def mark_uncertain(batch: Batch, entropy_share: float, share: int) -> Batch:
    """The batch with a column `uncertain`: 1.0 for the counted tokens whose entropy reaches the quantile 1 - entropy_share.

    `share` ranks hold each sequence. Collective: every rank.
    """
    counted = [mask.bool() for mask in batch.masks()]
    rows = [row.float().clamp(min=0.0) for row in batch.columns.get(OLD_ENTROPY, [])]
    mine = torch.cat([torch.empty(0), *(row[mask] for row, mask in zip(rows, counted, strict=True))])
    number = sum(exchange(len(mine))[::share])
    # A quantile lies between two of the tokens, and the upper one is the first that reaches it.
    place = math.ceil((1.0 - entropy_share) * (number - 1) - 1e-9)
    least = _smallest(mine.numpy(), place, share) if number else 0.0
    column = [((row >= least) & mask).float() for row, mask in zip(rows, counted, strict=True)]
    return batch.with_column(UNCERTAIN, column)


def _smallest(mine: np.ndarray, place: int, share: int) -> float:
    """The value at this place, from 0, among the sorted values of all ranks, none of which is negative.

    Floats of one sign have the order of their bits: each round counts the values by one more byte. So what is sent does not
    grow with the number of tokens. Collective: every rank.
    """
    bits, found = mine.astype(np.float32).view(np.uint32), 0
    for shift in (24, 16, 8, 0):
        counts = np.bincount(bits >> shift & 255, minlength=256).tolist()
        totals = np.cumsum(np.sum(exchange(counts)[::share], axis=0))
        byte = int(np.searchsorted(totals, place, side="right"))
        place -= int(totals[byte - 1]) if byte else 0
        found |= byte << shift
        bits = bits[bits >> shift & 255 == byte]
    return float(np.uint32(found).view(np.float32))
