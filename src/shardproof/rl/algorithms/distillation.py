"""On-policy distillation: the student's own completions, and a teacher that says how likely each of their tokens is.

The advantage of a token is `teacher_coef` (log q(token) - log p(token)), with q the teacher and p the student that drew
it: its mean over the student's samples is minus the reverse KL, KL(p || q). With rewards, theirs are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardproof.config.algorithms import SPECS
from shardproof.dist.collectives import together
from shardproof.rl.advantages import discounted
from shardproof.rl.algorithms.credit import Turns
from shardproof.rl.algorithms.presets import PolicyGradient
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch
from shardproof.train.loss import Columns, Loss, Scored, kl_estimate

TEACHER_LOGPS = "teacher_logps"


class Distillation(PolicyGradient):
    """Reverse KL to the teacher at every token, and at those behind it as far as `teacher_gamma` reaches."""

    spec = SPECS["distillation"]

    @property
    def columns(self) -> frozenset[str]:
        return super().columns | {"old_logps", TEACHER_LOGPS}

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        """Those of the rewards, which are 0 where nothing rewards, and the teacher's."""
        batch = super().advantages(batch, trajectories)
        with together("rollout"):
            return self._taught(batch, trajectories) if trajectories else batch

    def _taught(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        turns, settings = Turns.of(batch, trajectories), self.settings
        nearer = settings.teacher_coef * (batch.flat(TEACHER_LOGPS) - batch.flat("old_logps"))
        discounts_CT = turns.discounts(settings.teacher_gamma, settings.turn_gamma)
        row = turns.unpadded(discounted(turns.padded(nearer), discounts_CT))
        return batch.with_column("advantages", batch.rows(batch.flat("advantages") + row))

    def _make_loss(self) -> Loss:
        made = super()._make_loss()

        def function(scored: Scored, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = made.function(scored, columns)
            old, teacher = columns["old_logps"], columns[TEACHER_LOGPS]
            told = {"teacher/kl": old - teacher, "teacher/kl_k3": kl_estimate(old, teacher, "k3")}
            return loss, {**metrics, **told, "teacher/logprob": teacher}

        reductions = {
            **made.metrics,
            **dict.fromkeys(("teacher/kl", "teacher/kl_k3", "teacher/logprob"), "mean"),
        }
        columns = tuple(dict.fromkeys((*made.columns, "old_logps", TEACHER_LOGPS)))
        return replace(made, function=function, columns=columns, metrics=reductions)
