"""Algorithms: which advantages, which loss, which weights."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.config.schema import Algorithm as Settings
from shardproof.config.schema import Rollout
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.train.loss import Loss


@dataclass(frozen=True)
class Facts:
    """What `rl.experience` and `rl.updates` read until they use `Algorithm`."""

    advantages: str  # "normalised" | "centred" | "leave_one_out" | "batch" | "gae" | "none"
    weights: str
    dynamic_sampling: bool = False


ALGORITHMS: dict[str, Facts] = {
    "grpo": Facts("normalised", "sequence_mean"),
    "dr_grpo": Facts("centred", "constant"),
    "dapo": Facts("normalised", "token_mean", dynamic_sampling=True),
    "rloo": Facts("leave_one_out", "token_mean"),
    "reinforce_pp": Facts("batch", "token_mean"),
    "ppo": Facts("gae", "token_mean"),
    "gspo": Facts("normalised", "sequence_mean"),
    "cispo": Facts("normalised", "token_mean"),
    "sft": Facts("none", "token_mean"),
}


def make_loss(settings: Settings, top_p: float = 1.0) -> Loss:
    return make_algorithm(settings, Rollout(top_p=top_p)).loss
