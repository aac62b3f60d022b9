"""SFT: completions are given, and every one of their tokens counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shardproof.config.algorithms import SPECS
from shardproof.rl.algorithms.base import Algorithm
from shardproof.rollout.trajectory import Trajectory
from shardproof.train.batching import Batch
from shardproof.train.loss import Loss, sft


class SFT(Algorithm):
    spec = SPECS["sft"]

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        return batch

    @cached_property
    def loss(self) -> Loss:
        return sft(reported=True)
