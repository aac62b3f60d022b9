"""The part of the algorithm's section about what happens around its loss: updates, controllers, and what is learned from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardproof.config.numbers import MAX_STEPS, MAX_TOKENS, Bound, Coefficient, Count, Limit, StepsOrNever
from shardproof.config.section import Section

_RENAMED = {"updates_per_batch": "updates_per_epoch"}


class Dynamics(Section):
    """Updates per step, adaptive coefficients, the moving reference, and which completions are learned from."""

    epochs_per_batch: Count = 1
    """How often a step goes over its batch. Later epochs take the parts of the batch in another order, which
    depends on `train.seed`, the step and the epoch."""
    updates_per_epoch: Count = 1
    """Optimizer updates per epoch: the step's prompts are split into this many equal parts.
    `train.prompts_per_step` must be divisible by it. The old name `updates_per_batch` still works."""
    kl_target: Limit | None = None
    """KL divergence per token at which the policy is to stay: after each step `kl_coef` is raised if the KL is
    above the target, and lowered if it is below. By default `kl_coef` is constant."""
    kl_horizon: Annotated[int, Bound(gt=0, le=MAX_STEPS)] = 10_000
    """Number of completions over which the adaptive KL coefficient changes by at most a fifth of itself, for
    `kl_target`."""
    reference_sync_every: StepsOrNever = 0
    """Steps after which the reference moves towards the policy, for `kl_coef` above 0 and for `dpo` and `kto`. 0: it
    never moves."""
    reference_mix: Annotated[float, Bound(gt=0.0, le=1.0)] = 0.6
    """How far the reference moves: it becomes `reference_mix` times the policy plus `1 - reference_mix` times
    itself."""
    entropy_target: Limit | None = None
    """Entropy per token, in nats, below which an entropy bonus is added. Its weight begins at `entropy_coef` and
    changes by `entropy_step` after each step. By default the weight is `entropy_coef` throughout."""
    entropy_step: Coefficient = 0.005
    """How much the weight of the entropy bonus changes after each step, for `entropy_target`."""
    dynamic_sampling_on: str | None = None
    """Name of the reward function that must tell the completions of a prompt apart, for `dynamic_sampling`. By
    default the weighted total of all of them."""
    dynamic_sampling_rounds: Annotated[int, Bound(gt=0, le=1024)] = 4
    """Most rounds of sampling per step, for `dynamic_sampling`. If prompts are still missing after the last one,
    the step trains on fewer, and `prompts/missing` counts them."""
    overlong_from: Annotated[int, Bound(ge=0, le=MAX_TOKENS)] | None = None
    """Completion length in tokens from which reward is subtracted, growing to 1 at `rollout.max_new_tokens`.
    By default nothing is subtracted."""
    overlong: Literal["penalty", "mask", "neither"] | None = None
    """What happens to completions that are too long. `"penalty"`: reward is subtracted from `overlong_from` on.
    `"mask"`: completions that the length limit cut off count in no loss, but stay in their group's baseline.
    `"neither"`: they are trained on like others. By default `"penalty"` if `overlong_from` is set, else
    `"neither"`."""
    off_policy_limit: Limit | None = None
    """Completions with a negative advantage do not count in the loss if their log-probs have fallen by more than this, on
    average over their tokens, since they were drawn (TRL's `off_policy_mask_threshold`). They stay in its denominators.
    By default all count."""
    entropy_share: Annotated[float, Bound(gt=0.0, le=1.0)] = 1.0
    """Share of the batch's tokens that the policy learns from: those with the highest entropy (TRL's
    `top_entropy_quantile`). The others stay in the loss's denominators. 1: all tokens."""
    success_threshold: Annotated[float, Bound(ge=-1e6, le=1e6)] = 1.0
    """Value of a reward function from which on a completion counts as solved, in `reward/solved`, pass rates and
    evaluations."""
    success_on: list[str] = Field(default_factory=list)
    """Names of the reward functions that decide whether a completion is solved: the first of them that has something to
    say about it. By default the first of all functions that is about the row (`only`). Name several where each judges rows of
    its own, such as `["math_verify", "code"]`."""
    critic_warmup_steps: StepsOrNever = 0
    """Number of steps at the beginning in which only the critic is trained, for `ppo`."""

    @model_validator(mode="before")
    @classmethod
    def _read_old_keys(cls, data: Any) -> Any:
        """Keys as older recipes and runs have them, under the names of today."""
        if not isinstance(data, dict):
            return data
        for old, new in _RENAMED.items():
            if old in data:
                if data.get(new, data[old]) != data[old]:
                    raise ValueError(f"{old} is the old name of {new}: remove it")
                data = {key: value for key, value in data.items() if key != old} | {new: data[old]}
        return data

    @model_validator(mode="after")
    def _treats_length_in_one_way(self) -> Dynamics:
        if self.overlong == "penalty" and self.overlong_from is None:
            raise ValueError("overlong='penalty' needs the length from which it grows: set overlong_from")
        if self.overlong in ("mask", "neither") and self.overlong_from is not None:
            raise ValueError(
                f"overlong_from is for overlong='penalty', not for {self.overlong!r}: remove one"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates that a step makes, of all its epochs."""
        return self.epochs_per_batch * self.updates_per_epoch
