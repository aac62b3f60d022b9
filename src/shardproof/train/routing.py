"""The routers of a policy whose choice of experts is replayed: found once for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardproof.errors import fail
from shardproof.model.compiling import uncompiled
from shardproof.model.roles import VALUED
from shardproof.model.routing import Routers
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import reshard
from shardproof.train.forward import evaluating
from shardproof.train.state import training_state


def routers_of(policy: ShardedModel) -> Routers:
    """The policy's routers; a family whose choices cannot be replayed raises C001 by name.

    Collective: every rank, the first time.
    """
    state = training_state(policy)
    if state.routers is None:
        routers = Routers(policy.model)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=policy.device)
        with evaluating(policy), uncompiled():
            routers.settle(lambda: policy.module(task="logits", input_ids=ids, use_cache=False))
        reshard(policy.module)
        state.routers = routers
    return state.routers


def replayed_routers(policy: ShardedModel, facts: Sequence[Mapping[str, Any]]) -> Routers | None:
    """The routers, if some rank's batch names experts; `facts` are those of every rank's batch.

    A critic is a model of its own, with routers of its own: it chooses by itself.

    Collective: every rank, the first time.
    """
    named = {row["experts"] for row in facts if row["sequences"]}
    if policy.role in VALUED or True not in named:
        return None
    if len(named) > 1:
        raise fail("C004", "batch", "some ranks' batches name experts and others do not.")
    return routers_of(policy)
