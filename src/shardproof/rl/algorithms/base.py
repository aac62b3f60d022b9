"""What an algorithm is: which scores it needs, advantages, weights and losses. A new one is a class in one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from shardproof.config.algorithm import TIS_CAP
from shardproof.config.algorithms import AlgorithmSpec
from shardproof.config.schema import Algorithm as Settings
from shardproof.config.schema import Rollout
from shardproof.config.switches import filled
from shardproof.errors import fail
from shardproof.rl.advantages import overlong_penalty
from shardproof.rl.algorithms.covariance import choose_tokens
from shardproof.rl.algorithms.credit import Turns
from shardproof.rl.algorithms.uncertainty import OLD_ENTROPY, mark_uncertain
from shardproof.rollout.trajectory import TRUNCATED, Trajectory, reward_of
from shardproof.train.batching import Batch, weigh
from shardproof.train.loss import Loss, kl_estimate, policy_gradient
from shardproof.train.surrogates import CHOOSES, Surrogate, SurrogateSettings


class Algorithm:
    """The base of every algorithm. A subclass says what it is in `spec` and computes `advantages`.

    The rest follows from the recipe's settings, and can be replaced by subclasses that need another.
    """

    spec: ClassVar[AlgorithmSpec]
    surrogate: ClassVar[str | Surrogate] = "clipped"  # of the policy's loss: see train/surrogates.py

    def __init__(self, settings: Settings, rollout: Rollout):
        self.settings = filled(settings, self.spec)
        self.rollout = rollout
        # Those of now: controllers may move them from step to step.
        self.kl_coef, self.entropy_coef = settings.kl_coef, settings.entropy_coef
        self._made_loss: tuple[tuple[float, float], Loss] | None = None

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
        has_old = settings.updates_per_step > 1 and self.trust_region == "proximal"
        needed = {
            "ref_logps": settings.kl_coef > 0,
            "old_logps": has_old or in_reward or settings.surrogate in CHOOSES,
            OLD_ENTROPY: settings.entropy_share < 1.0,
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
        return "behaviour" if rollout.ahead and rollout.is_whole and not corrects else "proximal"

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
        entropy = settings.entropy_coef or settings.entropy_target
        held_back = settings.surrogate == "kl_cov"  # tokens without an advantage may be among these
        measured = settings.kl_target  # the KL of the whole batch
        other_terms = kl or entropy or measured or settings.router_coef or held_back or self.spec.has_critic
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

    def masks(self, trajectory: Trajectory) -> bool:
        """Whether a conversation counts in no loss because a limit cut it off. It stays in its group's baseline."""
        if self.settings.overlong != "mask":
            return False
        return trajectory.ended in TRUNCATED if trajectory.ended else not trajectory.finished

    @property
    def greedy_baseline(self) -> bool:
        """Whether advantages need the reward of each prompt's greedy completion: `Reward.greedy`."""
        return self.settings.baseline == "greedy"

    def weigh(self, batch: Batch, num_sequences: float, share: int) -> Batch:
        """The batch with a column `weights`; `num_sequences` conversations count over all ranks, of which `share` hold each.

        Collective: every rank.
        """
        settings = self.settings
        if settings.surrogate in CHOOSES:
            batch = choose_tokens(batch, settings, share)
        if settings.entropy_share < 1.0:
            batch = mark_uncertain(batch, settings.entropy_share, share)
        how, constant = settings.aggregation or self.spec.weights, num_sequences
        if how == "sequence_sum":
            how = "constant"
        elif how == "constant":
            constant *= self.rollout.max_new_tokens
        return weigh(batch, how, constant=constant, share=share)

    @property
    def loss(self) -> Loss:
        """The policy's loss, with the coefficients of now."""
        key = self.kl_coef, self.entropy_coef
        if self._made_loss is None or self._made_loss[0] != key:
            self._made_loss = key, self._make_loss()
        return self._made_loss[1]

    def _make_loss(self) -> Loss:
        settings = self.settings
        ratio = settings.ratio or "token"
        # TRL corrects its KL by the ratio of the surrogate.
        level = ratio if settings.preset == "trl" else "token"
        return policy_gradient(
            settings.clip_low,
            settings.clip_high,
            self.kl_coef if settings.kl_in == "loss" else 0.0,
            self.entropy_coef,
            surrogate=self._surrogate(),
            surrogate_settings=SurrogateSettings(
                ratio,
                settings.dual_clip or 0.0,
                (settings.sapo_temperature_pos, settings.sapo_temperature_neg),
                settings.cov_kl_coef,
                (
                    (settings.vespo_k_pos, settings.vespo_lambda_pos),
                    (settings.vespo_k_neg, settings.vespo_lambda_neg),
                ),
            ),
            kl_estimator=settings.kl_estimator,
            kl_ratio_correction=settings.kl_ratio_correction and level,
            report_kl=settings.kl_coef > 0,
            report_entropy=settings.entropy_target is not None,
            rollout_whole=self.rollout.is_whole,
            correction="tis" if settings.correction == "auto" else settings.correction,
            tis_cap=settings.tis_cap,
            mis_cap=settings.mis_cap,
            icepop_bounds=settings.icepop_bounds,
            trust_region=self.trust_region,
            off_policy_limit=settings.off_policy_limit,
            uncertain_only=settings.entropy_share < 1.0,
            name=settings.name,
        )

    def _surrogate(self) -> str | Surrogate:
        own, asked = type(self).surrogate, self.settings.surrogate or "clip"
        if own == "clipped":
            return {"clip": "clipped"}.get(asked, asked)
        if asked != "clip":
            message = f"algorithm.surrogate={asked!r}: {type(self).__name__} has a surrogate of its own."
            raise fail("C001", "algorithm", message, fix="remove the key")
        return own

    @property
    def value_loss(self) -> Loss | None:
        """The critic's loss; None without a critic."""
        return None

    def token_rewards(self, batch: Batch, turns: Turns) -> torch.Tensor:
        """The row of `turns.token_rewards`, less the KL of each token if that belongs to the reward."""
        row = turns.token_rewards()
        if self.settings.kl_coef > 0 and self.settings.kl_in == "reward":
            kl = kl_estimate(batch.flat("old_logps"), batch.flat("ref_logps"), self.settings.kl_estimator)
            row = row.float() - self.kl_coef * kl * batch.flat("mask")
        return row


def counted_only(batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
    """The batch in which no token of a conversation counts that failed or is left out: neither in weights nor in means."""
    masks = [
        mask if reward_of(trajectory).counts else torch.zeros_like(mask)
        for mask, trajectory in zip(batch.columns["mask"], trajectories, strict=True)
    ]
    return batch.with_column("mask", masks)
