"""The models whose opinion of a batch an algorithm needs, and how they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shardproof.config.schema import Recipe
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rl.algorithms.distillation import TEACHER_LOGPS
from shardproof.rl.algorithms.uncertainty import OLD_ENTROPY
from shardproof.rl.teacher import Teacher
from shardproof.rollout.experts import ExpertShape
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.batching import Batch
from shardproof.train.score import logprobs, values


@dataclass(frozen=True)
class Scorers:
    """The models whose opinion of a batch an algorithm may need, and how they are asked."""

    policy: ShardedModel
    reference: ShardedModel | None  # None: the policy's base with adapters off
    critic: ShardedModel | None
    temperature: float
    micro_batch_tokens: int
    replay: ExpertShape | None = None  # what the policy routes, if it is to choose the engine's experts
    teacher: Teacher | None = None

    def scored(self, batch: Batch, columns: Iterable[str]) -> Batch:
        """The batch with the log-probs and values that are named in `columns`. Collective: every rank.

        Experts are replayed by the policy alone: what a reference or a critic says is defined by its own routers.
        """
        size, wanted = self.micro_batch_tokens, set(columns)
        if "ref_logps" in wanted:
            # One temperature for policy and reference: a KL between differently scaled distributions means nothing.
            model, adapters = self.reference or self.policy, self.reference is not None
            found = logprobs(model, batch.sequences, self.temperature, adapters, micro_batch_tokens=size)
            batch = batch.with_column("ref_logps", _on_host(found))
        if TEACHER_LOGPS in wanted:
            assert self.teacher is not None, "an algorithm that needs a teacher has one"
            found = self.teacher.logprobs(batch.sequences, self.temperature, size)
            batch = batch.with_column(TEACHER_LOGPS, found)
        if {"old_logps", OLD_ENTROPY} & wanted:
            found, entropy = self._policys(batch, OLD_ENTROPY in wanted)
            if "old_logps" in wanted:
                batch = batch.with_column("old_logps", _on_host(found))
            if OLD_ENTROPY in wanted:
                batch = batch.with_column(OLD_ENTROPY, _on_host(entropy))
        if "values" in wanted:
            assert self.critic is not None, "an algorithm that needs values has a critic"
            found = values(self.critic, batch.sequences, micro_batch_tokens=size)
            batch = batch.with_column("values", _on_host(found))
        return batch

    def _policys(self, batch: Batch, wants_entropy: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(log-probs, entropies, if they are wanted) of the policy as it is now."""
        size, sequences = self.micro_batch_tokens, batch.sequences
        if wants_entropy:
            return logprobs(
                self.policy,
                sequences,
                self.temperature,
                entropy=True,
                micro_batch_tokens=size,
                experts=batch.experts,
            )
        found = logprobs(
            self.policy, sequences, self.temperature, micro_batch_tokens=size, experts=batch.experts
        )
        return found, []


def _on_host(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row.cpu() for row in rows]


def keeps_reference(recipe: Recipe, algorithm: Algorithm) -> bool:
    """Whether a run needs a reference that is loaded beside the policy: not where the policy's first weights score all."""
    if "ref_logps" not in algorithm.columns or recipe.model.lora is not None:
        return False
    precomputes = algorithm.spec.has_preference and recipe.algorithm.preference.precompute
    return not precomputes or recipe.reference is not None
