"""Before a step: everything is checked, and agreed on in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardproof.bounds import require_number
from shardproof.dist.collectives import together
from shardproof.errors import error_for, fail
from shardproof.model.families import max_positions
from shardproof.model.roles import FROZEN, VALUED
from shardproof.model.router import check_balanced
from shardproof.model.routing import Routers
from shardproof.shard.attest import check_optimizer
from shardproof.shard.settings import FSDP1
from shardproof.shard.sharded_model import ShardedModel
from shardproof.shard.torch_private import reshard
from shardproof.train.batching import (
    Batch,
    batch_facts,
    check_batch,
    check_same_in_group,
    spread,
    token_mean,
)
from shardproof.train.forward import Scoring, vocabulary_size
from shardproof.train.loss import Loss, find_loss
from shardproof.train.recompute import Recompute, StepPlan
from shardproof.train.routing import replayed_routers
from shardproof.train.scoring import scoring_of
from shardproof.train.state import training_state
from shardproof.train.staying import Staying


@dataclass(frozen=True)
class StepSettings:
    """How a step is to be taken."""

    loss: str | Loss
    micro_batch_tokens: int
    max_grad_norm: float | None
    temperature: float
    router_coef: float

    def check(self) -> None:
        """Raise for numbers with which a step would ascend, change nothing, or turn everything into NaN."""
        require_number("train_step", "micro_batch_tokens", self.micro_batch_tokens, above=0)
        require_number("train_step", "temperature", self.temperature, above=0)
        require_number("train_step", "router_coef", self.router_coef, at_least=0)
        if self.max_grad_norm is not None:
            require_number("train_step", "max_grad_norm", self.max_grad_norm, above=0)


@dataclass(frozen=True)
class Work:
    """A checked step: what to score, how, and with which loss."""

    micro_batches: list[Batch]
    scoring: Scoring
    recompute: StepPlan | None
    loss: Loss
    temperature: float
    router_coef: float
    num_tokens: int  # counted predictions of the global batch
    stays_gathered: bool  # parameters are gathered once, for all micro-batches
    routers: Routers | None  # that choose the experts which the micro-batches name; None: they name none


def prepare(
    policy: ShardedModel, batch: Batch, optimizer: torch.optim.Optimizer, settings: StepSettings
) -> Work:
    """Check everything before the first forward, and spread the batch; every rank raises the same error.

    One message carries all that the ranks must know of each other. With checkpoint_activations="auto" there is another,
    as what must be recomputed depends on the number of micro-batches that the first one settles.

    Collective: every rank.
    """
    state, share = training_state(policy), policy.sequence_parallel
    staying = state.staying = state.staying or Staying(policy)
    with together("train_step") as message:
        policy.check_resident("train_step")
        settings.check()
        loss = find_loss(settings.loss)
        _check_request(policy, batch, loss, settings.router_coef)
        # Checked once for each optimizer: its groups do not change between steps.
        if state.checked_optimizer is not optimizer:
            _check_optimizer(policy, optimizer)
        message.mine = {**batch_facts(batch, settings.micro_batch_tokens, share), **_weight_facts(batch)}
        message.mine["memory"] = staying.facts(batch, settings.micro_batch_tokens)
    state.checked_optimizer = optimizer
    check_same_in_group(message.rows, share)
    batch = _weighed(batch, message.rows, share)
    scoring = scoring_of(policy)
    routers = replayed_routers(policy, message.rows)
    parts = [part for part, _ in spread(batch, message.rows, one_by_one=not scoring.packed)]
    if policy.strategy == FSDP1 and policy.settings.cpu_offload and len(parts) > 1:
        text = f"strategy='fsdp1' with cpu_offload=True cannot accumulate gradients over {len(parts)} micro-batches."
        raise fail("C001", "train_step", text, fix="raise micro_batch_tokens, or use strategy='fsdp2'")
    recompute = _plan_recompute(policy, parts, optimizer, scoring, every_token=bool(settings.router_coef))
    num_tokens = sum(row["counted"] for row in message.rows) // share
    stays = recompute is not None and recompute.stays_gathered
    stays = staying.decide([row["memory"] for row in message.rows]) or stays
    stays = stays or policy.settings.reshard_after_forward is False
    return Work(
        parts,
        scoring,
        recompute,
        loss,
        settings.temperature,
        settings.router_coef,
        num_tokens,
        stays,
        routers,
    )


def _check_request(policy: ShardedModel, batch: Batch, loss: Loss, router_coef: float) -> None:
    config = policy.model.config
    if policy.role in FROZEN:
        text = f"a {policy.role} is frozen; load it with role='policy' to train it."
        raise fail("C001", "train_step", text)
    if policy.role != loss.role:
        raise fail("C001", "train_step", f"loss {loss.name!r} is for a {loss.role}, this is a {policy.role}.")
    if router_coef and policy.role in VALUED:
        raise fail(
            "C001",
            "train_step",
            f"router_coef={router_coef} is for a policy; a {policy.role}'s router is not balanced.",
        )
    check_balanced(config, router_coef, "train_step")
    missing = [name for name in loss.columns if name not in batch.columns]
    if missing and len(batch):
        raise fail("C004", "train_step", f"loss {loss.name!r} needs the columns {missing}.")
    check_batch(batch, vocabulary=vocabulary_size(policy), max_length=max_positions(config))


def _check_optimizer(policy: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    reshard(policy.module)
    findings = check_optimizer(policy.module, optimizer, dist.get_rank())
    if findings:
        raise error_for(findings)


def _weight_facts(batch: Batch) -> dict[str, Any]:
    """Whether this rank's tokens have weights, how many count, and what their masks add up to."""
    weighted = "weights" in batch.columns
    counted = batch.flat("weights") if weighted and len(batch) else batch.flat_mask()
    return {
        "weighted": weighted,
        "counted": int((counted != 0).sum()),
        "mask": float(batch.counts().sum()),
    }


def _weighed(batch: Batch, facts: Sequence[Mapping[str, Any]], share: int) -> Batch:
    """The batch with weights: its own, or the same for every counted token of the global batch."""
    # A rank without sequences has whatever columns the others have.
    weighted = {row["weighted"] for row in facts if row["sequences"]}
    if not weighted:
        fix = "pass at least one sequence on some rank"
        raise fail("C004", "train_step", "no rank has a sequence.", fix=fix)
    if len(weighted) > 1:
        raise fail("C004", "train_step", "some ranks have a `weights` column and others do not.")
    if weighted == {False}:
        return token_mean(batch, sum(row["mask"] for row in facts) / share)
    return batch if len(batch) else batch.with_column("weights", [])


def _plan_recompute(
    policy: ShardedModel,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    scoring: Scoring,
    every_token: bool,
) -> StepPlan | None:
    """What a step's micro-batches recompute; None where the load decided it. Collective: every rank."""
    if not policy.settings.recomputes_as_needed:
        return None
    state = training_state(policy)
    if state.recompute is None:
        state.recompute = Recompute(policy)
    if not state.recompute.blocks:
        return None
    return state.recompute.plan(policy, micro_batches, optimizer, scoring, every_token)
