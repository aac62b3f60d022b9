"""What a run must know of an algorithm before it is made. Free of torch: recipes are checked against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AlgorithmSpec:
    """What distinguishes an algorithm from the others."""

    compares_group: bool = (
        False  # its advantages compare the completions of one prompt: at least 2 are needed
    )
    has_critic: bool = False  # it trains a critic beside the policy
    samples: bool = True  # False: completions are given, and nothing is rewarded (SFT)
    weights: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # see train.batching.weigh
    clip_high: float | None = None  # where the recipe sets none; None: as clip_low
    dynamic_sampling: bool = False  # where the recipe does not say


SPECS: dict[str, AlgorithmSpec] = {
    "grpo": AlgorithmSpec(compares_group=True, weights="sequence_mean"),
    "dr_grpo": AlgorithmSpec(compares_group=True, weights="constant"),
    "dapo": AlgorithmSpec(compares_group=True, clip_high=0.28, dynamic_sampling=True),
    "rloo": AlgorithmSpec(compares_group=True),
    "reinforce_pp": AlgorithmSpec(),
    "ppo": AlgorithmSpec(has_critic=True),
    "gspo": AlgorithmSpec(compares_group=True, weights="sequence_mean"),
    "cispo": AlgorithmSpec(compares_group=True, clip_high=0.28),
    "sft": AlgorithmSpec(samples=False),
}
