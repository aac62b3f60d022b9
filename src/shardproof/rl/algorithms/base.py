"""What an algorithm is: which scores it needs, advantages, weights and losses. A new one is a class in one file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch

from shardproof.config.algorithms import AlgorithmSpec
from shardproof.config.learning import TIS_CAP
from shardproof.config.schema import Algorithm as Settings
from shardproof.config.schema import Rollout
from shardproof.rl.advantages import overlong_penalty
from shardproof.rl.algorithms.credit import Turns
from shardproof.rollout.trajectory import Trajectory, reward_of
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import Loss, Surrogate, kl_estimate, policy_gradient


class Algorithm:
    """The base of every algorithm. A subclass says what it is in `spec` and computes `advantages`.

    The rest follows from the recipe's settings, and can be replaced by subclasses that need another.
    """

    spec: ClassVar[AlgorithmSpec]
    surrogate: ClassVar[str | Surrogate] = "clipped"  # of the policy's loss: see train.loss.SURROGATES

    def __init__(self, settings: Settings, rollout: Rollout):
        self.settings = settings
        self.rollout = rollout

    def advantages(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        """The batch with a column `advantages`, and `returns` if there is a critic.

        `trajectories` are this rank's, in the order of the batch's sequences. A conversation may have several, with the
        same group and sample, which follow each other in the order of its turns. Those of one group are on one rank and
        follow each other, too. Collective: every rank.
        """
        raise NotImplementedError(f"{type(self).__name__} has no advantages(batch, trajectories)")

    @property
    def columns(self) -> frozenset[str]:
        """Which of the scores "ref_logps", "old_logps" and "values" the batch must have."""
        settings = self.settings
        in_reward = settings.kl_coef > 0 and settings.kl_in == "reward"
        # With one update the policy is its own old policy; by "behaviour" the engine's log-probs stand for it.
        has_old = settings.updates_per_batch > 1 and self.trust_region == "proximal"
        needed = {
            "ref_logps": settings.kl_coef > 0,
            "old_logps": has_old or in_reward,
            "values": self.spec.has_critic,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)

    @property
    def trust_region(self) -> str:
        """The policy that the ratio is measured from, "proximal" or "behaviour".

        Where sampling runs ahead, clipping around the policy that drew the tokens learned best (docs/running-ahead.md);
        a nucleus, FP8, or a correction that is asked for, needs the policy at the beginning of the step.
        """
        settings, rollout = self.settings, self.rollout
        if settings.trust_region != "auto":
            return settings.trust_region
        corrects = settings.correction != "auto" or settings.tis_cap != TIS_CAP or rollout.fp8 != "off"
        return "behaviour" if rollout.ahead and rollout.top_p == 1.0 and not corrects else "proximal"

    @property
    def drops_equal_rewards(self) -> bool:
        """Whether groups whose rewards are all equal are dropped, and others sampled in their place."""
        chosen = self.settings.dynamic_sampling
        return self.spec.dynamic_sampling if chosen is None else chosen

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether sequences whose advantages are all zero cannot move a weight, so that updates may leave them out."""
        settings = self.settings
        kl = settings.kl_coef if settings.kl_in == "loss" else 0.0
        other_terms = kl or settings.entropy_coef or settings.router_coef or self.spec.has_critic
        # In exact mode every sampled token is compared with the trainer's.
        return self.spec.samples and not other_terms and not self.rollout.exact

    def penalty(self, trajectory: Trajectory) -> float:
        """What is added to a conversation's reward: 0, or less for one with a turn that is too long."""
        start = self.settings.overlong_from
        if start is None:
            return 0.0
        turns = [segment for sequence in trajectory.sequences for segment in sequence.sampled]
        longest = max((len(segment.tokens) for segment in turns), default=0)
        return overlong_penalty(longest, start, self.rollout.max_new_tokens)

    def weigh(self, batch: Batch, num_sequences: float, share: int) -> Batch:
        """The batch with a column `weights`; `num_sequences` conversations count over all ranks, of which `share` hold each.

        Collective: every rank.
        """
        constant = num_sequences * self.rollout.max_new_tokens
        return weigh(batch, self.spec.weights, constant=constant, share=share)

    @cached_property
    def loss(self) -> Loss:
        """The policy's loss."""
        settings = self.settings
        high = settings.clip_high if settings.clip_high is not None else self.spec.clip_high
        return policy_gradient(
            settings.clip_low,
            high,
            settings.kl_coef if settings.kl_in == "loss" else 0.0,
            settings.entropy_coef,
            surrogate=type(self).surrogate,
            kl_estimator=settings.kl_estimator,
            kl_ratio_correction=settings.kl_ratio_correction,
            report_kl=settings.kl_coef > 0,
            rollout_top_p=self.rollout.top_p,
            correction="tis" if settings.correction == "auto" else settings.correction,
            tis_cap=settings.tis_cap,
            mis_cap=settings.mis_cap,
            icepop_bounds=settings.icepop_bounds,
            trust_region=self.trust_region,
            name=settings.name,
        )

    @property
    def value_loss(self) -> Loss | None:
        """The critic's loss; None without a critic."""
        return None

    def token_rewards(self, batch: Batch, turns: Turns) -> torch.Tensor:
        """The row of `turns.token_rewards`, less the KL of each token if that belongs to the reward."""
        row = turns.token_rewards()
        if self.settings.kl_coef > 0 and self.settings.kl_in == "reward":
            kl = kl_estimate(batch.flat("old_logps"), batch.flat("ref_logps"), self.settings.kl_estimator)
            row = row.float() - self.settings.kl_coef * kl * batch.flat("mask")
        return row


def counted_only(batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
    """The batch in which no token of a conversation counts that failed or is left out: neither in weights nor in means."""
    masks = [
        mask if reward_of(trajectory).counts else torch.zeros_like(mask)
        for mask, trajectory in zip(batch.columns["mask"], trajectories, strict=True)
    ]
    return batch.with_column("mask", masks)
