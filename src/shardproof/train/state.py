"""What training finds out about a model: found once for each model, whichever way it is then called."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from shardproof.model.routing import Routers
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.forward import Scoring
from shardproof.train.recompute import Recompute
from shardproof.train.staying import Staying


@dataclass
class TrainingState:
    """What is known of one model. The same on every rank."""

    scoring: Scoring | None = None  # how it is scored; found out on first use
    recompute: Recompute | None = None  # decides what is recomputed under checkpoint_activations="auto"
    staying: Staying | None = None  # decides where nothing else does whether parameters stay gathered
    checked_optimizer: torch.optim.Optimizer | None = (
        None  # the last one found to hold all trainable parameters
    )
    routers: Routers | None = None  # of a mixture of experts whose choices are replayed; found on first use
    num_skipped: int = 0  # steps skipped in a row


# By model, and gone with it.
_states: WeakKeyDictionary[ShardedModel, TrainingState] = WeakKeyDictionary()


def training_state(policy: ShardedModel) -> TrainingState:
    """What training has found out about a model so far."""
    return _states.setdefault(policy, TrainingState())
